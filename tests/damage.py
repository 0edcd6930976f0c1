"""What a disk or a copy does to a file."""

from pathlib import Path


def flip(path: Path) -> None:
    """Change a bit in the middle of a file; its size stays."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
