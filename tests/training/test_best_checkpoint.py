"""The best checkpoint by a metric of the step, and nothing for the steps that are not better."""

import errno
import os
from math import nan
from pathlib import Path
from unittest import mock

import pytest
from ranks import run_ranks

from vapo_megatron.checkpoint import checkpointer
from vapo_megatron.checkpoint.checkpointer import Checkpointer
from vapo_megatron.checkpoint.checkpoints import list_checkpoints
from vapo_megatron.checkpoint.manifest import Progress
from vapo_megatron.checkpoint.state_saver import SavedRun, Snapshot
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.monitoring.recorder import Recorder


def kept(run_dir: Path, best: str, values: list[float]) -> list[list[int]]:
    """The steps of the checkpoints kept after each step. Of a run without models, to be
    quick."""
    tree = {
        "model": {"path": "model"},
        "data": {
            "train": "unread.jsonl",
            "eval": [{"name": "sums", "path": "unread.jsonl", "samples": 2}],
        },
        "sampling": {"max_new_tokens": 8},
        "checkpoint": {"every": None, "every_minutes": None, "keep": {"last": 1, "best": best}},
    }
    config = TrainConfig.model_validate(tree)
    found = []
    with Recorder(run_dir, MonitoringConfig(), is_main_rank=False) as recorder:
        saver = Checkpointer(
            config.checkpoint, SavedRun(config, "train", run_dir, {}, "run"), recorder, None
        )
        for step, value in enumerate(values, 1):
            saver.safe_point(
                Snapshot(Progress(step=step), {best: value}), due=step == 5, last=False
            )
            saver.wait()
            found.append([name.step for name in list_checkpoints(run_dir)])
    return found


@pytest.mark.parametrize("best", ["reward/mean", "evaluation/sums_avg@2"])
def test_it_is_saved_and_stays_whichever_metric_says_so(tmp_path: Path, best: str) -> None:
    """By a metric that is no evaluation's every step was the best, and none of them stayed."""
    found = run_ranks(1, kept, tmp_path, best, [0.1, 0.3, 0.2, nan, 0.25, 0.4])[0]
    assert found == [[1], [2], [2], [2], [2, 5], [6]]


def kept_although_unreadable(run_dir: Path) -> list[list[int]]:
    """As above, where the checkpoints cannot be read at the third step."""
    answers = [mock.DEFAULT, mock.DEFAULT, OSError(errno.ESTALE, os.strerror(errno.ESTALE))]
    read = checkpointer.readable_manifests
    with mock.patch.object(checkpointer, "readable_manifests", wraps=read) as refused:
        refused.side_effect = [*answers, mock.DEFAULT]
        return kept(run_dir, "reward/mean", [0.1, 0.2, 0.3, 0.4])


def test_a_disk_that_cannot_be_read_once_costs_one_step(tmp_path: Path) -> None:
    assert run_ranks(1, kept_although_unreadable, tmp_path)[0] == [[1], [2], [2], [4]]
