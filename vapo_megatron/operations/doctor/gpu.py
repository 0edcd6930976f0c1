"""What `nvidia-smi` and `dcgmi` say of a node's GPUs, and judgements of it."""

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from vapo_megatron.config.plan import HardwareConfig
from vapo_megatron.operations.doctor.report import Line
from vapo_megatron.operations.hardware import RATES, Hardware

_MIB = 2**20
_IDLE_MIB = 1500  # that an idle GPU may show as used
# Only these modules have as many links as RATES says: cards (PCIe, NVL) and GPUs for some markets have others.
_MODULE = re.compile(r"A100-SXM4|H100 80GB HBM3$|H200$|B200$")
_DIAGNOSIS_SECONDS = 280.0


class Unreadable(Exception):
    """A tool is not there, failed, or said something unknown; the message names it."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as nvidia-smi shows it; links: of NVLink, whether each is up."""

    index: int
    name: str
    memory_mib: float
    used_mib: float
    driver: str
    ecc: str
    uncorrected: int
    remap_pending: bool
    remap_failed: bool
    mig: bool
    compute_mode: str
    links: tuple[bool, ...]


def read_gpus() -> list[Gpu]:
    """The node's GPUs, without those that have fallen off the bus. Raises Unreadable where nvidia-smi fails."""
    status = _output("nvidia-smi", "nvlink", "--status")
    links = {
        int(gpu): tuple("inactive" not in state for state in re.findall(r"Link \d+: (.*)", states))
        for gpu, states in re.findall(r"^GPU (\d+):.*\n((?:\s+.*\n?)*)", status, re.MULTILINE)
    }
    try:
        log = ElementTree.fromstring(_output("nvidia-smi", "-q", "-x"))
        driver = log.findtext("driver_version", "")
        gpus = [gpu for gpu in log.findall("gpu") if gpu.findtext("product_name") not in (None, "GPU is lost")]
        return [_read(index, gpu, driver, links.get(index, ())) for index, gpu in enumerate(gpus)]
    except (ElementTree.ParseError, ValueError, IndexError) as error:
        raise Unreadable(f"nvidia-smi -q -x says what is not understood: {error}") from None


def _read(index: int, gpu: ElementTree.Element, driver: str, links: tuple[bool, ...]) -> Gpu:
    memory = {name: float(gpu.findtext(f"fb_memory_usage/{name}", "0 MiB").split()[0]) for name in ("total", "used")}
    errors = [error.text or "" for error in gpu.findall("ecc_errors/volatile/*") if "uncorrectable" in error.tag]
    return Gpu(
        index=index,
        name=gpu.findtext("product_name", ""),
        memory_mib=memory["total"],
        used_mib=memory["used"],
        driver=driver,
        ecc=gpu.findtext("ecc_mode/current_ecc", "N/A"),
        uncorrected=sum(int(error) for error in errors if error.isdigit()),
        remap_pending=gpu.findtext("remapped_rows/remapped_row_pending") == "Yes",
        remap_failed=gpu.findtext("remapped_rows/remapped_row_failure") == "Yes",
        mig=gpu.findtext("mig_mode/current_mig") == "Enabled",
        compute_mode=gpu.findtext("compute_mode", "Default"),
        links=links,
    )


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=50)
    except OSError as error:
        raise Unreadable(f"{command[0]}, part of the driver, cannot be run: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise Unreadable(f"`{' '.join(command)}` says nothing for 50 s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise Unreadable(f"`{' '.join(command)}` failed: {said[-1]}")
    return done.stdout


def judge_gpus(gpus: Sequence[Gpu], hardware: HardwareConfig) -> list[Line]:
    """Whether as many GPUs are there as the config says, alike, free, sound and of the kind."""
    lines = [*_unlike(gpus, hardware), *_unsound(gpus)]
    return lines or [Line("ok", f"{len(gpus)} x {gpus[0].name}, driver {gpus[0].driver}, free and without errors")]


def _unlike(gpus: Sequence[Gpu], hardware: HardwareConfig) -> Iterator[Line]:
    if len(gpus) != hardware.gpus_per_node:
        found = f"{len(gpus)} GPUs answer, hardware.gpus_per_node={hardware.gpus_per_node}"
        remedy = "drain the node: a GPU has fallen off the bus (dmesg, Xid 79), or set hardware.gpus_per_node"
        yield Line("fault", found, remedy)
    kinds = Counter((gpu.name, gpu.memory_mib) for gpu in gpus)
    if len(kinds) > 1:
        named = "; ".join(f"{count} x {name} ({memory:.0f} MiB)" for (name, memory), count in kinds.items())
        yield Line("fault", f"GPUs differ: {named}", "take nodes of one kind: the slowest sets the pace")
    stated = Hardware(hardware).device_memory / _MIB
    if small := [gpu for gpu in gpus if gpu.memory_mib < 0.97 * stated]:
        found = f"GPUs {_named(small)} have {small[0].memory_mib:.0f} MiB, a {hardware.kind} has {stated:.0f}"
        yield Line("warning", found, "set hardware.kind, and see what `vapo-megatron plan` then says")


def _unsound(gpus: Sequence[Gpu]) -> Iterator[Line]:
    replace = "leave the node out and reset the GPU; if it comes back, have the GPU replaced"
    for status, affected, found, remedy in (
        (
            "fault",
            [gpu for gpu in gpus if gpu.used_mib > _IDLE_MIB],
            f"in use ({max((gpu.used_mib for gpu in gpus), default=0):.0f} MiB at most)",
            "end the processes that `nvidia-smi` lists, or take another node",
        ),
        ("fault", [gpu for gpu in gpus if gpu.mig], "in MIG mode", "have an administrator switch it off"),
        (
            "fault",
            [gpu for gpu in gpus if gpu.compute_mode != "Default"],
            "in an exclusive compute mode",
            "trainer and engine share a GPU: set compute mode Default (nvidia-smi -c 0)",
        ),
        ("fault", [gpu for gpu in gpus if gpu.uncorrected], "uncorrected memory errors since the driver came", replace),
        ("fault", [gpu for gpu in gpus if gpu.remap_pending], "a row of memory waiting to be remapped", replace),
        ("fault", [gpu for gpu in gpus if gpu.remap_failed], "a row of memory that could not be remapped", replace),
        (
            "warning",
            [gpu for gpu in gpus if gpu.ecc == "Disabled"],
            "ECC is off",
            "switch it on: nvidia-smi -e 1, reboot",
        ),
    ):
        if affected:
            yield Line("fault" if status == "fault" else "warning", f"GPUs {_named(affected)}: {found}", remedy)


def judge_links(gpus: Sequence[Gpu], hardware: HardwareConfig) -> list[Line]:
    """Whether all NVLinks are up; a missing link is a fault of an SXM module alone."""
    if hardware.gpus_per_node == 1:
        return [Line("not applicable", "one GPU a node")]
    wanted = RATES[hardware.kind].nvlinks
    wrong = [gpu for gpu in gpus if sum(gpu.links) < wanted]
    if not wrong:
        return [Line("ok", f"{wanted} links per GPU")]
    first = wrong[0]
    found = f"GPUs {_named(wrong)}: {sum(first.links)} of {wanted} links of GPU {first.index} ({first.name}) are up"
    if _MODULE.search(first.name):
        remedy = "leave the node out; see that nvidia-fabricmanager runs, with the driver's version"
        return [Line("fault", found, remedy)]
    remedy = f"nothing, if it has no more; {wanted} are those of an SXM module, hardware.kind={hardware.kind}"
    return [Line("warning", found, remedy)]


def diagnose() -> list[Line]:
    """`dcgmi diag -r 2`, the maker's test of memory, bus and clocks, where it is installed."""
    if shutil.which("dcgmi") is None:
        return [Line("skipped", "no dcgmi", "install datacenter-gpu-manager to have memory, bus and clocks tested")]
    done = subprocess.run(["dcgmi", "diag", "-r", "2"], capture_output=True, text=True, timeout=_DIAGNOSIS_SECONDS)
    if done.returncode == 0:
        return [Line("ok", "dcgmi diag -r 2 passes")]
    said = [
        line.strip(" |") for line in (done.stdout + done.stderr).splitlines() if re.search("fail|error", line, re.I)
    ]
    found = f"dcgmi diag -r 2 ends with {done.returncode}: {'; '.join(said[:3]) or 'no word'}"
    return [Line("fault", found[:300], "leave the node out; `dcgmi diag -r 3` says more")]


def _named(gpus: Sequence[Gpu]) -> str:
    return ", ".join(str(gpu.index) for gpu in gpus)
