"""Whole tiny runs that are stopped, killed and started again, in processes forked from the test."""

import builtins
import errno
import io
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ranks  # noqa: F401  (imports what ranks need before they are forked)
import torch.distributed as dist
from tiny_runs import make_model, problems, write_config, write_rows

import vapo_megatron.checkpoint.checkpointer as checkpointer
import vapo_megatron.checkpoint.host_memory as host_memory
import vapo_megatron.checkpoint.state_saver as state_saver
import vapo_megatron.engines.placement as placement
import vapo_megatron.rollout.ledger as ledger
import vapo_megatron.rollout.stream as stream
import vapo_megatron.training.score as score
import vapo_megatron.training.updates as updates
import vapo_megatron.training.value_pretraining as value_pretraining
from vapo_megatron import logs
from vapo_megatron.config import algorithm
from vapo_megatron.config.load import load_config
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.errors import VapoError
from vapo_megatron.run import launch, rank
from vapo_megatron.training import sft

PRESETS = Path(algorithm.__file__).parent / "presets"
# One response at a time and no cache: how requests happen to meet in a batch shows in the last bit
# of log-probs.
ENGINE: dict[str, Any] = {
    "max_running_requests": 1,
    "max_total_tokens": 8192,
    "context_length": 64,
    "server_args": {"disable_radix_cache": True},
}
DEADLINE = 240


@dataclass(frozen=True)
class World:
    """What all runs share: model, data, one server."""

    folder: Path
    model: Path
    train: Path
    evaluation: Path
    address: EngineAddress


def make_world(folder: Path, address: EngineAddress) -> World:
    """A model, problems, and an engine that runs already, which each run sends its weights before
    it uses it."""
    train = write_rows(folder / "train.jsonl", problems(64))
    evaluation = write_rows(folder / "eval.jsonl", problems(4))
    return World(folder, make_model(folder / "model"), train, evaluation, address)


class SharedServer:
    """Takes the place of a run's own server."""

    address: EngineAddress
    leads = True

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def start(self) -> None: ...
    def wait_until_ready(self) -> None: ...
    def ended(self) -> None: ...
    def lost(self) -> None: ...
    def lost_elsewhere(self) -> None: ...
    def is_closed(self) -> bool:
        return False

    def close(self) -> None: ...
    def stop(self) -> None: ...


def config_of(world: World, name: str, layout: Mapping[str, int], *overrides: str) -> TrainConfig:
    """VAPO in small: two recorded rollouts, three steps, an evaluation at each, a checkpoint at
    every safe point."""
    optimizer = {"lr": 1e-3, "warmup_steps": 4}
    user: dict[str, Any] = {
        "run": {"name": name, "root": str(world.folder / "runs"), "steps": 3},
        "cluster": {"restarts": 0},
        "model": {"path": str(world.model), "dtype": "float32"},
        "actor": {"layout": dict(layout), "optimizer": optimizer},
        "critic": {"layout": dict(layout), "optimizer": optimizer},
        "data": {
            "train": str(world.train),
            "eval": [{"name": "sums", "path": str(world.evaluation), "samples": 2}],
            "max_prompt_tokens": 16,
        },
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4},
        "sampling": {"max_new_tokens": 12},
        "rollout": {"load_format": "dummy", **ENGINE},
        "reward": {"verifier": "function", "function": "parity_grade:verify", "workers": 1},
        "algorithm": {
            "update": {"minibatch_size": 8},
            # A reference policy that is replaced is state as well.
            "kl": {
                "placement": "loss",
                "estimator": "k3",
                "coef": 0.01,
                "replace_reference_every": 2,
            },
        },
        "value_pretraining": {"iterations": 2, "replay_epochs": 1, "minibatch_size": 8},
        "evaluation": {"every": 1},
        "checkpoint": {"every": 1, "every_minutes": 1e-9},
        "monitoring": {"tensorboard": False},
    }
    path = write_config(world.folder / f"{name}.yaml", user)
    return load_config(TrainConfig, path, overrides, PRESETS)


@dataclass(frozen=True)
class End:
    """How an attempt ended."""

    code: int
    said: str


def live(
    world: World,
    config: TrainConfig,
    count: int,
    prepare: Callable[[], None] = lambda: None,
    stop: str | None = None,
    own_engines: bool = False,
    deadline: float = DEADLINE,
) -> End:
    """One life of a run on `count` ranks, started as `vapo-megatron train` starts it.

    Args:
        world: of the run.
        config: of the run.
        count: ranks.
        prepare: called in the starter before its ranks are forked; may lay a trap.
        stop: once this file is there, relative to the run directory, SIGUSR1 is sent to the starter
            and to all that it has started: ranks and verifiers.
        own_engines: the run starts its own, in place of the world's.
        deadline: seconds until it must have ended.
    """
    config = config.model_copy(
        update={"cluster": config.cluster.model_copy(update={"ranks": count})}
    )
    SharedServer.address = world.address
    return _life(config, partial(rank.train_rank, config), prepare, stop, own_engines, deadline)


def fine_tune(config: SftConfig, prepare: Callable[[], None] = lambda: None) -> End:
    """One life of `vapo-megatron sft`. prepare: as of live()."""
    return _life(config, partial(sft.sft_rank, config), prepare)


def _life(
    config: TrainConfig | SftConfig,
    body: Callable[[Path, Path | None], None],
    prepare: Callable[[], None] = lambda: None,
    stop: str | None = None,
    own_engines: bool = False,
    deadline: float = DEADLINE,
) -> End:
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    starter = context.Process(target=_start, args=(config, body, prepare, writer, own_engines))
    starter.start()
    writer.close()
    end = time.monotonic() + deadline
    if stop is not None:
        mark = Path(config.run.directory) / stop
        while not mark.exists() and starter.is_alive() and time.monotonic() < end:
            time.sleep(0.02)
        assert starter.pid is not None
        for _ in range(2):  # Slurm says it twice, and to every process of a step
            os.killpg(starter.pid, signal.SIGUSR1)
    try:
        said = reader.recv() if reader.poll(max(0.1, end - time.monotonic())) else ""
    except EOFError:
        said = ""
    starter.join(max(0.1, end - time.monotonic()))
    if starter.is_alive():
        starter.kill()
        raise AssertionError(f"{config.run.name}: no end within {deadline} s")
    assert starter.exitcode is not None
    return End(starter.exitcode, said)


def _start(
    config: Any,
    body: Callable[[Path, Path | None], None],
    prepare: Callable[[], None],
    writer: Any,
    own_engines: bool,
) -> None:
    os.setsid()
    logs.configure(logs.LogLevel.INFO)
    if not own_engines:
        placement.EngineServer = SharedServer  # type: ignore[assignment,misc]
    prepare()
    code = 0
    said = ""
    try:
        launch.launch(config, body, lambda *_: None)
    except VapoError as error:
        code = error.exit_code
        said = str(error)
    except BaseException:
        code = 99
        said = traceback.format_exc()
    writer.send(said)
    sys.stdout.flush()
    os._exit(code)


def kill_at(
    place: str,
    call: int,
    victim: int = 0,
    once: Path | None = None,
    number: signal.Signals = signal.SIGKILL,
    waits: bool = False,
) -> None:
    """Have a rank kill itself in its call-th call of a place; once: only where this file is not
    there; waits: every save is waited for."""
    if waits:
        safe_point = checkpointer.Checkpointer.safe_point

        def waited(saver: Any, *args: Any, **kwargs: Any) -> None:
            safe_point(saver, *args, **kwargs)
            saver.wait()

        checkpointer.Checkpointer.safe_point = waited  # type: ignore[method-assign]
    module, name = PLACES[place]
    original = getattr(module, name)
    calls = 0

    def trap(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += dist.get_rank() == victim
        if calls == call and dist.get_rank() == victim and not (once is not None and once.exists()):
            if once is not None:
                once.touch()
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(module, name, trap)


PLACES: dict[str, tuple[Any, str]] = {
    "rollout": (stream.GroupStream, "take"),
    "grading": (ledger.Ledger, "grade"),
    "value pretraining": (value_pretraining, "critic_step"),
    "scoring": (score, "_score_in_phase"),
    "policy update": (updates, "policy_loss"),
    "save": (state_saver, "commit_checkpoint"),
}


def fill_the_disk(limit: int) -> None:
    """While a checkpoint is written to the disk the kernel lets no file grow beyond a size, as a
    full disk would."""
    write = state_saver.StateSaver._write

    def refused(saver: Any, save: Any) -> Any:
        if save.folder.is_relative_to(host_memory.ROOT):
            return write(saver, save)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            return write(saver, save)
        finally:
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )

    state_saver.StateSaver._write = refused  # type: ignore[method-assign]


def refuse_checkpoints(number: int, times: int) -> None:
    """Have the file system refuse, with an error number, to give the first checkpoints that are
    written their names."""
    commit = state_saver.commit_checkpoint
    left = times

    def refused(*args: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            raise OSError(number, os.strerror(number))
        return commit(*args)

    state_saver.commit_checkpoint = refused  # type: ignore[assignment]


def lose_the_disk(folder: Path, place: str, call: int) -> None:
    """From the call-th call of a place on, have the file system answer nothing about a folder, as
    where it lost it."""
    module, name = PLACES[place]
    original = getattr(module, name)
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    def answers(act: Callable[..., Any]) -> Callable[..., Any]:
        def act_or_refuse(path: Any, *args: Any, **kwargs: Any) -> Any:
            if calls >= call and isinstance(path, str | Path) and Path(path).is_relative_to(folder):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            return act(path, *args, **kwargs)

        return act_or_refuse

    setattr(module, name, counted)
    for act in (
        "stat",
        "lstat",
        "listdir",
        "scandir",
        "mkdir",
        "open",
        "unlink",
        "rename",
        "replace",
        "rmdir",
    ):
        setattr(os, act, answers(getattr(os, act)))
    builtins.open = io.open = answers(open)  # type: ignore[assignment]


def refuse_sync(module: Any, part: str, times: int = 1000) -> None:
    """Have the file system refuse, so often, to sync paths with this part that a module writes."""
    sync = module.sync
    left = times

    def refused(path: Path) -> None:
        nonlocal left
        if part in str(path) and left:
            left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(path)

    module.sync = refused


_NOT_REPRODUCIBLE = re.compile(
    r"(^|/)(time|memory|device_memory|throughput)/|_seconds(/turn_\d+)?$"
)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run without seconds and bytes."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if not _NOT_REPRODUCIBLE.search(name)}
        for row in rows
    ]


def left_behind(run_dir: Path) -> dict[str, bytes]:
    """What a run is for, by file: exported models, samples, evaluations. Model cards give the
    run's name and hours."""
    found = {}
    for folder in ("hf", "samples", "evaluation"):
        for path in sorted((run_dir / folder).rglob("*")):
            if path.is_file() and path.name != "README.md":
                found[path.relative_to(run_dir).as_posix()] = path.read_bytes()
    return found | {"evaluation.json": (run_dir / "evaluation.json").read_bytes()}
