"""What a loop in a thread of its own does with work that comes too late."""

import asyncio
import inspect

import pytest

from vapo_megatron.loop_thread import LoopThread


def test_work_for_a_closed_loop_is_refused_and_dropped() -> None:
    thread = LoopThread()
    assert thread.run(asyncio.sleep(0, "done"), 30) == "done"
    assert thread.close(30)
    work = asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="closed"):
        thread.start(work)
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED
