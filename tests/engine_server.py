"""Real SGLang servers on tiny random models, shared by all tests that need no more of them (a
pytest plugin)."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_qwen3 import make_model
from transformers import Qwen3ForCausalLM

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.process import EngineServer

# On a GPU, compile kernels when they are met: DeepGEMM otherwise spends minutes on all that an
# engine may ever need.
os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")


@pytest.fixture(scope="session")
def model() -> Qwen3ForCausalLM:
    return make_model(0)


@pytest.fixture(scope="session")
def other_model() -> Qwen3ForCausalLM:
    return make_model(1)


@pytest.fixture(scope="session")
def model_path(model: Qwen3ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def config() -> RolloutConfig:
    return RolloutConfig(
        max_running_requests=64, max_total_tokens=16384, start_timeout_s=120, collect_timeout_s=60
    )


@pytest.fixture(scope="session")
def server(
    model_path: Path, config: RolloutConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    with EngineServer(
        model_path, config, "float32", tmp_path_factory.mktemp("logs") / "engine.log"
    ) as running:
        yield running


@pytest.fixture(scope="session")
def engine_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineAddress]:
    """Of whole runs in forked processes (attempts.py), one after the other."""
    from attempts import ENGINE
    from tiny_runs import make_model

    folder = tmp_path_factory.mktemp("engine_of_runs")
    model = make_model(folder / "model")
    with EngineServer(model, RolloutConfig(**ENGINE), "float32", folder / "engine.log") as running:
        yield running.address
