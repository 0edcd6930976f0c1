"""The decisions of slurm/lib.sh, taken by bash itself on what it finds; the commands of Slurm are stand-ins."""

import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Job:
    """A job as the library sees it: its record, its environment, and what it asked Slurm to do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = folder / "run.slurm"
        self.record.mkdir()
        self.asked = folder / "asked"
        self._bin = folder / "bin"
        self._bin.mkdir()
        self.stand_in("scontrol", f'echo "scontrol $*" >>{self.asked}')
        self.stand_in("srun", f'echo "srun $*" >>{self.asked}')
        self.stand_in("squeue", "echo 43")

    def stand_in(self, name: str, body: str) -> None:
        path = self._bin / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def bash(self, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "SLURM_JOB_NAME": "run",
            "SLURM_JOB_ID": "42",
            "SLURM_JOB_PARTITION": "batch",
            "SLURM_JOB_NUM_NODES": "2",
            "JOB": "42",
            "ENDING": "",
            "RESTART": "0",
            "REQUEUE": "1",
            "MAX_TRIES": "3",
            "RUNS": str(self.folder),
            "RUN_DIR": str(self.folder / "run"),
            "RECORD": str(self.record),
            "PROGRESS": str(self.folder / "run" / "state"),
            "EXITS": str(self.record / "exits"),
            "CONTAINER": "",
            "MOUNTS": "",
            "LOCAL_TMP": "/scratch",
            **variables,
        }
        return subprocess.run(
            ["bash", "-c", f"source slurm/lib.sh; {code}"], cwd=ROOT, env=environment, capture_output=True, text=True
        )

    def exits(self, tasks: Sequence[tuple[int, str]]) -> None:
        """What the tasks of a step recorded, in the order of their ends: code and node."""
        (self.record / "exits").mkdir()
        for index, (code, node) in enumerate(tasks):
            (self.record / "exits" / str(index)).write_text(f"{code} {node} {1_700_000_000_000_000_000 + index}\n")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize(
    "srun_code,tasks,expected",
    [
        (0, [(0, "a"), (0, "b")], "0"),
        (75, [(75, "a"), (75, "b")], "75"),
        (143, [(75, "a")], "75"),  # the others were ended because of the first
        (2, [(75, "a"), (2, "b")], "2"),
        (1, [(75, "a"), (1, "b")], "1"),
        (137, [(137, "b"), (1, "a")], "75"),  # what a killed task does to the others is no failure of the run
        (127, [(127, "a"), (127, "b")], "127"),
        (1, [(0, "a")], "75"),  # a node was lost, or a launch failed: no task tells of it
        (1, [], "75"),
    ],
)
def test_verdict_of_a_step(job: Job, srun_code: int, tasks: Sequence[tuple[int, str]], expected: str) -> None:
    job.exits(tasks)
    assert job.bash(f"verdict {srun_code}").stdout.strip() == expected


def test_the_first_task_that_a_signal_ended_names_the_node(job: Job) -> None:
    job.exits([(75, "a"), (135, "b"), (137, "c")])
    job.stand_in("sinfo", "printf '%s\\n' a b c d")
    ended = job.bash("end_job 75")
    assert ended.returncode == 75
    assert (job.record / "excluded_nodes").read_text().split()[0] == "b"
    # The job itself, and the one that waits behind it under the same name.
    assert job.asked.read_text().splitlines()[-3:] == [
        "scontrol requeue 42",
        "scontrol update JobId=42 ExcNodeList=b",
        "scontrol update JobId=43 ExcNodeList=b",
    ]


def test_no_node_is_left_out_that_the_job_cannot_do_without(job: Job) -> None:
    job.exits([(137, "b")])
    job.stand_in("sinfo", "printf '%s\\n' a b")
    ended = job.bash("end_job 75")
    assert "ExcNodeList" not in job.asked.read_text() and "scontrol requeue 42" in job.asked.read_text()
    assert "only 1 nodes would be left, 2 are needed" in ended.stdout


@pytest.mark.parametrize(
    "tries,expected",
    [
        ([], 0),
        (["42 step_000002", "42 step_000002"], 2),
        (["42 step_000002", "42 step_000001", "42 step_000002"], 1),
        (["42 step_000001"], 0),  # something was saved since
        (["41 step_000002", "41 step_000002"], 0),  # another job: somebody has submitted it anew
    ],
)
def test_tries_that_came_to_nothing_are_counted(job: Job, tries: Sequence[str], expected: int) -> None:
    for name in ("step_000001", "step_000002", ".step_000003.half"):
        (job.folder / "run" / "state" / name).mkdir(parents=True)
        os.utime(job.folder / "run" / "state" / name, (int(name[-1], 36), int(name[-1], 36)))
    lines = [f"time {each.split()[0]} restart=0 nodes=a from={each.split()[1]}\n" for each in tries]
    (job.record / "tries").write_text("".join(lines))
    assert job.bash("tries_from_here").stdout.strip() == str(expected)


def test_a_job_that_gets_nowhere_is_given_up(job: Job) -> None:
    job.exits([(75, "a")])
    (job.record / "tries").write_text("time 42 restart=0 nodes=a from=the_beginning\n" * 3)
    ended = job.bash("end_job 75")
    assert ended.returncode == 1 and "3 tries in a row" in ended.stdout
    assert not job.asked.exists() or "requeue" not in job.asked.read_text()


@pytest.mark.parametrize("variables", [{"REQUEUE": "0"}, {"ENDING": "1"}])
def test_a_cancelled_job_and_a_link_of_a_chain_are_not_requeued(job: Job, variables: Mapping[str, str]) -> None:
    job.exits([(75, "a")])
    assert job.bash("end_job 75", **variables).returncode == 75
    assert not job.asked.exists() or "requeue" not in job.asked.read_text()


@pytest.mark.parametrize("broken,code", [(["b"], 75), (["a", "b"], 1), ([], 1)])
def test_a_node_in_which_doctor_finds_a_fault_is_left_out(job: Job, broken: Sequence[str], code: int) -> None:
    # The first task tells of all faults. One that all nodes have, or that no node can be blamed for, ends the job.
    names = "".join(f"{node}\\n" for node in broken)
    job.stand_in(
        "srun",
        f"""before=
for argument; do
    [[ $argument = */exits/42.0.doctor ]] && echo "1 a 1" >"$argument/0" && echo "0 b 2" >"$argument/1"
    [[ $before = --broken-nodes ]] && printf "{names}" >"$argument"
    before=$argument
done
exit 1""",
    )
    job.stand_in("sinfo", "printf '%s\\n' a b c d")
    assert job.bash("check_nodes CONFIG", DOCTOR="1").returncode == code
    asked = job.asked.read_text() if job.asked.exists() else ""
    assert ("scontrol requeue 42" in asked, "ExcNodeList=b" in asked) == (code == 75, code == 75)


def test_a_port_in_use_is_passed_over(job: Job) -> None:
    first = int(job.bash("free_port").stdout)
    assert 15000 <= first < 32768
    with socket.create_server(("127.0.0.1", first)):
        assert int(job.bash("free_port").stdout) > first
    assert int(job.bash("free_port", SLURM_JOB_ID="43").stdout) != first


def test_a_container_sees_the_code_the_runs_and_the_local_disk(job: Job) -> None:
    job.bash("run_step train python3 -V", CONTAINER="/images/vapo.sqsh", MOUNTS="/data:/data")
    (asked,) = [line for line in job.asked.read_text().splitlines() if "task.sh" in line]
    assert "--container-image=/images/vapo.sqsh" in asked and f"--container-workdir={ROOT}" in asked
    mounts = re.search(r"--container-mounts=(\S+)", asked)
    assert mounts and set(mounts[1].split(",")) == {
        *(f"{path}:{path}" for path in (ROOT, job.folder, "/scratch", "/data")),
    }
