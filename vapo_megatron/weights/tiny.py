"""Small random models in the form of ordinary Hugging Face directories, for the quickstart and for
tests."""

import threading
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)
from transformers.utils import logging

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.errors import BadInput
from vapo_megatron.files import follow_umask
from vapo_megatron.models.model_files import read_config
from vapo_megatron.models.registry import FAMILIES
from vapo_megatron.weights.hf_writer import (
    CONFIG,
    check_replaceable,
    new_directory,
    write_json,
)

# The tokens that Qwen2.5 adds to its byte-pair tokens, in the order of their ids 151643 to 151664.
QWEN_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
QWEN_PLAIN_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# transformers draws from PyTorch's one generator, which threads that make models would share.
_DRAWING = threading.Lock()


def hf_config(shape: TinyModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The transformers config of this shape with the tokenizer's special tokens."""
    usual = dict(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tied,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        initializer_range=shape.initializer_range,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoConfig.for_model(shape.family, **usual | FAMILIES[shape.family].tiny(shape))


def save_tiny_model(shape: TinyModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> int:
    """Write config, float32 weights drawn from shape.seed, and tokenizer to directory, all or
    nothing, replacing an existing model; returns the parameter count. Raises BadInput where the
    family is unknown, the tokenizer is larger than the vocabulary or the directory cannot be
    written."""
    if shape.family not in FAMILIES:
        raise BadInput(f"family {shape.family!r}: expected one of {', '.join(sorted(FAMILIES))}")
    if len(tokenizer) > shape.vocab_size:
        raise BadInput(
            f"vocab_size {shape.vocab_size}: the tokenizer has {len(tokenizer)} tokens; give at "
            "least that many"
        )
    check_replaceable(directory)
    with _DRAWING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        model = AutoModelForCausalLM.from_config(hf_config(shape, tokenizer), dtype=torch.float32)
    logging.disable_progress_bar()
    with new_directory(directory) as folder:
        model.save_pretrained(folder)
        saved = read_config(folder)
        write_json(folder / CONFIG, FAMILIES[shape.family].tiny(shape) | saved)
        for weights in folder.glob("*.safetensors"):
            follow_umask(weights)
        tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def word_tokenizer(
    words: list[str], max_length: int, chat_template: str
) -> PreTrainedTokenizerBase:
    """A tokenizer whose tokens are whole words between spaces: <pad>, <bos>, <eos>, <unk>, then
    words in order."""
    special = ("<pad>", "<bos>", "<eos>", "<unk>")
    vocabulary = {word: index for index, word in enumerate((*special, *words))}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )


def tokenizer_from(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of directory; bare Qwen vocab.json and merges.txt get special tokens and ChatML
    template."""
    if (directory / "tokenizer_config.json").is_file() or (directory / "tokenizer.json").is_file():
        try:
            return AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise BadInput(f"{directory}: its tokenizer cannot be loaded ({reason})") from None
    if not ((directory / "vocab.json").is_file() and (directory / "merges.txt").is_file()):
        raise BadInput(
            f"{directory}: no tokenizer.json, nor vocab.json with merges.txt; give a tokenizer "
            "directory"
        )
    tokenizer = Qwen2Tokenizer(
        vocab=str(directory / "vocab.json"),
        merges=str(directory / "merges.txt"),
        chat_template=CHATML_TEMPLATE,
        model_max_length=32_768,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(token, special=True) for token in QWEN_SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in QWEN_PLAIN_TOKENS])
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer
