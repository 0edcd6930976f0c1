"""Where a server answers, and why it failed by its log."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

# Bytes read from the end of a log: it grows for days, and is read for each request that an engine
# fails to answer.
_LOG_END = 1 << 17
NO_WEIGHTS = -1
"""The weight version of a server that was started again: its answers are refused until the next
weight sync."""


@dataclass(frozen=True)
class EngineAddress:
    """URL and log of a server, to be sent to other ranks.

    key: carried by requests; empty: none is needed. owner: a mark in the versions of the weights
        that this trainer
    sends; needed by a server that other trainers could send weights to as well.
    """

    url: str
    log_file: str
    key: str = field(default="", repr=False)
    owner: str = ""

    def __str__(self) -> str:
        return f"{self.url} (log {self.log_file})"

    def cause(self) -> str:
        """Why the server failed, from its log, in words."""
        return cause_in_log(Path(self.log_file))


def cause_in_log(log_file: Path) -> str:
    """The last exception in a log, quoted in a clause; without one, a clause that names the log."""
    try:
        with log_file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_END))
            lines = log.read().decode(errors="replace").splitlines()[-400:]
    except OSError as error:
        return f"its log cannot be read: {error.strerror}"
    exceptions = [
        line.strip() for line in lines if re.match(r"\s*[\w.]*(Error|Exception|Killed)\b", line)
    ]
    if exceptions:
        return f'its log says "{exceptions[-1][:400]}"'
    return f"no exception is in its log, {log_file}"
