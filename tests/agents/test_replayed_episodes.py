"""Router replay of episodes: every token that the policy model reads goes through the experts that
it went through when an engine read it first, whatever turn and segment it belongs to."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from stub_episodes import TEMPLATE, Engine, fresh_engine, make_tokenizer, play

from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.microbatch import pack
from vapo_megatron.data.sample import Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.weights.routed_experts import ExpertChoices

CHOICES = ExpertChoices(layers=1, experts=256, per_token=2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("words"), TEMPLATE)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    fresh_engine()
    yield
    fresh_engine()


async def _ask(http_client: Any, base_url: str, messages: list[Any], **body: Any) -> list[Any]:
    answer = await http_client.post(
        f"{base_url}/chat/completions", json={"messages": messages, **body}
    )
    assert answer.status_code == 200
    return [*messages, answer.json()["choices"][0]["message"]]


async def three_turns(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    """The second answer is cut, so that its last token has no end token behind it."""
    messages = list(task["messages"])
    for turn in range(3):
        messages = await _ask(http_client, base_url, messages, max_tokens=2 if turn == 1 else 12)
        messages.append({"role": "user", "content": f"w{turn} w9"})
    return 1.0


async def two_contexts(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    """Two conversations, turn about; then a third that forgets all."""
    first = list(task["messages"])
    second = [{"role": "user", "content": "w5"}]
    for turn in range(2):
        first = [
            *await _ask(http_client, base_url, first),
            {"role": "user", "content": f"w1{turn}"},
        ]
        second = [
            *await _ask(http_client, base_url, second),
            {"role": "user", "content": f"w2{turn} w1"},
        ]
    await _ask(http_client, base_url, [{"role": "user", "content": "w6 w7"}])
    return 1.0


def segments_of(sample: Sample) -> list[tuple[list[int], np.ndarray, np.ndarray]]:
    """Tokens of each segment, which of them the policy wrote, and the experts that are read."""
    assert sample.routed_experts is not None
    ids = [*sample.prompt.token_ids, *sample.response_ids.tolist()]
    prompt = len(sample.prompt.token_ids)
    written = np.concatenate(([False] * prompt, sample.written))
    rows = sample.routed_experts.numpy().astype(int)
    assert len(rows) == len(ids) - 1
    bounds = [0, *(prompt + start for start in sample.segment_starts), len(ids)]
    return [(ids[a:b], written[a:b], rows[a : b - 1]) for a, b in pairwise(bounds)]


@pytest.mark.parametrize(("agent", "turns"), [("three_turns", [3]), ("two_contexts", [2, 2, 1])])
def test_each_token_has_the_experts_of_the_request_that_read_it(
    tokenizer: TextTokenizer, agent: str, turns: list[int]
) -> None:
    samples = play(tokenizer, f"{__name__}:{agent}", experts=CHOICES)
    for sample in samples:
        segments = segments_of(sample)
        assert len(segments) == len(turns)
        for (ids, written, rows), count in zip(segments, turns, strict=True):
            assert rows[:, 0].tolist() == ids[:-1], "its own, not those of another token"
            calls = rows[:, 1]
            last_drawn = np.flatnonzero(written[:-1] & ~written[1:])
            assert (
                len(last_drawn) == count - 1
                and (np.flatnonzero(np.diff(calls)) + 1 == last_drawn).all()
            )
            assert (np.diff(calls) >= 0).all(), (
                "a turn reads the last token of the one before and what is new"
            )


@pytest.mark.parametrize("agent", ["three_turns", "two_contexts"])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_the_policy_reads_them_in_its_micro_batches(
    tokenizer: TextTokenizer, agent: str, cp_size: int
) -> None:
    samples = play(tokenizer, f"{__name__}:{agent}", experts=CHOICES)
    for sample in samples:
        sample.reward = 1.0
    batch = from_samples(samples)
    assert batch.routed_experts is not None and all(
        sample.routed_experts is None for sample in samples
    )
    batch = batch.select([2, 0, 1])
    for rank in range(cp_size):
        packed = pack(batch, [1, 2, 0], 2 * cp_size, 8, cp_size, rank, 2)
        real = packed.ids > 0
        assert packed.experts is not None and real.sum() > 20
        assert packed.experts[real, 0].tolist() == packed.ids[real].tolist()


def test_a_request_is_told_the_experts_of_new_tokens_alone(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them each time would be as many bytes as turns squared."""
    starts = []
    generate = Engine.generate

    async def seen(
        self: Engine, prompts: list[list[int]], params: Any, experts: ExpertChoices, *more: Any
    ) -> Any:
        starts.append((len(prompts[0]), experts.start))
        return await generate(self, prompts, params, experts, *more)

    monkeypatch.setattr(Engine, "generate", seen)
    (sample,) = play(tokenizer, f"{__name__}:three_turns", samples=1, experts=CHOICES)
    prompt = len(sample.prompt.token_ids)
    ends = np.flatnonzero(np.diff(sample.written.astype(int)) == -1)
    assert [start for _, start in starts] == [0, *(prompt + end for end in ends)]


def test_without_replay_nothing_is_asked_and_nothing_kept(tokenizer: TextTokenizer) -> None:
    assert all(
        sample.routed_experts is None for sample in play(tokenizer, f"{__name__}:two_contexts")
    )
