"""What jobs go through on a real Slurm, with the real trainer: time limits, dead ranks, dead nodes,
cancellation."""

import shutil
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import yaml
from command_lines import command_line
from ports import free_ports
from sandbox import SlurmSandbox
from site_of_user import FOREVER, Site, processes_of, ranks_of
from tiny_runs import evaluate_config, write_config

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]


@pytest.fixture
def site(slurm: SlurmSandbox, tmp_path: Path) -> Iterator[Site]:
    with Site(slurm, tmp_path) as site:
        yield site


def test_an_engine_is_served_from_two_nodes(site: Site) -> None:
    """Both tasks start it, each with its part; a lost part is started again with the other."""
    config = site.train_config(1, engines=1)
    settings = yaml.safe_load(config.read_text())
    settings["rollout"]["api_key_variable"] = "ENGINE_KEY"
    settings["rollout"]["server_args"] = {"enable_metrics": True}
    config.write_text(yaml.safe_dump(settings))
    (port,) = free_ports(1)
    job = site.submit(
        "engine.sbatch",
        config,
        ["--nodes=2", "--job-name=engine", "--time=60"],
        PORT=str(port),
        GPUS="1",
        ENGINE_KEY="secret",
        GLOO_SOCKET_IFNAME="lo",
    )
    logs = site.runs / "engine-engines"

    def output() -> str:
        path = site.folder / "engine.out"
        return path.read_text() if path.exists() else ""

    def serving() -> int:
        return output().count("part of an engine") + output().count("engine at http://127.0.0.1:")

    site.wait_until("both parts serve", lambda: serving() == 2)
    assert f"the engine's URL: http://127.0.0.1:{port}" in output()
    (victim,) = (
        process
        for process in processes_of(job)
        if ["--node-rank", "1"] in map(list, pairwise(command_line(process)))
    )
    victim.kill()
    site.wait_until(
        "it serves again",
        lambda: output().count("serves again after") == 2,
    )
    assert len(list(logs.glob("*.ended1.log"))) == 2


def test_a_job_goes_on_unattended_until_its_run_is_finished(site: Site) -> None:
    """Its time limit comes, then a rank dies, then a node; an evaluation waits for the end of all
    that."""
    slurm = site.slurm
    run = "life"
    config = site.train_config(FOREVER, engines=1, every=2)
    job = site.submit(
        "train.sbatch",
        config,
        ["--nodes=3", f"--job-name={run}", "--time=60", "--signal=B:USR1@60"],
        DOCTOR="0",
        MAX_TRIES="2",
        SPARES="1",
    )
    model = site.runs / run / "hf" / "final" / "actor"
    evaluation = site.submit(
        "evaluate.sbatch",
        write_config(site.folder / "evaluate.yaml", evaluate_config(site.folder, model)),
        ["--job-name=evaluation", f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes"],
    )

    def restarted(times: int) -> None:
        site.wait_until(
            f"the job was requeued {times} times", lambda: int(slurm.job(job)["Restarts"]) == times
        )

    def saved_after(step: int) -> int:
        return site.wait_until(
            f"a step after {step} is saved", lambda: (now := site.saved_step(run)) > step and now
        )

    step = saved_after(1)
    site.train_config(FOREVER, engines=2, every=2)  # one on each node from now on
    slurm.call(
        "scontrol", "update", f"JobId={job}", f"TimeLimit={_minutes_with_room(slurm.job(job))}"
    )
    restarted(1)
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    assert site.exit_codes(run, f"{job}.0.train") == [75, 75]

    step = saved_after(max(step, site.saved_step(run)))
    victim, lost_node = ranks_of(job)[1]

    def stopped_with_a_newer_copy() -> bool:
        """A save that has begun may end while the rank stands, and be newer than the copy."""
        if site.copied_step(job) <= site.saved_step(run):
            return False
        victim.send_signal(signal.SIGSTOP)
        time.sleep(1)
        if site.copied_step(job) > site.saved_step(run):
            return True
        victim.send_signal(signal.SIGCONT)
        return False

    site.wait_until(
        "a rank is stopped while a copy is newer than the save", stopped_with_a_newer_copy
    )
    killed = time.monotonic()
    done = site.metrics(run)[-1]["step"]
    victim.send_signal(signal.SIGKILL)
    site.wait_until(
        "the ranks are started again", lambda: ranks_of(job).get(1, (victim,))[0] != victim
    )
    assert 137 in site.exit_codes(run, f"{job}.1.train")

    site.wait_until(
        "the next step is over", lambda: (rows := site.metrics(run)) and rows[-1]["step"] > done
    )
    print(f"from kill -9 of a rank to the end of the next step: {time.monotonic() - killed:.1f} s")
    step = saved_after(max(step, site.saved_step(run)))
    said = (site.folder / f"{run}.out").read_text().replace("\n", "")
    assert f"{lost_node} is left out" in said and "attempt 2" in said
    assert f"resumes from /dev/shm/vapo-job-{job}.1.127.0.0." in said, (
        "from a copy, without a new start of the job"
    )
    _, failed_node = ranks_of(job)[1]
    assert failed_node != lost_node and slurm.job(job)["Restarts"] == "1"
    slurm.call("scontrol", "update", f"NodeName={failed_node}", "State=DOWN", "Reason=test")
    restarted(2)
    last = site.saved_step(run) + 2
    site.train_config(last, engines=2, every=2)

    site.wait_until(
        "the job has ended",
        lambda: slurm.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"),
    )
    slurm.call("scontrol", "update", f"NodeName={failed_node}", "State=RESUME")
    ended = slurm.job(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "2")
    tries = site.tries(run)
    assert [int(each["restart"]) for each in tries] == [0, 1, 2]
    assert len({each["from"] for each in tries}) == 3, (
        "a try did not resume from the previous one's save"
    )
    # Slurm may leave no time to record the tasks it ended.
    assert [each.get("ended", "75_by_slurm") for each in tries] == ["75", "75_by_slurm", "0"]
    nodes = [slurm.call("scontrol", "show", "hostnames", each["nodes"]).split() for each in tries]
    assert failed_node in nodes[1] and failed_node not in nodes[2]
    assert [row["step"] for row in site.metrics(run) if row["step"]] == list(range(1, last + 1))

    site.wait_until(
        "the evaluation has ended", lambda: slurm.job(evaluation)["JobState"] == "COMPLETED"
    )
    assert datetime.fromisoformat(slurm.job(evaluation)["StartTime"]) >= datetime.fromisoformat(
        ended["EndTime"]
    )
    assert (site.runs / "evaluation" / "evaluation.json").is_file()
    assert not [
        path for path in site.local_tmp.iterdir() if not path.name.startswith("vapo-kernels-")
    ]
    left = _copies(job)  # nothing is started any more on a node that is down
    assert not left or [path.name for path in left] == [f"vapo-job-{job}.1.{failed_node}"]
    for path in left:
        shutil.rmtree(path)


def test_array_rows_are_runs_and_a_cancelled_one_leaves_nothing(site: Site) -> None:
    slurm = site.slurm
    rows = {"short": "run.seed=1 run.steps=2", "long": f"run.seed=2 run.steps={FOREVER}"}
    file = site.folder / "rows.txt"
    file.write_text("".join(f"{row} {values}\n" for row, values in rows.items()))
    array = site.submit(
        "array.sbatch",
        site.train_config(1, engines=1),
        ["--array=1-2", "--nodes=2", "--job-name=seeds", "--time=60"],
        ROWS=str(file),
        DOCTOR="quick",
    )
    site.wait_until("the long row has saved a step", lambda: site.saved_step("seeds-long") > 0)
    site.wait_until(
        "the short row is done", lambda: slurm.job(f"{array}_1")["JobState"] == "COMPLETED"
    )
    assert [row["step"] for row in site.metrics("seeds-short") if row["step"]] == [1, 2]
    assert "doctor ended with code 0" in (site.folder / f"seeds-{array}_1.out").read_text()
    seeds = [
        yaml.safe_load((site.runs / f"seeds-{row}" / "config.yaml").read_text())["run"]["seed"]
        for row in rows
    ]
    assert seeds == [1, 2]

    job = slurm.job(f"{array}_2")["JobId"]
    processes = list(processes_of(job))
    shared_memory = {path for process in processes for path in _shared_memory(process)}
    assert len(ranks_of(job)) == 2 and list(site.local_tmp.iterdir()) and len(_copies(job)) == 2
    slurm.call("scancel", f"{array}_2")
    site.wait_until(
        "the job is gone", lambda: not slurm.call("squeue", "--noheader", f"--jobs={array}_2")
    )
    assert slurm.job(f"{array}_2")["JobState"] == "CANCELLED"
    assert slurm.job(f"{array}_2")["Restarts"] == "0"
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert not [command_line(process) for process in alive]
    assert not processes_of(job)
    assert not [
        path for path in site.local_tmp.iterdir() if not path.name.startswith("vapo-kernels-")
    ]
    assert not [path for path in shared_memory if path.exists()] and not _copies(job)
    assert site.saved_step("seeds-long") > 0


def test_bad_input_ends_a_job_and_a_conversion_is_one(site: Site) -> None:
    slurm = site.slurm
    out = site.folder / "megatron"
    config = site.train_config(1, engines=1)
    refused = site.submit(
        "train.sbatch",
        config,
        ["--nodes=2", "--job-name=refused"],
        ["actor.layuot.tp=2"],
        DOCTOR="0",
    )
    converted = site.submit(
        "convert.sbatch",
        config,
        ["--job-name=convert"],
        ["tools/convert_hf_to_megatron.py", "--hf", str(site.model), "--out", str(out)],
    )
    site.wait_until("both have ended", lambda: not slurm.call("squeue", "--noheader"))
    assert [slurm.job(job)["ExitCode"] for job in (refused, converted)] == ["2:0", "0:0"]
    assert [slurm.job(job)["Restarts"] for job in (refused, converted)] == ["0", "0"]
    assert "layuot" in (site.folder / "refused.out").read_text()
    assert (out / "model.json").is_file()


def _minutes_with_room(job: dict[str, str]) -> int:
    """A time limit that a job which has run so long reaches within two minutes, and not before
    Slurm, which looks every 30 s, has warned of it."""
    hours, minutes, seconds = map(int, job["RunTime"].split(":"))
    return hours * 60 + minutes + (1 if seconds < 25 else 2)


def _copies(job: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"vapo-job-{job}.*"))


def _shared_memory(process: psutil.Process) -> list[Path]:
    try:
        return [
            Path(entry.path)
            for entry in process.memory_maps()
            if entry.path.startswith("/dev/shm/")
        ]
    except psutil.Error:
        return []
