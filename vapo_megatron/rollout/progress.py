"""Time limits that count from the last progress, not from the start."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Progress:
    """What an event loop waits for, and when some of it last arrived. For coroutines on that
    loop."""

    def __init__(self) -> None:
        self._seconds: dict[asyncio.Timeout, float] = {}

    def note(self) -> None:
        """Something arrived: every time limit starts again."""
        now = asyncio.get_running_loop().time()
        for limit, seconds in self._seconds.items():
            if not limit.expired():
                limit.reschedule(now + seconds)

    @asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[None]:
        """Raises TimeoutError once nothing has arrived for this many seconds."""
        async with asyncio.timeout(seconds) as limit:
            self._seconds[limit] = seconds
            try:
                yield
            finally:
                del self._seconds[limit]
