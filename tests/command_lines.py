"""Command lines of processes that may end at any moment."""

import psutil


def command_line(process: psutil.Process) -> list[str]:
    """Its arguments; none where it has ended, also where nobody has waited for it yet."""
    try:
        arguments: list[str] = process.cmdline()
    except psutil.NoSuchProcess:  # a zombie too
        return []
    return arguments
