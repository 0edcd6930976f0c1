"""A run that stops says why, and the reason comes from the rank that was asked to."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from attempts import fine_tune
from tiny_runs import make_model, sft_config

from vapo_megatron.checkpoint.checkpointer import Checkpointer
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.errors import TryAgain
from vapo_megatron.signals import first_signal


def signal_ranks(folder: Path, signals: dict[int, signal.Signals]) -> None:
    """Have some ranks get a signal before their first safe point; each rank notes what it ends
    with."""
    safe_point = Checkpointer.safe_point

    def asked(saver: Checkpointer, *args: Any, **kwargs: Any) -> None:
        rank = dist.get_rank()
        if rank in signals:
            os.kill(os.getpid(), signals[rank])
        try:
            safe_point(saver, *args, **kwargs)
        except TryAgain as error:
            (folder / f"rank{rank}").write_text(str(error))
            raise

    Checkpointer.safe_point = asked  # type: ignore[method-assign]


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[Callable[..., list[str]]]:
    """What each of two ranks says of the stop of a fine-tuning, by the signals that ranks get and
    its time limit."""
    # Under nohup it is ignored, and ranks would not heed it
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    user = sft_config(tmp_path, make_model(tmp_path / "model")) | {"cluster": {"ranks": 2}}

    def stop(signals: dict[int, signal.Signals], limit: float | None) -> list[str]:
        config = SftConfig.model_validate(user | {"checkpoint": {"job_timeout_s": limit}})
        end = fine_tune(config, partial(signal_ranks, tmp_path, signals))
        said = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
        assert end.code == 75 and end.said in said and "saved at step_000001" in end.said
        return said

    yield stop
    signal.signal(signal.SIGHUP, inherited)


@pytest.mark.parametrize(
    ("signals", "limit", "reason"),
    [
        ({1: signal.SIGTERM}, None, "SIGTERM on rank 1"),
        pytest.param({1: signal.SIGHUP}, 1e-9, "SIGHUP on rank 1", marks=pytest.mark.full),
        pytest.param(
            {0: signal.SIGUSR1, 1: signal.SIGUSR1}, None, "SIGUSR1", marks=pytest.mark.full
        ),
        pytest.param({}, 1e-9, "its time limit", marks=pytest.mark.full),
    ],
)
def test_every_rank_names_the_signal_and_who_got_it(
    stopped: Callable[..., list[str]],
    signals: dict[int, signal.Signals],
    limit: float | None,
    reason: str,
) -> None:
    for said in stopped(signals, limit):
        assert f"because of {reason}: start the same command again" in said, said


def test_a_signal_is_named_with_its_rank_unless_all_got_one() -> None:
    assert first_signal([None, None]) is None
    assert first_signal([None, None, "SIGHUP", "SIGTERM"]) == "SIGHUP on rank 2"
    assert first_signal(["SIGUSR1", None]) == "SIGUSR1 on rank 0"
    assert first_signal(["SIGTERM", "SIGTERM"]) == first_signal(["SIGTERM"]) == "SIGTERM"


def replace_by_a_file(path: Path) -> None:
    """Have a file stand where a folder of the run was, from the first safe point on."""
    safe_point = Checkpointer.safe_point

    def replaced(saver: Checkpointer, *args: Any, **kwargs: Any) -> None:
        if dist.get_rank() == 0 and not path.is_file():
            shutil.rmtree(path, ignore_errors=True)
            path.write_text("mine")
        dist.barrier()
        safe_point(saver, *args, **kwargs)

    Checkpointer.safe_point = replaced  # type: ignore[method-assign]


@pytest.mark.parametrize("name", [".", pytest.param("checkpoints", marks=pytest.mark.full)])
def test_a_file_in_place_of_the_run_ends_it_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    user = sft_config(tmp_path, make_model(tmp_path / "model")) | {"cluster": {"restarts": 0}}
    config = SftConfig.model_validate(user | {"checkpoint": {"every": 1}})
    place = Path(config.run.directory) / name
    end = fine_tune(config, partial(replace_by_a_file, place))
    assert end.code == 75 and end.said.count("\n") == 0, end.said
    assert "cannot be saved (Not a directory), tried twice" in end.said
    assert "Traceback" not in capfd.readouterr().err
    assert place.read_text() == "mine"
