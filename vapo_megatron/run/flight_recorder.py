"""What torch's flight recorder knows of this rank's collectives, in lines for whoever looks for the rank that hangs."""

import json
from typing import Any

from torch._C import _distributed_c10d

# Of NCCL's groups, and of all others.
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_LINES = 20


def last_collectives() -> list[str]:
    """The collectives that this rank began last, oldest first: those that hang are not over."""
    entries: list[dict[str, Any]] = []
    for name in _DUMPS:
        if (dump := getattr(_distributed_c10d, name, None)) is not None:
            entries += json.loads(dump()).get("entries", [])  # without: none was begun
    entries.sort(key=lambda entry: int(entry["time_created_ns"]))
    # What NCCL begins as one (a pipeline's sends and receives) has one number, and a state only in its last entry.
    over = {_named(entry) for entry in entries if entry["retired"] or entry["state"] == "completed"}
    return [_line(entry, _named(entry) in over) for entry in entries[-_LINES:]]


def _named(entry: dict[str, Any]) -> tuple[str, bool, int]:
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    return " ".join(entry["process_group"]), entry["is_p2p"], number


def _line(entry: dict[str, Any], over: bool) -> str:
    group, _, number = _named(entry)
    state = "over" if over else "NOT OVER"
    return f"{entry['profiling_name']} number {number} of group {group}, sizes {entry['input_sizes']}: {state}"
