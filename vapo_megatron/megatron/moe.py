"""Megatron's settings for mixtures of experts, and router replay.

Router replay sends the trainer's tokens through the experts that the engine chose for them. Engine
and trainer compute a router's logits with different kernels. Where two experts are close, a
rounding difference selects the other one, and the same weights then give a token another log-prob.
Replaying the choice, with weights still from the trainer's own logits, removes that difference and
lets the router's gradient flow (R3, arXiv 2510.11370, section 3). Megatron-Core has a class for
this, but keeps its instances in one list for the whole process; here each router has its own, for
several models and pipeline schedules.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor
from torch.nn import Module, Parameter

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.errors import RunFailed
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.models.layers import Experts
from vapo_megatron.weights.mapping import unwrapped


def moe_settings(experts: Experts, layout: LayoutConfig, grouped: bool) -> dict[str, Any]:
    """Fields of TransformerConfig for a model with experts.

    There is no auxiliary loss and no token is dropped, so that the trainer computes what the
    engines sample from. The router's logits and weights are float32, since small differences select
    other experts. Weights that are not normalised are the softmax over all experts
    (moe_router_pre_softmax), otherwise over the chosen ones.

    grouped: one grouped matrix product for all experts of a rank (Transformer Engine) rather than
        one each.
    """
    settings: dict[str, Any] = {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.size,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": experts.scores == "softmax" and not experts.normalised,
        "moe_router_score_function": experts.scores,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": grouped,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": 1,
    }
    if experts.factor != 1.0:
        settings["moe_router_topk_scaling_factor"] = experts.factor
    if experts.groups > 1:
        settings["moe_router_num_groups"] = experts.groups
        settings["moe_router_group_topk"] = experts.groups_per_token
    if experts.shared_size:
        settings["moe_shared_expert_intermediate_size"] = experts.shared_size
        settings["moe_shared_expert_gate"] = experts.shared_gate
    return settings


def add_expert_biases(model: Module) -> None:
    """Give each router the numbers that its experts are chosen by, float32 and not trained.
    Megatron has a buffer for them, which it moves after every step. Here they stay what the
    checkpoint has, and a parameter is loaded, synced, offloaded and saved as every other."""
    for _, router in _routers(model):
        bias = torch.zeros(router.num_experts, dtype=torch.float32, device=router.weight.device)
        router.expert_bias = Parameter(bias, requires_grad=False)


def add_expert_outputs_apart(experts: Module) -> None:
    """Let local experts have biases: Megatron adds these in place to what an autograd function
    returned as a view, which torch refuses."""

    def copied(linear: Any, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return output[0].clone(), output[1]

    for name, module in experts.named_modules():
        if name.endswith("linear_fc2"):
            module.register_forward_hook(copied)


def mark_experts(model: Module) -> None:
    """Mark the experts' parameters, whose gradients are reduced over the ranks that hold the same
    expert. Megatron marks them only where ep > 1. At ep 1 with sequence parallelism, every
    tensor-parallel rank sends its own tokens through its copy, and those gradients have to be
    summed as well; once, while Megatron also marks biases of row-parallel layers for the sum over
    tensor-parallel ranks. Nor are they duplicates of rank 0's in the gradient norm."""
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            parameter.sequence_parallel = False  # type: ignore[attr-defined]


def complete_megatron() -> None:
    """Fill gaps of Megatron-Core 0.16.1: a name that its router needs without Transformer Engine;
    plain numbers for the token counts of each rank, which it otherwise makes only when it copies
    tensors from a GPU; and, for weight gradients that Transformer Engine's layers accumulate
    themselves, an output layer that can be built without apex."""
    layers._grad_accum_fusion_available = True
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not current_platform().is_cuda:
        token_dispatcher.maybe_move_tensor_to_cpu = (
            lambda tensor, as_numpy=False, record_stream=False: (
                tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor
            )
        )


class ExpertReplay:
    """The experts that the tokens of one layer go through, in place of TopKRouter.router_replay."""

    def __init__(self) -> None:
        self._chosen: Tensor | None = None
        self._training = False
        self._again: deque[Tensor] = deque()

    def set(self, chosen: Tensor | None, training: bool) -> None:
        """chosen: integers [t, k] for the next tokens; None: the router chooses. training: a
        backward pass follows."""
        self._chosen = chosen
        self._training = training

    def forget(self) -> int:
        """Drop the records kept for recomputation; returns the number of passes dropped."""
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
        """Scores and indices [t, k] of the chosen experts (megatron.core's
        RouterReplay.get_replay_topk). A layer whose activations are recomputed runs twice: first
        without gradients, then with them in the backward pass, after other micro-batches have gone
        forward. Backward passes come in the order of the forward ones."""
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
    """Enable replay in every router of a chunk."""
    for _, router in _routers(model):
        router.router_replay = ExpertReplay()


def replay_experts(
    model: Module, experts: Tensor | None, sequence_rank: int = 0, sequence_size: int = 1
) -> None:
    """Send a chunk's next forward pass through experts, integers [t, layers of the whole model, k]
    for the context-parallel rank's tokens, of which the router sees a part under sequence
    parallelism. None lets the routers choose."""
    for layer, router in _routers(model):
        chosen = None if experts is None else experts[:, layer].chunk(sequence_size)[sequence_rank]
        router.router_replay.set(chosen, router.training)


@contextmanager
def replaying(chunks: Sequence[Module]) -> Iterator[None]:
    """Wrap the forward and backward passes of an update, so that no pass uses what an earlier one
    left behind. Raises RunFailed where a layer's activations were not recomputed although they
    should have been: later tokens would use the wrong experts."""
    routers = [router for chunk in chunks for router in _routers(chunk)]
    for _, router in routers:
        router.router_replay.forget()
    yield
    for layer, router in routers:
        left = router.router_replay.forget()
        if left:
            raise RunFailed(
                f"layer {layer}: the experts of {left} micro-batches were not replayed in the "
                "backward pass, expected all of them: set actor.recompute.granularity=none, or "
                "rollout.router_replay=false"
            )


def _routers(model: Any) -> list[tuple[int, Any]]:
    """The routers of a chunk, each with the index of its layer in the whole model."""
    layers = unwrapped(model).decoder.layers
    return [
        (layer.layer_number - 1, layer.mlp.router)
        for layer in layers
        if hasattr(layer.mlp, "router")
    ]
