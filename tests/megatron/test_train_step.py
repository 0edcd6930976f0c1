"""One batch gives one loss, one gradient norm and one set of weights, whatever the layout; the
reference is transformers with torch's AdamW, written out sample by sample."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from batches import LENGTHS, make_batch
from hf_models import write_model
from matrices import others_in_full
from ranks import run_ranks
from trainables import loss_of, make_trainable, small_logit_chunks

from vapo_megatron.config.model import (
    ActorConfig,
    CriticConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerSettings,
    RecomputeConfig,
)
from vapo_megatron.config.policy import KlConfig, PolicyLossConfig
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.megatron import schedule
from vapo_megatron.megatron.mesh import make_mesh
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.training.losses import PolicyLoss, ValueLoss
from vapo_megatron.weights.load import load_hf

# Of the log-probs that ratios are taken to.
ROLLOUT = {"highest": 0.0, "spread": 4.0}
# With an eps of 1e-8 the first steps are nearly signs of gradients, which one CPU rounds otherwise
# than another.
OPTIMIZER = OptimizerSettings(lr=1e-2, warmup_steps=0, eps=1e-5)
NO_RECOMPUTE = RecomputeConfig()
STEPS = 3


def token_tensors(batch: ExperienceBatch) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    total = batch.response_tokens
    correct = batch.correct.repeat_interleave(batch.response_lengths)
    return {
        "advantages": torch.randn(total, generator=generator),
        "targets": torch.randn(total, generator=generator),
        "weights": torch.full((total,), 1.0 / total),
        "nll_weights": correct / correct.sum(),
    }


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3"), "qwen3", tie_word_embeddings=True)


def policy_loss(batch: ExperienceBatch) -> PolicyLoss:
    t = token_tensors(batch)
    zeros = torch.zeros_like(t["advantages"])
    return PolicyLoss(
        config=PolicyLossConfig(entropy_coef=0.01),
        kl=KlConfig(),
        old_logprobs=batch.rollout_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        ref_logprobs=zeros,
        advantages=t["advantages"],
        importance=torch.ones_like(zeros),
        weights=t["weights"],
        nll_weights=t["nll_weights"],
        mean_weights=t["weights"],
    )


def train(
    model_dir: Path,
    layout: LayoutConfig,
    max_tokens: int,
    head: str,
    optimizer: OptimizerSettings = OPTIMIZER,
    recompute: RecomputeConfig = NO_RECOMPUTE,
    routed_experts: np.ndarray | None = None,
) -> tuple[list[tuple[float, float]], float]:
    """(loss, gradient norm) of each step, and the sum of squares of the outputs after the last."""
    spec = read_spec(model_dir)
    batch = make_batch(**ROLLOUT)
    batch.routed_experts = None if routed_experts is None else torch.from_numpy(routed_experts)
    shared = {
        "layout": layout,
        "optimizer": optimizer,
        "recompute": recompute,
        "max_tokens_per_microbatch": max_tokens,
    }
    section = ActorConfig(**shared) if head == "lm" else CriticConfig(**shared)
    mesh = make_mesh(layout)
    model = ModelConfig(path=str(model_dir), dtype="float32")
    trainable = Trainable(spec, model, section, mesh, head, name="actor", seed=1, temperature=0.9)  # type: ignore[arg-type]
    load_hf(trainable.chunks, spec, model_dir, mesh, head)
    trainable.prepare()
    small_logit_chunks(trainable)
    steps = []
    for _ in range(STEPS):
        if head == "lm":
            result = trainable.train_step(batch, range(batch.samples), policy_loss(batch))
            metrics = result.metrics
            loss = (
                metrics["policy_loss"]
                + 0.1 * metrics["nll_loss"]
                - 0.01 * metrics["update_entropy"]
            )
        else:
            t = token_tensors(batch)
            value = ValueLoss(ValueLossConfig(), t["targets"], t["targets"], t["weights"])
            result = trainable.train_step(batch, range(batch.samples), value)
            loss = result.metrics["value_loss"]
        steps.append((loss, result.grad_norm))
    return steps, float(trainable.score(batch).double().square().sum())


def reference(
    model_dir: Path, head: str, prepare: Callable[[Any], None] = lambda model: None
) -> tuple[list[tuple[float, float]], float]:
    """The same of transformers and torch; prepare may change the model first."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    prepare(model)
    batch = make_batch(**ROLLOUT)
    t = token_tensors(batch)
    value_weight = torch.nn.Parameter(torch.zeros(1, 32))
    value_bias = torch.nn.Parameter(torch.zeros(1))
    parameters = (
        list(model.parameters())
        if head == "lm"
        else [*model.model.parameters(), value_weight, value_bias]
    )
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=OPTIMIZER.eps,
    )

    def outputs() -> torch.Tensor:
        rows = []
        for s, (p, _) in enumerate(LENGTHS):
            ids = batch.tokens[batch.cu_seqlens[s] : batch.cu_seqlens[s + 1]].long()
            hidden = model.model(ids[None, :-1]).last_hidden_state[0]
            if head == "lm":
                log_p = (model.lm_head(hidden) / 0.9).log_softmax(-1)
                picked = log_p.gather(1, ids[1:, None])[:, 0]
                rows.append(torch.stack((picked, -(log_p.exp() * log_p).sum(-1)), -1)[p - 1 :])
            else:
                rows.append(F.linear(hidden, value_weight, value_bias)[p - 1 :])
        return torch.cat(rows)

    steps = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        out = outputs()
        if head == "lm":
            ratio = (out[:, 0] - batch.rollout_logprobs).exp()
            surrogate = torch.minimum(
                ratio * t["advantages"], ratio.clamp(0.8, 1.28) * t["advantages"]
            )
            loss = (
                -surrogate.mean()
                - 0.1 * (t["nll_weights"] * out[:, 0]).sum()
                - 0.01 * out[:, 1].mean()
            )
        else:
            loss = 0.5 * (out[:, 0] - t["targets"]).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    with torch.no_grad():
        return steps, float(outputs().double().square().sum())


LAYOUTS = [
    (1, LayoutConfig(), 1000),
    (2, LayoutConfig(tp=2, sequence_parallel=True), 1000),
    (2, LayoutConfig(), 40),
    (2, LayoutConfig(cp=2), 1000),
    (4, LayoutConfig(tp=2, pp=2), 40),
    (4, LayoutConfig(pp=2, vpp=2), 40),
    (4, LayoutConfig(tp=2, cp=2, sequence_parallel=True), 40),
    (8, LayoutConfig(), 1000),  # more ranks than samples
]
# One rank, which test_invariance.py compares with other splits.
IN_TEST = [(LAYOUTS[0], "lm"), (LAYOUTS[0], "value"), (LAYOUTS[1], "value")]


@pytest.mark.parametrize(
    ("cut", "head"), others_in_full(product(LAYOUTS, ("lm", "value")), IN_TEST)
)
def test_training_equals_transformers_and_adamw(
    model_dir: Path, cut: tuple[int, LayoutConfig, int], head: str
) -> None:
    world_size, layout, max_tokens = cut
    expected_steps, expected_sum = reference(model_dir, head)
    for steps, total in run_ranks(world_size, train, model_dir, layout, max_tokens, head):
        for (loss, norm), (expected_loss, expected_norm) in zip(steps, expected_steps, strict=True):
            assert loss == pytest.approx(expected_loss, rel=2e-5, abs=2e-6)
            assert norm == pytest.approx(expected_norm, rel=2e-5)
        assert total == pytest.approx(expected_sum, rel=5e-5)


def notes_of_progress(model_dir: Path) -> list[int]:
    """How often the watchdog hears of progress while a batch is scored, and while it is trained
    on."""
    trainable = make_trainable(model_dir, "lm", max_tokens_per_microbatch=40)
    batch = make_batch()
    notes = []
    count = len(trainable.microbatches(batch, range(batch.samples)))
    schedule.note_progress = lambda: notes.append(1)  # type: ignore[attr-defined]
    trainable.score(batch)
    scored = len(notes)
    trainable.train_step(batch, range(batch.samples), loss_of(trainable, batch))
    return [count, scored, len(notes) - scored]


def test_the_watchdog_hears_of_every_microbatch(tmp_path: Path) -> None:
    ((count, scored, trained),) = run_ranks(1, notes_of_progress, write_model(tmp_path, "qwen3"))
    assert count > 1 and count == scored == trained
