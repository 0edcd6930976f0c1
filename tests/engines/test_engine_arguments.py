"""What an engine is started with on GPUs, as a stand-in for its program sees it."""

import time
from pathlib import Path

import pytest
from stand_ins import Python

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.server.process import EngineServer


@pytest.fixture
def arguments_of(python: Python, tmp_path: Path):
    """A function from a config to the command line of its server."""

    def start(config: RolloutConfig, dtype: str, devices: range | None) -> list[str]:
        server, programs = EngineServer("model", config, dtype, tmp_path / "engine.log", devices), []
        server.start()
        end = time.monotonic() + 30
        while not (served := [arguments for arguments, _ in programs if "owner_guard" not in arguments[1]]):
            assert time.monotonic() < end, (tmp_path / "engine.log").read_text()
            time.sleep(0.02)
            programs += python.programs()
        server.stop()
        return served[0]

    return start


def test_batch_invariant_kernels_are_a_choice_on_gpus_and_the_rule_elsewhere(arguments_of) -> None:
    flag, gpu = "--enable-deterministic-inference", range(1)
    assert flag not in arguments_of(RolloutConfig(), "bfloat16", gpu)
    assert flag in arguments_of(RolloutConfig(deterministic=True), "bfloat16", gpu)
    assert flag in arguments_of(RolloutConfig(), "float32", gpu)
    assert flag in arguments_of(RolloutConfig(), "bfloat16", None)
    assert flag not in arguments_of(RolloutConfig(deterministic=False), "bfloat16", None)


def test_logits_of_bfloat16_engines_are_made_in_float32_unless_the_user_takes_it_back(arguments_of) -> None:
    flag = "--enable-fp32-lm-head"
    assert flag in arguments_of(RolloutConfig(), "bfloat16", range(1))
    assert flag not in arguments_of(RolloutConfig(), "float32", None)
    back = RolloutConfig(server_args={"enable_fp32_lm_head": False})
    assert flag not in arguments_of(back, "bfloat16", range(1))


def test_sglangs_own_watchdog_waits_for_kernels_and_weights(arguments_of) -> None:
    for seconds, expected in ((1800, "1800.0"), (60, "600.0")):
        told = arguments_of(RolloutConfig(start_timeout_s=seconds), "bfloat16", range(1))
        assert told[told.index("--watchdog-timeout") + 1] == expected


def test_the_log_of_an_engine_that_ended_with_its_rank_stays(arguments_of, tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text("why it ended")
    for _ in range(2):
        arguments_of(RolloutConfig(), "bfloat16", None)
    assert (tmp_path / "engine.ended1.log").read_text() == "why it ended" and (tmp_path / "engine.ended2.log").exists()
