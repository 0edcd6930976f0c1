"""Which collectives are said to be over."""

import json
from typing import Any

import pytest
from torch._C import _distributed_c10d

from vapo_megatron.run.watchdog import last_collectives


def _entry(name: str, number: int, state: str, created: int, p2p: bool = True) -> dict[str, Any]:
    return {
        "process_group": ["3", "PIPELINE"],
        "profiling_name": name,
        "p2p_seq_id": number if p2p else 7,
        "collective_seq_id": 7 if p2p else number,
        "is_p2p": p2p,
        "retired": False,
        "state": state,
        "time_created_ns": created,
        "input_sizes": [[2]],
    }


def test_sends_that_nccl_begins_as_one_are_over_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13 gives single ones no state (ProcessGroupNCCL::pointToPoint), only nccl:coalesced
    after them."""
    entries = [
        _entry("nccl:all_reduce", 2, "completed", 0, p2p=False),
        _entry("nccl:send 0->1", 1, "scheduled", 1),
        _entry("nccl:recv 0<-1", 1, "scheduled", 2),
        _entry("nccl:coalesced", 1, "completed", 3),
        _entry("nccl:send 0->1", 2, "scheduled", 4),
        _entry("nccl:coalesced", 2, "started", 5),
    ]
    monkeypatch.setattr(
        _distributed_c10d, "_dump_nccl_trace_json", lambda: json.dumps({"entries": entries}), False
    )
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace_json", lambda: "{}", False)
    assert [line.rpartition(": ")[2] for line in last_collectives()] == ["over"] * 4 + [
        "NOT OVER"
    ] * 2
