import os
import re
import resource
import signal
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.engines.inside.heartbeat import stands_still
from vapo_megatron.errors import BadInput
from vapo_megatron.rewards import workers as workers_module
from vapo_megatron.rewards.grading import grades_of
from vapo_megatron.rewards.math import Grade
from vapo_megatron.rewards.pool import Case, VerifierPool
from vapo_megatron.rewards.workers import WorkerProcess
from vapo_megatron.signals import STOP_SIGNALS

ROOT = Path(__file__).parents[2]


def _function_config(name: str, **settings: object) -> RewardConfig:
    return RewardConfig.model_validate(
        {"verifier": "function", "function": f"reward_functions:{name}", **settings}
    )


def _row(problem: str, answer: str, extra: dict[str, Any] | None = None) -> Prompt:
    return Prompt("1", problem, answer, (), extra=extra or {})


@pytest.fixture
def functions_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def math_pool() -> Iterator[VerifierPool]:
    with VerifierPool(RewardConfig(workers=2, incorrect=-1.0)) as pool:
        yield pool


def test_grades_keep_the_order_of_the_cases(math_pool: VerifierPool) -> None:
    cases = [
        ("4", "#### 4"),
        (r"\sqrt{12}", r"\boxed{2\sqrt{3}}"),
        ("4", "#### 5"),
        ("(x+1)^2", r"\boxed{x^2+2x+1}"),
    ]
    seen: dict[int, Grade] = {}
    grades = math_pool.grade_batch(cases * 3, on_done=seen.__setitem__)
    assert [grade.correct for grade in grades] == [True, True, False, True] * 3
    assert [grade.score for grade in grades] == [1.0, 1.0, -1.0, 1.0] * 3
    assert seen == dict(enumerate(grades))


def test_plain_cases_start_no_process(math_pool: VerifierPool) -> None:
    assert math_pool.grade_batch([("4", "#### 4"), ("4", "nothing")])[0].correct
    assert math_pool.workers.processes == []


def test_an_empty_batch_has_no_grades(math_pool: VerifierPool) -> None:
    assert math_pool.grade_batch([]) == []


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_worker_ignores_stop_signals_from_its_first_moment_on(number: signal.Signals) -> None:
    worker = WorkerProcess()
    try:
        worker.process.send_signal(number)  # Python has not started in it
        assert worker.ask(RewardConfig().model_dump(mode="json"), 60, 2048) == {}
        worker.process.send_signal(number)
        assert (
            worker.ask({"ground_truth": "1", "answer": "2", "answer_is_formula": True}, 60, 2048)[
                "reason"
            ]
            == "different"
        )
    finally:
        worker.close()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []), (
        "this process would not hear them any more"
    )


@pytest.mark.usefixtures("functions_importable")
def test_a_workers_fate_becomes_the_grade_of_its_answer_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with VerifierPool(_function_config("obey", workers=2, response_timeout_s=1.0)) as pool:
        responses = ["b", "hang", "exit", "b", "allocate", "raise", "x"]
        grades = pool.grade_batch([Case("ab", response, problem="a") for response in responses])
        reasons = [grade.reason for grade in grades]
        assert reasons == ["scored", "timeout", "crashed", "scored", "memory", "error", "scored"]
        assert [grade.correct for grade in grades] == [
            True,
            False,
            False,
            True,
            False,
            False,
            False,
        ]
        assert {grade.extracted for grade in grades} == {""}
        assert "printed by" not in "".join(capfd.readouterr())
        assert "KeyError" in grades[5].detail and "\n" not in grades[5].detail
        assert grades[2].detail == "worker ended with code 3" and grades[1].detail == ""
        assert pool.grade_batch([Case("ab", "b", problem="a")])[0].correct


def test_example_reward_function_grades_the_number_after_hashes() -> None:
    path = "examples.custom_functions.functions:number_after_hashes"
    config = RewardConfig.model_validate({"verifier": "function", "function": path, "workers": 1})
    responses = ["#### 4, no: #### -3", "#### -3, no: #### 4", "-3"]
    with VerifierPool(config) as pool:
        grades = pool.grade_batch([Case("-3", response, problem="a") for response in responses])
    assert [(grade.correct, grade.score) for grade in grades] == [
        (True, 1.0),
        (False, 0.1),
        (False, 0.0),
    ]


@pytest.mark.usefixtures("functions_importable")
def test_what_a_function_starts_ends_with_its_worker(tmp_path: Path) -> None:
    ends = ["hang", "exit", "b"]  # out of time, crashed, closed with the pool
    with VerifierPool(_function_config("obey", workers=1, response_timeout_s=1.0)) as pool:
        cases = [
            Case(
                "ab", f"leave a child, {end}", problem="a", extra={"pid_file": str(tmp_path / end)}
            )
            for end in ends
        ]
        assert [grade.reason for grade in pool.grade_batch(cases)] == [
            "timeout",
            "crashed",
            "scored",
        ]
        children = [psutil.Process(int((tmp_path / end).read_text())) for end in ends if end == "b"]
        assert all(child.is_running() for child in children)
    deadline = time.monotonic() + 120  # of what is killed, the kernel takes its time
    for end in ends:
        with suppress(psutil.NoSuchProcess):
            child = psutil.Process(int((tmp_path / end).read_text()))
            while child.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline, f"the child of {end} lives on"
                time.sleep(0.01)


@pytest.mark.usefixtures("functions_importable")
def test_not_even_daemons_outlive_the_timeout_of_their_function(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with VerifierPool(_function_config("obey", workers=1, response_timeout_s=2.0)) as pool:
        case = Case(
            "ab", "leave daemons, hang", problem="a", extra={"pid_file": str(pids), "daemons": 100}
        )
        assert pool.grade_batch([case])[0].reason == "timeout"
        daemons = pids.read_text().split()
        assert daemons and not [pid for pid in daemons if stands_still(int(pid)) is None]


@pytest.mark.usefixtures("functions_importable")
def test_daemons_do_not_outlive_a_worker_that_ends_itself(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with VerifierPool(_function_config("obey", workers=1)) as pool:
        case = Case(
            "ab", "leave daemons, exit", problem="a", extra={"pid_file": str(pids), "daemons": 10}
        )
        (grade,) = pool.grade_batch([case])
        assert (grade.reason, grade.detail) == ("crashed", "worker ended with code 3")
        daemons = pids.read_text().split()
        assert len(daemons) == 10 and not [pid for pid in daemons if stands_still(int(pid)) is None]


@pytest.mark.usefixtures("functions_importable")
def test_a_function_that_calls_exit_has_failed() -> None:
    with VerifierPool(_function_config("obey", workers=1)) as pool:
        leaving, after = pool.grade_batch([Case("", "sys.exit"), Case("", "pid")])
    assert (leaving.reason, leaving.detail) == ("error", "SystemExit: 0")
    assert after.reason == "scored"


@pytest.mark.full
@pytest.mark.usefixtures("functions_importable")
def test_many_timeouts_leave_nothing(tmp_path: Path) -> None:
    """A hundred, not a thousand: each costs the start of a worker, some 0.3 s on two cores."""
    pids = tmp_path / "pids"
    this = psutil.Process()

    def held() -> tuple[int, int, int]:
        return this.num_fds(), len(this.children(recursive=True)), this.num_threads()

    before = held()
    with VerifierPool(_function_config("obey", workers=4, response_timeout_s=0.1)) as pool:
        case = Case(
            "ab", "leave daemons, hang", problem="a", extra={"pid_file": str(pids), "daemons": 3}
        )
        assert [grade.reason for grade in pool.grade_batch([case] * 100)] == ["timeout"] * 100
        daemons = pids.read_text().split()
        assert len(daemons) > 100 and not [pid for pid in daemons if stands_still(int(pid)) is None]
    # The kernel counts a thread for a moment after it was joined.
    last = time.monotonic() + 10
    while held() != before and time.monotonic() < last:
        time.sleep(0.05)
    assert held() == before


@pytest.mark.usefixtures("functions_importable")
def test_orphans_that_end_do_not_fill_the_process_table() -> None:
    with VerifierPool(_function_config("orphans", workers=1, response_timeout_s=60.0)) as pool:
        (grade,) = pool.grade_batch([Case("", "", extra={"orphans": 300})])
        assert grade.score == 0.0, grade.detail


@pytest.mark.usefixtures("functions_importable")
def test_workers_start_beside_a_thousand_connections() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(limits[0], 2048), limits[1]), limits[1]))
    connections = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        with VerifierPool(_function_config("obey", workers=1)) as pool:
            (grade,) = pool.grade_batch([Case("", "", extra={"score": 0.7})])
    finally:
        for connection in connections:
            os.close(connection)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert grade.score == 0.7


@pytest.mark.usefixtures("functions_importable")
def test_function_score_is_reward_and_correct_above_threshold() -> None:
    with VerifierPool(_function_config("obey", workers=1, correct_above=0.6)) as pool:
        cases = [Case("", "", extra={"score": score}) for score in (0.5, 0.7, -2.0)]
        assert [(v.score, v.correct) for v in pool.grade_batch(cases)] == [
            (0.5, False),
            (0.7, True),
            (-2.0, False),
        ]
        assert not pool.grade_batch([Case("", "", extra={"score": 0.6})])[0].correct
    with VerifierPool(_function_config("obey", workers=1, correct_above=None)) as pool:
        assert [(v.score, v.correct) for v in pool.grade_batch(cases)] == [
            (0.5, False),
            (0.7, False),
            (-2.0, False),
        ]


@pytest.mark.usefixtures("functions_importable")
def test_a_score_that_is_not_finite_is_an_error() -> None:
    with VerifierPool(_function_config("obey", workers=1)) as pool:
        grades = pool.grade_batch(
            [Case("", "", extra={"score": score}) for score in ("nan", "inf", "-inf", "1e39")]
        )
        assert [grade.reason for grade in grades] == ["error"] * 4


@pytest.mark.usefixtures("functions_importable")
def test_a_worker_has_its_limits_and_nothing_to_read() -> None:
    with VerifierPool(
        _function_config("obey", workers=1, response_timeout_s=7.0, memory_mib=700)
    ) as pool:
        limits, memory = pool.grade_batch([Case("", "limits"), Case("", "raise memory")])
        assert limits.detail == "ValueError: (700, 0, 0) b''"
        assert memory.reason == "memory"


@pytest.mark.usefixtures("functions_importable")
def test_a_function_with_torch_fits_the_default_limit(tmp_path: Path) -> None:
    library = tmp_path / "libtorch_cuda.so"
    with library.open("wb") as file:
        file.truncate(4 << 30)  # sparse
    case = Case("", "", extra={"library": str(library)})
    with VerifierPool(_function_config("with_torch", workers=1, response_timeout_s=120.0)) as pool:
        (grade,) = pool.grade_batch([case])
    assert (grade.reason, grade.score) == ("scored", 3.0), grade.detail


@pytest.mark.usefixtures("functions_importable")
@pytest.mark.parametrize("response", ["allocate", "share"])
def test_a_worker_that_grows_too_large_is_ended(response: str) -> None:
    with VerifierPool(
        _function_config("obey", workers=1, response_timeout_s=60.0, memory_mib=300)
    ) as pool:
        grade, after = pool.grade_batch([Case("", response), Case("", "pid")])
    assert grade.reason == "memory" and after.reason == "scored"
    if response == "share":
        assert re.fullmatch(r"\d+ MiB, above reward\.memory_mib=300", grade.detail)


def test_a_workers_own_memory_counts_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_LOOK_SECONDS", 0.0)
    worker = WorkerProcess()
    try:
        with pytest.raises(MemoryError, match=r"^\d+ MiB, above reward\.memory_mib=1$"):
            worker.ask(RewardConfig().model_dump(mode="json"), 60, 1)
    finally:
        worker.close()


def test_a_worker_may_end_before_its_memory_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = WorkerProcess()
    ready = worker._ready

    def poll(milliseconds: float) -> list[Any]:
        if worker.process.returncode is not None:
            return ready.poll(milliseconds)
        worker.process.kill()
        worker.process.wait(timeout=240)
        return []

    monkeypatch.setattr(worker, "_ready", SimpleNamespace(poll=poll))
    try:
        with pytest.raises(ConnectionError):
            worker.ask({}, 60, 2048)
    finally:
        worker.close()


@pytest.mark.usefixtures("functions_importable")
def test_only_a_case_whose_worker_was_killed_is_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen = tmp_path / "seen"
    with VerifierPool(_function_config("noted", workers=1, response_timeout_s=0.3)) as pool:
        grades = pool.grade_batch(
            [Case(str(seen), "a", problem="exit"), Case(str(seen), "b", problem="60")]
        )
        assert [(grade.reason, grade.extracted) for grade in grades] == [
            ("crashed", ""),
            ("timeout", ""),
        ]
        assert seen.read_text() == "ab"
    assert "failed on a response (crashed worker ended with code 0);" in capfd.readouterr().err


@pytest.mark.usefixtures("functions_importable")
def test_a_function_is_tried_with_what_stands_in_a_row(tmp_path: Path) -> None:
    answer = str(tmp_path / "seen")
    with VerifierPool(_function_config("noted", workers=1)) as pool:
        pool.check([_row("0", answer)])
        pool.refuse("has not failed")
    assert Path(answer).read_text() == answer, "the answer stands for the response"
    with VerifierPool(_function_config("raises", workers=1)) as pool:
        pool.check([_row("0", "a", {"gold": 1})])


@pytest.mark.usefixtures("functions_importable")
def test_an_interrupted_batch_is_dropped_and_no_other(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    # Two seconds: a loaded machine grades a few more of it, and never the last.
    dropped = string.ascii_uppercase + "abcdefghijklmn"

    def batch(letters: str) -> list[Case]:
        return [Case(str(seen), letter, problem="0.05") for letter in letters]

    def interrupt(*_: object) -> None:
        raise InterruptedError

    with VerifierPool(_function_config("noted", workers=1)) as pool:
        others: list[Grade] = []
        thread = threading.Thread(target=lambda: others.extend(pool.grade_batch(batch("xyz"))))
        with pytest.raises(InterruptedError):
            pool.grade_batch(
                batch(dropped),
                on_done=lambda *_: (thread.start(), time.sleep(0.02), interrupt()),
            )
        assert len(pool.grade_batch(batch("."))) == 1
        thread.join()
        assert [grade.correct for grade in others] == [True] * 3
    graded = set(seen.read_text())
    assert set("Axyz.") <= graded and "n" not in graded


@pytest.mark.usefixtures("functions_importable")
def test_waiting_for_a_closed_pool_ends_and_leaves_nothing_open() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    pool = VerifierPool(_function_config("slow", workers=2))
    told = threading.Event()

    def wait() -> None:
        with pytest.raises(RuntimeError, match=r"^the verifier pool is closed$"):
            pool.grade_batch([Case("", "60"), Case("", "60")])
        told.set()

    thread = threading.Thread(target=wait)
    thread.start()
    deadline = time.monotonic() + 120
    while len(pool.workers.processes) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pool.workers.processes) == 2
    pool.close()
    thread.join(timeout=240)
    assert told.is_set()
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.usefixtures("functions_importable")
def test_there_are_as_many_workers_as_have_something_to_do() -> None:
    with VerifierPool(_function_config("slow", workers=3)) as pool:
        assert len(pool.workers.processes) == 1
        assert len(pool.grade_batch([Case("", "0")])) == len(pool.workers.processes) == 1
        pool.grade_batch([Case("", "0.2"), Case("", "0.2")])
        assert len(pool.workers.processes) == 2
        pool.grade_batch([Case("", "0.1") for _ in range(9)])
        assert len(pool.workers.processes) == 3


@pytest.mark.usefixtures("functions_importable")
def test_workers_that_cannot_start_are_told_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILLED_AT_IMPORT", str(tmp_path / "always"))
    with pytest.raises(BadInput, match=r"\(ended with code -9\)"):
        VerifierPool(_function_config("slow"))
    assert (tmp_path / "always.times").read_text() == "xxx"
    monkeypatch.delenv("KILLED_AT_IMPORT")
    monkeypatch.setattr(workers_module, "STARTUP_SECONDS", 0.001)
    with pytest.raises(BadInput, match=r"did not start in 0.001 s\)"):
        VerifierPool(_function_config("slow"))
    with VerifierPool(RewardConfig()) as pool:
        for _ in range(2):
            with pytest.raises(BadInput, match=r"a verifier worker could not start \(did not"):
                pool.grade_batch([(r"\sin 2x", r"\boxed{2 \sin x \cos x}")])
            assert pool.workers.processes == []


@pytest.mark.usefixtures("functions_importable")
def test_killed_starts_are_counted_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILLED_AT_IMPORT", str(tmp_path / "twice"))
    with VerifierPool(_function_config("obey", workers=1)) as pool:
        for starts in (3, 6):
            pool.grade_batch([Case("", "pid")])
            assert len((tmp_path / "twice.times").read_text()) == starts
            pool.workers.processes[0].process.kill()
            pool.workers.processes[0].process.wait(timeout=240)


def test_unclosed_pool_does_not_keep_a_program_from_ending() -> None:
    code = (
        "from vapo_megatron.config.reward import RewardConfig\n"
        "from vapo_megatron.rewards.pool import Case, VerifierPool\n"
        "pool = VerifierPool(RewardConfig(verifier='function', function='operator:itemgetter', "
        "workers=1))\npool.grade_batch([Case('', '')])\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=240)


@pytest.mark.usefixtures("functions_importable")
def test_responses_larger_than_a_pipe_arrive_whole() -> None:
    with VerifierPool(_function_config("obey", workers=1)) as pool:
        long = "é\ud800" * 300_000
        assert pool.grade_batch([Case(long, long), Case(long + "x", long)])[0].correct
        assert not pool.grade_batch([Case(long + "x", long)])[0].correct


@pytest.mark.usefixtures("functions_importable")
@pytest.mark.parametrize("name", ["missing", "NOT_CALLABLE"])
def test_a_function_that_cannot_be_loaded_is_named_at_once(name: str) -> None:
    with pytest.raises(BadInput, match=rf"reward\.function=reward_functions:{name}"):
        VerifierPool(_function_config(name))


def test_a_module_that_does_not_exist_is_named_at_once() -> None:
    with pytest.raises(BadInput, match="No module named 'no_such_module'"):
        VerifierPool(RewardConfig(verifier="function", function="no_such_module:f"))


def test_function_and_verifier_go_together() -> None:
    with pytest.raises(ValueError, match="verifier=function"):
        RewardConfig(function="module:name")


@pytest.mark.usefixtures("functions_importable")
def test_a_worker_lost_between_batches_costs_no_case() -> None:
    with VerifierPool(_function_config("obey", workers=1)) as pool:
        (first,) = pool.grade_batch([Case("", "pid")])
        pool.workers.processes[0].process.kill()
        pool.workers.processes[0].process.wait(timeout=240)
        (second,) = pool.grade_batch([Case("", "pid")])
        assert second.reason == "scored" and second.score != first.score


@pytest.mark.usefixtures("functions_importable")
def test_a_worker_that_reads_nothing_is_given_up_in_time() -> None:
    with VerifierPool(_function_config("obey", workers=1, response_timeout_s=0.5)) as pool:
        worker = pool.workers.processes[0]
        os.kill(worker.worker, signal.SIGSTOP)
        late = threading.Timer(20, worker.process.kill)
        late.start()
        try:
            (grade,) = pool.grade_batch([Case("", "x" * (1 << 20))])  # more than its pipe holds
            assert grade.reason == "timeout" and late.is_alive()
        finally:
            late.cancel()


@pytest.mark.usefixtures("functions_importable")
def test_a_killed_worker_costs_no_case_but_one_that_kills_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is killed while it starts, one over a case; a case that kills two of them counts as
    incorrect."""
    monkeypatch.setenv("KILLED_AT_IMPORT", str(tmp_path / "import"))
    with VerifierPool(_function_config("killed_once", workers=1)) as pool:
        grades = pool.grade_batch([Case("", str(tmp_path / name)) for name in ("once", "always")])
        assert [(grade.correct, grade.reason) for grade in grades] == [
            (True, "scored"),
            (False, "crashed"),
        ]
    assert (tmp_path / "import").exists()


@pytest.mark.usefixtures("functions_importable")
def test_close_ends_the_workers() -> None:
    pool = VerifierPool(_function_config("obey", workers=1))
    (grade,) = pool.grade_batch([Case("", "pid")])
    pool.close()
    pool.close()
    assert not _alive(int(grade.score))
    with pytest.raises(RuntimeError, match="closed"):
        pool.grade_batch([Case("", "pid")])


@pytest.mark.parametrize("stopped", [(), ("worker",), ("supervisor",), ("worker", "supervisor")])
def test_workers_die_with_a_trainer_that_is_killed_in_mid_case(stopped: tuple[str, ...]) -> None:
    """A supervisor is stopped where a debugger, Slurm's suspend, or the pool that is about to end
    it has done so."""
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from vapo_megatron.config.reward import RewardConfig\n"
        "from vapo_megatron.rewards.pool import Case, VerifierPool\n"
        "pool = VerifierPool(RewardConfig(verifier='function', function='reward_functions:slow', "
        "workers=1))\nprint(pool.workers.processes[0].worker, flush=True)\n"
        "pool.grade_batch([Case('', '600')])\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert trainer.stdout is not None
    worker = int(trainer.stdout.readline())
    processes = {"worker": worker, "supervisor": psutil.Process(worker).ppid()}
    assert processes["supervisor"] != trainer.pid
    try:
        assert _alive(worker)
        for name in stopped:
            os.kill(processes[name], signal.SIGSTOP)
    finally:
        trainer.kill()
        trainer.wait(timeout=240)
        trainer.stdout.close()
    deadline = time.monotonic() + 60
    while any(map(_alive, processes.values())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [name for name, pid in processes.items() if _alive(pid)]


@pytest.mark.usefixtures("functions_importable")
def test_a_supervisor_that_was_stopped_for_a_while_serves_on() -> None:
    with VerifierPool(_function_config("obey", workers=1)) as pool:
        (before,) = pool.grade_batch([Case("", "pid")])
        supervisor = pool.workers.processes[0].process.pid
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(supervisor, number)
        (after,) = pool.grade_batch([Case("", "pid")])
        assert before.score == after.score


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for a parent to notice does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.usefixtures("functions_importable")
@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("of_two", "TypeError"),
        ("text", "ValueError: could not convert"),
        ("raises", "KeyError: 'gold'"),
    ],
)
def test_function_that_always_fails_is_refused_when_tried(
    name: str, named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        VerifierPool(_function_config(name)) as pool,
        pytest.raises(BadInput, match=named) as refusal,
    ):
        pool.check([_row("1 plus 1", "2")])
    assert f"reward_functions:{name}" in str(
        refusal.value
    ) and "f(problem, answer, response, extra)" in str(refusal.value)
    assert "failed when it was tried with the first row, its answer as the response (" in str(
        refusal.value
    )
    assert capfd.readouterr().err == "", "the refusal says it"


@pytest.mark.usefixtures("functions_importable")
def test_failures_are_counted_and_the_first_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    cases = [Case("2", "fail"), Case("2", "2"), None, Case("2", "fail")]
    with VerifierPool(_function_config("raises_on_fail", workers=1)) as pool:
        pool.check([_row("1 plus 1", "2")])
        grades = grades_of(cases, pool)
        assert [grade and grade.reason for grade in grades] == ["error", "scored", None, "error"]
        told = (
            "reward.function=reward_functions:raises_on_fail failed on a response (LookupError: on "
            "the way);"
        )
        said = capfd.readouterr()
        assert said.err.count(told) == said.err.count("\n") == 1 and said.out == ""
        with pytest.raises(BadInput, match=r"all of 2 responses \(LookupError"):
            grades_of([cases[0], cases[3]], pool)
        # Nearly all were truncated: that says little of the function
        grades_of([cases[0], None, None], pool)
    assert capfd.readouterr().err == ""


def test_cases_that_are_alike_are_settled_once(
    math_pool: VerifierPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    submit = math_pool.workers.submit
    monkeypatch.setattr(
        math_pool.workers, "submit", lambda case: (sent.append(case["answer"]), submit(case))[1]
    )
    right = (r"\sin 2x", r"\boxed{2 \sin x \cos x}")
    wrong = (r"\sin 2x", r"\boxed{\sin x \cos x}")
    seen: list[int] = []
    cases = [wrong, right, wrong, ("4", "#### 4"), right, wrong]
    grades = math_pool.grade_batch(cases, on_done=lambda index, _: seen.append(index))
    assert [grade.correct for grade in grades] == [False, True, False, True, True, False]
    assert [grade.extracted for grade in grades[:4]] == [
        r"\sin x \cos x",
        r"2 \sin x \cos x",
        r"\sin x \cos x",
        "4",
    ]
    assert sent == [r"\sin x \cos x", r"2 \sin x \cos x"] and sorted(seen) == list(range(6))


def test_the_time_of_a_case_is_that_of_its_processor() -> None:
    """What else the machine does, here for twice the time limit, is not the answer's fault."""
    with VerifierPool(RewardConfig(workers=1, response_timeout_s=2.0)) as pool:
        pool.grade_batch([(r"\sin x", r"\boxed{\cos x}")])
        worker = pool.workers.processes[0].worker
        os.kill(worker, signal.SIGSTOP)
        threading.Timer(4.0, os.kill, [worker, signal.SIGCONT]).start()
        assert pool.grade_batch([(r"\sin 2x", r"\boxed{2 \sin x \cos x}")])[0].correct
        assert pool.workers.processes[0].worker == worker


def test_slow_formula_shows_in_its_grade_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with VerifierPool(RewardConfig(workers=1, response_timeout_s=0.01)) as pool:
        (grade,) = pool.grade_batch([(r"\sin 2x", r"\boxed{2 \sin x \cos x}")])
        assert grade == Grade(False, "timeout", r"2 \sin x \cos x", -1.0)
        pool.refuse("is not there")
    assert capfd.readouterr().err == "", "only a user's function is to blame"


@pytest.mark.parametrize(("used", "seconds"), [(0.0, 10.0), (2.0, 1.0), (1.0, 5.5)])
def test_case_due_by_processor_time_or_ten_times_that_wall_time(
    monkeypatch: pytest.MonkeyPatch, used: float, seconds: float
) -> None:
    """used: processor seconds a second, of a worker that does not reply, or half of them within the
    first second."""
    clock = SimpleNamespace(now=100.0)
    worker = WorkerProcess()

    def poll(milliseconds: float) -> list[Any]:
        clock.now += milliseconds / 1000
        return []

    def process(pid: int) -> SimpleNamespace:
        assert pid in (worker.process.pid, worker.worker)
        busy = (
            (clock.now - 100) * used
            if used != 1.0
            else 0.1 * (clock.now - 100) + 0.45 * (clock.now > 100)
        )
        return SimpleNamespace(
            cpu_times=lambda: SimpleNamespace(user=3 + busy / 2, system=busy / 2)
        )

    try:
        with monkeypatch.context() as patched:
            patched.setattr(workers_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
            patched.setattr(worker, "_ready", SimpleNamespace(poll=poll))
            patched.setattr(workers_module, "psutil", SimpleNamespace(Process=process))
            with pytest.raises(TimeoutError):
                worker.ask({}, 1.0, 2048, of_cpu=True)
            assert clock.now - 100 == pytest.approx(seconds, abs=0.06)
            clock.now = 100.0
            with pytest.raises(TimeoutError):
                worker.ask({}, 1.0, 2048)
            assert clock.now == 101, "of a start, or of a function, the time is that of the clock"
    finally:
        worker.close()


def test_a_reward_of_the_config_is_finite_in_float32() -> None:
    with pytest.raises(ValueError, match="less than or equal to"):
        RewardConfig(correct=1e39)
    with pytest.raises(ValueError, match="greater than or equal to"):
        RewardConfig(incorrect=-1e39)
