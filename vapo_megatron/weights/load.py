"""Loads Megatron shards from a Hugging Face directory, for any tensor- and pipeline-parallel layout."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Module

from vapo_megatron.errors import BadInput
from vapo_megatron.weights.families import EMBEDDING, IGNORED, LM_HEAD, VALUE_HEAD_BIAS, VALUE_HEAD_WEIGHT
from vapo_megatron.weights.hf_files import HFTensors
from vapo_megatron.weights.mapping import Entry, MeshView, entries, local_parameters
from vapo_megatron.weights.model_files import read_config
from vapo_megatron.weights.spec import Head, ModelSpec

SCORE_WEIGHT, SCORE_BIAS = VALUE_HEAD_WEIGHT.hf[0], VALUE_HEAD_BIAS.hf[0]


@torch.no_grad()
def load_hf(
    chunks: Sequence[Module],
    spec: ModelSpec,
    hf_dir: Path,
    mesh: MeshView,
    head: Head,
    *,
    value_head: Literal["new", "saved"] = "new",
    head_init_std: float = 0.0,
    seed: int = 0,
) -> None:
    """Fill every parameter of this rank's chunks once, in place and in their own dtype. No communication.

    A value model's backbone comes from the directory whatever its head; its head is either new, or the `score` of a
    reward model (...ForSequenceClassification) or of a saved value model (...ForTokenClassification), which has
    spec.value_outputs labels; a reward model without bias gives a bias of zero.

    Args:
        chunks, spec, mesh, head: what build_model made, the spec of hf_dir, the layout and the head of the chunks.
        hf_dir: what to read; only this rank's rows and columns are.
        value_head: for head "value": "new" makes one and hf_dir is a language model, "saved" reads that of hf_dir.
        head_init_std: standard deviation of a new head's weight (normal), drawn from seed on every rank; its bias is 0.

    Raises:
        BadInput: a tensor is missing, unknown, of another shape, not of floating point or not finite; a file is missing
            or truncated; a saved head has other labels than spec.value_outputs; a tied head has weights of its own.
            Every rank checks every tensor's header, so all of them raise the same.
    """
    tensors = HFTensors(hf_dir)
    names = checked_names(tensors, spec, head, value_head)
    for entry, parameter in local_parameters(chunks, spec, head, mesh.tp_size):
        if entry.hf[0] not in names:
            parameter.copy_(new_head(entry, spec, head_init_std, seed))
            continue
        sources = [tensors[names[name]] for name in entry.hf]
        value = entry.rule.to_shard(sources, spec, mesh.tp_rank, mesh.tp_size)
        if not all(bool(end.isfinite()) for end in value.aminmax()):
            raise BadInput(
                f"{hf_dir}: tensor {' or '.join(names[name] for name in entry.hf)} holds NaN or infinity: it cannot be "
                "trained, give another model"
            )
        parameter.copy_(value)


def check_weights(hf_dir: Path, spec: ModelSpec, head: Head, *, value_head: Literal["new", "saved"] = "new") -> None:
    """Raises BadInput in every case where load_hf would; reads only the headers of the files."""
    checked_names(HFTensors(hf_dir), spec, head, value_head)


def checked_names(
    tensors: HFTensors, spec: ModelSpec, head: Head, value_head: Literal["new", "saved"]
) -> dict[str, str]:
    """Maps each Hugging Face name that is read to its name in the directory. A new head's are not included."""
    shapes = {
        name: shape
        for entry in entries(spec, head)
        for name, shape in zip(entry.hf, entry.rule.hf_shapes(spec), strict=True)
    }
    names = {name: name for name in shapes}
    present = tensors.names
    if head == "value":
        for name in (SCORE_WEIGHT, SCORE_BIAS):
            del names[name]
        if value_head == "saved":
            names |= _saved_head(tensors, spec.value_outputs)
    missing = [name for name, actual in names.items() if actual not in present]
    if missing:
        raise BadInput(
            f"{tensors.directory}: tensor {missing[0]} is missing ({len(missing)} of {len(names)} are), expected by "
            f"config.json of family {spec.family}: fetch the model again or fix config.json"
        )
    optional = [re.escape(LM_HEAD.hf[0])] if head == "value" or spec.tied else []
    ignored = re.compile("|".join((*optional, IGNORED)))
    unread = present - set(names.values())
    extra = sorted(name for name in unread if not ignored.fullmatch(name))
    if extra:
        kind = "score" if head == "value" and value_head == "saved" else "language-model"
        raise BadInput(
            f"{tensors.directory}: tensor {extra[0]} is not known ({len(extra)} are not), expected only those of a "
            f"{spec.family} model with a {kind} head: give another directory"
        )
    for name, actual in names.items():
        tensors.check(actual, shapes[name])
    (words,), (lm_head,) = EMBEDDING.hf, LM_HEAD.hf
    if head == "lm" and spec.tied and lm_head in present and not torch.equal(tensors[words][:9], tensors[lm_head][:9]):
        raise BadInput(
            f"{tensors.directory}: {lm_head} is not {words}, but config.json has tie_word_embeddings: it would not be "
            f"used; set tie_word_embeddings to false to train it, or remove {lm_head} from the files"
        )
    return names


def score_names(tensors: HFTensors) -> list[str]:
    """Names of value-head weights in a directory, which may have a prefix."""
    return [name for name in tensors.names if name == SCORE_WEIGHT or name.endswith("." + SCORE_WEIGHT)]


def _saved_head(tensors: HFTensors, outputs: int) -> dict[str, str]:
    """Names of the value head's tensors, which must have a label for each output."""
    scores = score_names(tensors)
    if len(scores) != 1:
        raise BadInput(
            f"{tensors.directory}: {len(scores)} tensors named {SCORE_WEIGHT}, expected one: give a directory of "
            "...ForSequenceClassification or ...ForTokenClassification form, or start from a policy with a new head"
        )
    labels = tensors[scores[0]].shape[0]
    listed = read_config(tensors.directory).get("id2label")
    if labels != outputs or (isinstance(listed, dict) and len(listed) != outputs):
        reason = "a value is one number" if outputs == 1 else "as many as algorithm.value_loss.bins"
        raise BadInput(
            f"{tensors.directory}: {scores[0]} has {labels} rows and config.json "
            f"{len(listed) if isinstance(listed, dict) else 'no'} labels, expected {outputs} of each: {reason}"
        )
    bias = scores[0].removesuffix(SCORE_WEIGHT) + SCORE_BIAS
    return {SCORE_WEIGHT: scores[0]} | ({SCORE_BIAS: bias} if bias in tensors.names else {})


def new_head(entry: Entry, spec: ModelSpec, std: float, seed: int) -> Tensor:
    """A new value head's weight or bias, in float32 on the CPU."""
    shape = entry.rule.hf_shapes(spec)[0]
    if entry.rule is VALUE_HEAD_BIAS or std == 0.0:
        return torch.zeros(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std
