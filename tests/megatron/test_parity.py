"""The comparison that a conversion ends with, on a machine with a GPU."""

from pathlib import Path

import pytest
import torch.distributed as dist
from hf_models import write_model

from vapo_megatron.megatron import parity
from vapo_megatron.megatron.platform import Platform
from vapo_megatron.weights.spec import read_spec
from vapo_megatron.weights.torch_dist import write_model_card


def test_its_world_has_a_group_of_the_cpu_which_meshes_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: begun.append(backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(parity, "current_platform", lambda: Platform("cuda", "nccl", "spawn"))
    with parity._process_group_of_one():
        assert begun == ["cpu:gloo,cuda:nccl"]


def test_a_model_that_has_no_room_on_the_device_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_dir = write_model(tmp_path / "policy", "qwen3")
    write_model_card(tmp_path / "saved", read_spec(hf_dir), "lm", hf_dir, "float32")
    monkeypatch.setattr(Platform, "free_bytes", lambda _: 1 << 10)
    assert "0.0 GiB are free" in parity.comparison(tmp_path / "saved", hf_dir)
