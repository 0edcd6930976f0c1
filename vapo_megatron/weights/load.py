"""Loads Megatron shards from a Hugging Face directory, for any tensor- and pipeline-parallel
layout."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Module

from vapo_megatron.errors import BadInput
from vapo_megatron.models.model_files import read_config
from vapo_megatron.models.spec import LM_HEAD, SCORE_BIAS, SCORE_WEIGHT, Head, ModelSpec
from vapo_megatron.weights.carried import open_weights
from vapo_megatron.weights.hf_files import HFTensors
from vapo_megatron.weights.mapping import Entry, MeshView, entries, local_parameters

_logger = logging.getLogger(__name__)

# Buffers of old versions of transformers, which carry no parameter.
_IGNORED = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"


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
    """Fill every parameter of this rank's chunks once, in place and in their own dtype. No
    communication.

    A value model's backbone comes from the directory whatever its head; its head is either new, or
    the `score` of a reward model (...ForSequenceClassification) or of a saved value model
    (...ForTokenClassification), which has spec.value_outputs labels; a reward model without bias
    gives a bias of zero.

    Args:
        chunks, spec, mesh, head: what build_model made, the spec of hf_dir, the layout and the head
            of the chunks.
        hf_dir: what to read; only this rank's rows and columns are.
        value_head: for head "value": "new" makes one and hf_dir is a language model, "saved" reads
            that of hf_dir.
        head_init_std: standard deviation of a new head's weight (normal), drawn from seed on every
            rank; its bias is 0.

    Raises:
        BadInput: a tensor is missing, unknown, of another shape, not of floating point or not
            finite; a file is missing or truncated; a saved head has other labels than
            spec.value_outputs; a tied head has separate weights. Every rank checks every tensor's
            header, so all of them raise the same.
    """
    tensors = open_weights(hf_dir, spec)
    names = checked_names(tensors, spec, head, value_head)
    for entry, parameter in local_parameters(chunks, spec, head, mesh.tp_size):
        if entry.hf[0] not in names:
            parameter.copy_(new_head(entry, head_init_std, seed))
            continue
        sources = [entry.part(tensors[names[name]]) for name in entry.hf]
        value = entry.rule.to_shard(sources, mesh.tp_rank, mesh.tp_size)
        if not all(bool(end.isfinite()) for end in value.aminmax()):
            raise BadInput(
                f"{hf_dir}: tensor {' or '.join(names[name] for name in entry.hf)} holds NaN or "
                "infinity: it cannot be trained, give another model"
            )
        parameter.copy_(value)


def check_weights(
    hf_dir: Path, spec: ModelSpec, head: Head, *, value_head: Literal["new", "saved"] = "new"
) -> None:
    """Raises BadInput in every case where load_hf would; reads only the headers of the files. Logs
    the tensors left out."""
    tensors = open_weights(hf_dir, spec)
    checked_names(tensors, spec, head, value_head)
    for note in notes_on_files(tensors, spec):
        _logger.warning("%s: %s", hf_dir, note)


def notes_on_files(tensors: HFTensors, spec: ModelSpec) -> list[str]:
    """Lines on what in the files is not trained as it is: layers that predict further tokens,
    indexers, and quantised weights."""
    notes = []
    if spec.indexed:
        notes.append(
            f"attention reads all tokens of inputs up to {spec.max_position_embeddings} tokens "
            "(index_topk), and longer ones are refused; indexers are not trained, and exports "
            "carry them"
        )
    if names := _ahead(tensors, spec):
        least = min(names)
        first = "mtp" if least.startswith("mtp.") else ".".join(least.split(".")[:3])
        notes.append(
            f"{first}.* ({len(names)} tensors for multi-token prediction) are not read, trained, "
            "synced or exported"
        )
    if tensors.scaled:
        notes.append(
            f"{tensors.scaled} FP8 tensors are read as bfloat16; exports have no FP8 weights, and "
            "no quantization_config"
        )
    return notes


def _ahead(tensors: HFTensors, spec: ModelSpec) -> set[str]:
    """Names of tensors of layers after the model's last."""
    if not spec.predicts_ahead:
        return set()
    layers = ((name, re.match(r"model\.layers\.(\d+)\.|mtp\.", name)) for name in tensors.names)
    return {
        name
        for name, layer in layers
        if layer is not None and (layer[1] is None or int(layer[1]) >= spec.num_layers)
    }


def checked_names(
    tensors: HFTensors, spec: ModelSpec, head: Head, value_head: Literal["new", "saved"]
) -> dict[str, str]:
    """Maps each Hugging Face name that is read to its name in the directory. A new head's are not
    included."""
    shapes = {
        name: shape
        for entry in entries(spec, head)
        for name, shape in zip(entry.hf, entry.rule.file_shapes(), strict=True)
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
        _refuse_fused_experts(tensors, missing[0])
        raise BadInput(
            f"{tensors.directory}: tensor {missing[0]} is missing ({len(missing)} of {len(names)} "
            f"are), expected by config.json of family {spec.family}: fetch the model again or fix "
            "config.json"
        )
    optional = [re.escape(LM_HEAD)] if head == "value" or spec.tied else []
    ignored = re.compile("|".join((*optional, _IGNORED)))
    unread = present - set(names.values()) - _ahead(tensors, spec) - spec.empty_tensors().keys()
    extra = sorted(name for name in unread if not ignored.fullmatch(name))
    if extra:
        kind = "score" if head == "value" and value_head == "saved" else "language-model"
        raise BadInput(
            f"{tensors.directory}: tensor {extra[0]} is not known ({len(extra)} are not), expected "
            f"only tensors of a {spec.family} model with a {kind} head: give another directory"
        )
    for name, actual in names.items():
        tensors.check(actual, shapes[name])
    (words,) = spec.embedding.hf
    if (
        head == "lm"
        and spec.tied
        and LM_HEAD in present
        and not torch.equal(tensors[words][:9], tensors[LM_HEAD][:9])
    ):
        raise BadInput(
            f"{tensors.directory}: {LM_HEAD} is not {words}, but config.json has "
            "tie_word_embeddings: it would not be used; set tie_word_embeddings to false to train "
            f"it, or remove {LM_HEAD} from the files"
        )
    return names


def _refuse_fused_experts(tensors: HFTensors, missing: str) -> None:
    """Raises BadInput where an expert's tensor is missing because all experts are one tensor."""
    fused = sorted(name for name in tensors.names if re.search(r"\.experts\.\D", name))
    if fused and re.search(r"\.experts\.\d", missing):
        raise BadInput(
            f"{tensors.directory}: its experts are fused, {fused[0]} is one tensor of all, where "
            f"{missing} is expected: load it with transformers and save it again "
            "(save_pretrained(..., save_original_format=True) writes each expert by itself)"
        )


def score_names(tensors: HFTensors) -> list[str]:
    """Names of value-head weights in a directory, which may have a prefix."""
    return [
        name for name in tensors.names if name == SCORE_WEIGHT or name.endswith("." + SCORE_WEIGHT)
    ]


def _saved_head(tensors: HFTensors, outputs: int) -> dict[str, str]:
    """Names of the value head's tensors, which must have a label for each output."""
    scores = score_names(tensors)
    if len(scores) != 1:
        raise BadInput(
            f"{tensors.directory}: {len(scores)} tensors named {SCORE_WEIGHT}, expected one: give "
            "a directory of ...ForSequenceClassification or ...ForTokenClassification form, or "
            "start from a policy with a new head"
        )
    labels = tensors[scores[0]].shape[0]
    listed = read_config(tensors.directory).get("id2label")
    if labels != outputs or (isinstance(listed, dict) and len(listed) != outputs):
        reason = "a value is one number" if outputs == 1 else "as many as algorithm.value_loss.bins"
        raise BadInput(
            f"{tensors.directory}: {scores[0]} has {labels} rows and config.json "
            f"{len(listed) if isinstance(listed, dict) else 'no'} labels, expected {outputs} of "
            f"each: {reason}"
        )
    bias = scores[0].removesuffix(SCORE_WEIGHT) + SCORE_BIAS
    return {SCORE_WEIGHT: scores[0]} | ({SCORE_BIAS: bias} if bias in tensors.names else {})


def new_head(entry: Entry, std: float, seed: int) -> Tensor:
    """A new value head's weight or bias, in float32 on the CPU."""
    shape = entry.rule.hf_shapes()[0]
    if entry.hf == (SCORE_BIAS,) or std == 0.0:
        return torch.zeros(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std
