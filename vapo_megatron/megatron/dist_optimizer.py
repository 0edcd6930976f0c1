"""The training state of a Trainable as one sharded state dict: weights, optimizer and schedule, for any layout.

Optimizer states are written in the shapes of the parameters (megatron/optimizer_shards.py), under keys that begin with
"optimizer.", so that they load at another tensor, pipeline, context or data-parallel size.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.optim import Adam

from vapo_megatron.megatron.optimizer_shards import empty_states, gathered_states, put_states, reads
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.weights.torch_dist import CONTENT_METADATA, model_state, put_model_state

# Of an optimizer's parameter group: how far it is. All else in it comes from the config.
_PROGRESS = ("params", "step")
_STATES = "param_state"

Load = Callable[[dict[str, Any]], dict[str, Any]]


def training_state(trainable: Trainable) -> dict[str, Any]:
    """Collective: what dist_checkpointing saves of a model.

    A model without an optimizer (a reference policy) has weights alone.
    """
    state = _state(trainable, loading=False)
    for part, found in _optimizer_states(trainable, state):
        if isinstance(part, DistributedOptimizer):
            found[_STATES] = gathered_states(part, _weights(state))
    return state


def load_training_state(trainable: Trainable, load: Load) -> None:
    """Collective: fill a prepared (or frozen) model, a portion of its optimizer's states after the other.

    Learning rates and decay follow the config of today, at the step that was saved.

    Args:
        trainable: to be filled.
        load: collective; a sharded state dict as dist_checkpointing.load fills it.
    """
    _prime(trainable)
    loaded = load(_state(trainable, loading=True))
    put_model_state(trainable.chunks, loaded)
    if trainable.optimizer is None:
        return
    for part, found in _optimizer_states(trainable, loaded):
        groups = part.optimizer.param_groups
        settings = [{key: value for key, value in group.items() if key not in _PROGRESS} for group in groups]
        _load(part, found)
        for group, before in zip(part.optimizer.param_groups, settings, strict=True):
            group.update(before)
    trainable.scheduler.num_steps = loaded["scheduler"]["num_steps"]
    trainable.scheduler.step(0)
    del loaded
    weights = model_state(trainable.chunks)
    for part in _parts(trainable):
        if isinstance(part, DistributedOptimizer):
            _load_states(part, weights, load)


def _state(trainable: Trainable, loading: bool) -> dict[str, Any]:
    """All but the states that a distributed optimizer holds in parts."""
    state = model_state(trainable.chunks)
    if trainable.optimizer is None:
        return state
    _prime(trainable)
    parts = _parts(trainable)
    if len(parts) > 1:
        trainable.optimizer._synchronize_steps()
    found: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, DistributedOptimizer):
            found.append(part.state_dict())
        else:
            found.append(part.sharded_state_dict(dict(state), is_loading=loading, metadata=CONTENT_METADATA))
    state["optimizer"] = found[0] if len(found) == 1 else dict(enumerate(found))
    state["scheduler"] = {"num_steps": trainable.scheduler.num_steps}
    return state


def _weights(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key.startswith("model")}


def _optimizer_states(trainable: Trainable, state: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Each optimizer of a model with what a state dict has of it."""
    if trainable.optimizer is None:
        return []
    parts, found = _parts(trainable), state["optimizer"]
    return [(part, found if len(parts) == 1 else found[index]) for index, part in enumerate(parts)]


def _load_states(part: Any, weights: dict[str, Any], load: Load) -> None:
    """Collective: all ranks read equally often, whatever they hold; pipeline stages differ."""
    portions = reads(part, weights)
    most = torch.tensor(len(portions), device=current_platform().device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    for number in range(int(most)):
        portion = portions[number] if number < len(portions) else []
        put_states(part, portion, load({_STATES: empty_states(portion)}).get(_STATES, {}))


def _parts(trainable: Trainable) -> list[Any]:
    """Megatron's optimizers of a model: one, or one for its dense part and one for its experts."""
    chained = getattr(trainable.optimizer, "chained_optimizers", None) or [trainable.optimizer]
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def _prime(trainable: Trainable) -> None:
    """Give an optimizer that has made no step yet the states that its first step would begin with.

    Megatron can neither save nor load one without, and its own way to make them is a step.
    """
    for part in _parts(trainable) if trainable.optimizer is not None else ():
        inner = part.optimizer
        part.init_state_fn(inner, part.config)
        if isinstance(inner, Adam):
            _set_steps(inner)


def _set_steps(inner: Adam) -> None:
    """torch's Adam counts steps in a tensor of each parameter."""
    for values in inner.state.values():
        found = values.get("step")
        # A tensor of its own each: one that all of them shared would count a step for every parameter.
        values["step"] = torch.zeros(()) if found is None else found.detach().clone()


def _load(part: Any, state: dict[str, Any]) -> None:
    """Megatron's load_state_dict, with the step counters that each Adam wants."""
    inner = part.optimizer
    if isinstance(part, DistributedOptimizer):
        state = {key: value for key, value in state.items() if not key.startswith(_STATES)}
    elif isinstance(inner, Adam):
        # Megatron leaves a count of 0 out of what it saves, and torch wants one.
        state.get("optimizer", state)["state"].setdefault("common_step", torch.zeros(()))
    part.load_state_dict(state)
    if isinstance(inner, Adam):
        _set_steps(inner)
    for group in inner.param_groups:
        if "step" in group:
            group["step"] = int(group["step"])  # fused ones take no float, and torch's Adam saves one
