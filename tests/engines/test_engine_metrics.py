"""What an engine tells Prometheus, where server_args ask for it."""

import urllib.request
from pathlib import Path

import pytest

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.server import DIRECT, EngineServer


@pytest.mark.full
def test_an_engine_reports_to_prometheus_where_asked(model_path: Path, config: RolloutConfig, tmp_path: Path) -> None:
    asked = config.model_copy(update={"server_args": {"enable_metrics": True}})
    with EngineServer(model_path, asked, "float32", tmp_path / "engine.log") as server:
        body = b'{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "ignore_eos": true}}'
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.address.key}"}
        request = urllib.request.Request(f"{server.address.url}/generate", data=body, headers=headers)
        DIRECT.open(request, timeout=60).close()
        with DIRECT.open(f"{server.address.url}/metrics", timeout=60) as answer:  # Prometheus has no key
            lines = answer.read().decode().splitlines()
    written = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("sglang:generation_tokens_total")]
    assert written == [4.0]
    assert any(line.startswith("sglang:num_running_reqs") for line in lines)
