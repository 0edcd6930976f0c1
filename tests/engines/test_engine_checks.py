"""Engines over nodes: checks before anything is started, on nodes of two
GPUs."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stand_ins import Python
from tiny_runs import make_model, train_config

from vapo_megatron.checks import preflight, sizes
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput, RunFailed


@pytest.fixture(autouse=True)
def node_of_two_gpus(monkeypatch: pytest.MonkeyPatch, gpus: Callable[[int], None]) -> None:
    """As Slurm shows them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    gpus(2)


def config_of(folder: Path, **rollout: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        train_config(folder, make_model(folder / "model")) | {"rollout": rollout}
    )


@pytest.mark.parametrize(("tp", "devices"), [(1, "4"), (2, "4,5")])
def test_arguments_are_those_of_the_first_engine(
    tmp_path: Path, python: Python, tp: int, devices: str
) -> None:
    preflight.first_engine(
        config_of(tmp_path, tp=tp, server_args={"ep_size": tp}), None
    ).check_arguments()
    ((arguments, environment),) = python.programs()
    assert environment["CUDA_VISIBLE_DEVICES"] == devices
    assert arguments[-2:] == ["--ep-size", str(tp)]


def test_arguments_that_are_never_read_are_no_hang(tmp_path: Path, python: Python) -> None:
    python.wait()
    config = config_of(tmp_path, server_args={"ep_size": 1}, start_timeout_s=0.2)
    started = time.monotonic()
    with pytest.raises(RunFailed, match=r"rollout\.start_timeout_s=0\.2 s"):
        preflight.first_engine(config, None).check_arguments()
    assert time.monotonic() < started + 30


def test_an_engine_is_on_one_node(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"rollout\.tp=4 does not divide the 2 GPUs of a node"):
        sizes.check_rollout_groups(config_of(tmp_path, tp=4), 8)
    sizes.check_rollout_groups(config_of(tmp_path, tp=2), 8)


def test_engines_that_lose_their_weights_cannot_be_sent_changes(tmp_path: Path) -> None:
    changes = {"only_changes": True}
    with pytest.raises(BadInput, match=r"rollout\.sync\.only_changes=true: .*external_urls"):
        sizes.check_rollout_groups(config_of(tmp_path, sync=changes), 8)
    urls = ("http://127.0.0.1:30000",)
    sizes.check_rollout_groups(config_of(tmp_path, sync=changes, external_urls=urls), 8)
