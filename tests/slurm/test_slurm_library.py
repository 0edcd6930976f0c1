"""The decisions of slurm/lib.sh, taken by bash itself; the commands of Slurm are
stand-ins."""

import os
import re
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Job:
    """A job as the library sees it: its record, its environment, and its requests to Slurm."""

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
        self.tries("the_beginning")

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
            "SLURM_TASKS_PER_NODE": "1(x2)",
            "SLURM_JOB_NODELIST": "ab",
            "JOB": "42",
            "MASTER_ADDR": "a",
            "DOCTOR_WAIT": "300",
            "DOCTOR_LIMIT": "60",
            "ENDING": "",
            "RESTART": "0",
            "REQUEUE": "1",
            "MAX_TRIES": "3",
            "RUNS": str(self.folder),
            "RUN_DIR": str(self.folder / "run"),
            "RECORD": str(self.record),
            "PROGRESS": str(self.folder / "run" / "checkpoints"),
            "EXITS": str(self.record / "exits"),
            "CONTAINER": "",
            "MOUNTS": "",
            "LOCAL_TMP": "/scratch",
            "SETUP": "",
            **variables,
        }
        return subprocess.run(
            ["bash", "-c", f"source slurm/lib.sh; {code}"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )

    def tries(self, since: str, *ends: str) -> None:
        """Tries that began at one saved state: those that have ended, and this one."""
        lines = [
            f"time 42 restart=-{len(ends) - i} nodes=a from={since} {end}"
            for i, end in enumerate(ends)
        ]
        (self.record / "tries").write_text(
            "\n".join([*lines, f"time 42 restart=0 nodes=a from={since}\n"])
        )

    def on_nodes(self, *nodes: str, excluded: str = "(null)") -> None:
        """The job runs on these nodes of a partition of a, b, c and d; the user excluded others."""
        self.stand_in(
            "scontrol",
            f"""case "$*" in
"show hostnames ab") printf '%s\\n' {" ".join(nodes)} ;;
"show hostnames "*) tr , '\\n' <<<"$3" ;;
"show job "*) echo "JobId=$4 ExcNodeList={excluded} Reason=None" ;;
*) echo "scontrol $*" >>{self.asked} ;;
esac""",
        )
        self.stand_in("sinfo", "[[ $* = *--states=down* ]] || printf '%s\\n' a b c d")

    def doctor_says(
        self,
        broken: Sequence[str],
        tasks: Sequence[tuple[int, int, str]],
        then: str = "exit 1",
        step: str = "doctor",
    ) -> None:
        """What the doctor step does: broken nodes it names, its tasks (number, code, node), and how
        srun ends."""
        named = "".join(f"{node}\\n" for node in broken)
        ended = "".join(
            f'echo "{code} {node} 1{task}" >"$argument/{task}"\n' for task, code, node in tasks
        )
        self.stand_in(
            "srun",
            f"""[[ $* != *--overlap* ]] || exit 0
before=
for argument; do
    if [[ $argument = */exits/42.0.{step} ]]; then
        {ended or ":"}
    fi
    [[ $before != --broken-nodes || -z "{named}" ]] || printf "{named}" >"$argument"
    before=$argument
done
{then}""",
        )

    @property
    def excluded(self) -> list[str]:
        file = self.record / "excluded_nodes"
        return [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def ended(self) -> str:
        """How this try ended."""
        return (self.record / "tries").read_text().splitlines()[-1].partition("ended=")[2]

    def exits(self, tasks: Sequence[tuple[int, str]]) -> None:
        """What the tasks of a step recorded, in the order of their ends: code and node."""
        (self.record / "exits").mkdir()
        for index, (code, node) in enumerate(tasks):
            (self.record / "exits" / str(index)).write_text(
                f"{code} {node} {1_700_000_000_000_000_000 + index}\n"
            )


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
        (
            137,
            [(137, "b"), (1, "a")],
            "75",
        ),  # what a killed task does to the others is no failure of the run
        (76, [(76, "b"), (75, "a")], "75"),  # a device failed: its node is left out
        (1, [(75, "a"), (1, "b")], "1"),  # out of memory, which the others notice first
        (127, [(127, "a"), (127, "b")], "127"),
        (1, [(0, "a")], "75"),  # a node was lost, or a launch failed: no task tells of it
        (1, [], "75"),
        (
            134,
            [(1, "a"), (134, "b"), (134, "c")],
            "1",
        ),  # NCCL's watchdog aborts the peers of a rank that failed
        (134, [(75, "a"), (134, "b")], "75"),
        (134, [(75, "a"), (134, "b"), (1, "c")], "1"),
    ],
)
def test_the_code_of_a_step(
    job: Job, srun_code: int, tasks: Sequence[tuple[int, str]], expected: str
) -> None:
    job.exits(tasks)
    assert job.bash(f"code_of_step {srun_code}").stdout.strip() == expected


@pytest.mark.parametrize("first", [135, 76])
def test_first_task_ended_by_signal_or_device_names_the_node(job: Job, first: int) -> None:
    job.exits([(75, "a"), (first, "b"), (137, "c")])
    job.on_nodes("a", "b")
    ended = job.bash("end_job 75")
    assert ended.returncode == 75
    assert (job.record / "excluded_nodes").read_text().split()[0] == "b"
    # The job itself, and the one that waits behind it under the same name.
    assert job.asked.read_text().splitlines()[-3:] == [
        "scontrol requeue 42",
        "scontrol update JobId=42 ExcNodeList=b",
        "scontrol update JobId=43 ExcNodeList=b",
    ]


@pytest.mark.parametrize(
    "tasks,node",
    [
        ([(1, "a"), (134, "b"), (134, "c")], ""),
        ([(137, "a"), (134, "b")], "a"),
        ([(134, "a"), (137, "b")], "a"),
        ([(75, "a"), (134, "b")], ""),
        ([(75, "a"), (76, "b"), (134, "c")], "b"),
        ([(2, "a"), (139, "b")], ""),
    ],
)
def test_only_the_node_of_the_first_failure_is_blamed(
    job: Job, tasks: Sequence[tuple[int, str]], node: str
) -> None:
    job.exits(tasks)
    assert job.bash("died_on").stdout.strip() == node


def test_nodes_that_the_user_excluded_stay_so(job: Job) -> None:
    job.exits([(137, "b")])
    job.on_nodes("a", "b", excluded="d,e")
    job.stand_in("sinfo", "[[ $* = *--states=down* ]] || printf '%s\\n' a b c d f")
    job.bash("end_job 75")
    assert "scontrol update JobId=42 ExcNodeList=b,d,e" in job.asked.read_text().splitlines()


def test_tasks_of_an_array_that_wait_leave_the_node_out(job: Job) -> None:
    job.exits([(137, "b")])
    job.on_nodes("a", "b")
    job.stand_in(
        "squeue", r"""[[ "$* " = *"--array "* ]] && printf '43_3\n43_4\n' || echo '43_[3-4%2]'"""
    )
    job.bash("end_job 75")
    assert job.asked.read_text().splitlines()[-3:] == [
        f"scontrol update JobId={waiting} ExcNodeList=b" for waiting in ("42", "43_3", "43_4")
    ]


def test_no_node_is_left_out_that_the_job_cannot_do_without(job: Job) -> None:
    job.exits([(137, "b")])
    job.stand_in("sinfo", "printf '%s\\n' a b")
    ended = job.bash("end_job 75")
    assert (
        "ExcNodeList" not in job.asked.read_text()
        and "scontrol requeue 42" in job.asked.read_text()
    )
    assert "only 1 nodes would be left, 2 are needed" in ended.stdout


@pytest.mark.parametrize(
    "tries,expected",
    [
        ([], 0),
        (["42 step_000002", "42 step_000002"], 2),
        (["42 step_000002", "42 step_000001", "42 step_000002"], 1),
        (["42 step_000001"], 0),  # something was saved since
        (["41 step_000002", "41 step_000002"], 0),  # another job: somebody has submitted it again
    ],
)
def test_tries_that_came_to_nothing_are_counted(
    job: Job, tries: Sequence[str], expected: int
) -> None:
    for name in ("step_000001", "step_000002", ".step_000003.half"):
        (job.folder / "run" / "checkpoints" / name).mkdir(parents=True)
        os.utime(job.folder / "run" / "checkpoints" / name, (int(name[-1], 36), int(name[-1], 36)))
    lines = [
        f"time {each.split()[0]} restart=0 nodes=a from={each.split()[1]} ended=75\n"
        for each in tries
    ]
    (job.record / "tries").write_text("".join(lines))
    assert job.bash("tries_from_here").stdout.strip() == str(expected)


def test_a_job_that_gets_nowhere_is_given_up(job: Job) -> None:
    job.exits([(75, "a")])
    job.tries("the_beginning", "ended=75", "ended=75")
    ended = job.bash("end_job 75")
    assert ended.returncode == 1 and "3 tries in a row" in ended.stdout
    assert not job.asked.exists() or "requeue" not in job.asked.read_text()


def test_a_job_whose_tries_cannot_be_counted_is_not_tried_again(job: Job) -> None:
    """The file system that holds the record fails permanently, and so will every save of the
    run."""
    job.exits([(75, "a")])
    job.stand_in("sed", "echo 'sed: cannot write: Input/output error' >&2; exit 4")
    ended = job.bash("end_job 75")
    assert ended.returncode == 1 and "tries cannot be written" in ended.stdout
    assert not job.asked.exists() or "requeue" not in job.asked.read_text()


@pytest.mark.parametrize(
    "ends,count",
    [
        (["ended=75", "ended=75_by_slurm", "", "ended=75_node_left_out", "ended=75"], 2),
        (["", "", "", ""], 0),  # a node was lost with the script on it
    ],
)
def test_tries_ended_by_slurm_or_doctor_are_no_failures(
    job: Job, ends: Sequence[str], count: int
) -> None:
    job.tries("the_beginning", *ends)
    assert job.bash("tries_from_here").stdout.strip() == str(count)
    job.tries("step_000001", *ends)
    assert job.bash("tries_from_here").stdout.strip() == "0"


@pytest.mark.parametrize("down,ended", [("", "75"), ("echo b", "75_by_slurm")])
def test_a_try_that_lost_a_node_of_slurms_is_recorded_as_such(
    job: Job, down: str, ended: str
) -> None:
    job.exits([(75, "a")])
    job.stand_in("sinfo", f"[[ $* != *--states=down* ]] || {down or ':'}")
    assert job.bash("end_job 75").returncode == 75
    assert job.ended == ended


@pytest.mark.parametrize("variables", [{"REQUEUE": "0"}, {"ENDING": "1"}])
def test_a_cancelled_job_and_a_link_of_a_chain_are_not_requeued(
    job: Job, variables: Mapping[str, str]
) -> None:
    job.exits([(75, "a")])
    assert job.bash("end_job 75", **variables).returncode == 75
    assert not job.asked.exists() or "requeue" not in job.asked.read_text()


AWAY = "scontrol: error: Unable to contact slurm controller (connect failure)"
REFUSED = "Requested operation is presently disabled for job 42"


@pytest.mark.parametrize(
    ("said", "wait", "asked"), [(AWAY, "600", 3), (AWAY, "0", 1), (REFUSED, "600", 1)]
)
def test_a_controller_that_is_away_is_asked_again(
    job: Job, said: str, wait: str, asked: int
) -> None:
    """It is restarted, or has too much to do, just when a job is to be requeued."""
    job.exits([(75, "a")])
    job.stand_in("sleep", ":")
    job.stand_in("sinfo", "printf '%s\\n' a b c d")
    job.stand_in(
        "scontrol",
        f"""case $1 in
requeue)
    echo requeue >>{job.asked}
    [[ $(grep -c requeue {job.asked}) = 3 ]] || {{ echo "{said}" >&2; exit 1; }} ;;
update) echo "$*" >>{job.asked} ;;
esac""",
    )
    (job.record / "excluded_nodes").write_text("b yesterday\n")
    ended = job.bash("end_job 75", CONTROLLER_WAIT=wait)
    lines = job.asked.read_text().splitlines()
    assert ended.returncode == 75 and lines.count("requeue") == asked
    assert ended.stderr.count(said) == min(asked, 2), "Slurm's answer is shown"
    assert ("update JobId=42 ExcNodeList=b" in lines) == (asked == 3)


def test_nodes_are_not_lost_while_the_controller_is_away(job: Job) -> None:
    job.on_nodes("a", "b")
    scontrol = job.folder / "bin" / "scontrol"
    scontrol.rename(scontrol.with_name("answering"))
    job.stand_in("sleep", "touch back")
    job.stand_in(
        "scontrol",
        f"""if [[ $1 = show && $2 = job ]]; then
    [[ -e back ]] || {{ echo "{AWAY}" >&2; exit 1; }}
    echo "JobId=42 NodeList=a,b"
else
    answering "$@"
fi""",
    )
    code = f'cd {job.folder}; choose_nodes && echo "${{NODES[*]}}"'
    done = job.bash(code, SPARES="0")
    assert done.stdout == "a b\n", done.stdout


@pytest.mark.parametrize("broken,code", [(["b"], 75), (["a", "b"], 1), ([], 1)])
def test_a_node_in_which_doctor_finds_a_fault_is_left_out(
    job: Job, broken: Sequence[str], code: int
) -> None:
    # The first task tells of all faults. One that all nodes have, or that no node can be blamed
    # for, ends the job.
    job.doctor_says(broken, [(0, 1, "a"), (1, 0, "b")])
    job.on_nodes("a", "b")
    assert job.bash("check_nodes CONFIG", DOCTOR="1").returncode == code
    asked = job.asked.read_text() if job.asked.exists() else ""
    assert ("scontrol requeue 42" in asked, "ExcNodeList=b" in asked) == (code == 75, code == 75)
    assert job.ended == ("75_node_left_out" if code == 75 else "1")


def test_a_node_that_cannot_be_left_out_is_not_tried_for_ever(job: Job) -> None:
    (job.record / "excluded_nodes").write_text("b yesterday\n")
    job.doctor_says(["b"], [(0, 1, "a"), (1, 0, "b")])
    job.on_nodes("a", "b")
    assert job.bash("check_nodes CONFIG", DOCTOR="1").returncode == 75
    assert job.ended == "75"


@pytest.mark.parametrize(
    "tasks,blamed",
    [
        ([(0, 0, "a")], ["b"]),
        ([(1, 1, "b")], ["a"]),  # nobody meets where the first node hangs
        ([], []),  # every node hangs: a file system does
    ],
)
def test_a_doctor_that_hangs_before_it_has_begun_names_its_node(
    job: Job, tasks: Sequence[tuple[int, int, str]], blamed: Sequence[str]
) -> None:
    job.doctor_says([], tasks, then="exec sleep 300")
    job.on_nodes("a", "b")
    assert job.bash("check_nodes CONFIG", DOCTOR="1", DOCTOR_LIMIT="1").returncode == 75
    assert job.excluded == blamed
    assert job.ended == ("75_node_left_out" if blamed else "75")


def test_the_first_node_is_not_blamed_for_waiting_for_another(job: Job) -> None:
    job.doctor_says([], [(1, 0, "b")], then="exit 124")
    job.on_nodes("a", "b", "c")
    assert job.bash("check_nodes CONFIG", DOCTOR="1", SLURM_JOB_NUM_NODES="3").returncode == 75
    assert job.excluded == ["c"]


@pytest.mark.parametrize("unfit,code", [(["b"], 75), (["a", "b"], 1)])
def test_a_node_without_a_usable_disk_is_left_out(
    job: Job, unfit: Sequence[str], code: int
) -> None:
    job.doctor_says(
        [], [(index, 76 if node in unfit else 1, node) for index, node in enumerate("ab")]
    )
    job.on_nodes("a", "b")
    assert job.bash("check_nodes CONFIG", DOCTOR="1").returncode == code
    assert job.excluded == (["b"] if code == 75 else [])


def test_a_request_to_save_while_doctor_runs_is_not_lost(job: Job) -> None:
    job.doctor_says([], [(0, 0, "a"), (1, 0, "b")], then="kill -USR1 $BATCH; sleep 0.5; exit 0")
    job.on_nodes("a", "b")
    # scancel reaches tasks alone, and these pass over it.
    job.stand_in("scancel", "exit 0")
    code = (
        "export BATCH=$BASHPID; trap on_usr1 USR1; check_nodes CONFIG; run_step train python3 -V; "
        "echo trained"
    )
    ended = job.bash(code, DOCTOR="1")
    assert (
        ended.returncode == 75
        and "train is not begun" in ended.stdout
        and "trained" not in ended.stdout
    )
    assert "scontrol requeue 42" in job.asked.read_text() and job.excluded == []


@pytest.mark.parametrize(("found", "ends"), [(2, True), (1, False), (0, False)])
def test_bad_input_ends_a_job_before_its_nodes_are_examined(
    job: Job, found: int, ends: bool
) -> None:
    # Any other code is a matter of the node that looked: doctor comes next and names it.
    job.doctor_says([], [(0, found, "a")], step="check")
    job.on_nodes("a", "b")
    ended = job.bash("check_run CONFIG; echo doctor is next")
    assert ("doctor is next" in ended.stdout, ended.returncode) == (not ends, 2 if ends else 0)
    assert job.ended == ("2" if ends else "")


def test_a_port_in_use_is_passed_over(job: Job) -> None:
    first = int(job.bash("free_port").stdout)
    assert 15000 <= first < 32768
    with socket.create_server(("127.0.0.1", first)):
        assert int(job.bash("free_port").stdout) > first
    assert int(job.bash("free_port", SLURM_JOB_ID="43").stdout) != first


@pytest.mark.parametrize(
    ("cores", "tasks", "asked", "expected"),
    [
        ("64(x2)", "8(x2)", "", 8),
        ("128(x15),64", "8(x16)", "", 8),
        ("4", "8", "", 1),
        ("64(x2)", "8(x2)", "12", 12),
    ],
)
def test_a_task_has_its_share_of_the_smallest_node(
    job: Job, cores: str, tasks: str, asked: str, expected: int
) -> None:
    job.on_nodes("a", "b")
    begun = job.bash(
        'begin_job "$RUN_DIR" "$PROGRESS" >/dev/null; printenv SRUN_CPUS_PER_TASK',
        VENV="",
        SPARES="0",
        SLURM_JOB_CPUS_PER_NODE=cores,
        SLURM_TASKS_PER_NODE=tasks,
        **({"SLURM_CPUS_PER_TASK": asked} if asked else {}),
    )
    assert begun.stdout.strip() == str(expected), begun.stderr


def test_exit_codes_of_steps_of_days_ago_are_removed(job: Job) -> None:
    exits = job.record / "exits"
    now = time.time()
    for name, days in (("42.-2.train", 4.5), ("42.-1.train", 2.5)):
        (exits / name).mkdir(parents=True)
        (exits / name / "0").write_text("75 a 1\n")
        os.utime(exits / name, (now - days * 86_400,) * 2)
    job.bash("run_step train python3 -V")
    assert {path.name for path in exits.iterdir()} == {"42.-1.train", "42.0.train"}


def test_tasks_of_a_run_are_bound_to_no_fixed_cores(job: Job) -> None:
    job.bash("run_step train python3 -V; run_step check python3 -V")
    train, check = [line for line in job.asked.read_text().splitlines() if "task.sh" in line]
    assert "--cpu-bind=none" in train and "--cpu-bind" not in check


@pytest.mark.parametrize(("refuses", "tries"), [("--gpus-per-node=0", 2), ("", 1), ("task", 2)])
def test_nodes_are_cleaned_where_a_site_wants_gpus_of_every_step(
    job: Job, refuses: str, tries: int
) -> None:
    job.on_nodes("a", "b")
    job.stand_in(
        "srun", f'echo "srun $*" >>{job.asked}; [[ -z "{refuses}" || "$* task" != *"{refuses}"* ]]'
    )
    done = job.bash('on_alive_nodes "$FORGET_COPIES"; echo code $?', SLURMD_NODENAME="a")
    asked = [line for line in job.asked.read_text().splitlines() if line.startswith("srun")]
    assert len(asked) == tries and "--gpus-per-node=0" in asked[0] and "vapo-job-" in asked[-1]
    assert ("/dev/shm/vapo-job-42.*" in done.stdout) == (
        refuses == "task"
    ) and done.stdout.endswith("code 0\n")


def test_a_container_sees_the_code_the_runs_and_the_local_disk(job: Job) -> None:
    setup = job.folder / "site" / "setup.sh"
    setup.parent.mkdir()
    setup.touch()
    job.bash(
        "run_step train python3 -V",
        CONTAINER="/images/vapo.sqsh",
        MOUNTS="/data:/data",
        SETUP=str(setup),
    )
    (asked,) = [line for line in job.asked.read_text().splitlines() if "task.sh" in line]
    assert "--container-image=/images/vapo.sqsh" in asked and f"--container-workdir={ROOT}" in asked
    mounts = re.search(r"--container-mounts=(\S+)", asked)
    assert mounts and set(mounts[1].split(",")) == {
        *(f"{path}:{path}" for path in (ROOT, job.folder, "/scratch", "/data", setup.parent)),
    }


@pytest.mark.parametrize("script", ["train.sbatch", "array.sbatch", "evaluate.sbatch"])
@pytest.mark.parametrize("refused", [None, "plan", "train", "evaluate", "sbatch"])
def test_outside_a_job_a_script_checks_and_submits_nothing(
    job: Job, script: str, refused: str | None
) -> None:
    job.stand_in("python3", f'echo "$*" >>{job.asked}; [[ $3 != {refused} ]] || exit 2')
    job.stand_in("sbatch", f'echo "sbatch $*" >>{job.asked}; [[ {refused} != sbatch ]]')
    environment = {
        "PATH": f"{job.folder}/bin:{os.environ['PATH']}",
        "VENV": "",
        "RUNS": str(job.folder / "runs"),
    }
    command = ["bash", f"slurm/{script}", "actor.optimizer.lr=2e-6"]
    environment |= {"SLURM_JOB_NUM_NODES": "2", "SPARES": "1"} if script == "train.sbatch" else {}
    if script != "array.sbatch":
        environment["SLURM_JOB_NAME"] = "20261122"  # which YAML would read as a number
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    asked = job.asked.read_text().splitlines()
    trains = script != "evaluate.sbatch"
    can_refuse = ("sbatch", "plan", "train") if trains else ("sbatch", "evaluate")
    assert ended.returncode == (2 if refused in can_refuse else 0), ended.stderr
    assert ("nothing was found" in ended.stdout) == (ended.returncode == 0)
    assert "cli train" in ended.stdout if trains else "cli evaluate" in ended.stdout
    assert f"run.name='{'gsm8k-seed1' if script == 'array.sbatch' else '20261122'}'" in ended.stdout
    assert "--test-only" in asked[0] and asked[0].endswith(
        f"slurm/{script} actor.optimizer.lr=2e-6"
    )
    assert not (job.folder / "runs").exists()
    looked = [("train --check", ""), ("plan", "--gpus 8")] if trains else [("evaluate", "--check")]
    for line, (begin, end) in zip(asked[1:], looked, strict=True):
        assert line.startswith(f"-m vapo_megatron.cli {begin} examples/") and line.endswith(end)
        assert "actor.optimizer.lr=2e-6" in line


@pytest.mark.parametrize(
    ("script", "name", "more"),
    [
        ("train.sbatch", "aime_vapo_32b", {}),
        ("train.sbatch", "mine", {"SLURM_JOB_NAME": "mine", "SLURM_JOB_NUM_NODES": "4"}),
        ("evaluate.sbatch", "evaluate", {}),
        ("array.sbatch", "gsm8k-seed1", {}),
        ("engine.sbatch", "engine-engine", {}),
        ("convert.sbatch", "convert", {}),
    ],
)
def test_in_an_allocation_a_script_checks_and_starts_nothing(
    job: Job, script: str, name: str, more: dict[str, str]
) -> None:
    """As seen with Slurm 22.05: salloc sets these, and names and nodes of the user replace its."""
    job.stand_in("python3", f'echo "$* of ${{SLURM_PROCID-nobody}}" >>{job.asked}')
    job.stand_in("sbatch", f'echo "sbatch $*" >>{job.asked}')
    job.stand_in("scontrol", "echo JobId=42 JobName=interactive NumNodes=2 Reason=None")
    environment = {
        "PATH": f"{job.folder}/bin:{os.environ['PATH']}",
        "VENV": "",
        "RUNS": str(job.folder / "runs"),
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NAME": "interactive",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "ab",
        "SLURM_NTASKS": "16",
        "SLURM_PROCID": "0",
        **more,
    }
    command = ["bash", f"slurm/{script}", "actor.optimizer.lr=2e-6"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"the config has: {job.folder}/runs/{name}\n" in ended.stdout
    assert "the job would run, in every task: " in ended.stdout
    asked = job.asked.read_text().splitlines()
    assert not [line for line in asked if line.startswith("srun")]
    assert all(line.endswith(" of nobody") for line in asked[1:])
    if script == "train.sbatch":
        nodes = 4 if more else 16
        assert f"--nodes={nodes} " in asked[0] and f"--gpus {8 * nodes} " in asked[2]
    assert not (job.folder / "runs").exists()


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("engine.sbatch", ["rollout.seed=2"], "rollout.seed=2 --port 30000 --meet FIRST_NODE:"),
        ("convert.sbatch", ["tools/convert_hf_to_megatron.py"], "tools/convert_hf_to_megatron.py"),
    ],
)
def test_scripts_without_a_check_say_what_they_run(
    job: Job, script: str, arguments: list[str], said: str
) -> None:
    job.stand_in("sbatch", f'echo "sbatch $*" >>{job.asked}')
    environment = {"PATH": f"{job.folder}/bin:{os.environ['PATH']}", "VENV": ""}
    command = ["bash", f"slurm/{script}", *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "the job would run, in every task: " in ended.stdout and said in ended.stdout


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("one run.seed=1\ntwo run.seed=2", "cli train"),  # its last line has no end
        ("one run.seed=1\n\n", "has nothing in line 2"),
        ("one run.seed=1\n", "has nothing in line 2"),
    ],
)
def test_a_row_is_read_however_its_line_ends(job: Job, rows: str, said: str) -> None:
    job.stand_in("python3", "exit 0")
    job.stand_in("sbatch", "exit 0")
    (job.folder / "rows.txt").write_text(rows)
    environment = {
        "PATH": f"{job.folder}/bin:{os.environ['PATH']}",
        "VENV": "",
        "ROWS": str(job.folder / "rows.txt"),
        "SLURM_ARRAY_TASK_ID": "2",
    }
    command = ["bash", "slurm/array.sbatch"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if said == "cli train":
        assert ended.returncode == 0, ended.stderr
        assert "run.name='gsm8k-two'" in ended.stdout and "run.seed=2\n" in ended.stdout
    else:
        assert ended.returncode == 2 and said in ended.stderr and "unbound" not in ended.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--checkpoint", "final", "run.seed=2"],
        ["run.seed=2", "--checkpoint", "final"],
        ["run.seed=2", "--checkpoint=final"],
    ],
)
def test_a_run_evaluates_its_own_export(job: Job, arguments: list[str]) -> None:
    """Its config says where it lies; the results and what Slurm left of the job are beside it."""
    job.stand_in("python3", f'echo "$*" >>{job.asked}')
    job.stand_in("sbatch", f'echo "sbatch $*" >>{job.asked}')
    config = job.folder / "runs" / "mine" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.touch()
    environment = {"PATH": f"{job.folder}/bin:{os.environ['PATH']}", "VENV": ""}
    command = ["bash", "slurm/evaluate.sbatch", *arguments]

    def ended(**more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, cwd=ROOT, env=environment | more, capture_output=True, text=True
        )

    done = ended(EVALUATION_CONFIG=str(config))
    assert done.returncode == 0, done.stderr
    assert f"the config has: {config.parent}_final\n" in done.stdout
    _, asked = job.asked.read_text().splitlines()
    assert asked == (
        f"-m vapo_megatron.cli evaluate {config} run.resume=auto {' '.join(arguments)} --check"
    )
    wrong = ended(EVALUATION_CONFIG="examples/aime_qwen2.5_32b/evaluate.yaml")
    assert wrong.returncode == 2 and "needs EVALUATION_CONFIG=runs/NAME/config.yaml" in wrong.stderr


def test_without_a_job_a_setting_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "VENV": str(tmp_path), "CONFIG": "absent.yaml"}
    ended = subprocess.run(
        ["bash", "slurm/train.sbatch"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr == f"aime_vapo_32b: CONFIG=absent.yaml: no such file, seen from {ROOT}\n"
