"""Episodes through the endpoint: tokens as drawn, observations between, what breaks, what begins a
segment."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from batches import in_segments
from openai import AsyncOpenAI
from tiny_qwen3 import token_logprobs
from transformers import Qwen3ForCausalLM

from vapo_megatron.agents.agent import load_agent
from vapo_megatron.agents.episodes import Agents, episode_metrics, is_whole
from vapo_megatron.config.data import PromptTemplate
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import EpisodeConfig, RolloutConfig, SamplingConfig
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.errors import BadInput
from vapo_megatron.evaluation.evaluator import Evaluator, generate_with
from vapo_megatron.evaluation.responses import read_responses
from vapo_megatron.rewards.grading import grade_samples
from vapo_megatron.rewards.math import Grade
from vapo_megatron.rewards.pool import Case, VerifierPool
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.packed_groups import pack_groups, unpack_groups
from vapo_megatron.rollout.request import GroupRequest
from vapo_megatron.weights.tiny import word_tokenizer

TEMPLATE = (
    "{% for m in messages %}<bos> {{ m['role'] }} {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<bos> assistant {% endif %}"
)
PRIVILEGED = (50, 51, 52)  # what a critic alone reads: neither endpoint nor engine may
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("words")
    words = ["user", "assistant", "tool", "system", *(f"w{n}" for n in range(120))]
    word_tokenizer(words, 256, TEMPLATE).save_pretrained(folder)
    return TextTokenizer(folder, PromptTemplate(chat_template=True))


@pytest.fixture
def dispatcher(
    server: EngineServer, config: RolloutConfig, tokenizer: TextTokenizer
) -> Iterator[Dispatcher]:
    with Dispatcher([server.address], config, [tokenizer.eos_id]) as running:
        yield running


async def one_turn(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    client = AsyncOpenAI(base_url=base_url, api_key="none", http_client=http_client)
    answer = await client.chat.completions.create(model="policy", messages=task["messages"])
    assert answer.choices[0].message.content is not None
    return 1.0


async def three_turns(task: dict[str, Any], base_url: str, http_client: Any) -> dict[str, Any]:
    client = AsyncOpenAI(base_url=base_url, api_key="none", http_client=http_client)
    messages = list(task["messages"])
    for turn in range(3):
        stream = await client.chat.completions.create(
            model="policy", messages=messages, stream=True
        )
        content = "".join([part.choices[0].delta.content or "" async for part in stream])
        messages += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": f"w{turn} w{turn}"},
        ]
    return {"reward": 0.25, "tool_errors": 2}


async def forgets(task: dict[str, Any], base_url: str, http_client: Any) -> None:
    client = AsyncOpenAI(base_url=base_url, api_key="none", http_client=http_client)
    for problem in ("w5", "w6 w7"):
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": problem}]
        )


async def hangs(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    await asyncio.sleep(60)
    return 1.0


async def raises(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    raise KeyError("of the user's")


async def lies(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    await one_turn(task, base_url, http_client)
    return float("nan")


async def prowls(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    other = base_url.replace(base_url.split("/")[-2], "guess")
    answer = await http_client.post(
        f"{other}/chat/completions", json={"messages": task["messages"]}
    )
    assert answer.status_code == 404
    for body in ({}, {"messages": [{"role": "root"}]}, {"messages": task["messages"], "n": 4}):
        assert (
            await http_client.post(f"{base_url}/chat/completions", json=body)
        ).status_code == 400
    return await one_turn(task, base_url, http_client)


class Echo:
    """Gives back what it is told, twice."""

    def __init__(self) -> None:
        self.steps = 0

    async def reset(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return list(task["messages"])

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        self.steps += 1
        return [{"role": "user", "content": message["content"]}], 0.5, self.steps == 2


def play(
    dispatcher: Dispatcher,
    tokenizer: TextTokenizer,
    name: str,
    limit: int = 12,
    samples: int = 3,
    **limits: Any,
) -> tuple[list[Any], Agents]:
    settings = RolloutConfig(
        agent=f"{__name__}:{name}", episode=EpisodeConfig(**{"max_tokens": 200} | limits)
    )
    agents = Agents(dispatcher, tokenizer, settings)
    try:
        return dispatcher.loop.run(agents.generate(group(tokenizer, samples, limit))), agents
    finally:
        agents.close()


def group(tokenizer: TextTokenizer, samples: int = 3, limit: int = 12) -> GroupRequest:
    prompt = Prompt(
        "row",
        "w3 w4",
        "w9",
        tuple(tokenizer.encode_prompt("w3 w4")),
        cursor=7,
        privileged_ids=PRIVILEGED,
    )
    return GroupRequest(prompt, samples, SamplingConfig(max_new_tokens=limit), limit, 11, 0)


def test_an_episode_of_one_turn_is_the_response(
    dispatcher: Dispatcher, tokenizer: TextTokenizer
) -> None:
    direct = dispatcher.loop.run(dispatcher.generate(group(tokenizer)))
    samples, _ = play(dispatcher, tokenizer, "one_turn")
    for ours, theirs in zip(samples, direct, strict=True):
        ours.reward = theirs.reward = 1.0
        for name in (
            "seed",
            "index",
            "finish_reason",
            "versions",
            "weight_version",
            "engine",
            "loss_mask",
        ):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.prompt.token_ids == theirs.prompt.token_ids
        # The engine runs a group as one batch and episodes as they come: rounding differs, tokens
        # do not.
        np.testing.assert_allclose(ours.rollout_logprobs, theirs.rollout_logprobs, atol=1e-5)
        ours.rollout_logprobs = theirs.rollout_logprobs
    ours = from_samples(samples).tensors()
    theirs = from_samples(direct).tensors()
    assert ours.keys() == theirs.keys() and all(
        bool((ours[key] == theirs[key]).all()) for key in ours
    )


def test_turns_are_kept_as_drawn_with_log_probs_of_full_context(
    dispatcher: Dispatcher, tokenizer: TextTokenizer, model: Qwen3ForCausalLM
) -> None:
    samples, _ = play(dispatcher, tokenizer, "three_turns")
    assert is_whole(samples) and episode_metrics(samples)["agent/turns"] == 3
    for sample in samples:
        tokens = [*sample.prompt.token_ids, *sample.response_ids.tolist()]
        expected = np.array(token_logprobs(model, tokens)[len(sample.prompt.token_ids) - 1 :])
        mask = sample.loss_mask
        assert np.abs(sample.rollout_logprobs - expected)[mask].max() < 1e-4
        assert np.diff(mask.astype(int)).tolist().count(1) == 2 and mask[0] and mask[-1]
        observed = tokenizer.decode_all(sample.response_ids[~mask].tolist())
        assert (
            observed.count("user w0 w0 <eos> <bos> assistant") == 1
            and observed.count("user w1 w1") == 1
        )
        assert (
            sample.episode["tool_errors"] == 2
            and sample.episode["tokens_observed"] == (~mask).sum()
        )
    assert len({sample.seed for sample in samples}) == 3 and samples[0].reward == 0.25
    packed = pack_groups({7: samples})
    again = unpack_groups(packed, lambda _: group(tokenizer).prompt, tokenizer.decode)[7]
    assert [s.prompt.token_ids for s in again] == [s.prompt.token_ids for s in samples]
    assert [s.episode for s in again] == [s.episode for s in samples]


def test_a_rewritten_history_begins_a_segment_of_the_same_sample(
    dispatcher: Dispatcher, tokenizer: TextTokenizer, model: Qwen3ForCausalLM
) -> None:
    samples, _ = play(dispatcher, tokenizer, "forgets")
    row = episode_metrics(samples)
    again = tokenizer.encode_prompt("w6 w7")
    assert len(samples) == 3 and row["agent/turns"] == row["agent/segments"] == 2, (
        "an episode is one sample"
    )
    assert row["agent/tokens_rewritten"] == len(again)
    assert row["agent/tokens_written"] == sum(s.loss_mask.sum() for s in samples) / 3
    for sample in samples:
        (start,) = sample.segment_starts
        assert (
            sample.prompt.token_ids == tuple(tokenizer.encode_prompt("w5"))
            and sample.reward is None
        )
        assert sample.response_ids[start : start + len(again)].tolist() == again
        assert not sample.loss_mask[start : start + len(again)].any()
        assert sample.loss_mask.sum() == len(sample.loss_mask) - len(again)
    for sample in samples:
        sample.reward = 0.0
    packed = pack_groups({7: samples})
    for kept in (
        samples,
        unpack_groups(packed, lambda _: group(tokenizer).prompt, tokenizer.decode)[7],
    ):
        batch = from_samples(kept)
        assert batch.privileged_tokens.tolist() == [*PRIVILEGED] * 3
        assert (batch.table().critic_lengths - batch.lengths).tolist() == [2 * 3] * 3, (
            "before each segment"
        )
    for part in in_segments(samples):  # the log-probs are those of each segment's own context
        tokens = [*part.prompt.token_ids, *part.response_ids.tolist()]
        expected = np.array(token_logprobs(model, tokens)[len(part.prompt.token_ids) - 1 :])
        assert np.abs(part.rollout_logprobs - expected).max() < 1e-4


def test_all_segments_count_towards_the_tokens_of_an_episode(
    dispatcher: Dispatcher, tokenizer: TextTokenizer
) -> None:
    most = 2 * len(tokenizer.encode_prompt("w6 w7")) + 12 + 3
    samples, _ = play(dispatcher, tokenizer, "forgets", max_tokens=most)
    assert all(len(s.prompt.token_ids) + len(s.response_ids) <= most for s in samples)
    for sample in samples:  # 12 tokens in the first segment leave four for the second
        assert (
            sample.loss_mask[: sample.segment_starts[0]].sum() < 12
            or len(sample.response_ids) == most - 6
        )


def test_evaluation_plays_episodes_and_grades_the_ungraded(
    dispatcher: Dispatcher, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    problems = [replace(group(tokenizer).prompt, id=f"p{n}", cursor=n) for n in range(2)]
    sampling = SamplingConfig(max_new_tokens=12)
    for name, reason in (("Echo", "agent"), ("forgets", "asked"), ("raises", "broken: error")):
        settings = RolloutConfig(agent=f"{__name__}:{name}", episode=EpisodeConfig(max_tokens=200))
        agents = Agents(dispatcher, tokenizer, settings)
        generator = generate_with(
            partial(dispatcher.collect, generate=agents.generate),
            tokenizer.decode,
            sampling,
            11,
            0,
            RewardConfig(),
        )
        evaluator = Evaluator(cast(VerifierPool, AskedVerifier()), RewardConfig())
        try:
            responses = evaluator.answer("set", problems, 2, generator)
        finally:
            agents.close()
        for response in responses:
            response.finish_reason = "stop"  # what this policy writes ends at its limit
        result, _ = evaluator.conclude("set", problems, responses, 2, tmp_path / f"{name}.jsonl")
        assert result.avg_at_k == (name != "raises") and {
            one.grade_reason for one in responses
        } == {reason}
        again = read_responses(tmp_path / f"{name}.jsonl")
        assert again == responses and all(bool(one.episode) is (name != "raises") for one in again)
        assert all(
            one.episode.endswith(one.text) and one.episode != one.text
            for one in again
            if one.episode
        )


class AskedVerifier:
    """Finds everything right that it is asked about."""

    def grade_batch(self, cases: Sequence[Case], on_done: Callable[..., None]) -> list[Grade]:
        return [Grade(True, cast(Any, "asked")) for _ in cases]


def test_rewards_of_an_environment_stay_with_their_turns(
    dispatcher: Dispatcher, tokenizer: TextTokenizer
) -> None:
    samples, _ = play(dispatcher, tokenizer, "Echo")
    for sample in samples:
        ends = np.append(
            np.flatnonzero(np.diff(sample.loss_mask.astype(int)) == -1), len(sample.loss_mask) - 1
        )
        assert np.flatnonzero(sample.turn_rewards).tolist() == ends.tolist() and set(
            sample.turn_rewards[ends]
        ) == {0.5}
    assert [sample.reward for sample in samples] == [1.0] * 3 and episode_metrics(samples)[
        "agent/turns"
    ] == 2
    grade_samples(samples, None, tokenizer.decode, RewardConfig())  # type: ignore[arg-type]
    assert all(sample.correct and sample.grade_reason == "agent" for sample in samples)


@pytest.mark.parametrize(
    ("name", "limits", "cause"),
    [("hangs", {"timeout_s": 0.2}, "timeout"), ("raises", {}, "error"), ("lies", {}, "error")],
)
def test_what_breaks_is_counted_by_cause_and_has_no_tokens(
    dispatcher: Dispatcher, tokenizer: TextTokenizer, name: str, limits: dict[str, Any], cause: str
) -> None:
    samples, agents = play(dispatcher, tokenizer, name, **limits)
    assert not is_whole(samples) and not sum(len(sample.response_ids) for sample in samples)
    broken = {key: count for key, count in agents.broken_metrics(9).items() if count}
    assert broken == {"agent/broken": 0.25, f"agent/broken_{cause}": 3}


@pytest.mark.parametrize("limits", [{"max_turns": 2}, {"max_tokens": 24}])
def test_an_episode_that_reaches_a_limit_is_truncated(
    dispatcher: Dispatcher, tokenizer: TextTokenizer, limits: dict[str, int]
) -> None:
    samples, _ = play(dispatcher, tokenizer, "three_turns", **limits)
    assert is_whole(samples) and all(
        sample.truncated and sample.reward is None for sample in samples
    )
    assert all(
        len(s.prompt.token_ids) + len(s.response_ids) <= limits.get("max_tokens", 200)
        for s in samples
    )
    (cut,), _ = play(dispatcher, tokenizer, "Echo", samples=1, max_turns=1)
    grade_samples([cut], cast(VerifierPool, AskedVerifier()), tokenizer.decode, RewardConfig())
    assert cut.truncated and cut.reward == -1.0 + 0.5, "what it earned before the limit stays"


def test_verifiers_that_are_not_there_are_refused_by_name() -> None:
    with pytest.raises(
        BadInput, match=r"rollout\.agent=verifiers:no_such_environment: cannot be imported"
    ):
        load_agent("verifiers:no_such_environment")


def test_only_the_episodes_own_path_answers(
    dispatcher: Dispatcher, tokenizer: TextTokenizer
) -> None:
    samples, _ = play(dispatcher, tokenizer, "prowls")
    assert is_whole(samples)


def test_tool_calls_are_parsed_by_the_engine(dispatcher: Dispatcher, server: EngineServer) -> None:
    text = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    left, calls = dispatcher.loop.run(
        dispatcher.parse_tool_calls(server.address.url, text, TOOLS, "qwen25")
    )
    assert left.strip() == "I add." and [(c["name"], c["parameters"]) for c in calls] == [
        ("add", '{"a": 1}')
    ]


@pytest.mark.parametrize("name", ["missing", "group", "PromptTemplate"])
def test_an_agent_that_cannot_be_run_is_refused_by_name(name: str) -> None:
    with pytest.raises(BadInput, match=f"rollout.agent={__name__}:{name}"):
        load_agent(f"{__name__}:{name}")
