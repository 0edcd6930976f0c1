"""Prompts computed once for their groups: log-probs, entropies, values, metrics and every gradient
are those of prompts computed for each response."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grouped_batches import grouped_batch
from hf_models import write_model
from invariance import named_gradients
from ranks import run_ranks
from trainables import make_trainable, policy_loss, small_logit_chunks, value_loss

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.data.batch import ExperienceBatch

WHOLE = 1000
REL = 1e-5


def make_batch(experts: int) -> ExperienceBatch:
    """experts: layers * experts per token; the prompts of a group go through the same ones."""
    batch = grouped_batch()
    if experts:
        generator = torch.Generator().manual_seed(8)
        rows = [
            torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(experts // 2)])
            for _ in range(int((batch.lengths - 1).sum()))
        ]
        batch.routed_experts = torch.stack(rows).flatten(1).to(torch.uint8)
        for sample in range(batch.samples):
            first = sample - sample % 4
            shared = int(batch.prompt_lengths[sample]) - 1
            own = batch.sample_experts(sample)
            trunk = batch.sample_experts(first)
            assert own is not None and trunk is not None
            own[:shared] = trunk[:shared]
    return batch


def trained(
    model_dir: Path, head: Any, loss: str, experts: int, share: bool, section: dict[str, Any]
) -> dict[str, Any]:
    """Collective: positions of this rank's micro-batches, scores, metrics and gradients of a step;
    gradients of rank 0."""
    # Where a gradient is near 0, AdamW divides rounding errors by eps.
    trainable = make_trainable(
        model_dir, head, share_prompts=share, optimizer={"eps": 1e-3}, **section
    )
    small_logit_chunks(trainable)
    batch = make_batch(experts)
    everything = range(batch.samples)
    made = (
        value_loss(batch)
        if head == "value"
        else policy_loss(batch, batch.rollout_logprobs, loss, aggregation="sequence_mean")
        if loss == "gspo"
        else policy_loss(batch, batch.rollout_logprobs, loss)
    )
    positions = [len(m.ids) for m in trainable.microbatches(batch, everything)]
    scores = trainable.score(batch).numpy()
    result = trainable.train_step(batch, everything, made)
    metrics = result.metrics | {"grad_norm": result.grad_norm}
    gradients = named_gradients(trainable)
    if torch.distributed.get_rank():
        gradients = {}
    return {
        "positions": positions,
        "scores": scores,
        "metrics": metrics,
        "gradients": gradients,
    }


def assert_close(found: Any, expected: Any, what: str) -> None:
    error = np.abs(np.asarray(found) - np.asarray(expected)).max()
    size = np.abs(np.asarray(expected)).max()
    assert error <= REL * size + 1e-7, f"{what}: {error:.2e} of {size:.2e}"


@dataclass(frozen=True)
class Case:
    """A model and how it is cut."""

    family: str
    world: int = 1
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    tokens: int = WHOLE
    head: str = "lm"
    loss: str = "ppo_clip"
    experts: int = 0
    section: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [self.family, self.head, self.loss, self.layout.describe(self.world)]
        parts += ["replay"] * bool(self.experts) + [*self.section]
        return "-".join(parts).replace(" ", "-")


FULL = {"recompute": {"granularity": "full"}}
SELECTIVE = {"recompute": {"granularity": "selective"}}
TP = LayoutConfig(tp=2, sequence_parallel=True)
CASES = [
    *(Case(family) for family in ("gpt_oss", "deepseek_v3")),
    Case("qwen3", tokens=70, head="value", section=SELECTIVE),
    Case("qwen3", 2, TP, tokens=80, loss="gspo"),
    Case("qwen3", 2, LayoutConfig(pp=2), tokens=60, section=FULL),
    Case("qwen3_moe", 2, LayoutConfig(ep=2), tokens=100, experts=8, section=FULL),
]
IN_FULL = [
    *(Case(family) for family in ("qwen3", "gemma3_text", "ministral3")),
    Case("smollm3", head="value"),
    Case("glm4_moe", 2, TP, tokens=80),
    Case("gpt_oss", 4, LayoutConfig(pp=2, vpp=2), tokens=60),
    Case("gemma3_text", 2, TP, head="value"),
    Case("deepseek_v3", 4, LayoutConfig(tp=2, ep=2, sequence_parallel=True), tokens=90),
    Case("qwen3", 4, LayoutConfig(tp=2, pp=2, sequence_parallel=True), tokens=60, section=FULL),
    Case("llama", 4, tokens=50),
]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in IN_FULL)], ids=str
)
def test_shared_prompts_change_no_number(tmp_path: Path, case: Case) -> None:
    model_dir = write_model(tmp_path / "model", case.family)
    given = (model_dir, case.head, case.loss, case.experts)
    (expected,) = run_ranks(1, trained, *given, False, {})
    section = {"layout": case.layout, "max_tokens_per_microbatch": case.tokens} | case.section
    found = run_ranks(case.world, trained, *given, True, section)
    # Replicas each have their own samples
    size = case.layout.model_size
    computed = sum(sum(rank["positions"]) for rank in found) / size
    assert computed < 0.85 * sum(expected["positions"])
    assert max(max(rank["positions"]) for rank in found) <= case.tokens
    for rank, report in enumerate(found):
        assert_close(report["scores"], expected["scores"], f"rank {rank}, scores")
        for name, value in expected["metrics"].items():
            assert_close(report["metrics"][name], value, f"rank {rank}, {name}")
    assert found[0]["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        assert_close(found[0]["gradients"][name], gradient, name)
        assert np.abs(gradient).max() > 0 or ".experts." in name, "an expert may have no token"
