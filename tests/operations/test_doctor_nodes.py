"""Doctor as it runs: on this machine alone, and as several nodes that meet, with one that hangs or
sees other files."""

import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ranks  # noqa: F401  (imports what processes need before they are forked)
from called import exit_code_of
from ports import free_port
from tiny_runs import make_model, train_config, write_config

from vapo_megatron import cli
from vapo_megatron.config.load import load_config
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.operations.doctor import allreduce, checks, command, nodes
from vapo_megatron.operations.doctor.checks import Check, Examination, check_engine, perform
from vapo_megatron.operations.doctor.nodes import Line, Meeting
from vapo_megatron.operations.plan.inputs import SHIPPED

pytestmark = pytest.mark.full

WAIT = 60.0


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    return write_config(folder / "train.yaml", train_config(folder, make_model(folder / "model")))


@pytest.fixture
def config(config_file: Path) -> PlanConfig:
    return load_config(PlanConfig, config_file, [], cli.PRESETS)


def names_of(world: int) -> list[str]:
    return [f"n{rank}" for rank in range(world)]


def node(
    rank: int,
    world: int,
    port: int,
    config_file: Path,
    out: Path,
    overrides: list[str],
    offloaded: bool,
) -> None:
    """One process of doctor, as srun starts it on a node called n<rank>."""
    os.environ |= {"SLURM_NTASKS": str(world), "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "SLURMD_NODENAME": f"n{rank}",
    }
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    if offloaded:
        stuck = (Check("versions", lambda _: time.sleep(3600) or [], 1.0),)
        command.checks = lambda *_: (*stuck, *checks.checks(config, WAIT)[1:])  # type: ignore[assignment]
    config = load_config(PlanConfig, config_file, overrides, cli.PRESETS)
    command.show = lambda reports: out.write_text(
        json.dumps([asdict(report) for report in reports])
    )  # type: ignore
    code = command.doctor(
        config,
        quick=True,
        wait=WAIT,
        broken_file=out.with_suffix(".broken"),
        node_names=names_of(world),
    )
    os._exit(code)


def run_nodes(
    folder: Path,
    config_file: Path,
    overrides: list[list[str]],
    offloaded: int | None = None,
    absent: int | None = None,
) -> Any:
    """What node 0 says of as many nodes as there are overrides; the exit codes must tell the
    same."""
    port = free_port()
    context: Any = multiprocessing.get_context("fork")
    processes = [
        context.Process(
            target=node,
            args=(
                rank,
                len(overrides),
                port,
                config_file,
                folder / str(rank),
                given,
                rank == offloaded,
            ),
        )
        for rank, given in enumerate(overrides)
        if rank != absent
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(240)
            assert process.exitcode is not None, "a node did not end"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    nodes = json.loads((folder / "0").read_text())
    said = {"nodes": nodes, "broken_nodes": (folder / "0.broken").read_text().split()}
    assert processes[0].exitcode == (1 if said["broken_nodes"] else 0)
    assert all(process.exitcode == 0 for process in processes[1:])
    return said


def lines_of(said: Any, node: str, check: str) -> list[Any]:
    (report,) = [report for report in said["nodes"] if report["node"] == node]
    return [line for line in report["lines"] if line["check"] == check]


def test_three_sound_nodes(tmp_path: Path, config_file: Path) -> None:
    said = run_nodes(tmp_path, config_file, [[], [], []])
    assert [report["node"] for report in said["nodes"]] == ["n0", "n1", "n2"]
    assert said["broken_nodes"] == []
    for name in ("n0", "n1", "n2"):
        for check in ("config", "shared files", "alike"):
            assert [line["status"] for line in lines_of(said, name, check)] == ["ok"], (name, check)
    root = Path(config_file.parent)
    assert not list(root.rglob(".doctor*")), "a file was left behind"


def test_the_node_that_hangs_or_sees_other_files_is_named(
    tmp_path: Path, config_file: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "train.jsonl").write_text('{"problem": "1 plus 1", "answer": "2"}\n')
    other_files = [f"data.train={elsewhere / 'train.jsonl'}"]
    said = run_nodes(tmp_path, config_file, [[], other_files, []], offloaded=2)
    assert said["broken_nodes"] == ["n1", "n2"]
    (hanging,) = lines_of(said, "n2", "versions")
    assert hanging["status"] == "fault" and "hangs" in hanging["found"] and hanging["remedy"]
    (different,) = lines_of(said, "n1", "alike")
    assert different["status"] == "fault" and "files" in different["found"]
    assert [line["status"] for line in lines_of(said, "n2", "config")] == ["ok"], (
        "later checks go on"
    )


def test_a_node_that_does_not_come_is_named(
    tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "WAIT", 8.0)
    said = run_nodes(tmp_path, config_file, [[], [], []], absent=1)
    assert said["broken_nodes"] == ["n1"]
    (line,) = lines_of(said, "n1", "ranks")
    assert line["status"] == "fault" and "rank 1" in line["found"]


def test_alone_with_an_engine_and_bandwidth(
    config: PlanConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Examination(config, Meeting(None, "here", 1), quick=False, wait=1)
    by_name = {check.name: check for check in checks.checks(config, 1)}
    (engine,) = perform(by_name["engine"], alone)
    assert engine.status == "ok", engine.found
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # as torchrun sets it
    (reduced,) = perform(by_name["all-reduce"], alone)
    assert reduced.status == "ok", reduced.found


def test_what_a_check_raises_is_its_line(config: PlanConfig) -> None:
    def broken(_: Examination) -> list[Line]:
        raise ValueError("no such thing")

    alone = Examination(config, Meeting(None, "here", 1), quick=True, wait=1)
    (line,) = perform(Check("broken", broken, 30), alone)
    assert line.status == "fault" and "ValueError: no such thing" in line.found
    (line,) = perform(Check("slow", broken, 30, slow=True), alone)
    assert line.status == "skipped"
    (line,) = perform(Check("between", broken, 30, between=True), alone)
    assert line.status == "not applicable"


def test_a_node_that_sees_other_files_under_run_root_says_so(
    tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_APPEARS_WITHIN", 0.5)
    real = nodes.check_shared_files
    mounts = {index: tmp_path / f"mount{index}" for index in range(3)}
    mounts[2] = mounts[0]  # node 1 has mounted something else there
    for folder in mounts.values():
        folder.mkdir(exist_ok=True)

    def check(meeting: Meeting, root: Path, deadline: float) -> list[Line]:
        if meeting.index == 1:
            monkeypatch.setattr(Path, "is_file", lambda _: False)
        return real(meeting, mounts[meeting.index], deadline)

    monkeypatch.setattr(checks, "check_shared_files", check)
    report = run_nodes(tmp_path, config_file, [[], [], []])
    statuses = [lines_of(report, f"n{index}", "shared files")[0]["status"] for index in range(3)]
    assert statuses == ["ok", "fault", "ok"] and report["broken_nodes"] == ["n1"]


def test_no_large_engine_starts_in_the_memory_of_a_login_node(
    config: PlanConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 << 30))
    large = config.model.model_copy(update={"path": str(SHIPPED / "Qwen2.5-32B")})
    (line,) = check_engine(config.model_copy(update={"model": large}), gpus=0)
    assert line.status == "skipped" and "61 of 64 GiB" in line.found and line.remedy


def test_a_truncated_model_is_a_fault_and_the_exit_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_config(
        tmp_path / "train.yaml", train_config(tmp_path, make_model(tmp_path / "model"))
    )
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    codes: list[int] = []
    monkeypatch.setattr("vapo_megatron.run.ranks.leave", codes.append)  # it ends the process
    for name in ("RANK", "WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    exit_code_of("doctor", file, "--quick")
    rows = {line.split()[0]: line for line in capfd.readouterr().out.splitlines() if line.strip()}
    assert codes == [1] and rows["config"].split()[1] == "fault" and "broken:" in rows
    assert "no GPU here" in rows["gpus"]
    exit_code_of("doctor", file, "--quick", "--json")
    content = json.loads(capfd.readouterr().out)
    (report,) = content["nodes"]
    assert codes == [1, 1] and content["broken"] == [report["node"]]
    assert report["status"] == "fault"
    assert {line["check"] for line in report["lines"] if line["status"] == "fault"} == {"config"}


def test_an_all_reduce_that_hangs_is_killed() -> None:
    before = set(psutil.Process().children())
    (result,) = allreduce.measure(1, False, 0, 2, "127.0.0.1", 9, deadline=0.2)
    assert "no answer" in result.error and set(psutil.Process().children()) == before
