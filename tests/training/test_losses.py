"""Losses that look at whole responses, at histograms or at a reference: the same numbers at every
layout, and plain torch's."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from batches import LENGTHS, make_batch
from hf_models import write_model
from matrices import others_in_full
from ranks import run_ranks
from transformers import AutoModelForTokenClassification

from vapo_megatron.config.model import (
    ActorConfig,
    CriticConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerSettings,
)
from vapo_megatron.config.policy import KlConfig, PolicyLossConfig
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.megatron.mesh import make_mesh
from vapo_megatron.megatron.offload import PARTS
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.training.losses import PolicyLoss, ValueLoss
from vapo_megatron.training.score import values
from vapo_megatron.weights.export import save_hf
from vapo_megatron.weights.load import load_hf

BINS = 21
STEPS = 2
HL_GAUSS = ValueLossConfig(kind="hl_gauss", bins=BINS, low=-1.5, high=1.5)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen2"), "qwen2", num_hidden_layers=2)


def noise(seed: int, total: int) -> torch.Tensor:
    return torch.randn(total, generator=torch.Generator().manual_seed(seed))


def policy_loss(
    batch: ExperienceBatch, scored: torch.Tensor, settings: dict[str, Any]
) -> PolicyLoss:
    """Old log-probs, reference and rollout stand near the policy's, so that bounds act on some
    tokens alone."""
    total = batch.response_tokens
    return PolicyLoss(
        config=PolicyLossConfig.model_validate(
            {"clip_low": 0.1, "clip_high": 0.1, **settings["loss"]}
        ),
        kl=KlConfig.model_validate(settings["kl"]),
        old_logprobs=scored + 0.2 * noise(1, total),
        rollout_logprobs=scored + 0.2 * noise(2, total),
        ref_logprobs=scored + 0.2 * noise(3, total),
        advantages=noise(4, total),
        importance=noise(6, total).exp(),
        weights=(1 / (batch.samples * batch.response_lengths)).repeat_interleave(
            batch.response_lengths
        ),
        nll_weights=torch.zeros(total),
        mean_weights=torch.full((total,), 1 / total),
    )


def train_policy(
    model_dir: Path, layout: LayoutConfig, max_tokens: int, settings: dict[str, Any]
) -> Any:
    spec = read_spec(model_dir)
    batch = make_batch()
    mesh = make_mesh(layout)
    section = ActorConfig(
        layout=layout,
        optimizer=OptimizerSettings(lr=1e-2, warmup_steps=0, eps=1e-3),
        max_tokens_per_microbatch=max_tokens,
    )
    actor = Trainable(
        spec, ModelConfig(path="unused", dtype="float32"), section, mesh, "lm", name="actor", seed=1
    )
    load_hf(actor.chunks, spec, model_dir, mesh, "lm")
    actor.prepare()
    loss = policy_loss(batch, actor.score(batch)[:, 0], settings)
    results = [actor.train_step(batch, range(batch.samples), loss) for _ in range(STEPS)]
    return [(r.grad_norm, r.metrics) for r in results], float(
        actor.score(batch).double().square().sum()
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": {"loss": {"kind": "gspo", "aggregation": "sequence_mean"}, "kl": {}},
    "sao": {"loss": {"kind": "sao"}, "kl": {}},
    "k3": {"loss": {"dual_clip": 3.0}, "kl": {"placement": "loss", "estimator": "k3", "coef": 0.3}},
}
LAYOUTS = [
    (2, LayoutConfig(cp=2), 1000),
    (2, LayoutConfig(), 40),
    (4, LayoutConfig(tp=2, cp=2, sequence_parallel=True), 24),
    (4, LayoutConfig(pp=2, cp=2), 24),
]
IN_TEST = [
    (LAYOUTS[0], "gspo"),
    (LAYOUTS[1], "sao"),
    (LAYOUTS[2], "gspo"),
    (LAYOUTS[2], "k3"),
    (LAYOUTS[3], "sao"),
]


@pytest.fixture(scope="module")
def one_rank(model_dir: Path) -> dict[str, Any]:
    return {
        name: run_ranks(1, train_policy, model_dir, LayoutConfig(), 1000, settings)[0]
        for name, settings in SETTINGS.items()
    }


@pytest.mark.parametrize(("cut", "name"), others_in_full(product(LAYOUTS, SETTINGS), IN_TEST))
def test_layout_does_not_change_a_policy_loss(
    model_dir: Path, one_rank: dict[str, Any], cut: tuple[int, LayoutConfig, int], name: str
) -> None:
    world_size, layout, max_tokens = cut
    expected_steps, expected_sum = one_rank[name]
    for steps, total in run_ranks(
        world_size, train_policy, model_dir, layout, max_tokens, SETTINGS[name]
    ):
        assert total == pytest.approx(expected_sum, rel=1e-5)
        for (norm, metrics), (expected_norm, expected) in zip(steps, expected_steps, strict=True):
            assert norm == pytest.approx(expected_norm, rel=2e-5)
            assert metrics == pytest.approx(expected, rel=2e-5, abs=2e-6)


def test_gspo_clips_whole_responses(model_dir: Path, one_rank: dict[str, Any]) -> None:
    """The clip fractions of the six mean log-ratios, counted with their tokens."""
    batch = make_batch()
    (_, metrics), *_ = one_rank["gspo"][0]
    log_ratio = -0.2 * noise(1, batch.response_tokens)
    advantages = noise(4, batch.response_tokens)
    lengths = batch.response_lengths.tolist()
    ratios = torch.cat([part.mean().exp().expand(len(part)) for part in log_ratio.split(lengths)])
    low = ((ratios < 0.9) & (advantages < 0)).float().mean()
    high = ((ratios > 1.1) & (advantages > 0)).float().mean()
    assert low + high > 0
    assert metrics["clip_fraction_low"] == pytest.approx(float(low), abs=1e-6)
    assert metrics["clip_fraction_high"] == pytest.approx(float(high), abs=1e-6)


def train_critic(model_dir: Path, layout: LayoutConfig, max_tokens: int, out: Path) -> Any:
    spec = read_spec(model_dir, value_outputs=BINS)
    batch = make_batch()
    mesh = make_mesh(layout)
    section = CriticConfig(
        layout=layout,
        optimizer=OptimizerSettings(lr=1e-2, warmup_steps=0, eps=1e-3),
        max_tokens_per_microbatch=max_tokens,
    )
    critic = Trainable(
        spec,
        ModelConfig(path="unused", dtype="float32"),
        section,
        mesh,
        "value",
        name="critic",
        seed=1,
    )
    load_hf(critic.chunks, spec, model_dir, mesh, "value", head_init_std=0.1)
    critic.prepare()
    save_hf(critic.chunks, spec, mesh, "value", model_dir, out)
    total = batch.response_tokens
    loss = ValueLoss(HL_GAUSS, noise(1, total), torch.zeros(total), torch.full((total,), 1 / total))
    before = values(critic, batch, HL_GAUSS)
    results = [critic.train_step(batch, range(batch.samples), loss) for _ in range(STEPS)]
    steps = [(r.metrics["value_loss"], r.grad_norm) for r in results]
    return before.tolist(), steps, values(critic, batch, HL_GAUSS).tolist()


def expected_critic(start: Path) -> Any:
    """The same with transformers' token classifier of as many labels as there are bins."""
    model = AutoModelForTokenClassification.from_pretrained(start).double().eval()
    batch = make_batch()
    total = make_batch().response_tokens
    width = 3.0 / (BINS - 6)  # three bins lie beyond -1.5..1.5 on either side
    outer = 1.5 + 3 * width
    edges = torch.linspace(-outer, outer, BINS + 1, dtype=torch.float64)
    gaussian = torch.distributions.Normal(
        noise(1, total).double().clamp(-outer, outer)[:, None], 0.75 * width
    )
    mass = gaussian.cdf(edges).diff(dim=-1)
    target = mass / mass.sum(-1, keepdim=True)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-3)

    def log_probs() -> torch.Tensor:
        rows = []
        for s, (p, _) in enumerate(LENGTHS):
            ids = batch.tokens[batch.cu_seqlens[s] : batch.cu_seqlens[s + 1]].long()
            rows.append(model(ids[None, :-1]).logits[0, p - 1 :].log_softmax(-1))
        return torch.cat(rows)

    def means() -> list[float]:
        with torch.no_grad():
            found: list[float] = (log_probs().exp() @ ((edges[1:] + edges[:-1]) / 2)).tolist()
        return found

    before = means()
    steps = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = -(target * log_probs()).sum(-1).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    return before, steps, means()


@pytest.mark.parametrize(
    "world_size,layout",
    [
        pytest.param(1, LayoutConfig(), marks=pytest.mark.full),
        (2, LayoutConfig(cp=2)),
        pytest.param(4, LayoutConfig(tp=2, pp=2, sequence_parallel=True), marks=pytest.mark.full),
    ],
)
def test_a_critic_of_bins_learns_and_is_saved(
    model_dir: Path, tmp_path: Path, world_size: int, layout: LayoutConfig
) -> None:
    answers = run_ranks(world_size, train_critic, model_dir, layout, 40, tmp_path / "critic")
    start = tmp_path / "critic"
    assert transformers.AutoConfig.from_pretrained(start).num_labels == BINS
    expected_before, expected_steps, expected_after = expected_critic(start)
    for before, steps, after in answers:
        assert before == pytest.approx(expected_before, abs=1e-5)
        assert after == pytest.approx(expected_after, abs=1e-4)
        for found, expected in zip(steps, expected_steps, strict=True):
            assert found == pytest.approx(expected, rel=2e-5)


def frozen_scores(model_dir: Path, layout: LayoutConfig) -> Any:
    """Largest differences of a reference to its policy: at first, after an update, after it was
    replaced."""
    spec = read_spec(model_dir)
    batch = make_batch()
    mesh = make_mesh(layout)
    section = ActorConfig(layout=layout, optimizer=OptimizerSettings(lr=1e-2, warmup_steps=0))
    model = ModelConfig(path="unused", dtype="float32")
    actor, reference = (
        Trainable(spec, model, section, mesh, "lm", name=n, seed=1) for n in ("actor", "reference")
    )
    for trainable in (actor, reference):
        load_hf(trainable.chunks, spec, model_dir, mesh, "lm")
    actor.prepare()
    reference.freeze()
    loss = policy_loss(batch, actor.score(batch)[:, 0], SETTINGS["k3"])

    def difference() -> float:
        reference.offloader.onload_only(*PARTS)
        found = float((reference.score(batch) - actor.score(batch)).abs().max())
        reference.offloader.onload_only()
        return found

    found = [difference()]
    actor.train_step(batch, range(batch.samples), loss)
    found.append(difference())
    reference.copy_from(actor)
    found.append(difference())
    assert not any(
        p.requires_grad or p.grad is not None for c in reference.chunks for p in c.parameters()
    )
    return found


@pytest.mark.parametrize("world_size,layout", [(1, LayoutConfig()), (4, LayoutConfig(tp=2, pp=2))])
def test_a_reference_stands_still_until_it_is_replaced(
    model_dir: Path, world_size: int, layout: LayoutConfig
) -> None:
    for at_first, after_update, after_replacement in run_ranks(
        world_size, frozen_scores, model_dir, layout
    ):
        assert max(at_first, after_replacement) < 1e-5
        assert after_update > 1e-3


def test_figures_of_parts_that_are_off_are_not_reported(model_dir: Path) -> None:
    batch = make_batch()
    off = policy_loss(batch, torch.zeros(batch.response_tokens), SETTINGS["sao"])
    on = replace(off, kl=KlConfig(placement="loss", estimator="k2", coef=0.1))
    assert "kl_loss" not in off.sums and "kl_loss" in on.sums
