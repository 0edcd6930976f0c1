"""Router replay: in the trainer, tokens go through the experts that the engine chose for them.

Engine and trainer compute a router's logits in other kernels, and where two experts are close a rounding difference
chooses the other one: the same weights then give a token another log-prob. Replaying the choice, with weights still
from the trainer's own logits, takes that difference away and lets the router's gradient flow (R3, "Stabilizing MoE
Reinforcement Learning by Aligning Training and Inference Routers", arXiv 2510.11370, section 3).

Megatron-Core has a class for this, whose instances are one list over all models of the process and which is told by
hand when activations are computed again; with several models and pipeline schedules each router keeps its own here.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from vapo_megatron.errors import RunFailed


class ExpertReplay:
    """Which experts the tokens of one layer are to go through; in the place of TopKRouter.router_replay."""

    def __init__(self) -> None:
        self._chosen: Tensor | None = None
        self._training = False
        self._again: deque[Tensor] = deque()

    def set(self, chosen: Tensor | None, training: bool) -> None:
        """chosen: integers [t, k], of the tokens that the layer sees next; None lets the router choose.

        training: whether a backward pass follows.
        """
        self._chosen, self._training = chosen, training

    def forget(self) -> int:
        """Forget what was to be passed again; how many passes that were."""
        left = len(self._again)
        self._again.clear()
        return left

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices [t, k] of the experts chosen (megatron.core's RouterReplay.get_replay_topk).

        A layer whose activations are recomputed is passed twice: without gradients first, and with them in the backward
        pass, by which time other micro-batches have gone forward. Backward passes follow in the order of the forward
        ones, at every pipeline schedule.
        """
        chosen = self._chosen
        if torch.is_grad_enabled() and self._again:
            chosen = self._again.popleft()
        elif self._training and not torch.is_grad_enabled() and chosen is not None:
            self._again.append(chosen)
        if chosen is None:
            assert default_compute_topk is not None
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        index = chosen.to(device=scores.device, dtype=torch.int64)
        return scores.gather(1, index), index


def install_router_replay(model: Module) -> None:
    """Make every router of a chunk able to replay."""
    for _, router in _routers(model):
        router.router_replay = ExpertReplay()


def replay_experts(model: Module, experts: Tensor | None, sequence_rank: int = 0, sequence_size: int = 1) -> None:
    """Have a chunk's next forward pass go through these experts.

    experts: integers [t, layers of the whole model, k] of the context-parallel rank's tokens, of which the router sees
    the part of sequence_rank under sequence parallelism; None lets the routers choose.
    """
    for layer, router in _routers(model):
        chosen = None if experts is None else experts[:, layer].chunk(sequence_size)[sequence_rank]
        router.router_replay.set(chosen, router.training)


@contextmanager
def replaying(chunks: Sequence[Module]) -> Iterator[None]:
    """Around the forward and backward passes of an update: none goes through what an earlier one has left behind.

    Raises:
        RunFailed: activations of a layer were to be computed again and were not, so that the next ones that are would
            have gone through experts of other tokens.
    """
    routers = [found for chunk in chunks for found in _routers(chunk)]
    for _, router in routers:
        router.router_replay.forget()
    yield
    for layer, router in routers:
        left = router.router_replay.forget()
        if left:
            raise RunFailed(
                f"layer {layer}: the experts of {left} micro-batches were not replayed in the backward pass, expected "
                "all of them: set actor.recompute.granularity=none, or rollout.router_replay=false"
            )


def _routers(model: Any) -> list[tuple[int, Any]]:
    """The routers of a chunk, each with the index of its layer in the whole model."""
    while hasattr(model, "module"):
        model = model.module
    return [
        (layer.layer_number - 1, layer.mlp.router) for layer in model.decoder.layers if hasattr(layer.mlp, "router")
    ]
