"""One Slurm for all tests of the session that want one."""

import os
from collections.abc import Iterator

import pytest
from sandbox import SlurmSandbox, missing_programs


@pytest.fixture(scope="session")
def slurm(request: pytest.FixtureRequest) -> Iterator[SlurmSandbox]:
    """A Slurm with four nodes. Where there can be none the test is skipped, or fails under
    --require-slurm."""
    missing = missing_programs()
    if missing or os.geteuid() != 0:
        reason = (
            f"not installed: {', '.join(missing)}" if missing else "a Slurm for tests needs root"
        )
        if request.config.getoption("--require-slurm"):
            pytest.fail(reason)
        pytest.skip(reason)
    with SlurmSandbox() as sandbox:
        yield sandbox
