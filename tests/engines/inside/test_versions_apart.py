"""Tokens that are on their way when weights come in place are marked with the weights that computed
them."""

from types import SimpleNamespace
from typing import Any

import pytest


class Request(SimpleNamespace):
    """One of SGLang's, with some tokens; chunks: of its prompt that are still to be read."""

    def __init__(self, tokens: int, chunks: int = 0) -> None:
        super().__init__(output_ids=list(range(tokens)), weight_version_events=[], extra_key=None)
        self.is_retracted = False
        self.inflight_middle_chunks = chunks

    def finished(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("tokens", "chunks", "pending", "spans"),
    [
        (5, 0, True, [("0", 0, 6), ("7", 6, 9)]),
        (5, 0, False, [("0", 0, 5), ("7", 5, 9)]),
        (0, 0, True, [("0", 0, 1), ("7", 1, 4)]),
        (0, 1, True, [("7", 0, 4)]),
    ],
    ids=["decoded", "nothing on its way", "prompt just read", "prompt read in part"],
)
def test_a_token_on_its_way_has_the_version_of_its_weights(
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    chunks: int,
    pending: bool,
    spans: list[tuple[str, int, int]],
) -> None:
    from sglang.srt.utils import weight_versions as versions

    from vapo_megatron.engines.inside import (
        processes,  # imports SGLang, for which it prepares this process
    )

    serving = SimpleNamespace(weight_version="0")
    request = Request(tokens, chunks)
    monkeypatch.setattr(processes, "get_serving", lambda: serving)

    class Scheduler:
        waiting_queue: tuple[Any, ...] = ()
        result_queue = [(SimpleNamespace(reqs=[request]), None)] if pending else []

        def _add_request_to_queue(self, req: Any) -> None: ...

        def record_weight_version_change(self, new_version: str | None) -> None:
            if new_version not in (None, serving.weight_version):
                versions.record_weight_version_events([request], serving.weight_version)
                serving.weight_version = new_version

    processes.keep_versions_apart(Scheduler)
    for version in ("0", None, "7"):
        Scheduler().record_weight_version_change(version)
    final = max(9 if tokens else 4, len(request.output_ids))
    marked = versions.compute_weight_version_spans(request.weight_version_events, "7", final)
    assert [(span.version, span.start, span.end) for span in marked] == spans
