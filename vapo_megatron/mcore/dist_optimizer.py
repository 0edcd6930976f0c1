"""The training state of a Trainable as one sharded state dict: weights, optimizer and schedule, for any layout.

Optimizer states are written in the shapes of the parameters (Megatron's "fully_reshardable"), under keys that begin
with "optimizer.", so that they load at another tensor, pipeline, context or data-parallel size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Adam

from vapo_megatron.mcore.trainable import Trainable
from vapo_megatron.weights.torch_dist import CONTENT_METADATA, model_state, put_model_state

_METADATA = CONTENT_METADATA | {"distrib_optim_sharding_type": "fully_reshardable"}
# Of an optimizer's parameter group: how far it is. All else in it comes from the config.
_PROGRESS = ("params", "step")


def training_state(trainable: Trainable, loading: bool = False) -> dict[str, Any]:
    """Collective: what dist_checkpointing saves of a model, or (loading) what it is to fill.

    A model without an optimizer (a reference policy) has weights alone.
    """
    state = model_state(trainable.chunks)
    if trainable.optimizer is not None:
        _prime(trainable)
        with _padding_counted(_parts(trainable)):
            state["optimizer"] = trainable.optimizer.sharded_state_dict(
                dict(state), is_loading=loading, metadata=_METADATA
            )
        state["scheduler"] = {"num_steps": trainable.scheduler.num_steps}
    return state


def put_training_state(trainable: Trainable, state: dict[str, Any]) -> None:
    """Take what dist_checkpointing.load filled of training_state(trainable, loading=True).

    Learning rates and decay follow the config of today, at the step that was saved.
    """
    put_model_state(trainable.chunks, state)
    if trainable.optimizer is None:
        return
    parts = _parts(trainable)
    settings = [_settings(part) for part in parts]
    loaded = state["optimizer"]
    for index, part in enumerate(parts):
        _load(part, loaded if len(parts) == 1 else loaded[index])
    for part, groups in zip(parts, settings, strict=True):
        for group, before in zip(part.optimizer.param_groups, groups, strict=True):
            group.update(before)
    trainable.scheduler.num_steps = state["scheduler"]["num_steps"]
    trainable.scheduler.step(0)


def _parts(trainable: Trainable) -> list[Any]:
    """Megatron's optimizers of a model: one, or one for its dense part and one for its experts."""
    chained = getattr(trainable.optimizer, "chained_optimizers", None) or [trainable.optimizer]
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


@contextmanager
def _padding_counted(parts: Sequence[Any]) -> Iterator[None]:
    """Let Megatron count the padding of its gradient buckets as content while it gathers optimizer states.

    It joins the buckets without their padding and then cuts parameters out at their places in the padded buffer: after
    the first padded bucket (tied embeddings on a pipeline have buckets of their own) the states of other parameters
    would be saved, and zeros at the end (Megatron-Core 0.16.1, DistributedOptimizer.get_parameter_state_dp_zero).
    """
    buffers = [buffer for part in parts for buffer in getattr(part, "buffers", ())]
    counts = [(buffer, buffer.numel, buffer.numel_unpadded) for buffer in buffers]
    counts += [(b, b.grad_data.numel(), b.numel_unpadded) for buffer in buffers for b in buffer.buckets]
    try:
        for counted, whole, _ in counts:
            counted.numel_unpadded = whole
        yield
    finally:
        for counted, _, unpadded in counts:
            counted.numel_unpadded = unpadded


def _settings(part: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k not in _PROGRESS} for group in part.optimizer.param_groups]


def _prime(trainable: Trainable) -> None:
    """Give an optimizer that has made no step yet the states that its first step would begin with.

    Megatron can neither save nor load one without, and its own way to make them is a step.
    """
    for part in _parts(trainable):
        inner = part.optimizer
        part.init_state_fn(inner, part.config)
        if isinstance(inner, Adam):
            _set_steps(inner)


def _set_steps(inner: Adam, step: torch.Tensor | None = None) -> None:
    """torch's Adam counts steps in a tensor of each parameter; None leaves those that are there."""
    for values in inner.state.values():
        found = values.get("step") if step is None else step
        # A tensor of its own each: one that all of them shared would count a step for every parameter.
        values["step"] = torch.zeros(()) if found is None else found.detach().clone()


def _load(part: Any, state: dict[str, Any]) -> None:
    """Megatron's load_state_dict, for the distributed optimizer in two parts: its own takes torch's step counter for
    one of the tensors to be loaded."""
    inner = part.optimizer
    if "param_state" not in state:
        if isinstance(inner, Adam):
            # Megatron leaves a count of 0 out of what it saves, and torch wants one.
            state.get("optimizer", state)["state"].setdefault("common_step", torch.zeros(()))
        part.load_state_dict(state)
        if isinstance(inner, Adam):
            _set_steps(inner)
        return
    part.load_state_dict({k: v for k, v in state.items() if not k.startswith("param_state")})
    steps = [values.pop("step") for values in inner.state.values() if "step" in values]
    part.load_parameter_state_from_fully_reshardable(state["param_state"])
    if isinstance(inner, Adam):
        _set_steps(inner, steps[0] if steps else None)
