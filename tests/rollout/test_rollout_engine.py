"""Against a real server: its samples, its reports, and its weights."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_qwen3 import EOS, largest_difference, token_logprobs
from transformers import Qwen3ForCausalLM

from vapo_megatron.config.rollout import AsynchronousConfig, RolloutConfig, SamplingConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.engines.external_server import ask_health
from vapo_megatron.engines.server.client import EngineClient, PauseMode
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.engines.weight_sync.session import WeightSync
from vapo_megatron.engines.weight_sync.transports import SharedMemoryTransport
from vapo_megatron.errors import RunFailed
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GenerationRequest

PROMPTS = [
    Prompt(
        id=str(i), problem="", answer="", token_ids=tuple(range(3 + i, 8 + 2 * i)), cursor=100 + i
    )
    for i in range(6)
]
SAMPLING = SamplingConfig(max_new_tokens=24)
SEQUENCES = [[5, 9, 77, 31, 64, 8, 100], [120, 3, 3, 40], list(range(10, 60))]


@pytest.fixture
def dispatcher(server: EngineServer, config: RolloutConfig) -> Iterator[Dispatcher]:
    with Dispatcher([server.address], config, stop_token_ids=[EOS]) as running:
        yield running


@pytest.fixture
def sync(server: EngineServer, model: Qwen3ForCausalLM) -> Iterator[WeightSync]:
    """Leaves the server with the weights of model, version 0, however the test ends."""
    with WeightSync(SharedMemoryTransport(EngineClient(server.address, 60), 1)) as running:
        yield running
        running.load(buckets_of(model), version=0)


def buckets_of(model: Qwen3ForCausalLM, size: int = 5) -> list[list[tuple[str, torch.Tensor]]]:
    tensors = list(model.state_dict().items())
    return [tensors[start : start + size] for start in range(0, len(tensors), size)]


def test_garbage_collection_skips_what_an_idle_server_holds(
    server: EngineServer,
) -> None:
    log = Path(server.address.log_file).read_text()
    frozen = re.search(r"^(\d+) objects are frozen; garbage collection: True$", log, re.MULTILINE)
    assert frozen is not None, log
    assert int(frozen[1]) > 100_000


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8), (1.5, 1.0)])
def test_rollout_logprobs_are_at_temperature_over_the_vocabulary(
    dispatcher: Dispatcher, model: Qwen3ForCausalLM, temperature: float, top_p: float
) -> None:
    sampling = SamplingConfig(max_new_tokens=24, temperature=temperature, top_p=top_p)
    for sample in dispatcher.collect(
        GenerationRequest(PROMPTS, 2, sampling, seed=1, weight_version=0)
    ):
        tokens = [*sample.prompt.token_ids, *sample.response_ids]
        expected = token_logprobs(model, tokens, temperature)[-len(sample.response_ids) :]
        assert sample.rollout_logprobs == pytest.approx(expected, abs=1e-4)


def test_samples_come_in_order_and_say_where_they_come_from(dispatcher: Dispatcher) -> None:
    counts: list[int] = []
    samples = dispatcher.collect(
        GenerationRequest(PROMPTS, 3, SAMPLING, seed=2, weight_version=0), on_done=counts.append
    )
    assert [(sample.group, sample.index) for sample in samples] == [
        (g, i) for g in range(6) for i in range(3)
    ]
    assert all(sample.prompt is PROMPTS[sample.group] for sample in samples)
    assert {(sample.weight_version_oldest, sample.weight_version) for sample in samples} == {(0, 0)}
    assert len({sample.seed for sample in samples}) == 18
    assert counts == [3] * 6


def test_a_response_depends_on_its_seed_and_not_on_its_batch(dispatcher: Dispatcher) -> None:
    together = dispatcher.collect(GenerationRequest(PROMPTS, 4, SAMPLING, seed=3, weight_version=0))
    alone = dispatcher.collect(
        GenerationRequest(PROMPTS[4:5], 2, SAMPLING, seed=3, weight_version=0)
    )
    assert [list(sample.response_ids) for sample in alone] == [
        list(sample.response_ids) for sample in together[16:18]
    ]
    other_seed = dispatcher.collect(
        GenerationRequest(PROMPTS, 4, SAMPLING, seed=4, weight_version=0)
    )
    assert all(
        list(a.response_ids) != list(b.response_ids)
        for a, b in zip(together, other_seed, strict=True)
    )


def test_a_response_ends_with_the_end_token_or_at_the_limit(dispatcher: Dispatcher) -> None:
    samples = dispatcher.collect(GenerationRequest(PROMPTS, 32, SAMPLING, seed=5, weight_version=0))
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample in samples:
        assert EOS not in sample.response_ids[:-1]
        assert (sample.response_ids[-1] == EOS) == (sample.finish_reason == "stop")
        assert len(sample.response_ids) == 24 or sample.finish_reason == "stop"
        assert len(sample.rollout_logprobs) == len(sample.response_ids)


def test_pushed_weights_are_the_ones_that_answer(
    sync: WeightSync, dispatcher: Dispatcher, other_model: Qwen3ForCausalLM
) -> None:
    expected = [token_logprobs(other_model, sequence) for sequence in SEQUENCES]
    assert largest_difference(sync, SEQUENCES, expected) > 1e-4
    sync.load(buckets_of(other_model), version=7)
    assert largest_difference(sync, SEQUENCES, expected) < 1e-4
    samples = dispatcher.collect(GenerationRequest(PROMPTS, 1, SAMPLING, seed=1, weight_version=7))
    assert {sample.weight_version for sample in samples} == {7}


def test_response_continues_with_new_weights_and_log_probs(
    server: EngineServer,
    dispatcher: Dispatcher,
    sync: WeightSync,
    model: Qwen3ForCausalLM,
    other_model: Qwen3ForCausalLM,
) -> None:
    long = SamplingConfig(max_new_tokens=220)
    groups = [
        replace(g, goes_on=True)
        for g in GenerationRequest(PROMPTS[:4], 2, long, seed=3, weight_version=0).groups()
    ]
    modes: dict[PauseMode, bool] = {"retract": True, "in_place": False}
    for mode, exact in modes.items():
        # How soon they are under way, and over, is the machine's affair.
        for wait in (0.2, 0.1, 0.4, 0.8):
            work = [dispatcher.loop.start(dispatcher.generate(group)) for group in groups]
            time.sleep(wait)
            with WeightSync(
                SharedMemoryTransport(EngineClient(server.address, 60), 1), pause=mode
            ) as later:
                later.load(buckets_of(other_model), version=7)
            samples = [sample for future in work for sample in future.result(timeout=120)]
            mixed = [sample for sample in samples if len(sample.versions) == 2]
            if mixed:
                break
            sync.load(buckets_of(model), version=0)
        assert mixed, "none was under way"
        for sample in mixed:
            (old, before), (new, after) = sample.versions
            assert (old, new) == (0, 7) == (sample.weight_version_oldest, sample.weight_version)
            assert before + after == len(sample.response_ids)
            tokens = [*sample.prompt.token_ids, *sample.response_ids.tolist()]
            by_old, by_new = (
                token_logprobs(m, tokens)[-(before + after) :] for m in (model, other_model)
            )
            assert sample.rollout_logprobs[:before] == pytest.approx(by_old[:before], abs=1e-4)
            assert abs(float(sample.rollout_logprobs[before]) - by_old[before]) > 1e-4, (
                "marked one version too new"
            )
            same = sample.rollout_logprobs[before:] == pytest.approx(by_new[before:], abs=1e-4)
            assert same is exact, "in place, the old weights' prefix stays in the cache"
        sync.load(buckets_of(model), version=0)


@pytest.mark.full
def test_response_waiting_over_in_place_sync_reads_no_old_cache(
    model_path: Path,
    config: RolloutConfig,
    model: Qwen3ForCausalLM,
    other_model: Qwen3ForCausalLM,
    tmp_path: Path,
) -> None:
    ahead = AsynchronousConfig(max_staleness=1, weight_sync="in_place")
    # Deterministic engines cache no prompts on a CPU.
    config = config.model_copy(
        update={"asynchronous": ahead, "deterministic": False, "max_running_requests": 4}
    )
    long = SamplingConfig(max_new_tokens=120)
    (group,) = GenerationRequest(PROMPTS[5:], 32, long, seed=3, weight_version=0).groups()
    with EngineServer(model_path, config, "float32", tmp_path / "engine.log") as server:
        server.wait_until_ready()
        client = EngineClient(server.address, 60)
        with (
            Dispatcher([server.address], config, [EOS]) as dispatcher,
            WeightSync(SharedMemoryTransport(client, 1), pause="in_place") as sync,
        ):
            sync.load(buckets_of(model), version=0)
            dispatcher.collect(
                GenerationRequest(PROMPTS[5:], 1, SAMPLING, seed=1, weight_version=0)
            )
            # The server runs four of them; the others wait in it, and the old weights have read
            # their prompt.
            work = dispatcher.loop.start(dispatcher.generate(replace(group, goes_on=True)))
            time.sleep(0.2)
            sync.load(buckets_of(other_model), version=7)
            samples = work.result(timeout=120)
    waited = [sample for sample in samples if sample.weight_version_oldest == 7]
    assert waited, "none began after the weight sync"
    for sample in waited:
        tokens = [*sample.prompt.token_ids, *sample.response_ids.tolist()]
        expected = token_logprobs(other_model, tokens)[-len(sample.response_ids) :]
        assert sample.rollout_logprobs == pytest.approx(expected, abs=1e-4)


def test_what_is_cancelled_ends_in_the_server(dispatcher: Dispatcher, server: EngineServer) -> None:
    long = SamplingConfig(max_new_tokens=220)
    (group,) = GenerationRequest(PROMPTS[:1], 2, long, seed=3, weight_version=0).groups()
    work = dispatcher.loop.start(dispatcher.generate(group))
    time.sleep(0.2)
    work.cancel()
    client = EngineClient(server.address, 5.0)
    dispatcher.loop.run(client._wait_until_idle())
    dispatcher.loop.run(client.close())


def test_responses_that_wait_for_weights_are_no_hang(
    dispatcher: Dispatcher, server: EngineServer
) -> None:
    """A weight sync may take longer than the limit of a batch."""
    client = EngineClient(server.address, 5.0)
    dispatcher.loop.run(client.pause("in_place"))
    request = GenerationRequest(PROMPTS, 1, SAMPLING, 1, 0)
    with ThreadPoolExecutor() as threads:
        work = threads.submit(dispatcher.collect, request)
        time.sleep(1.0)
        told = ask_health(server.address, 5)
        dispatcher.loop.run(client.resume())
        dispatcher.loop.run(client.close())
        assert (
            told is not None
            and told["requests"] == len(PROMPTS)
            and told["paused"]
            and told["batches"] > 0
        )
        assert len(work.result(timeout=240)) == len(PROMPTS)


def test_a_version_other_than_expected_ends_the_run(dispatcher: Dispatcher) -> None:
    with pytest.raises(RunFailed, match="of version 0 to 0, expected 1"):
        dispatcher.collect(GenerationRequest(PROMPTS, 1, SAMPLING, seed=1, weight_version=1))


def test_the_tensor_that_differs_is_named(sync: WeightSync, model: Qwen3ForCausalLM) -> None:
    assert sync.differing_tensors(buckets_of(model)) == []
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights["model.layers.1.self_attn.k_proj.weight"][5, 5] += 1e-5
    assert sync.differing_tensors([list(weights.items())]) == [
        "model.layers.1.self_attn.k_proj.weight differs"
    ]
    expected = [token_logprobs(model, sequence) for sequence in SEQUENCES]
    assert largest_difference(sync, SEQUENCES, expected) < 1e-4


def test_a_request_the_server_refuses_is_told_in_one_line(
    dispatcher: Dispatcher, server: EngineServer
) -> None:
    too_long = Prompt(id="long", problem="", answer="", token_ids=tuple([5] * 300))
    with pytest.raises(RunFailed) as raised:
        dispatcher.collect(GenerationRequest([too_long], 1, SAMPLING, seed=1, weight_version=0))
    assert server.address.log_file in str(raised.value)
    assert "256" in str(raised.value)
    assert "\n" not in str(raised.value)
