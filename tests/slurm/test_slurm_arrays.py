"""The tasks of a real array that wait while another one is requeued."""

import os
import subprocess
from pathlib import Path

import pytest
from sandbox import NODES, SlurmSandbox

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def test_waiting_tasks_leave_out_more_nodes(slurm: SlurmSandbox, tmp_path: Path) -> None:
    script = tmp_path / "nothing.sh"
    script.write_text("#!/bin/bash\n")
    options = ("--hold", "--array=1-4%1", "--job-name=rows", f"--exclude={NODES[3]}")
    array = slurm.submit(script, tmp_path, (*options, "--output=/dev/null"))
    (tmp_path / "excluded_nodes").write_text(f"{NODES[1]} yesterday\n")
    settings = {
        "SLURM_JOB_ID": array,
        "SLURM_JOB_NAME": "rows",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_PARTITION": "batch",
        "JOB": f"{array}_1",
        "RECORD": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", "-c", "source slurm/lib.sh; leave_out_excluded"],
        cwd=ROOT,
        env={**os.environ, **slurm.environment, **settings},
        capture_output=True,
        text=True,
    )
    left_out = [slurm.job(f"{array}_{task}")["ExcNodeList"] for task in range(1, 5)]
    slurm.call("scancel", array)
    assert done.stderr == "", done.stdout
    for nodes in left_out:
        assert slurm.call("scontrol", "show", "hostnames", nodes).split() == [NODES[1], NODES[3]]
