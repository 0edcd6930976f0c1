"""A Megatron model as a Hugging Face directory that transformers loads."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from torch.nn import Module

from vapo_megatron.errors import BadInput
from vapo_megatron.weights.export import stream_hf
from vapo_megatron.weights.hf_card import carried_files, exported_config
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
