"""Check a GPU node with this repository, in its root: environment, kernels, layers, engine,
quickstart, speed.

    make gpu-check                                          everything; the limits add up to 96
    minutes make gpu-check STEPS="environment layers" BUDGET=560    some steps, in 560 s at most
    python -m tools.gpu_check --list                        the table of checks

Exit codes: 0 all have passed; 1 one failed or ran past its limit; 2 it was called in a way it
cannot use; 3 nothing failed, but not all were checked (no GPU here, or the budget ended).
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.gpu_check.checks import Check, UsageError, chosen, table
from tools.gpu_check.page import write_results
from tools.gpu_check.runner import Result, exit_code, run_all

_ROOT = Path(__file__).resolve().parents[2]
_ASK = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    given = _parser().parse_args(arguments)
    out: Path = given.out.resolve()
    try:
        checks = chosen(table(out, given.attention), given.steps)
        if given.list:
            _show(checks)
            return 0
        return _check(checks, out, given.budget, given.site)
    except UsageError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2


def _check(checks: Sequence[Check], out: Path, budget: float | None, site: Path | None) -> int:
    logs = out / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--out {out}: {error.strerror}: give a folder that can be written"
        ) from None
    environment = environment_of_checks(site, os.environ)
    gpu = gpu_name(environment)
    machine = gpu or "no GPU that PyTorch can use"
    print(f"gpu-check: {machine}; {len(checks)} checks, results in {out}", flush=True)
    results = run_all(
        checks, logs, environment, root=_ROOT, budget=budget, has_gpu=bool(gpu), tell=tell_result
    )
    write_results(results, out, machine)
    left = [result.check.name for result in results if result.status == "not checked"]
    if left:
        print(f"gpu-check: not checked: {', '.join(left)}")
    code = exit_code(results)
    print(f"gpu-check: exit code {code}; see {out / 'results.md'}")
    return code


def environment_of_checks(
    site: Path | None, own: os._Environ[str] | dict[str, str]
) -> dict[str, str]:
    """What the checks run in.

    Args:
        site: a folder of packages that stands before the installed ones; its kernels and PyTorch
            may be of versions other than those that SGLang asks for.
        own: this process's environment.
    """
    paths = [str(site) if site else "", str(_ROOT), own.get("PYTHONPATH", "")]
    defaults = {
        "OMP_NUM_THREADS": "4",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    environment = {
        **defaults,
        **own,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    if site is not None:
        environment["SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"] = "1"
        # SGLang's compiled radix tree misreads tensors of another PyTorch than the one it was built
        # for.
        environment["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"
    if shutil.which("nvcc", path=environment.get("PATH")) is None:
        toolkits = sorted(Path("/usr/local").glob("cuda*/bin/nvcc"))
        if toolkits:
            home = toolkits[-1].resolve().parents[1]
            environment |= {
                "CUDA_HOME": str(home),
                "PATH": f"{home / 'bin'}{os.pathsep}{environment.get('PATH', '')}",
            }
    return environment


def gpu_name(environment: dict[str, str]) -> str:
    """The name of the GPU; empty where PyTorch finds none, or is not there."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK],
            capture_output=True,
            text=True,
            env=environment,
            cwd=_ROOT,
            timeout=180,
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def tell_result(result: Result) -> None:
    """Print a line of what came of a check."""
    print(
        f"{result.status:<14} {result.check.name:<16} {result.seconds:5.0f} s  {result.line}",
        flush=True,
    )


def _show(checks: Sequence[Check]) -> None:
    for check in checks:
        print(f"{check.step:<12} {check.name:<16} at most {check.limit:3.0f} s  {check.shows}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", help="of the table (--list); none: all")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu-check"), help="folder for results and logs"
    )
    parser.add_argument(
        "--budget", type=float, help="seconds for all checks; none: the sum of their limits"
    )
    parser.add_argument(
        "--attention",
        default="auto",
        help="attention backend of the quickstarts' engines, as triton",
    )
    parser.add_argument(
        "--site", type=Path, help="folder of packages that stands before the installed ones"
    )
    parser.add_argument("--list", action="store_true", help="show the checks and run none")
    return parser


if __name__ == "__main__":
    sys.exit(main())
