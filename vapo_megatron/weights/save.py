"""A Megatron model as a Hugging Face directory that transformers loads, and its adapters as one that PEFT loads."""

import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module

from vapo_megatron.config.atomic import follow_umask, sync
from vapo_megatron.config.model import AdapterConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.weights.adapters import peft_config
from vapo_megatron.weights.export import stream_adapters, stream_hf
from vapo_megatron.weights.hf_card import carried_files, exported_config, write_json
from vapo_megatron.weights.hf_writer import MAX_SHARD_BYTES, HFWriter
from vapo_megatron.weights.mapping import MeshView
from vapo_megatron.weights.model_files import read_config
from vapo_megatron.weights.spec import Head, ModelSpec


def save_hf(
    chunks: Sequence[Module],
    spec: ModelSpec,
    mesh: MeshView,
    head: Head,
    source_dir: Path,
    out_dir: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model; collective over all ranks. Global rank 0 writes, its block (stream_hf) streams, the others wait.

    A language model becomes ...ForCausalLM, a value model ...ForTokenClassification with a label for each output of
    its head (score.weight [labels, hidden], score.bias [labels]). config.json, tokenizer, chat template and (of a
    language model) generation config are those of source_dir. The directory appears whole, or not at all.

    Args:
        chunks: this rank's.
        spec: what they were built from.
        mesh: their layout.
        head: their head.
        source_dir: the Hugging Face directory that the model came from.
        out_dir: where to write; a model directory there is replaced.
        max_shard_bytes: bound on a file, and on what rank 0 holds of it in memory.

    Raises:
        BadInput: on every rank, where source_dir has no config.json or the file system refuses.
    """
    refusal: list[str | None] = [None]
    if mesh.in_first_model_parallel_group:
        stream = stream_hf(chunks, spec, mesh, head)
        if dist.get_rank() == 0:
            try:
                config = exported_config(read_config(source_dir), spec, head, next(chunks[0].parameters()).dtype)
                with HFWriter(out_dir, config, source_dir, carried_files(head), max_shard_bytes) as writer:
                    for bucket in stream:
                        for name, tensor in bucket:
                            writer.add(name, tensor)
            except BadInput as error:
                refusal = [str(error)]
        # The other ranks are in the stream's collectives: a rank that stopped early goes through them as well.
        with suppress(StopIteration):
            while True:
                next(stream)
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0] is not None:
        raise BadInput(refusal[0])


def adapter_folder(exported: Path) -> Path:
    """Where the adapters of a model are exported that is exported with them in its weights."""
    return exported.with_name(f"{exported.name}_adapter")


def save_adapters(
    chunks: Sequence[Module], spec: ModelSpec, mesh: MeshView, config: AdapterConfig, source_dir: Path, out_dir: Path
) -> None:
    """Write a language model's adapters as PEFT's PeftModel.from_pretrained reads them; collective as save_hf.

    source_dir: of the model that they adapt, which adapter_config.json names.

    Raises:
        BadInput: on every rank, where the file system refuses.
    """
    refusal: list[str | None] = [None]
    if mesh.in_first_model_parallel_group:
        tensors: dict[str, Tensor] = {}
        for bucket in stream_adapters(chunks, spec, mesh, config):
            if dist.get_rank() == 0:
                tensors |= {f"base_model.model.{name}": tensor.to("cpu", copy=True) for name, tensor in bucket}
        if dist.get_rank() == 0:
            try:
                _write_adapters(tensors, peft_config(config, spec, str(source_dir)), out_dir)
            except OSError as error:
                refusal = [f"{out_dir}: cannot be written ({error.strerror or error}): free or name another place"]
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0] is not None:
        raise BadInput(refusal[0])


def _write_adapters(tensors: dict[str, Tensor], config: dict[str, Any], out_dir: Path) -> None:
    """The directory appears whole, in place of one that is there, or not at all. Raises OSError."""
    temporary = out_dir.with_name(f".{out_dir.name}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        path = temporary / "adapter_model.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        follow_umask(path)
        sync(path)
        write_json(temporary / "adapter_config.json", config)
        if (out_dir / "adapter_config.json").is_file():
            shutil.rmtree(out_dir)
        os.replace(temporary, out_dir)
        sync(out_dir.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
