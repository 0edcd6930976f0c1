"""The Kubernetes example uses options that torchrun and vapo-megatron accept."""

import os
import subprocess
from pathlib import Path

import yaml

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.train import TrainConfig

ROOT = Path(__file__).parents[2]


def test_the_pods_command_is_a_torchrun_of_a_valid_config(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all((ROOT / "examples/kubernetes/train.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    said = subprocess.run(
        [*container["command"], *container["args"]],
        env=environment | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "3"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    dockerfile = (ROOT / "docker" / "h100.Dockerfile").read_text()
    assert f"\nWORKDIR {container['workingDir']}\n" in dockerfile
    (stop,) = container["lifecycle"]["preStop"]["exec"]["command"][2:]
    # Only the ranks are asked, which are children of torchrun, the pod's first process: nothing is
    # ended by its name.
    assert stop.startswith("pkill -USR1 -P 1; ") and " procps " in dockerfile
    options = dict(zip(said[0:10:2], said[1:10:2], strict=True))
    assert options["--nnodes"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert options["--node-rank"] == "3"
    # A pod's name below the headless service, whose selector finds the pods of this job.
    name, _, domain = options["--master-addr"].partition(".")
    assert (name, domain) == (f"{job['metadata']['name']}-0", service["metadata"]["name"])
    assert (pod["subdomain"], service["spec"]["selector"]) == (
        domain,
        {"job-name": job["metadata"]["name"]},
    )
    assert said[10:13] == ["-m", "vapo_megatron.cli", "train"]
    config = load_config(TrainConfig, ROOT / said[13], said[14:], PRESETS)
    assert config.run.resume == "auto"
    # What the config calls data/ is the folder that all pods see, evaluation sets included.
    assert (tmp_path / "data").readlink() == Path(environment["DATA"])
    assert {
        path.parts[0] for path in (config.data.train, *(entry.path for entry in config.data.eval))
    } == {"data"}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(options["--nproc-per-node"])
