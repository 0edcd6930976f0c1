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
        server = EngineServer("model", config, dtype, tmp_path / "engine.log", devices)
        programs = []
        server.start()
        end = time.monotonic() + 120
        while not (
            served := [arguments for arguments, _ in programs if "owner_guard" not in arguments[1]]
        ):
            assert time.monotonic() < end, (tmp_path / "engine.log").read_text()
            time.sleep(0.02)
            programs += python.programs()
        server.stop()
        return served[0]

    return start


def test_batch_invariant_kernels_are_a_choice_on_gpus_only(arguments_of) -> None:
    flag = "--enable-deterministic-inference"
    gpu = range(1)
    assert flag not in arguments_of(RolloutConfig(), "bfloat16", gpu)
    assert flag in arguments_of(RolloutConfig(deterministic=True), "bfloat16", gpu)
    assert flag in arguments_of(RolloutConfig(), "float32", gpu)
    assert flag in arguments_of(RolloutConfig(), "bfloat16", None)
    assert flag not in arguments_of(RolloutConfig(deterministic=False), "bfloat16", None)


def test_bfloat16_engines_compute_float32_logits_by_default(
    arguments_of,
) -> None:
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
    assert (tmp_path / "engine.ended1.log").read_text() == "why it ended" and (
        tmp_path / "engine.ended2.log"
    ).exists()


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, 65536),
        ({"context_length": 192, "max_running_requests": 96}, 18432),
        ({"context_length": 8192}, 65536),
        ({"context_length": 192, "max_total_tokens": 4096}, 4096),
    ],
)
def test_cache_without_a_gpu_holds_running_responses(
    arguments_of, settings: dict[str, int], tokens: int
) -> None:
    arguments = arguments_of(RolloutConfig(**settings), "float32", None)
    assert arguments[arguments.index("--max-total-tokens") + 1] == str(tokens)
    on_gpu = arguments_of(RolloutConfig(context_length=192), "float32", range(1))
    assert "--max-total-tokens" not in on_gpu
