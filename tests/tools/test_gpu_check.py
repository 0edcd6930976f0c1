"""`make gpu-check`: its table, its limits, its codes. The checks themselves need a GPU; what runs
them does not."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tools.gpu_check.__main__ import environment_of_checks, main
from tools.gpu_check.checks import Check, UsageError, chosen, table
from tools.gpu_check.page import write_results
from tools.gpu_check.runner import Result, exit_code, run_all

ROOT = Path(__file__).parents[2]


def planted(
    name: str, program: str, limit: float = 60.0, expects: str = "", gpu: bool = False
) -> Check:
    return Check(name, "planted", ("-c", program), limit, "a stand-in", expects, gpu)


def perform(
    out: Path, *checks: Check, budget: float | None = None, has_gpu: bool = True
) -> dict[str, Result]:
    results = run_all(
        checks,
        out,
        environment_of_checks(None, os.environ),
        root=ROOT,
        budget=budget,
        has_gpu=has_gpu,
        tell=lambda result: None,
    )
    return {result.check.name: result for result in results}


def test_failing_check_ends_no_other_and_sets_the_exit_code(tmp_path: Path) -> None:
    found = perform(
        tmp_path,
        planted("breaks", "print('before'); raise ValueError('planted')"),
        planted("dies", "import os; os.kill(os.getpid(), 11)"),
        planted("hangs", "import time; print('begun', flush=True); time.sleep(600)", limit=2.0),
        planted("passes", "print('12.5 TFLOP/s')"),
    )
    assert [found[name].status for name in found] == ["failed", "failed", "over its limit", "ok"]
    assert (
        found["breaks"].line == "exit code 1: ValueError: planted" and "-11" in found["dies"].line
    )
    assert found["hangs"].line == "ended after 2 s; last: begun" and found["hangs"].seconds < 20
    assert found["passes"].line == "12.5 TFLOP/s"
    assert exit_code(list(found.values())) == 1
    assert exit_code([found["passes"]]) == 0
    assert exit_code([found["passes"], found["hangs"]]) == 1


def test_a_success_that_shows_nothing_is_a_failure(tmp_path: Path) -> None:
    expects = next(check.expects for check in table(tmp_path, "auto") if "pytest" in check.command)
    found = perform(
        tmp_path,
        planted("all skipped", "print('5 skipped in 2.1s')", expects=expects),
        planted("some skipped", "print('3 passed, 2 skipped in 2.1s')", expects=expects),
        planted("none chosen", "print('120 deselected, 0 passed')", expects=expects),
    )
    assert [result.status for result in found.values()] == ["failed", "ok", "failed"]
    assert found["some skipped"].line == "3 passed, 2 skipped in 2.1s"


def test_processes_of_check_end_with_it_even_against_their_will(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    program = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {stubborn!r}])\n"
        "print(child.pid, flush=True)\ntime.sleep(600)"
    )
    found = perform(
        tmp_path,
        planted("parent", program, limit=3.0),
        planted("leaves", program.replace("600)", "1)", 2)),
    )
    for result in found.values():
        pid = int((tmp_path / f"{result.check.name}.log").read_text().split()[0])
        end = time.monotonic() + 120
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end, f"{result.check.name} left a process behind"
            time.sleep(0.05)


@pytest.mark.full
def test_a_check_without_time_or_gpu_is_skipped_and_no_success(tmp_path: Path) -> None:
    checks = (planted("cpu", "print('ok')"), planted("gpu", "print('ok')", gpu=True))
    found = perform(tmp_path, *checks, has_gpu=False)
    assert [result.status for result in found.values()] == ["ok", "not checked"]
    assert "needs a GPU" in found["gpu"].line and not (tmp_path / "gpu.log").exists()
    assert exit_code(list(found.values())) == 3
    late = perform(tmp_path, *checks, budget=25.0)
    assert [result.status for result in late.values()] == ["not checked", "not checked"]
    assert "no time left of the budget of 25 s" in late["cpu"].line
    cut = perform(
        tmp_path, planted("slow", "import time; time.sleep(600)", limit=300.0), budget=29.0
    )
    assert cut["slow"].status == "over its limit" and cut["slow"].seconds < 28
    assert exit_code([]) == 3


def test_every_check_runs_what_is_there(tmp_path: Path) -> None:
    checks = table(tmp_path, "triton")
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        command = check.command
        if "-m" in command:
            module = command[command.index("-m") + 1]
            assert module == "pytest" or importlib.util.find_spec(module) is not None, module
        elif command[0] != "-c":
            assert (ROOT / command[0]).is_file(), command
        for argument in command:
            assert not argument.startswith("tests/") or (ROOT / argument).is_dir(), argument
        for marker in re.findall(r"^gpu and (\w+)$", command[-1]):
            tests = [file.read_text() for file in (ROOT / command[-3]).glob("test_*.py")]
            assert any(f"@pytest.mark.{marker}\n" in text for text in tests), (
                f"mark with pytest.mark.{marker} the test of {command[-3]} that shows: "
                f"{check.shows}"
            )
    folders = {
        argument for check in checks for argument in check.command if argument.startswith("tests/")
    }
    marked = {
        file.parent.relative_to(ROOT).as_posix()
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^ *(@|pytestmark = )?pytest\.mark\.gpu\b", file.read_text(), re.M)
    }
    assert folders == marked - {"tests/tools"}, (
        "a folder with tests for GPUs has a check in tools/gpu_check/checks.py; of tests/tools: "
        "the export for Blackwell, which nothing else here needs"
    )


def test_what_others_failed_at_comes_right_after_the_environment(tmp_path: Path) -> None:
    names = [check.name for check in table(tmp_path, "auto") if check.step != "environment"]
    assert names[:2] == ["ipc_into_saved_memory", "indices_over_a_pause"]
    page = (ROOT / "docs" / "gpu.md").read_text()
    steps = re.findall(r"^\| \d\. .* \| `make gpu-check STEPS=\"?(.*?)\"?` \|", page, re.M)
    assert steps[:2] == ["environment", "memory"], "the page has the same order"


@pytest.mark.parametrize("name", ["quickstart", "quickstart_fp32"])
def test_quickstart_keys_in_gpu_check_exist_in_its_configs(name: str, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        "quickstart_run", ROOT / "examples" / "quickstart" / "run.py"
    )
    assert spec is not None and spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    (check,) = (check for check in table(tmp_path, "triton") if check.name == name)
    given = [
        value
        for flag, value in zip(check.command, check.command[1:], strict=False)
        if flag == "--set"
    ]
    assert "rollout.server_args.attention_backend=triton" in given
    for_sft, for_vapo = run.divide([*run.ONE_GPU, *given])
    assert "critic.layout.tp=1" in for_vapo and "critic.layout.tp=1" not in for_sft
    assert "model.dtype=bfloat16" in for_sft and "model.dtype=bfloat16" in for_vapo


def test_page_shows_every_check_and_ends_of_failed_logs(
    tmp_path: Path,
) -> None:
    rows = [{"shape": "7b", "MFU": "48.1%", "f+b s": 1.23456}]
    for name in ("mfu", "breaks"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"title": "2 | 4096", "rows": rows}))
    found = perform(
        tmp_path,
        planted("mfu", "print('a | b')"),
        planted("breaks", "print('what was before'); raise SystemExit(7)"),
        planted("left", "", gpu=True),
        has_gpu=False,
    )
    write_results(list(found.values()), tmp_path, "a stand-in")
    page = (tmp_path / "results.md").read_text()
    told = json.loads((tmp_path / "results.json").read_text())
    assert told["exit_code"] == 1 and [one["status"] for one in told["checks"]] == [
        "ok",
        "failed",
        "not checked",
    ]
    assert "| 7b | 48.1% | 1.235 |" in page and page.count("48.1%") == 1, (
        "figures of a failed check are not its own"
    )
    assert (
        "a \\| b" in page and "what was before" in page and "breaks: the end of breaks.log" in page
    )


@pytest.mark.full
def test_without_gpus_it_says_what_it_could_not_check(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu_check", "environment", "layers", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "not checked: driver, te_layers" in done.stdout
    assert "| environment | ok |" in (tmp_path / "results.md").read_text()


def test_it_starts_where_nothing_but_python_is_there(tmp_path: Path) -> None:
    isolated = [sys.executable, "-I", "-S", "-c"]
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tools.gpu_check.__main__ import main\nsys.exit(main(['--list']))"
    )
    done = subprocess.run([*isolated, program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "mfu_7b" in done.stdout, done.stderr


def test_a_step_or_folder_that_cannot_be_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["nonsense"]) == 2
    assert capsys.readouterr().err.startswith(
        "gpu-check: no step nonsense: there are environment, memory, layers"
    )
    (tmp_path / "file").touch()
    assert main(["environment", "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(UsageError):
        chosen(table(tmp_path, "auto"), ["environment", "mfu"])
    assert {check.step for check in chosen(table(tmp_path, "auto"), ["sync", "bench"])} == {
        "sync",
        "bench",
    }


def test_packages_of_a_folder_come_first_with_other_kernels(tmp_path: Path) -> None:
    plain = environment_of_checks(None, {"PYTHONPATH": "/own", "OMP_NUM_THREADS": "2"})
    assert plain["PYTHONPATH"] == f"{ROOT}:/own" and plain["OMP_NUM_THREADS"] == "2"
    assert "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK" not in plain
    ours = environment_of_checks(tmp_path, {})
    assert (
        ours["PYTHONPATH"] == f"{tmp_path}:{ROOT}"
        and ours["SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"] == "1"
    )
