"""Processes that agents have started and left."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from vapo_megatron.signals import adopt_orphans, end_descendants

_logger = logging.getLogger(__name__)

# Processes of libraries that end after this one: multiprocessing's, which removes shared memory,
# and a tracker's.
_ENDS_LATER = ("multiprocessing.resource_tracker", "wandb")


@contextmanager
def leftovers_end(agent: str | None) -> Iterator[None]:
    """End the processes that agents have left, daemons included, when everything else that this
    process has started has ended.

    Agents are code of this process, so their subprocesses are its child like the engines are: to be
    entered first, left last. Processes that this one had before stay: a notebook that evaluates has
    others.

    Args:
        agent: rollout.agent; None: nothing is done.
    """
    if agent is None:
        yield
        return
    earlier = set(psutil.Process().children(recursive=True))
    adopt_orphans()
    try:
        yield
    finally:
        count = end_descendants(lambda child: child in earlier or _ends_later(child))
        if count:
            _logger.warning(
                "rollout.agent=%s: %d processes that it had started and not ended were killed",
                agent,
                count,
            )


def _ends_later(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        line = " ".join(process.cmdline())
        return any(name in line for name in _ENDS_LATER)
    return False
