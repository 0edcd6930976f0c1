"""A prompt's history as its baseline, written out in plain numbers, and kept over a checkpoint to
the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import spread

from vapo_megatron.algorithms import calibration
from vapo_megatron.algorithms.baselines import TRACKER_FADE
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.return_history import ReturnHistory
from vapo_megatron.training.shards import ShardedBatch

# Of each step the rows that are drawn, by source and id, with rewards; "cut" ones were cut off.
STEPS = [
    [("a", "1", 1.0), ("a", "2", -1.0), ("b", "1", -1.0)],
    [("a", "1", -1.0), ("a", "3", 1.0), ("a", "1", 1.0), ("cut", "9", -1.0)],
    [("a", "1", 1.0), ("b", "1", 1.0), ("cut", "9", 1.0), ("a", "4", -1.0)],
]
BASELINE = {
    "advantage": {"estimator": "batch_baseline", "tracker": True},
    "shaping": {"truncated": "mask"},
}


def batch_of(step: int) -> ShardedBatch:
    samples = [
        Sample(Prompt(row, "", (
            ""
        ), (1,), source=source), 10 * step + n, 0, 0, [3] * (n + 2), [0.0] * (n + 2),  # type: ignore[arg-type]
               "length" if source == "cut" else "stop", 0, 0, reward=reward)
        for n, (source, row, reward) in enumerate(STEPS[step])
    ]  # fmt: skip
    batch = spread(from_samples(samples))
    batch.local.values = torch.zeros(batch.local.response_tokens)
    return batch


def estimated(
    config: dict[str, Any], history: ReturnHistory, step: int
) -> tuple[ShardedBatch, dict[str, float]]:
    batch = batch_of(step)
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        estimate_advantages(
            batch, AlgorithmConfig.model_validate(config), recorder, history=history
        )
        return batch, dict(recorder.write(1))


def baselines() -> list[list[float]]:
    """What is expected of each response with a return, step by step."""
    tracked: dict[tuple[str, str], tuple[float, float]] = {}
    expected = []
    for rows in STEPS:
        known = [(row[:2], row[2]) for row in rows if row[0] != "cut"]
        total = sum(reward for _, reward in known)
        values = []
        for row, reward in known:
            others = (total - reward) / (len(known) - 1)
            faded, weight = tracked.get(row, (0.0, 0.0))
            values.append((faded + others) / (weight + 1))
        for row in {row for row, _ in known}:
            faded, weight = tracked.get(row, (0.0, 0.0))
            earned = [reward for answered, reward in known if answered == row]
            tracked[row] = TRACKER_FADE * faded + sum(earned), TRACKER_FADE * weight + len(earned)
        expected.append(values)
    return expected


@pytest.mark.parametrize("resumed", [False, True])
def test_the_baseline_of_a_response_is_its_prompts_history(resumed: bool) -> None:
    """Rows of one id in two files are two prompts; a response without a return is neither read nor
    remembered."""
    history = ReturnHistory()
    for step, expected in enumerate(baselines()):
        batch, row = estimated(BASELINE, history, step)
        kept = ~batch.table.truncated
        per_response = batch.local.advantages[batch.local.response_cu_seqlens[:-1]]  # type: ignore[index]
        found = (batch.table.rewards - per_response)[kept]
        assert found.tolist() == pytest.approx(expected)
        assert row[names.TRACKED] == pytest.approx([0, 2 / 3, 2 / 3][step])
        if resumed:
            saved = history.tracked_state()()
            tracked = history.tracked
            history = ReturnHistory(tracked=saved)
            assert history.tracked == tracked, "to the bit"
    assert len(history.tracked) == 5


def test_a_history_is_as_exact_as_its_checkpoint() -> None:
    history = ReturnHistory(tracked=b'{"5": [0.1, 1.0]}')
    baselines, share = history.track(torch.tensor([5]), torch.tensor([1.0]), torch.tensor([True]))
    assert baselines.tolist() == [pytest.approx((0.1 + 0.0) / (1 + 1), rel=1e-14)] and share == 1
    assert history.tracked["5"] == pytest.approx(
        [TRACKER_FADE * 0.1 + 1.0, TRACKER_FADE + 1], rel=1e-14
    )


def test_calibration_weighs_the_history_in_the_place_of_a_group() -> None:
    switches = {
        "advantage": {"calibration": "values", "tracker": True},
        "shaping": {"truncated": "mask"},
    }
    history = ReturnHistory()
    past = None
    for step, expected in enumerate(baselines()):
        batch, _ = estimated(switches, history, step)
        known = ~batch.table.truncated
        sums = calibration.response_sums(
            batch.local.values[None],  # type: ignore[index]
            batch.local.response_cu_seqlens,
        )[known]
        means = torch.tensor(expected, dtype=torch.float64)
        moments = calibration.moments(sums, batch.table.rewards[known], means[None])
        past = moments if past is None else past.followed_by(moments)
    assert history.past is not None and past is not None
    for found, wanted in zip(history.past, past, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("advantage", "samples", "message"),
    [
        (
            {"estimator": "batch_baseline", "tracker": True},
            4,
            "advantage.tracker=true with batch.samples_per_prompt=4",
        ),
        (
            {"estimator": "grpo", "tracker": True},
            1,
            "tracker=true with estimator=grpo and calibration=none",
        ),
        ({"tracker": True}, 1, "tracker=true with estimator=gae and calibration=none"),
    ],
)
def test_a_history_that_nothing_reads_is_refused(
    advantage: dict[str, Any], samples: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.model_validate(
            {
                "model": {"path": "model"},
                "data": {"train": "train.jsonl"},
                "sampling": {"max_new_tokens": 8},
                "batch": {"samples_per_prompt": samples},
                "algorithm": {"advantage": advantage},
            }
        )
