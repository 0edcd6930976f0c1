"""Episodes of several segments are scored and trained alike at any layout, and as if segments were
samples."""

import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import in_segments, with_observation, with_segment
from hf_models import VOCAB, write_model
from ranks import run_ranks
from trainables import loss_of, make_trainable, policy_loss

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample


def episodes() -> list[Sample]:
    """Three episodes, of one, two and three segments."""
    generator = torch.Generator().manual_seed(2)
    samples = []
    for number, (prompt, response) in enumerate([(3, 12), (5, 9), (2, 17)]):
        ids = torch.randint(0, VOCAB, (prompt + response,), generator=generator).tolist()
        fields: Any = (ids[prompt:], [-2.0] * response, "stop", 0, 0)
        sample = Sample(
            Prompt(str(number), "", "", tuple(ids[:prompt])),
            number,
            0,
            0,
            *fields,
            reward=1.0,
            correct=True,
        )
        sample = with_observation(sample, response - 2, 3)
        for after in [response // 2, response // 4][:number]:
            sample = with_segment(sample, after, 4)
        samples.append(sample)
    return samples


def scored(
    model_dir: Path, head: Any, split: bool, layout: LayoutConfig
) -> tuple[list[float], float]:
    trainable = make_trainable(model_dir, head, layout=layout, max_tokens_per_microbatch=64)
    batch = from_samples(in_segments(episodes()) if split else episodes())
    outputs = trainable.score(batch)[:, 0].tolist()
    norm = trainable.train_step(batch, range(batch.samples), loss_of(trainable, batch)).grad_norm
    return outputs, norm


@pytest.mark.parametrize("head", ["lm", pytest.param("value", marks=pytest.mark.full)])
def test_segments_are_read_alone_at_any_layout(tmp_path: Path, head: str) -> None:
    model_dir = write_model(tmp_path / "model", "qwen3")
    ((outputs, norm),) = run_ranks(1, scored, model_dir, head, True, LayoutConfig())
    for ranks, layout in (
        (1, LayoutConfig()),
        (2, LayoutConfig(cp=2)),
        (4, LayoutConfig(tp=2, pp=2, sequence_parallel=True)),
    ):
        for ours, our_norm in run_ranks(ranks, scored, model_dir, head, False, layout):
            assert ours == pytest.approx(outputs, abs=2e-5) and our_norm == pytest.approx(
                norm, rel=1e-4
            )


def stepped(model_dir: Path, layout: LayoutConfig) -> tuple[Any, dict[str, float]]:
    """Log-ratios to the old policy and advantages by token, and the metrics of a step of GSPO."""
    trainable = make_trainable(model_dir, "lm", layout=layout, max_tokens_per_microbatch=64)
    batch = from_samples(episodes())
    chance = torch.Generator().manual_seed(3)
    log_ratio = 0.3 * torch.randn(batch.response_tokens, generator=chance)
    old = trainable.score(batch)[:, 0] - log_ratio
    bounds = {"clip_low": 0.02, "clip_high": 0.02, "aggregation": "sequence_mean"}
    loss = policy_loss(batch, old, "gspo", **bounds)
    by_token = torch.stack((log_ratio, loss.advantages)).double().tolist()
    return by_token, trainable.train_step(batch, range(batch.samples), loss).metrics


def test_gspo_has_one_ratio_for_all_segments(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path / "model", "qwen3")
    for ranks, layout in ((1, LayoutConfig()), (2, LayoutConfig(cp=2))):
        for (log_ratio, advantages), metrics in run_ranks(ranks, stepped, model_dir, layout):
            low = high = 0
            for start, end in pairwise((0, 12, 21, 38)):
                ratio = math.exp(statistics.fmean(log_ratio[start:end]))
                low += sum(a < 0 for a in advantages[start:end]) * (ratio < 0.98)
                high += sum(a > 0 for a in advantages[start:end]) * (ratio > 1.02)
            assert low + high > 0
            assert metrics["clip_fraction_low"] == pytest.approx(low / 38)
            assert metrics["clip_fraction_high"] == pytest.approx(high / 38)
