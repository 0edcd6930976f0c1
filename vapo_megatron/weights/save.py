"""A Megatron model as a Hugging Face directory that transformers loads."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module

from vapo_megatron.errors import BadInput
from vapo_megatron.weights.export import stream_hf
from vapo_megatron.weights.hf_writer import GENERATION_CONFIG, MAX_SHARD_BYTES, TOKENIZER_FILES, HFWriter
from vapo_megatron.weights.mapping import MeshView
from vapo_megatron.weights.spec import Head, ModelSpec, read_config


def save_hf(
    chunks: Sequence[Module],
    spec: ModelSpec,
    mesh: MeshView,
    head: Head,
    source_dir: Path,
    out_dir: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model; collective over all ranks. Global rank 0 writes, its tp x pp block streams, the others wait.

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
        dtype: of the written tensors; None leaves them as they are.
        max_shard_bytes: bound on a file, and on what rank 0 holds of it in memory.

    Raises:
        BadInput: on every rank, where source_dir has no config.json or the file system refuses.
    """
    refusal: list[str | None] = [None]
    if mesh.dp_rank == 0 and mesh.cp_rank == 0:
        stream = stream_hf(chunks, spec, mesh, head, dtype=dtype)
        if dist.get_rank() == 0:
            try:
                written = dtype or next(iter(chunks[0].parameters())).dtype
                config = _config(read_config(source_dir), spec, head, written)
                carried = TOKENIZER_FILES if head == "value" else (GENERATION_CONFIG, *TOKENIZER_FILES)
                with HFWriter(out_dir, config, source_dir, carried, max_shard_bytes) as writer:
                    for bucket in stream:
                        for name, tensor in bucket:
                            writer.add(name, tensor)
            except BadInput as error:
                refusal = [str(error)]
        # The other ranks are in the stream's collectives: whoever stopped early goes through them as well.
        with suppress(StopIteration):
            while True:
                next(stream)
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0] is not None:
        raise BadInput(refusal[0])


def _config(source: dict[str, Any], spec: ModelSpec, head: Head, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of what is written: the source's, with class, labels and dtype as they are now."""
    config = {key: value for key, value in source.items() if key not in ("auto_map", "_name_or_path")}
    table = spec.table
    config["architectures"] = [table.causal_lm if head == "lm" else table.token_classification]
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    for key in ("id2label", "label2id", "num_labels", "problem_type"):
        config.pop(key, None)
    if head == "value":
        labels = ["value"] if spec.value_outputs == 1 else [f"bin_{i}" for i in range(spec.value_outputs)]
        config["id2label"] = {str(i): label for i, label in enumerate(labels)}
        config["label2id"] = {label: i for i, label in enumerate(labels)}
        config["classifier_dropout"] = 0.0
    return config
