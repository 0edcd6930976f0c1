"""Ranks on several nodes resume from copies in the nodes' host memory; each also keeps the copy of
the one before it."""

import multiprocessing
import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import attempts
import pytest
import torch.distributed as dist
from damage import flip
from ports import free_port
from ranks import run_ranks
from tiny_runs import make_model, sft_config

from vapo_megatron import logs
from vapo_megatron.checkpoint import checkpointer as checkpoint
from vapo_megatron.checkpoint import nodes
from vapo_megatron.checkpoint.manifest import Manifest, file_facts
from vapo_megatron.checkpoint.nodes import NodeCopy, Nodes
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.errors import TryAgain
from vapo_megatron.run import launch
from vapo_megatron.run.ranks import LOST_A_PEER
from vapo_megatron.training import sft

# Ranks by node: what a node keeps for another is not always as much as it has itself.
NODES = "aabc"


def config_of(folder: Path, name: str) -> SftConfig:
    user = sft_config(folder, folder / "model")
    user["run"] = {"name": name, "root": str(folder / "runs"), "resume": "auto"}
    user["data"]["steps"] = 7
    user["actor"] = {"layout": {"tp": 2}}
    user["cluster"] = {"ranks": len(NODES), "collective_timeout_s": 60}
    user["checkpoint"] = {"every": 4, "every_minutes": None, "keep": {"last": 9}}
    return SftConfig.model_validate(user)


def killed_in(step: int) -> None:
    """Rank 2 kills itself after a step, once the copies of the step before are whole on all
    nodes."""
    safe_point = checkpoint.Checkpointer.safe_point

    def trap(saver: Any, snapshot: Any, **kwargs: Any) -> None:
        while saver._memory is not None and saver._memory.is_busy:
            time.sleep(0.01)  # no rank may find that the last copy is still being made
        if dist.get_rank() == 2 and snapshot.progress.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        safe_point(saver, snapshot, **kwargs)

    checkpoint.Checkpointer.safe_point = trap  # type: ignore[method-assign]
    checkpoint._COPYING_SHARE = 1e9  # a copy after each step, however short


def rank_of(config: SftConfig, rank: int, port: int, memory: Path, kill: int) -> None:
    """As Slurm starts it, with a folder of its node."""
    os.setsid()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(NODES)), "MASTER_PORT": str(port)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": str(NODES[:rank].count(NODES[rank]))}
    os.environ["VAPO_HOST_MEMORY"] = str(memory / NODES[rank])
    sys.stdout = sys.stderr = (memory / f"said{rank}").open("w")
    logs.configure(logs.LogLevel.INFO)
    killed_in(kill)
    launch.launch(config, partial(sft.sft_rank, config), lambda *_: None)
    sys.stderr.flush()
    os._exit(0)


def live(config: SftConfig, memory: Path, kill: int = 0) -> tuple[list[Any], str]:
    """Exit codes of ranks that others started, and what rank 0 said."""
    context = multiprocessing.get_context("fork")
    port = free_port()
    ranks = [
        context.Process(target=rank_of, args=(config, n, port, memory, kill))
        for n in range(len(NODES))
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        if rank.is_alive():
            rank.kill()
            rank.join()
    return [rank.exitcode for rank in ranks], (memory / "said0").read_text()


def copies(memory: Path, node: str) -> list[str]:
    return sorted(path.name for path in (memory / node / "checkpoints").iterdir())


@pytest.mark.full
@pytest.mark.timeout(240)
def test_what_a_node_has_lost_comes_from_the_one_that_keeps_it(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    memory = tmp_path / "shm"
    memory.mkdir()
    straight = config_of(tmp_path, "straight")
    lost = config_of(tmp_path, "lost")
    assert attempts.fine_tune(straight).code == 0

    codes, _ = live(lost, memory, kill=4)
    assert codes[2] == -signal.SIGKILL and {*codes[:2], codes[3]} == {LOST_A_PEER}
    assert [copies(memory, node) for node in "abc"] == [["step_000003"]] * 3
    held = {node: {path.name for path in (memory / node).rglob("*.distcp")} for node in "abc"}
    parts = {node: {int(name.split("_")[2]) for name in names} for node, names in held.items()}
    assert parts == {"a": {0, 1, 3}, "b": {0, 1, 2}, "c": {2, 3}}, (
        "its copies, and the previous node's"
    )

    # Node b is another one, and a file of rank 3 on c has changed: all of that is on c and a.
    shutil.rmtree(memory / "b")
    flip(next((memory / "c").rglob("__3_*.distcp")))
    codes, said = live(lost, memory, kill=6)
    assert codes[2] == -signal.SIGKILL, said
    assert f"resumes from {memory}/a/checkpoints/step_000003" in said.replace("\n", "")
    assert "the content of actor/__3_" in (memory / "said3").read_text()

    # Of ranks 0 and 1 there is no copy any more: the last checkpoint it is, the one of step 4.
    assert [copies(memory, node) for node in "abc"] == [["step_000005"]] * 3
    shutil.rmtree(memory / "a")
    shutil.rmtree(memory / "b")
    codes, said = live(lost, memory)
    assert codes == [0] * len(NODES), said
    assert "step_000005: " in said and "is on no node; it is left aside" in said
    assert [copies(memory, node) for node in "abc"] == [["step_000006"]] * 3, (
        "abandoned files do no harm"
    )
    run_dir = Path(lost.run.directory)
    other = Path(straight.run.directory)
    assert (
        attempts.metrics(run_dir) == attempts.metrics(other) and len(attempts.metrics(run_dir)) == 7
    )
    weights = "hf/final/actor/model.safetensors"
    assert (run_dir / weights).read_bytes() == (other / weights).read_bytes()


def fetched(folder: Path, file: str, changes: bool) -> str:
    """What rank 1 says of a file that it gets from another node; changes: while it is on its
    way."""
    receive = nodes.receive_file

    def received(path: Path, *args: Any) -> OSError | None:
        failed = receive(path, *args)
        flip(path)
        return failed

    if changes:
        nodes.receive_file = received
    ids = {
        "checkpoint_id": "c",
        "run_id": "r",
        "step": 8,
        "kind": "sft",
        "models": (),
        "world_size": 2,
    }
    facts = file_facts(folder / "a", [folder / "a" / file])
    manifest = Manifest.model_validate(ids | {"layouts": {}, "metrics": {}, "files": facts})
    path = folder / "ab"[dist.get_rank()]
    copy = NodeCopy(path, manifest, Nodes.of(path), dist.group.WORLD)
    copy.look()
    try:
        copy._note = lambda names: None  # type: ignore[method-assign]  # one rank may have raised
        copy.fetch([file] if dist.get_rank() else [])
        return ""
    except TryAgain as error:
        return str(error)


@pytest.mark.parametrize("changes", [False, True])
def test_file_that_changes_between_nodes_is_not_used(tmp_path: Path, changes: bool) -> None:
    for node in "ab":
        (tmp_path / node).mkdir()
    (tmp_path / "a" / "progress.json").write_bytes(b"{}" * 50)
    _, said = run_ranks(2, fetched, tmp_path, "progress.json", changes)
    assert (tmp_path / "b" / "progress.json").exists()
    if changes:
        assert (
            "the content of progress.json has changed" in said
            and "on its way between nodes" in said
        )
    else:
        assert not said


@pytest.mark.parametrize(
    ("places", "keepers"),
    [("aabb", [2, 3, 0, 1]), ("aabc", [2, 2, 3, 0]), ("abb", [1, 0, 0]), ("a", [0])],
)
def test_each_rank_has_a_keeper_on_the_next_node(places: str, keepers: list[int]) -> None:
    nodes = Nodes(tuple(places))
    assert [nodes.keeper(rank) for rank in range(len(places))] == keepers
    everybody = [rank for keeper in range(len(places)) for rank in nodes.kept_by(keeper)]
    assert sorted(everybody) == list(range(len(places)))
