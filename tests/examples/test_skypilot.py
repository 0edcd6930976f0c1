"""The SkyPilot example has keys that SkyPilot knows, and a command that torchrun and vapo-megatron
accept."""

import os
import subprocess
from pathlib import Path

import yaml

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.train import TrainConfig

ROOT = Path(__file__).parents[2]
# Of SkyPilot's reference of its YAML, those that the example may use.
KEYS = {
    "": {"name", "resources", "num_nodes", "envs", "secrets", "file_mounts", "run"},
    "resources": {"accelerators", "image_id", "disk_size", "use_spot", "job_recovery"},
    "job_recovery": {"strategy", "max_restarts_on_errors"},
    "mount": {"name", "source", "store", "mode", "persistent"},
}


def test_every_node_runs_torchrun_of_a_valid_config(tmp_path: Path) -> None:
    job = yaml.safe_load((ROOT / "examples/skypilot/train.yaml").read_text())
    resources = job["resources"]
    (mount,) = job["file_mounts"].values()
    assert job.keys() <= KEYS[""] and resources.keys() <= KEYS["resources"]
    assert resources["job_recovery"].keys() <= KEYS["job_recovery"]
    assert mount.keys() <= KEYS["mount"] and mount["mode"] in ("MOUNT", "COPY", "MOUNT_CACHED")
    name, _, gpus = resources["accelerators"].partition(":")
    assert name == "H100" and job["secrets"] == {"HF_TOKEN": None}
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    dockerfile = (ROOT / "docker" / "h100.Dockerfile").read_text()
    first, environment, *rest = job["run"].splitlines()
    assert first == "cd /opt/vapo-megatron" and "\nWORKDIR /opt/vapo-megatron\n" in dockerfile
    assert environment.endswith(":$PATH") and environment[12:-6] in dockerfile
    nodes = {
        "SKYPILOT_NUM_NODES": str(job["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": gpus,
        "SKYPILOT_NODE_RANK": "3",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4",
    }
    said = subprocess.run(
        ["bash", "-ec", "\n".join(rest)],
        env=job["envs"] | nodes | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    options = dict(zip(said[0:10:2], said[1:10:2], strict=True))
    assert options["--nnodes"] == "4" and options["--nproc-per-node"] == gpus
    assert options["--node-rank"] == "3" and options["--master-addr"] == "10.0.0.1"
    assert said[10:13] == ["-m", "vapo_megatron.cli", "train"]
    own = [f"model.path={tmp_path}" if at.startswith("model.path") else at for at in said[14:]]
    config = load_config(TrainConfig, ROOT / said[13], own, PRESETS)
    assert config.run.resume == "auto" and config.run.directory.startswith("/shared/")
    assert (tmp_path / "data").readlink() == Path("/shared/data")
    cluster = load_config(TrainConfig, ROOT / said[13], [], PRESETS).cluster
    assert cluster.ranks in (None, job["num_nodes"] * int(gpus))
