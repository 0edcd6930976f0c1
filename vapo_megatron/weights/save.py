"""A Megatron model as a Hugging Face directory that transformers loads, and its adapters as one that PEFT loads."""

import itertools
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from vapo_megatron.collectives import on_rank_zero
from vapo_megatron.config.model import AdapterConfig
from vapo_megatron.weights.adapters import peft_config
from vapo_megatron.weights.export import stream_adapters, stream_hf
from vapo_megatron.weights.hf_writer import (
    MAX_SHARD_BYTES,
    carried_files,
    check_replaceable,
    exported_config,
    hf_writer,
    new_directory,
    save_tensors,
    write_json,
)
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

    A language model becomes ...ForCausalLM, a value model ...ForTokenClassification with a label for each output of its
    head (score.weight [labels, hidden], score.bias [labels]). config.json, tokenizer, chat template and (of a language
    model) generation config are those of source_dir, the directory that the model came from. out_dir appears whole, in
    place of a model that is there, or not at all. max_shard_bytes bounds a file, and what rank 0 holds in memory.

    Raises BadInput: on every rank, where source_dir has no config.json or the file system refuses.
    """
    stream = stream_hf(chunks, spec, mesh, head) if mesh.in_first_model_parallel_group else iter(())

    def write() -> None:
        try:
            config = exported_config(read_config(source_dir), spec, head, next(chunks[0].parameters()).dtype)
            with hf_writer(out_dir, config, source_dir, carried_files(head), max_shard_bytes) as writer:
                for name, tensor in itertools.chain.from_iterable(stream):
                    writer.add(name, tensor)
        finally:
            deque(stream, maxlen=0)  # the other ranks are in the stream's collectives

    if dist.get_rank() > 0:
        deque(stream, maxlen=0)
    on_rank_zero(write)


def adapter_folder(exported: Path) -> Path:
    """Where the adapters of an exported model go, whose weights have them merged."""
    return exported.with_name(f"{exported.name}_adapter")


def save_adapters(
    chunks: Sequence[Module], spec: ModelSpec, mesh: MeshView, config: AdapterConfig, source_dir: Path, out_dir: Path
) -> None:
    """Write a language model's adapters as PEFT's PeftModel.from_pretrained reads them; collective as save_hf.
    adapter_config.json names source_dir, the model that they adapt. Raises BadInput where the file system refuses."""
    tensors: dict[str, Tensor] = {}
    for bucket in stream_adapters(chunks, spec, mesh, config) if mesh.in_first_model_parallel_group else ():
        if dist.get_rank() == 0:
            tensors |= {f"base_model.model.{name}": tensor.to("cpu", copy=True) for name, tensor in bucket}

    def write() -> None:
        check_replaceable(out_dir, "adapter_config.json")
        with new_directory(out_dir) as folder:
            save_tensors(tensors, folder / "adapter_model.safetensors")
            write_json(folder / "adapter_config.json", peft_config(config, spec, str(source_dir)))

    on_rank_zero(write)
