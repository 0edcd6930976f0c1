"""What a Hugging Face directory holds beside weights: config.json, tokenizer, chat template, index of the shards."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vapo_megatron.config.atomic import sync
from vapo_megatron.weights.hf_files import INDEX_FILE, SINGLE_FILE
from vapo_megatron.weights.spec import Head, ModelSpec

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates"),
)


def carried_files(head: Head) -> tuple[str, ...]:
    """Names, of files and folders, that an export takes over as they are."""
    return TOKENIZER_FILES if head == "value" else (GENERATION_CONFIG, *TOKENIZER_FILES)


def copy_carried(source_dir: Path, folder: Path, names: Sequence[str]) -> None:
    """Copy what is there of names, files or directories, from source_dir into folder, which is made. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        source, target = source_dir / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copyfile(source, target)
            sync(target)
    sync(folder)


def exported_config(source: dict[str, Any], spec: ModelSpec, head: Head, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of an exported model: the source's, with class, labels, layers and dtype as they are now."""
    config = {key: value for key, value in source.items() if key not in ("auto_map", "_name_or_path")}
    table = spec.table
    config["architectures"] = [table.causal_lm if head == "lm" else table.token_classification]
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        if key in config:
            config[key] = 0  # layers that predict further tokens are left out
    for key in ("id2label", "label2id", "num_labels", "problem_type"):
        config.pop(key, None)
    if head == "value":
        labels = ["value"] if spec.value_outputs == 1 else [f"bin_{i}" for i in range(spec.value_outputs)]
        config["id2label"] = {str(i): label for i, label in enumerate(labels)}
        config["label2id"] = {label: i for i, label in enumerate(labels)}
        config["classifier_dropout"] = 0.0
    return config


def shard_names(count: int) -> list[str]:
    """Names of the weight files of a directory with so many of them."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def write_index(folder: Path, shards: Sequence[Sequence[str]], total_size: int) -> None:
    """Write the index of several shards; one alone needs none. Raises OSError.

    shards: names of the tensors in each. total_size: bytes of all of them.
    """
    if len(shards) == 1:
        return
    files = shard_names(len(shards))
    places = {tensor: name for name, tensors in zip(files, shards, strict=True) for tensor in tensors}
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_size}, "weight_map": places})


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file in the form transformers has, and have it on the disk. Raises OSError."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    sync(path)
