"""The table of checks: what is run, for how long at most, and what it must say to have passed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class UsageError(Exception):
    """The check was called in a way it cannot use: told in one line, exit code 2."""


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: unique; of its log, and of the JSON with its figures where it is a benchmark.
        step: the group that it is asked for by.
        command: arguments of Python.
        limit: seconds after which it is ended, which is a failure.
        shows: what it shows, for the page of results.
        expects: a regular expression of a line that it must print; that line stands in the results.
            Empty: the last line does.
        gpu: whether it needs a GPU.
    """

    name: str
    step: str
    command: tuple[str, ...]
    limit: float
    shows: str
    expects: str = ""
    gpu: bool = True


def table(out: Path, attention: str) -> tuple[Check, ...]:
    """All checks, in their order.

    Args:
        out: gets the figures of benchmarks and the quickstarts' runs.
        attention: the attention backend of SGLang's that engines of quickstarts take; "auto":
            SGLang's choice.
    """
    return (
        Check("driver", "environment", ("-c", _SMI), 30, "the driver answers", "GPU|NVIDIA"),
        _program(
            "environment",
            "facts",
            "environment",
            "versions, what is missing, memory, bus",
            "",
            gpu=False,
        ),
        # Others met both; either makes every later step of a run wrong or impossible.
        _tests(
            "ipc_into_saved_memory",
            "memory",
            300,
            "CUDA IPC under torch_memory_saver",
            _SYNC,
            "-m",
            _IPC,
        ),
        _tests(
            "indices_over_a_pause",
            "memory",
            300,
            "log-probs after a pause are those before it",
            _SYNC,
            "-m",
            _PAUSE,
        ),
        _program(
            "te_layers",
            "layers",
            "layers",
            "Transformer Engine: FP8 recipes, packed attention",
            "^ok$",
        ),
        _tests(
            "tests_mcore",
            "tests",
            600,
            "layers against PyTorch, FP8 against BF16, layouts",
            "tests/megatron",
        ),
        _bench(out, "logprob_head", "bench", "logprob_head", (), "chunked.*yes"),
        _trained(out, "mfu_1.5b", "bench", "1.5b", sequences=4),
        _program(
            "engine_kernels", "engine_kernels", "engine", "the kernels that engines call", "^ok$"
        ),
        _tests("tests_engine", "engine", 540, "engine, weight sync, its memory", _SYNC),
        _synced(out, "sync_1.5b", "1.5b"),
        _synced(out, "sync_7b", "7b"),
        _bench(out, "decode", "decode", "decode", ("--shapes", "1.5b", "7b"), "decode_overhead="),
        _quickstart(out, "quickstart", attention),
        _quickstart(out, "fp32", attention, "model.dtype=float32", "model.attention=sdpa"),
        _trained(out, "mfu_7b", "bench7b", "7b", sequences=2),
        _trained(out, "mfu_32b_slice", "bench32b", "32b-slice", sequences=2),
    )


def chosen(checks: Sequence[Check], steps: Sequence[str]) -> list[Check]:
    """The checks of some steps, in the table's order; of all steps where none is named.

    Raises:
        UsageError: there is no such step.
    """
    known = list(dict.fromkeys(check.step for check in checks))
    for step in steps:
        if step not in known:
            raise UsageError(f"no step {step}: there are {', '.join(known)}")
    return [check for check in checks if not steps or check.step in steps]


_SMI = (
    "import subprocess; print(subprocess.run(['nvidia-smi', "
    "'--query-gpu=name,driver_version,memory.total,pstate', '--format=csv,noheader'], check=True, "
    "capture_output=True, text=True).stdout)"
)
_SYNC = "tests/engines/weight_sync"
_IPC = "gpu and ipc_into_saved_memory"
_PAUSE = "gpu and indices_over_a_pause"
# Tests that were all skipped have shown nothing, though pytest calls that a success.
_PASSED = r"\b[1-9]\d* passed"


def _program(
    name: str, module: str, step: str, shows: str, expects: str, gpu: bool = True
) -> Check:
    return Check(name, step, ("-m", f"tools.gpu_check.{module}"), 240, shows, expects, gpu)


def _tests(name: str, step: str, limit: float, shows: str, *chosen: str) -> Check:
    pytest = ("-m", "pytest", "-q", "-rfEs", "--maxfail=20", "-p", "no:cacheprovider", "-m", "gpu")
    # The first engine of a machine compiles for longer than a test may take elsewhere.
    return Check(name, step, (*pytest, "--timeout", f"{limit:g}", *chosen), limit, shows, _PASSED)


def _bench(
    out: Path, name: str, step: str, module: str, arguments: tuple[str, ...], expects: str
) -> Check:
    command = (
        "-W",
        "ignore",
        "-m",
        f"benchmarks.{module}",
        *arguments,
        "--json",
        str(out / f"{name}.json"),
    )
    return Check(
        name, step, command, 300, f"benchmarks.{module} {' '.join(arguments)}".strip(), expects
    )


def _trained(out: Path, name: str, step: str, shape: str, sequences: int) -> Check:
    arguments = ("--shapes", shape, "--sequences", str(sequences))
    # A row that does not fit has no MFU
    return _bench(out, name, step, "gpu", arguments, rf"{shape}.*bf16.*\d%")


def _synced(out: Path, name: str, shape: str) -> Check:
    return _bench(
        out, name, "sync", "weight_sync", ("--shape", shape, "--layouts", "1x1"), r"weight sync.*\d"
    )


def _quickstart(out: Path, step: str, attention: str, *overrides: str) -> Check:
    backend = () if attention == "auto" else (f"rollout.server_args.attention_backend={attention}",)
    given = [part for override in (*backend, *overrides) for part in ("--set", override)]
    folder = str(out / f"run_{step}")
    command = ("examples/quickstart/run.py", "--one-gpu", "--steps", "20", "--out", folder, *given)
    shows = f"cold start to evaluation {' '.join(overrides)}".strip()
    return Check(
        f"quickstart_{step}" if overrides else "quickstart",
        step,
        command,
        590,
        shows,
        "Accuracy on unseen",
    )
