"""The folder of a run in host memory: copies of its state that outlive its ranks, and where its processes meet.

It is one folder a run and machine, in /dev/shm, and holds checkpoints as a run directory does. What it was made for is
over when the process that made it is: whoever makes the next one removes it.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from vapo_megatron.checkpoint.checkpoints import RECORD_FOLDER
from vapo_megatron.checkpoint.lease import Holder

_logger = logging.getLogger(__name__)

ROOT = Path("/dev/shm")
_PREFIX = "vapo-run-"
_OWNER_FILE = "owner.json"


def host_memory_of(run_dir: Path) -> Path:
    """Where the copies of a run are, if there are any."""
    return ROOT / f"{_PREFIX}{hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:16]}"


@contextmanager
def host_memory(run_dir: Path) -> Iterator[Path | None]:
    """A new folder for copies of a run that this process holds the lease of; None where the system refuses.

    It is removed at the end, and so are those of processes of this machine that were killed.
    """
    own, here = host_memory_of(run_dir), Holder.here(os.environ)
    _remove_abandoned(here)
    shutil.rmtree(own, ignore_errors=True)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=ROOT))
        (folder / _OWNER_FILE).write_text(json.dumps(asdict(here)))
        # A checkpoint names what value pretraining has recorded by its place in the run directory.
        (folder / RECORD_FOLDER).symlink_to(run_dir.absolute() / RECORD_FOLDER)
        folder.rename(own)
    except OSError as error:
        _logger.warning(
            "%s: cannot be used (%s): ranks that are killed are not started again from a copy", ROOT, error.strerror
        )
        yield None
        return
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _remove_abandoned(here: Holder) -> None:
    for path in (*ROOT.glob(f"{_PREFIX}*"), *ROOT.glob(f".{_PREFIX}*")):
        with suppress(OSError, ValueError, TypeError):  # another user's, or one that is just being made
            if Holder(**json.loads((path / _OWNER_FILE).read_text())).lives(here) is False:
                shutil.rmtree(path)
