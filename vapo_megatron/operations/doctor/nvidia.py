"""What nvidia-smi says of a node's GPUs: the query, its parsing, and judgements. Parsing is pure."""

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vapo_megatron.config.hardware import HardwareConfig, Kind
from vapo_megatron.operations.doctor.report import Line
from vapo_megatron.operations.hardware import RATES

FIELDS = (
    "index",
    "name",
    "memory.total",
    "memory.used",
    "driver_version",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "mig.mode.current",
    "compute_mode",
)
QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
LINKS = ("nvidia-smi", "nvlink", "--status")
# Contexts of nobody: what an idle GPU of this kind shows as used.
_IDLE_MIB = 1500
# How nvidia-smi names the SXM modules whose number of links RATES has.
_SXM: dict[Kind, re.Pattern[str]] = {
    "a100-40g": re.compile(r"\bA100-SXM4"),
    "a100-80g": re.compile(r"\bA100-SXM4"),
    "h100-80g": re.compile(r"\bH100 80GB HBM3$"),
    "h200-141g": re.compile(r"\bH200$"),
    "b200-180g": re.compile(r"\bB200$"),
}


class Unreadable(Exception):
    """A tool is not there, failed, or said something unknown; the message names it."""


@dataclass(frozen=True)
class Gpu:
    """One row. None stands for what the GPU does not tell ("[N/A]")."""

    index: int
    name: str
    memory_mib: float
    used_mib: float
    driver: str
    ecc: bool | None
    uncorrected: int | None
    remap_pending: bool | None
    remap_failed: bool | None
    mig: bool | None
    compute_mode: str


def run_tool(command: Sequence[str], deadline: float) -> str:
    """Standard output of a tool. Raises Unreadable where it is not there, fails or does not end in time (seconds)."""
    if shutil.which(command[0]) is None:
        raise Unreadable(f"{command[0]} is not installed")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline, check=False)
    except subprocess.TimeoutExpired:
        raise Unreadable(f"{' '.join(command[:2])} did not end within {deadline:g} s") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Unreadable(f"{' '.join(command[:2])} ended with code {done.returncode}: {said[0] if said else 'no word'}")
    return done.stdout


def parse_gpus(text: str) -> list[Gpu]:
    """The rows of QUERY. Raises Unreadable for a row of another form."""
    found = []
    for row in filter(None, (line.strip() for line in text.splitlines())):
        cells = [cell.strip() for cell in row.split(",")]
        if len(cells) != len(FIELDS):
            raise Unreadable(f"nvidia-smi: {len(cells)} values where {len(FIELDS)} were asked for: {row[:120]}")
        index, name, total, used, driver, ecc, uncorrected, pending, failed, mig, mode = cells
        try:
            found.append(
                Gpu(
                    index=int(index),
                    name=name,
                    memory_mib=float(total),
                    used_mib=float(used),
                    driver=driver,
                    ecc=_flag(ecc),
                    uncorrected=None if _absent(uncorrected) else int(uncorrected),
                    remap_pending=_flag(pending),
                    remap_failed=_flag(failed),
                    mig=_flag(mig),
                    compute_mode=mode,
                )
            )
        except ValueError as error:
            raise Unreadable(f"nvidia-smi: {error}: {row[:120]}") from None
    return found


def _absent(cell: str) -> bool:
    return cell.strip("[]").lower() in ("n/a", "not supported", "unknown error", "")


def _flag(cell: str) -> bool | None:
    if _absent(cell):
        return None
    if cell.lower() in ("enabled", "yes", "1"):
        return True
    if cell.lower() in ("disabled", "no", "0"):
        return False
    raise ValueError(f"{cell!r} is neither yes nor no")


def parse_links(text: str) -> dict[int, list[float | None]]:
    """GB/s of every NVLink by GPU, None for an inactive one, from LINKS."""
    links: dict[int, list[float | None]] = {}
    gpu: int | None = None
    for line in map(str.strip, text.splitlines()):
        if line.startswith("GPU ") and ":" in line:
            gpu = int(line[4:].partition(":")[0])
            links[gpu] = []
        elif line.startswith("Link ") and gpu is not None:
            rate = line.partition(":")[2].strip()
            links[gpu].append(None if "inactive" in rate.lower() else float(rate.split()[0]))
        elif "all links are inactive" in line.lower() and gpu is not None:
            links[gpu].append(None)
    return links


def judge_gpus(gpus: Sequence[Gpu], hardware: HardwareConfig) -> list[Line]:
    """Whether as many GPUs are there as the config says, alike, free, whole and of the kind."""
    lines, check = [], "gpus"
    if len(gpus) != hardware.gpus_per_node:
        lines.append(
            Line(
                check,
                "fault",
                f"{len(gpus)} GPUs answer, hardware.gpus_per_node={hardware.gpus_per_node}",
                "drain the node: a GPU has fallen off the bus (dmesg, Xid 79), or set hardware.gpus_per_node",
            )
        )
    kinds = Counter((gpu.name, gpu.memory_mib, gpu.driver) for gpu in gpus)
    if len(kinds) > 1:
        named = "; ".join(f"{count} x {name} ({memory:.0f} MiB)" for (name, memory, _), count in kinds.items())
        lines.append(Line(check, "fault", f"GPUs differ: {named}", "take nodes of one kind: the slowest sets the pace"))
    stated = hardware.device_memory_gib * 1024 if hardware.device_memory_gib else RATES[hardware.kind].memory / 2**20
    small = [gpu.index for gpu in gpus if gpu.memory_mib < 0.97 * stated]
    if small:
        lines.append(
            Line(
                check,
                "warning",
                f"GPUs {_named(small)} have {gpus[small[0]].memory_mib:.0f} MiB, a {hardware.kind} has {stated:.0f}",
                "set hardware.kind, and see what `vapo-megatron plan` then says",
            )
        )
    used = [gpu.index for gpu in gpus if gpu.used_mib > _IDLE_MIB]
    if used:
        lines.append(
            Line(
                check,
                "fault",
                f"GPUs {_named(used)} are in use ({max(gpu.used_mib for gpu in gpus):.0f} MiB at most)",
                "end the processes that `nvidia-smi` lists, or take another node",
            )
        )
    split = [gpu.index for gpu in gpus if gpu.mig]
    if split:
        lines.append(
            Line(check, "fault", f"GPUs {_named(split)} are in MIG mode", "have an administrator switch it off")
        )
    closed = [gpu.index for gpu in gpus if gpu.compute_mode.lower() not in ("default", "[n/a]")]
    if closed:
        lines.append(
            Line(
                check,
                "fault",
                f"GPUs {_named(closed)} are in compute mode {gpus[closed[0]].compute_mode}",
                "trainer and engine share a GPU: set compute mode Default (nvidia-smi -c 0)",
            )
        )
    if not lines:
        lines.append(Line(check, "ok", f"{len(gpus)} x {gpus[0].name}, driver {gpus[0].driver}, all free"))
    return lines


def judge_ecc(gpus: Sequence[Gpu]) -> list[Line]:
    """Whether memory errors are corrected, and none was beyond correction."""
    lines = []
    for what, broken in (
        ("uncorrected memory errors since the driver was loaded", [g.index for g in gpus if g.uncorrected]),
        ("a row of memory waiting to be remapped", [g.index for g in gpus if g.remap_pending]),
        ("a row of memory that could not be remapped", [g.index for g in gpus if g.remap_failed]),
    ):
        if broken:
            remedy = "leave the node out and reset the GPU; if it comes back, have the GPU replaced"
            lines.append(Line("ecc", "fault", f"GPUs {_named(broken)}: {what}", remedy))
    off = [gpu.index for gpu in gpus if gpu.ecc is False]
    if off:
        lines.append(Line("ecc", "warning", f"GPUs {_named(off)}: ECC is off", "switch it on: nvidia-smi -e 1, reboot"))
    if not lines and any(gpu.ecc is None for gpu in gpus):
        return [Line("ecc", "warning", "the GPUs do not tell of ECC", "nothing, where their kind has none")]
    return lines or [Line("ecc", "ok", "on, no errors")]


def judge_links(
    links: Mapping[int, Sequence[float | None]], names: Mapping[int, str], hardware: HardwareConfig
) -> list[Line]:
    """Whether all NVLinks are up, equally many on every GPU.

    Args:
        links: from parse_links.
        names: of the GPUs by index. A missing link is a fault of an SXM module of the kind alone: cards (PCIe, NVL)
            and GPUs made for some markets have other numbers of links, and bridges that are not there are no fault.
        hardware: what the node is taken for.
    """
    if hardware.gpus_per_node == 1:
        return [Line("nvlink", "not applicable", "one GPU a node")]
    wanted = RATES[hardware.kind].nvlinks
    down = {gpu: sum(rate is None for rate in rates) for gpu, rates in links.items() if None in rates}
    few = {gpu: sum(rate is not None for rate in rates) for gpu, rates in links.items()}
    few = {gpu: up for gpu, up in few.items() if up < wanted}
    if not links:
        return [Line("nvlink", "warning", "nvidia-smi lists no GPU", "see whether `nvidia-smi nvlink --status` works")]
    if few or down:
        gpu, up = next(iter(few.items())) if few else (next(iter(down)), wanted)
        name = names.get(gpu, "of unknown name")
        certain = _SXM[hardware.kind].search(name)
        return [
            Line(
                "nvlink",
                "fault" if certain else "warning",
                f"GPUs {_named(list(few or down))}: {up} of {wanted} links of GPU {gpu} ({name}) are up",
                "leave the node out; see that nvidia-fabricmanager runs, with the driver's version"
                if certain
                else f"nothing, if it has no more; {wanted} are those of an SXM module, hardware.kind={hardware.kind}",
            )
        ]
    rate = sum(rate for rate in links[min(links)] if rate is not None)
    return [Line("nvlink", "ok", f"{wanted} links a GPU, {rate:.0f} GB/s together in one direction")]


def _named(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))
