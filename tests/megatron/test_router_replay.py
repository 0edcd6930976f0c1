"""Experts are passed again in the backward pass, each micro-batch through its own, whatever came
before."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from vapo_megatron.errors import RunFailed
from vapo_megatron.megatron.moe import install_router_replay, replay_experts, replaying

SCORES = torch.rand(3, 6, generator=torch.Generator().manual_seed(1))


def chunk(layers: int = 2) -> Module:
    """What a chunk's routers look like from outside."""
    model = Module()
    blocks = [
        SimpleNamespace(layer_number=n + 1, mlp=SimpleNamespace(router=Module()))
        for n in range(layers)
    ]
    model.decoder = SimpleNamespace(layers=blocks)  # type: ignore[assignment]
    install_router_replay(model)
    return model


def routers(model: Any) -> list[Module]:
    return [block.mlp.router for block in model.decoder.layers]


def experts(first: int) -> Tensor:
    """Of three tokens, [3, 2 layers, 2]."""
    return (torch.arange(12).reshape(3, 2, 2) + first) % 6


def forward(model: Module, chosen: Tensor) -> None:
    """The forward pass of a layer whose activations are computed again: without gradients."""
    replay_experts(model, chosen)
    with torch.no_grad():
        for layer, router in enumerate(routers(model)):
            _, index = router.router_replay.get_replay_topk(SCORES, 2)  # type: ignore[union-attr,operator]
            assert torch.equal(index, chosen[:, layer])


def backward(model: Module) -> list[Tensor]:
    """The experts of each layer in the pass that computes them again."""
    return [router.router_replay.get_replay_topk(SCORES, 2)[1] for router in routers(model)]  # type: ignore[union-attr,operator]


def test_a_forward_pass_without_backward_is_not_replayed_later() -> None:
    model = chunk()
    forward(model, experts(5))
    with replaying([model]):
        forward(model, experts(1))
        forward(model, experts(2))
        for chosen in (experts(1), experts(2)):
            assert all(
                torch.equal(found, chosen[:, layer]) for layer, found in enumerate(backward(model))
            )


def test_a_forward_pass_that_is_not_passed_again_ends_the_update() -> None:
    model = chunk()
    with (
        pytest.raises(RunFailed, match="layer 0: the experts of 1 micro-batches were not replayed"),
        replaying([model]),
    ):
        forward(model, experts(1))
    with replaying([model]):  # and nothing of it is left
        forward(model, experts(2))
        backward(model)


def test_an_error_of_the_update_itself_is_the_one_that_is_told() -> None:
    model = chunk()
    with pytest.raises(ZeroDivisionError), replaying([model]):
        forward(model, experts(1))
        raise ZeroDivisionError
