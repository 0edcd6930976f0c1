"""The example whose context is compacted: its configs are valid, right summaries lead to the
answer, and the mask takes out summaries alone."""

import asyncio
import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.agents import compact, lookup
from examples.agents.learn import TASKS
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.train import TrainConfig

FOLDER = Path(compact.__file__).parent
COMPACT = TASKS["compact"]


@pytest.mark.parametrize("method", COMPACT.methods)
def test_each_method_has_a_config(method: str) -> None:
    config = load_config(
        TrainConfig, FOLDER / COMPACT.config, list(COMPACT.methods[method]), PRESETS
    )
    assert config.value_pretraining.enabled == method.startswith("token")
    assert config.algorithm.uses_critic != method.startswith("grpo")
    assert (config.critic.kind == "regression") == (method == "regression")
    assert (config.algorithm.mask_function is not None) == method.endswith("_masked")


class Policy:
    """An HTTP client whose policy looks up what its context says, and summarises what it has
    reached; it notes its contexts."""

    def __init__(self, wrong_summary: bool = False) -> None:
        self.wrong_summary = wrong_summary
        self.contexts: list[list[str]] = []

    async def post(self, url: str, json: dict[str, Any]) -> Any:
        said = [message["content"] for message in json["messages"]]
        self.contexts.append(said)
        content = self.answer(said)
        choices = [{"message": {"role": "assistant", "content": content}}]
        return SimpleNamespace(raise_for_status=lambda: None, json=lambda: {"choices": choices})

    def answer(self, said: list[str]) -> str:
        calls = sum(text.startswith("get") for text in said)
        key, hops = said[0].split()
        left = int(hops[1:]) - calls
        if calls:
            key = [text for text in said if text.startswith("k")][-1]
        if said[-1] == compact.SUMMARISE:
            return f"{'k0' if self.wrong_summary else key} h{left}"
        return f"get {key} h{left}" if left else f"#### {int(key[1:]) % 10}"


def played(row: dict[str, Any], policy: Policy) -> str:
    """The last message of an episode."""
    task = {"table": row["table"], "messages": [{"role": "user", "content": row["problem"]}]}
    asyncio.run(compact.play(task, "", policy))
    return policy.answer(policy.contexts[-1])


def test_right_summaries_lead_to_the_answer() -> None:
    wrong = 0
    for number in range(30):
        row = lookup.problem(random.Random(number), 0, compact.FEWEST_HOPS, compact.MOST_HOPS)
        policy = Policy()
        assert played(row, policy) == f"#### {row['answer']}"
        assert max(map(len, policy.contexts)) <= 2 * compact.CALLS + 2
        wrong += played(row, Policy(wrong_summary=True)) != f"#### {row['answer']}"
    assert wrong > 20


def test_a_context_restarts_from_the_summary_alone() -> None:
    row = lookup.problem(random.Random(1), 0, 5, 5)
    policy = Policy()
    played(row, policy)
    restarts = [
        (before, after)
        for before, after in pairwise(policy.contexts)
        if after[: len(before)] != before
    ]
    assert len(restarts) == 2
    for before, after in restarts:
        assert before[-1] == compact.SUMMARISE and after == [policy.answer(before)]


def test_demonstrations_are_turns_of_such_episodes() -> None:
    rows = list(compact.demonstrations(random.Random(1), 400))
    assert len(rows) == 400
    for row in rows:
        words = row["response"].split()
        if row["problem"].endswith(compact.SUMMARISE):
            assert words[0][0] == "k" and words[1][0] == "h" and len(words) == 2
        else:
            assert words[0] in ("get", "####")
    summaries = [row for row in rows if row["problem"].endswith(compact.SUMMARISE)]
    assert 40 < len(summaries) < 160


def test_the_mask_takes_out_summaries_alone() -> None:
    sample = SimpleNamespace(
        response_ids=list(range(20)),
        turns=((0, 4, False), (5, 9, False), (11, 14, False), (16, 20, False)),
        segment_starts=(14,),
    )
    kept = compact.without_summaries(sample, lambda ids: "")  # type: ignore[arg-type]
    assert [place for place in range(20) if not kept[place]] == [11, 12, 13]
