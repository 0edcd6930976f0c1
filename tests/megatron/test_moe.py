"""A mixture of experts trains as transformers with torch's AdamW do, whatever ranks its experts are
spread over."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from batches import LENGTHS, make_batch, spread
from family_table import EXPERTS, WITH_EXPERTS
from hf_models import SIZES, read_tensors, write_model
from ranks import run_ranks
from test_family_gradients import megatron as megatron_gradients
from test_family_gradients import sequences
from test_train_step import OPTIMIZER, ROLLOUT, reference, train
from trainables import make_trainable

from vapo_megatron.config.model import (
    ActorConfig,
    CriticConfig,
    LayoutConfig,
    ModelConfig,
    RecomputeConfig,
)
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.mesh import check_layout, check_model_layout, make_mesh
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.weights.load import load_hf

pytestmark = pytest.mark.full

LAYOUTS = [
    (1, LayoutConfig(), 1000, "lm"),
    (2, LayoutConfig(ep=2), 40, "lm"),
    (2, LayoutConfig(ep=2), 40, "value"),
    (2, LayoutConfig(tp=2, sequence_parallel=True), 1000, "lm"),
    (2, LayoutConfig(tp=2, ep=2, sequence_parallel=True), 40, "lm"),
    (4, LayoutConfig(tp=2, ep=2, sequence_parallel=True), 40, "value"),
    (4, LayoutConfig(tp=2, ep=4, sequence_parallel=True), 40, "lm"),
    (4, LayoutConfig(pp=2, ep=2), 40, "lm"),
    (4, LayoutConfig(pp=2, vpp=2, ep=2), 40, "value"),
    (4, LayoutConfig(ep=2), 1000, "lm"),
    (4, LayoutConfig(cp=2, ep=2), 40, "lm"),
    (2, LayoutConfig(cp=2, ep=2), 40, "value"),
    (8, LayoutConfig(tp=2, pp=2, ep=4, sequence_parallel=True), 40, "lm"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A model whose weights of a token's experts sum up to 1, and one where they do not."""
    root = tmp_path_factory.mktemp("qwen3_moe")
    return {
        norm: write_model(root / str(norm), "qwen3_moe", norm_topk_prob=norm)
        for norm in (True, False)
    }


def compare(
    got: list[tuple[list[tuple[float, float]], float]],
    expected: tuple[list[tuple[float, float]], float],
) -> None:
    for steps, total in got:
        for (loss, norm), (expected_loss, expected_norm) in zip(steps, expected[0], strict=True):
            assert loss == pytest.approx(expected_loss, rel=2e-5, abs=2e-6)
            assert norm == pytest.approx(expected_norm, rel=2e-5)
        assert total == pytest.approx(expected[1], rel=5e-5)


@pytest.mark.parametrize(("world_size", "layout", "max_tokens", "head"), LAYOUTS)
def test_experts_train_as_in_transformers(
    models: dict[bool, Path], world_size: int, layout: LayoutConfig, max_tokens: int, head: str
) -> None:
    for norm in (True, False) if world_size == 1 else (True,):
        got = run_ranks(world_size, train, models[norm], layout, max_tokens, head)
        compare(got, reference(models[norm], head))


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, LayoutConfig(tp=2, sequence_parallel=True)),
        (4, LayoutConfig(tp=2, pp=2, ep=2, sequence_parallel=True)),
    ],
)
def test_the_gradient_of_every_expert_equals_transformers(
    models: dict[bool, Path], tmp_path: Path, world_size: int, layout: LayoutConfig
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(models[False], dtype=torch.float32)
    rows = []
    for ids in sequences():
        tokens = torch.tensor(ids)
        rows.append(
            model(tokens[None, :-1]).logits[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        )
    (-torch.cat(rows).mean()).backward()
    with torch.no_grad():
        # Saved in the place of the weights, gradients get the names of files: experts are one
        # tensor in memory.
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    model.save_pretrained(tmp_path)
    expected = read_tensors(tmp_path)
    for _, gradients in run_ranks(world_size, megatron_gradients, models[False], layout):
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            error = (torch.from_numpy(gradients[name]) - gradient).abs().max()
            assert error <= 1e-5 * gradient.abs().max() + 1e-7, f"{name}: {error}"


REPLAY_LAYOUTS = [
    (1, LayoutConfig(), 40, RecomputeConfig()),
    (2, LayoutConfig(pp=2), 40, RecomputeConfig(granularity="full")),
    (2, LayoutConfig(cp=2, ep=2), 40, RecomputeConfig()),
    (
        4,
        LayoutConfig(tp=2, pp=2, vpp=2, ep=2, sequence_parallel=True),
        40,
        RecomputeConfig(granularity="full"),
    ),
]


def random_experts() -> np.ndarray:
    """Other experts than the router's for every position, layer by layer: uint8 [positions, layers
    * 2]."""
    generator = torch.Generator().manual_seed(9)
    positions = sum(p + r - 1 for p, r in LENGTHS)
    noise = torch.rand(
        positions, SIZES["num_hidden_layers"], EXPERTS["num_experts"], generator=generator
    )
    return noise.topk(EXPERTS["num_experts_per_tok"]).indices.flatten(1).to(torch.uint8).numpy()


def route_as_told(model: Any, experts: torch.Tensor) -> None:
    """Have transformers' routers choose these experts, sample after sample, over and over."""
    per_sample = (
        experts.unflatten(1, (len(model.model.layers), -1))
        .long()
        .split([p + r - 1 for p, r in LENGTHS])
    )
    for index, layer in enumerate(model.model.layers):
        gate = layer.mlp.gate
        samples = itertools.cycle(per_sample)

        def forward(
            hidden: torch.Tensor, gate: Any = gate, samples: Any = samples, index: int = index
        ) -> Any:
            logits = F.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            chosen = next(samples)[:, index]
            weights = logits.softmax(-1).gather(1, chosen)
            return (
                logits,
                weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights,
                chosen,
            )

        gate.forward = forward


@pytest.mark.parametrize(("world_size", "layout", "max_tokens", "recompute"), REPLAY_LAYOUTS)
def test_replayed_experts_take_the_place_of_the_routers_choice(
    models: dict[bool, Path],
    world_size: int,
    layout: LayoutConfig,
    max_tokens: int,
    recompute: RecomputeConfig,
) -> None:
    experts = random_experts()
    norm = layout.cp == 1
    expected = reference(
        models[norm], "lm", lambda model: route_as_told(model, torch.from_numpy(experts))
    )
    assert abs(expected[1] - reference(models[norm], "lm")[1]) > 1e-2
    got = run_ranks(
        world_size, train, models[norm], layout, max_tokens, "lm", OPTIMIZER, recompute, experts
    )
    compare(got, expected)


def own_experts(model_dir: Path) -> np.ndarray:
    """What the routers of transformers choose for every position of the batch."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    batch = make_batch(**ROLLOUT)
    rows = []
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        router = getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)
        if router is not None:
            router.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
        else:  # engines send rows of dense layers, too
            layer.mlp.register_forward_hook(lambda _, __, out: chosen.append(unread(out)))
    for sample in range(batch.samples):
        chosen.clear()
        ids = batch.tokens[batch.cu_seqlens[sample] : batch.cu_seqlens[sample + 1]].long()
        with torch.no_grad():
            model(ids[None, :-1])
        rows.append(torch.cat(chosen, 1))
    return torch.cat(rows).to(torch.uint8).numpy()


def unread(output: torch.Tensor) -> torch.Tensor:
    """Experts of a layer that has none, [tokens, 2]."""
    return torch.zeros(output.shape[-2], EXPERTS["num_experts_per_tok"], dtype=torch.long)


def scored(model_dir: Path, routed_experts: np.ndarray, head: str) -> tuple[np.ndarray, np.ndarray]:
    """Outputs for the batch without and with the experts told."""
    batch = make_batch(**ROLLOUT)
    section = ActorConfig() if head == "lm" else CriticConfig()
    spec = read_spec(model_dir)
    mesh = make_mesh(LayoutConfig())
    model = ModelConfig(path="unused", dtype="float32")
    trainable = Trainable(spec, model, section, mesh, head, name="actor", seed=1)  # type: ignore[arg-type]
    load_hf(trainable.chunks, spec, model_dir, mesh, head, head_init_std=1.0)  # type: ignore[arg-type]
    trainable.prepare()
    free = trainable.score(batch).numpy()
    batch.routed_experts = torch.from_numpy(routed_experts)
    return free, trainable.score(batch).numpy()


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_the_routers_own_choice_replayed_changes_nothing(tmp_path: Path, family: str) -> None:
    source = write_model(tmp_path, family)
    own = own_experts(source)
    ((free, replayed),) = run_ranks(1, scored, source, own, "lm")
    assert np.abs(free - replayed).max() < 1e-6
    ((free, replayed),) = run_ranks(1, scored, source, 3 - own, "lm")
    assert np.abs(free - replayed).max() > 1e-2


def scored_by_one_of_two(
    model_dir: Path, routed_experts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs for one sample, which one of two ranks computes and the other lends its experts for;
    as it should be."""
    batch = make_batch(**ROLLOUT)
    batch.routed_experts = torch.from_numpy(routed_experts)
    model = make_trainable(model_dir, "lm", layout=LayoutConfig(ep=2))
    expected = model.score(batch)[: int(batch.response_lengths[0])]
    one = spread(batch.select([0]))
    part = one.model_input(model, [0])
    found = one.return_to_owner(part, model.score(part.batch, share=part.share))
    return found.numpy(), expected.numpy()


def test_a_rank_without_samples_replays_for_the_others(models: dict[bool, Path]) -> None:
    (found, expected), (nothing, _) = run_ranks(
        2, scored_by_one_of_two, models[True], random_experts()
    )
    assert len(nothing) == 0 and np.abs(found - expected).max() < 1e-5


def test_a_critic_does_not_replay_the_policys_experts(models: dict[bool, Path]) -> None:
    ((free, replayed),) = run_ranks(1, scored, models[True], random_experts(), "value")
    assert np.array_equal(free, replayed)


@pytest.mark.parametrize(
    ("world_size", "family", "layout", "told"),
    [
        (
            4,
            "qwen3_moe",
            LayoutConfig(ep=8),
            "actor.layout.ep=8 does not divide the 4 ranks of a pipeline stage",
        ),
        (
            3,
            "qwen3_moe",
            LayoutConfig(ep=3),
            "actor.layout.ep=3 does not divide the model's 4 experts",
        ),
        (2, "qwen3", LayoutConfig(ep=2), "actor.layout.ep=2: a qwen3 model has no experts"),
        (2, "qwen3_moe", LayoutConfig(tp=2), "actor.layout.sequence_parallel=false with tp=2"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(
    tmp_path: Path, world_size: int, family: str, layout: LayoutConfig, told: str
) -> None:
    spec = read_spec(write_model(tmp_path, family))
    with pytest.raises(BadInput, match=told):
        check_layout(layout, world_size, "actor")
        check_model_layout(spec, layout, "actor")
