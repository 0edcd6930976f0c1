"""What slurm/lib.sh does where ranks of a job are lost: on which nodes they begin again; the
commands of Slurm are stand-ins."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from test_slurm_library import ROOT, Job

pytestmark = pytest.mark.full

KILLED = ["77 a", "137 b"]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def run(
    job: Job, attempts: Sequence[Sequence[str]], nodes: str, down: str = "", **settings: str
) -> tuple[str, str]:
    """The nodes of each attempt, and what the job then says: each attempt ends with these codes on
    these nodes.

    down: a node that Slurm takes off the job during the first one.
    """
    names = "\\n".join(nodes)
    gone = f"| grep -v {down}" if down else ""
    job.stand_in(
        "scontrol",
        f"""case "$*" in
"show hostnames now")
    if [[ -e {job.folder}/began ]]; then printf '{names}\\n' {gone}; else printf '{names}\\n'; fi ;;
"show hostnames "*) printf '{names}\\n' ;;
"show job "*) echo "JobId=$4 NodeList=now Reason=None" ;;
esac""",
    )
    ends = [
        "; ".join(f'echo "{end} {number}" >"$exits/{number}"' for number, end in enumerate(codes))
        or ":"
        for codes in attempts
    ]
    cases = "\n".join(
        f"*/exits/42.0.train{f'.{n}' if n else ''}) {end} ;;" for n, end in enumerate(ends)
    )
    failing = "".join(
        str(int(any(not end.startswith("0") for end in codes) or not codes)) for codes in attempts
    )
    job.stand_in(
        "srun",
        f"""touch {job.folder}/began
if [[ $* = *--overlap* ]]; then echo "overlap $*" >>{job.asked}; exit 0; fi
for argument; do
    [[ $argument != --ntasks* ]] || echo "asked $argument" >>{job.asked}
    [[ $argument != --nodelist=* ]] ||
        echo "nodes ${{argument#*=}} attempt $VAPO_ATTEMPT" >>{job.asked}
    exits=$argument
    case $argument in
    {cases}
    *) continue ;;
    esac
    failing={failing}
    exit ${{failing:$VAPO_ATTEMPT:1}}
done""",
    )
    settings = {"SPARES": "0", "RESTARTS": "2", "SLURM_JOB_NUM_NODES": str(len(nodes)), **settings}
    ended = job.bash('run_ranks train python3 -V; echo "ended $STEP_CODE"', ASKED="", **settings)
    asked = job.asked.read_text().splitlines() if job.asked.exists() else []
    return " ".join(
        line.split()[1] for line in asked if line.startswith("nodes ")
    ), ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("attempts", "nodes", "settings", "used", "code"),
    [
        ([["0 a", "0 b"]], "ab", {}, "a,b", "0"),
        # A spare takes the place; where there is none it is the same nodes, so often.
        ([KILLED, ["0 a", "0 c"]], "abc", {"SPARES": "1"}, "a,b a,c", "0"),
        ([["77 a", "76 b"], ["0 a", "0 c"]], "abc", {"SPARES": "1"}, "a,b a,c", "0"),
        ([KILLED, KILLED, KILLED, ["0 a"]], "ab", {}, "a,b a,b a,b", "75"),
        ([KILLED, ["0 a"]], "ab", {"RESTARTS": "0"}, "a,b", "75"),
        # The first node goes: the ranks meet elsewhere.
        ([["137 a", "77 b"], ["0 b", "0 c"]], "abc", {"SPARES": "1"}, "a,b b,c", "0"),
        # A rank that hangs is killed by Slurm silently; the others name it.
        ([["77 a"], ["0 a", "0 b"]], "ab", {}, "a,b a,b", "0"),
        # No spare for a node that cannot be used; saved for a time limit or for USR1; failed for
        # good.
        ([["77 a", "76 b"], ["0 a"]], "ab", {}, "a,b", "75"),
        ([["75 a", "75 b"], ["0 a"]], "ab", {}, "a,b", "75"),
        ([["77 a", "1 b"], ["0 a"]], "ab", {}, "a,b", "1"),
        ([["2 a"], ["0 a"]], "ab", {}, "a,b", "2"),
    ],
)
def test_ranks_are_started_again_within_the_job(
    job: Job,
    attempts: Sequence[Sequence[str]],
    nodes: str,
    settings: dict[str, str],
    used: str,
    code: str,
) -> None:
    found, said = run(job, attempts, nodes, **settings)
    assert (found, said.splitlines()[-1]) == (used, f"ended {code}"), said
    assert job.excluded == (["a"] if used.endswith("b,c") else ["b"] if "c" in used else []), (
        "on the next try too"
    )


def test_node_taken_down_by_slurm_is_replaced_while_spares_last(job: Job, tmp_path: Path) -> None:
    used, said = run(job, [["77 a"], ["0 a", "0 c"]], "abc", down="b", SPARES="1")
    assert used == "a,b a,c" and said.endswith("ended 0\n"), said
    (tmp_path / "other").mkdir()
    used, said = run(Job(tmp_path / "other"), [[], ["0 a"]], "ab", down="b")
    assert (
        used == "a,b"
        and "1 of the job's nodes are left, 2 are needed" in said
        and said.endswith("ended 75\n")
    ), said


@pytest.mark.parametrize(
    ("nodes", "given", "asked"),
    [
        ("ab", "4(x2)", "--ntasks=8 --ntasks-per-node=4"),
        ("a", "4", "--ntasks=4 --ntasks-per-node=4"),
        ("ab", "2,3", ""),
        ("abc", "2(x2),3", ""),
    ],
)
def test_a_node_has_as_many_tasks_as_slurm_gave_it(
    job: Job, nodes: str, given: str, asked: str
) -> None:
    """However they were requested: per node, or in all."""
    _, said = run(job, [[f"0 {node}" for node in nodes]], nodes, SLURM_TASKS_PER_NODE=given)
    lines = job.asked.read_text().splitlines() if job.asked.exists() else []
    assert " ".join(line.split()[1] for line in lines if line.startswith("asked")) == asked
    assert asked or f"the nodes have {given} tasks, expected as many on each" in said


@pytest.mark.parametrize(("code", "tasks"), [(75, [(137, "b")]), (1, [(1, "a")]), (2, [(2, "a")])])
def test_copies_go_before_a_job_is_requeued_or_fails(
    job: Job, code: int, tasks: list[tuple[int, str]]
) -> None:
    """Nobody else empties the memory of these nodes."""
    job.exits(tasks)
    assert job.bash(f"COPIES=1; end_job {code}").returncode == code
    assert any(
        "rm -rf" in line and "vapo-job-" in line for line in job.asked.read_text().splitlines()
    )


@pytest.mark.parametrize("script", ["train.sbatch", "array.sbatch"])
def test_a_job_whose_first_node_is_lost_is_requeued(script: str) -> None:
    """Seen with Slurm 22.05: with --no-kill it is FAILED then, or RUNNING without a script to its
    time limit."""
    asked = [
        line.split()[1]
        for line in (ROOT / "slurm" / script).read_text().splitlines()
        if line.startswith("#SBATCH")
    ]
    assert "--requeue" in asked and "--no-kill" not in asked
