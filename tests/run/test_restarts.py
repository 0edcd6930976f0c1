"""Ranks that are killed are started again in the same process, from a copy in host memory or the
last checkpoint."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attempts
import pytest
import torch.distributed as dist
from tiny_runs import make_model, problems, write_rows

from vapo_megatron.checkpoint import host_memory
from vapo_megatron.checkpoint.manifest import MANIFEST_FILE, Damaged, Manifest, file_facts
from vapo_megatron.checkpoint.resume import Start
from vapo_megatron.config.load import dump_config
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.errors import Interrupted, TryAgain
from vapo_megatron.run import launch
from vapo_megatron.run.ranks import RankKilled
from vapo_megatron.weights.hf_writer import write_json

BeginAt = Callable[[Callable[[TrainConfig], Path | None]], None]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("restarts")
    train, evaluation = (
        write_rows(folder / f"{name}.jsonl", problems(64)) for name in ("train", "eval")
    )
    world = attempts.World(
        folder, make_model(folder / "model"), train, evaluation, EngineAddress("", "")
    )
    return attempts.config_of(world, "run", {"tp": 1}, "cluster.ranks=2", "cluster.restarts=2")


@pytest.fixture
def begin_at(monkeypatch: pytest.MonkeyPatch) -> BeginAt:
    """Sets the checkpoint at which a start of this config begins; None: at the beginning."""

    def begin(checkpoint_of: Callable[[TrainConfig], Path | None]) -> None:
        monkeypatch.setattr(
            launch, "prepare_start", lambda settings, *_: Start(checkpoint_of(settings))
        )

    return begin


@pytest.mark.parametrize(
    ("checkpoints", "kills", "ends_well"),
    [
        # The checkpoint that each start finds; how many of them are killed.
        (["", "", "", ""], 2, True),
        (["", "", "", ""], 3, False),
        (["", "a", "a", "b", "b"], 4, True),
        (["", "a", "a", "a"], 3, False),
    ],
)
def test_killed_ranks_start_again(
    config: TrainConfig,
    tmp_path: Path,
    begin_at: BeginAt,
    checkpoints: list[str],
    kills: int,
    ends_well: bool,
) -> None:
    found = iter(checkpoints)
    resumes: list[str] = []

    def next_checkpoint(settings: TrainConfig) -> Path | None:
        resumes.append(settings.run.resume)
        name = next(found)
        return Path(name) if name else None

    begin_at(next_checkpoint)

    def body(run_dir: Path, start: Start) -> None:
        if dist.get_rank() == 1:
            number = len(list(tmp_path.iterdir()))
            (tmp_path / f"{number}_{start.checkpoint}").touch()
            if number < kills:
                os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    if ends_well:
        assert launch.launch(config, body, lambda *_: None)
    else:
        with pytest.raises(TryAgain, match="rank1 was killed by SIGKILL"):
            launch.launch(config, body, lambda *_: None)
    starts = sorted(path.name.partition("_")[2] for path in tmp_path.iterdir())
    expected = [name or "None" for name in checkpoints[: kills + ends_well]]
    assert starts == sorted(expected)
    assert resumes[0] == "never" and set(resumes[1:]) == {"auto"}


def saved(folder: Path, checkpoint_id: str, config: TrainConfig | None = None) -> Path:
    """A checkpoint without models; config: whose config.yaml it has."""
    folder.mkdir(parents=True)
    files = {}
    if config is not None:
        dump_config(config, folder / "config.yaml")
        files = {
            name: facts.model_dump()
            for name, facts in file_facts(folder, [folder / "config.yaml"]).items()
        }
    ids = {
        "checkpoint_id": checkpoint_id,
        "run_id": "r",
        "step": int(folder.name.removeprefix("step_")),
        "kind": "train",
        "models": (),
        "world_size": 1,
    }
    manifest = Manifest.model_validate(ids | {"layouts": {}, "metrics": {}, "files": files})
    write_json(folder / MANIFEST_FILE, manifest.model_dump(mode="json"))
    return folder


def test_after_a_damaged_copy_ranks_start_from_last_checkpoint(
    config: TrainConfig, tmp_path: Path, begin_at: BeginAt
) -> None:
    run = config.run.model_copy(update={"root": str(tmp_path), "name": "damaged"})
    config = config.model_copy(update={"run": run})
    memory = tmp_path / "memory"
    checkpoints = Path(config.run.directory) / "checkpoints"
    copy = saved(memory / "checkpoints" / "step_000008", "copied")
    on_disk = saved(checkpoints / "step_000004", "saved")
    begin_at(lambda _: on_disk)
    after: Any = partial(
        launch._start_after, settings=config, lease=SimpleNamespace(take=lambda: None)
    )
    again = after(RankKilled("killed"), start=Start(memory=memory))
    assert again.checkpoint == copy
    assert (
        after(Damaged("damaged", shared=True), start=again).checkpoint == on_disk
        and not copy.exists()
    )


def test_a_disk_that_is_gone_does_not_hide_why_the_ranks_ended(
    config: TrainConfig, begin_at: BeginAt
) -> None:
    answers = iter([None])

    def first_alone(_: TrainConfig) -> Path | None:
        for answer in answers:
            return answer
        raise OSError(errno.ESTALE, "Stale file handle")

    def body(run_dir: Path, start: Start) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    begin_at(first_alone)
    with pytest.raises(TryAgain, match="rank1 was killed by SIGKILL"):
        launch.launch(config, body, lambda *_: None)


def test_ctrl_c_in_a_start_from_host_memory_names_state_there(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_memory: Path
) -> None:
    """Not an older checkpoint, nor run.overwrite=true, which would remove it."""
    run = config.run.model_copy(update={"root": str(tmp_path), "name": "asked", "resume": "auto"})
    config = config.model_copy(update={"run": run})
    copy = saved(
        host_memory.host_memory_of(Path(config.run.directory)) / "checkpoints" / "step_000008",
        "copied",
        config,
    )
    saved(Path(config.run.directory) / "checkpoints" / "step_000004", "saved", config)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "start_ranks", interrupted)
    with pytest.raises(
        Interrupted, match=f"saved in host memory, {copy}: rerun the command with run.resume=auto"
    ):
        launch.launch(config, lambda *_: None, lambda *_: None)
    assert copy.is_dir()


def test_restart_uses_the_copy_that_a_killed_starter_left(
    config: TrainConfig, tmp_path: Path, begin_at: BeginAt, shared_memory: Path
) -> None:
    """And from the last checkpoint where that is newer, or the folder goes away while the run goes
    on."""
    run = config.run.model_copy(update={"root": str(tmp_path), "name": "left", "resume": "auto"})
    config = config.model_copy(update={"run": run})
    run_dir = Path(config.run.directory)
    place = host_memory.host_memory_of(run_dir) / "checkpoints" / "step_000008"
    copy = saved(place, "copied", config)
    (copy.parent / ".step_000009.half").mkdir()
    saved(run_dir / "checkpoints" / "step_000004", "saved", config)
    begun = tmp_path / "begun"
    begun.mkdir()

    begin_at(lambda _: run_dir / "checkpoints" / "step_000004")

    def body(_: Path, start: Start) -> None:
        assert start.memory is not None and start.memory.is_dir() and start.checkpoint is not None
        number = len(list(begun.iterdir()))
        dist.barrier()
        if dist.get_rank() == 0:
            (begun / f"{number}_{start.is_copy}").touch()
            if number == 0:
                shutil.rmtree(start.memory)
                os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    assert launch.launch(config, body, lambda *_: None)
    assert sorted(path.name for path in begun.iterdir()) == ["0_True", "1_False"]
    saved(host_memory.host_memory_of(run_dir) / "checkpoints" / "step_000002", "older")
    assert launch.find_left_copy(config, SimpleNamespace(take=lambda: None)) is None  # type: ignore[arg-type]


def test_stop_request_ends_ranks_with_stopped_one_and_keeps_copy(
    config: TrainConfig,
    tmp_path: Path,
    begin_at: BeginAt,
    shared_memory: Path,
    look_every: Callable[[float], None],
) -> None:
    """They cannot save; started again they would not know of the request."""
    look_every(0.1)
    run = config.run.model_copy(update={"root": str(tmp_path), "name": "stopped", "resume": "auto"})
    config = config.model_copy(update={"run": run})
    run_dir = Path(config.run.directory)
    saved(run_dir / "checkpoints" / "step_000004", "saved", config)
    begin_at(lambda _: run_dir / "checkpoints" / "step_000004")

    def body(_: Path, start: Start) -> None:
        assert start.memory is not None
        if dist.get_rank() == 0:
            with (tmp_path / "starts").open("a") as file:
                file.write("x")
            saved(start.memory / "checkpoints" / "step_000006", "copied", config)
            os.kill(os.getppid(), signal.SIGTERM)
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    with pytest.raises(
        TryAgain,
        match=r"rank1 .* was stopped .*; the state is saved in host memory, .*step_000006: a st",
    ):
        launch.launch(config, body, lambda *_: None)
    assert (tmp_path / "starts").read_text() == "x"
    copy = launch.find_left_copy(config, SimpleNamespace(take=lambda: None))  # type: ignore[arg-type]
    assert copy is not None and copy.name == "step_000006"
