"""Network adapters as the kernel shows them under /sys/class/infiniband."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vapo_megatron.operations.doctor.report import Line

SYSFS = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Port:
    """One port: its adapter and number, the state's word ("ACTIVE"), the rate in Gb/s and the layer below."""

    name: str
    state: str
    rate: float
    layer: str


def read_ports(root: Path = SYSFS) -> list[Port]:
    """All ports of all adapters; none where the kernel has no such adapter. A port that cannot be read is "unknown"."""
    ports = []
    for folder in sorted(root.glob("*/ports/*")):
        state = _word(folder / "state").rpartition(":")[2].strip() or "unknown"
        rate = _word(folder / "rate").split()
        number = float(rate[0]) if rate and rate[0].replace(".", "", 1).isdigit() else 0.0
        ports.append(
            Port(f"{folder.parts[-3]}:{folder.name}", state, number, _word(folder / "link_layer") or "unknown")
        )
    return ports


def judge_ports(ports: Sequence[Port], nodes: int) -> list[Line]:
    """Whether the adapters are up, and as fast as each other."""
    if nodes == 1:
        return [Line("not applicable", f"one node; {len(ports)} ports")]
    if not ports:
        remedy = "load its driver; NCCL otherwise goes over TCP, which is many times slower"
        return [Line("warning", "the kernel shows no InfiniBand or RoCE adapter", remedy)]
    up = [port for port in ports if port.state == "ACTIVE"]
    down = [port for port in ports if port.state != "ACTIVE"]
    if not up:
        return [Line("fault", f"none of {len(ports)} ports is active", "leave the node out; see ibstat")]
    lines = []
    fastest = max(port.rate for port in up)
    slow = [port for port in up if port.rate < fastest and port.layer == "InfiniBand"]
    if slow:
        named = ", ".join(f"{port.name} ({port.rate:g} Gb/s)" for port in slow)
        remedy = "see that it trained at full width (ibstat, cable); a storage adapter belongs out of NCCL_IB_HCA"
        lines.append(Line("warning", f"slower than {fastest:g} Gb/s: {named}", remedy))
    if down:
        # Ports that nothing is plugged into are usual: other nodes tell whether this one is worse.
        named = ", ".join(f"{port.name} {port.state}" for port in down)
        lines.append(Line("warning", f"not active: {named}", "plug it in, or leave it out of NCCL_IB_HCA"))
    return lines or [Line("ok", f"{len(up)} ports active at {fastest:g} Gb/s")]


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
