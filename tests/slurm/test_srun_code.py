"""The exit code of srun where its tasks end differently, which slurm/lib.sh does not rely on
(docs/dependencies.md)."""

import subprocess
from pathlib import Path

import pytest
from sandbox import SlurmSandbox

# Each task waits for the other, so that no order of their starts decides.
TASKS = """
touch "$0/started.$SLURM_PROCID"
until [[ -e $0/started.0 && -e $0/started.1 ]]; do sleep 0.05; done
if [[ $SLURM_PROCID = 0 ]]; then sleep "$1"; eval "$3"; else sleep "$2"; exit 75; fi
"""


@pytest.mark.full
@pytest.mark.parametrize("delays", [("0", "1"), ("1", "0")], ids=["75 last", "75 first"])
@pytest.mark.parametrize(
    ("end", "code"), [("kill -KILL $$", 137), ("exit 2", 75)], ids=["killed", "bad input"]
)
def test_srun_tells_the_highest_code_of_its_tasks(
    slurm: SlurmSandbox, tmp_path: Path, delays: tuple[str, str], end: str, code: int
) -> None:
    done = subprocess.run(
        [
            "srun",
            "--nodes=2",
            "--ntasks=2",
            "--ntasks-per-node=1",
            "--kill-on-bad-exit=0",
            "bash",
            "-c",
            TASKS,
            str(tmp_path),
            *delays,
            end,
        ],
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
