"""Writes Hugging Face directories: shards of bounded size, all or nothing."""

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vapo_megatron.errors import BadInput
from vapo_megatron.files import cannot_write, follow_umask, put_in_place, sync
from vapo_megatron.models.model_files import check_absent
from vapo_megatron.models.registry import family_of
from vapo_megatron.models.spec import Head, ModelSpec
from vapo_megatron.weights.carried import ExportForm
from vapo_megatron.weights.hf_files import INDEX_FILE, SINGLE_FILE

MAX_SHARD_BYTES = 2 << 30
# The model card. One with this line is written again; without it, it is somebody's own.
CARD = "README.md"
MARK = "<!-- Written by vapo-megatron; remove this line to keep changes of your own. -->"
# Keys of config.json that hold for the source alone.
_LEFT_OUT = ("auto_map", "_name_or_path", "quantization_config")
# Keys that count layers for multi-token prediction, which are left out.
_AHEAD = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)


def check_replaceable(directory: Path, mark: str = CONFIG) -> None:
    """Raises BadInput where the directory is neither empty nor a model's, which contains `mark`."""
    is_empty = directory.is_dir() and not any(directory.iterdir())
    if directory.exists() and not (directory / mark).is_file() and not is_empty:
        raise BadInput(f"{directory}: exists and is not a model directory; name another place")


def is_own(card: Path) -> bool:
    """Whether a model card is somebody's own."""
    return card.is_file() and MARK not in card.read_text(encoding="utf-8", errors="replace")


@contextmanager
def new_directory(target: Path, replace: bool = True) -> Iterator[Path]:
    """A temporary directory beside `target`: it replaces target when the body succeeds, and is
    removed otherwise. A model card of somebody's own in target stays. Without `replace`, target
    must not exist and only one process at a time can create it. Raises BadInput where the file
    system refuses (full disk, no permission), in the body too."""
    temporary = target.with_name(
        f".{target.name}.{secrets.token_hex(4)}" if replace else f"{target.name}.partial"
    )
    if not replace:
        check_absent(target)
    try:
        temporary.mkdir(parents=True)
    except FileExistsError:
        raise BadInput(
            f"{temporary}: another process is writing it, or was killed at it: wait for it, or "
            "remove it"
        ) from None
    except OSError as error:
        raise cannot_write(target, error) from None
    try:
        yield temporary
        if is_own(target / CARD):
            copy_carried(target, temporary, (CARD,))
        for path in temporary.rglob("*"):
            if path.is_file():
                sync(path)  # libraries that write some of them do not wait for the disk
        put_in_place(temporary, target)
    except (SafetensorError, OSError) as error:
        raise cannot_write(target, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file and flush it to disk. Raises OSError or SafetensorError."""
    save_file(tensors, path, metadata={"format": "pt"})
    follow_umask(path)
    sync(path)


class _Shards:
    """The weight files of a directory, each written when it is full. Memory: one of them."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self._total = 0
        self._names: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; it is copied off its device now and written when its shard is full."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._max_bytes:
            self._write()
        self._pending[name] = tensor.detach().to("cpu", copy=True)
        self._pending_bytes += size

    def finish(self) -> None:
        """Write the rest, number the files, and write their index."""
        self._write()
        count = self.count
        places = dict[str, str]()
        for i, tensors in enumerate(self._names):
            name = SINGLE_FILE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / f"{i:05d}").rename(self._folder / name)
            places |= dict.fromkeys(tensors, name)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": places}
            write_json(self._folder / INDEX_FILE, index)

    @property
    def count(self) -> int:
        """Files written until now."""
        return len(self._names)

    def _write(self) -> None:
        save_tensors(self._pending, self._folder / f"{len(self._names):05d}")
        self._names.append(list(self._pending))
        self._total += self._pending_bytes
        self._pending = {}
        self._pending_bytes = 0


@contextmanager
def hf_writer(
    out_dir: Path,
    config: dict[str, Any],
    source_dir: Path,
    carried: tuple[str, ...],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    replace: bool = True,
) -> Iterator[_Shards]:
    """Yields an object to add() tensors to; when the body ends they become a model directory,
    replacing an existing one. config: content of config.json. carried: names to copy from
    source_dir where they exist. replace: see new_directory. Raises BadInput where the file system
    refuses, or out_dir holds something that is not a model."""
    if replace:
        check_replaceable(out_dir)
    with new_directory(out_dir, replace) as folder:
        shards = _Shards(folder, max_shard_bytes)
        yield shards
        shards.finish()
        write_json(folder / CONFIG, config)
        copy_carried(source_dir, folder, carried)


def carried_files(head: Head) -> tuple[str, ...]:
    """Files and folders that an export copies unchanged."""
    return TOKENIZER_FILES if head == "value" else (GENERATION_CONFIG, *TOKENIZER_FILES)


def copy_carried(source_dir: Path, folder: Path, names: Sequence[str]) -> None:
    """Copy the names, files or directories, that exist from source_dir into folder, which is
    created. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        source = source_dir / name
        target = folder / name
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copyfile(source, target)
            sync(target)
    sync(folder)


def add_carried(writer: _Shards, form: ExportForm) -> None:
    """Add the tensors that were not trained, as they are in the source, where the form has some."""
    if form.carried is not None:
        for name in sorted(form.carried.names):
            writer.add(name, form.carried[name][:])


def exported_config(
    form: ExportForm, spec: ModelSpec, head: Head, dtype: torch.dtype
) -> dict[str, Any]:
    """config.json of an exported model: the source's, with the family's name, current class, labels
    and dtype; of a model with a vision part that part's as it was."""
    config = _current(form.config, dtype)
    if "dtype" not in config and "torch_dtype" not in config:
        config["dtype"] = str(dtype).removeprefix("torch.")
    if form.is_nested:
        return config | {"text_config": _current(config["text_config"], dtype)}
    family = family_of(config)
    assert family is not None, "its spec was read"
    config["model_type"] = family.model_type
    kind = family.causal_lm if head == "lm" else family.token_classification
    config["architectures"] = [kind]
    for key in ("id2label", "label2id", "num_labels", "problem_type"):
        config.pop(key, None)
    if head == "value":
        labels = (
            ["value"]
            if spec.value_outputs == 1
            else [f"bin_{i}" for i in range(spec.value_outputs)]
        )
        config["id2label"] = {str(i): label for i, label in enumerate(labels)}
        config["label2id"] = {label: i for i, label in enumerate(labels)}
        config["classifier_dropout"] = 0.0
    return config


def _current(source: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A copy without what holds for the source alone, its dtype, if it has one, changed."""
    config = {key: value for key, value in source.items() if key not in _LEFT_OUT}
    for key in _AHEAD:
        if key in config:
            config[key] = 0
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = str(dtype).removeprefix("torch.")
    return config


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as transformers formats it, and flush it to disk. Raises OSError."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    sync(path)
