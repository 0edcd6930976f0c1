"""Small GGUF files, written from random models of transformers by the gguf package's own writer."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from transformers import AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.weights.tiny import CHATML_TEMPLATE, hf_config, word_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(bytes_to_unicode().values()), "an", "Ġan"]
CONTEXT = 256


def random_model(family: str, tied: bool = True) -> Any:
    """A random model of 64 channels in float32, each of its tensors different."""
    shape = TinyModel(
        family=family,
        vocab_size=len(TOKENS),
        layers=2,
        hidden_size=64,
        intermediate_size=96,
        heads=4,
        kv_heads=2,
        head_dim=128 if family == "qwen3" else 16,  # transformers reads no other size for Qwen3
        max_positions=CONTEXT,
        tied=tied,
    )
    config = hf_config(shape, word_tokenizer(["a"], CONTEXT, CHATML_TEMPLATE))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model.eval()


def write_gguf(
    path: Path,
    model: Any,
    *,
    architecture: str,
    types: GGMLQuantizationType = GGMLQuantizationType.F32,
    pre: str = "smollm",
    extra: dict[str, np.ndarray] | None = None,
    leave_out: str = "",
    scaling: str = "",
) -> None:
    """Write a model as llama.cpp's converter does.

    types: of matrices. pre: the tokenizer's rule. extra: tensors beside the model's. leave_out: a
    tensor that is not written. scaling: rope.scaling.type.
    """
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny model")
    writer.add_license("apache-2.0")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", 16))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(TOKENS))
    if scaling:
        writer.add_string(f"{architecture}.rope.scaling.type", scaling)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(["a n", "Ġ an"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHATML_TEMPLATE)
    for name, values in _tensors(model, architecture).items():
        if name == leave_out:
            continue
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, types), raw_dtype=types)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(kinds[architecture], model.config.num_hidden_layers)
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, _, ending = name.rpartition(".")
        values = parameter.numpy()
        if architecture == "llama" and "q_proj" in name:
            values = _pairs_side_by_side(values, model.config.num_attention_heads)
        if architecture == "llama" and "k_proj" in name:
            values = _pairs_side_by_side(values, model.config.num_key_value_heads)
        tensors[f"{names.get_name(stem)}.{ending}"] = values
    return tensors


def _pairs_side_by_side(weight: np.ndarray, heads: int) -> np.ndarray:
    """As LlamaModel.permute of llama.cpp's converter."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
