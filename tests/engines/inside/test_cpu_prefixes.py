"""Requests that wait for a prompt which another one computes, and what the engine computes then."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from hf_models import write_model
from tiny_qwen3 import EOS, SIZES

from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.deadlines import ask
from vapo_megatron.engines.inside.cpu_prefixes import siblings
from vapo_megatron.engines.inside.cpu_shim import _allowing_torch
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GenerationRequest

PROMPT_TOKENS, GROUP = 48, 8


@dataclass
class Waiting:
    """What a queue knows of a request."""

    rid: str
    origin_input_ids: list[int]
    prefix_len: int = 0
    output_ids: list[int] = field(default_factory=list)


def test_a_sibling_waits_until_its_prompt_is_cached() -> None:
    prompt = list(range(40))
    queue = [
        Waiting("first", prompt),
        Waiting("second", prompt),
        Waiting("other", [*prompt[:-1], 99]),
        Waiting("cached", prompt, prefix_len=39),
        Waiting("continued", prompt, output_ids=[5]),
    ]
    assert siblings(queue) == {"second"}


def test_short_prompts_are_not_waited_for() -> None:
    assert siblings([Waiting(str(index), list(range(16))) for index in range(3)]) == set()


@pytest.mark.parametrize(
    ("deterministic", "policy", "is_disabled"),
    [(True, "fcfs", True), (True, "lpm", False), (False, "fcfs", False)],
)
def test_the_cache_is_off_unless_prompts_are_shared(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool, policy: str, is_disabled: bool
) -> None:
    from sglang.srt.arg_groups import choices, overrides

    allowed: list[str] = []
    declared: dict[str, bool] = {}
    monkeypatch.setattr(overrides, "declare_resolution", lambda *_, **said: declared.update(said))
    arguments = SimpleNamespace(
        enable_deterministic_inference=deterministic, schedule_policy=policy
    )
    _allowing_torch(
        arguments,
        lambda _: allowed.extend(choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND),
    )
    assert declared == ({"disable_radix_cache": True} if is_disabled else {})
    assert "torch_native" in allowed
    assert "torch_native" not in choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen3", **SIZES)


def group_of(model_dir: Path, log: Path, share_prompts: bool) -> tuple[list[Sample], float]:
    """A group of one prompt, and the prompt tokens that the server computed for it."""
    config = RolloutConfig(
        max_running_requests=GROUP,
        max_total_tokens=2048,
        share_prompts=share_prompts,
        server_args={"enable_metrics": True},
    )
    prompts = [Prompt("0", "", "", tuple(range(3, 3 + PROMPT_TOKENS)))]
    request = GenerationRequest(prompts, GROUP, SamplingConfig(max_new_tokens=12), 7, 0)
    with (
        EngineServer(model_dir, config, "float32", log) as server,
        Dispatcher([server.address], config, stop_token_ids=[EOS]) as dispatcher,
    ):
        samples = dispatcher.collect(request)
        metrics = ask(f"{server.address.url}/metrics", 60).content.decode()
    cached = [
        float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith("sglang:cached_tokens_total")
    ]
    return samples, GROUP * PROMPT_TOKENS - sum(cached)


def test_a_group_computes_its_prompt_once(model_dir: Path, tmp_path: Path) -> None:
    alone, computed_alone = group_of(model_dir, tmp_path / "alone.log", share_prompts=False)
    shared, computed = group_of(model_dir, tmp_path / "shared.log", share_prompts=True)
    assert computed_alone == GROUP * PROMPT_TOKENS
    # The first computes all of it, the others their last token
    assert computed == PROMPT_TOKENS + GROUP - 1
    for one, other in zip(alone, shared, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        assert other.rollout_logprobs == pytest.approx(one.rollout_logprobs, abs=1e-5)
