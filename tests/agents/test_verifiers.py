"""Environments of the library verifiers, played by their names on engines that write a script.
`make test-verifiers` installs the library; where it is missing these tests are skipped."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stub_episodes import Engine, fresh_engine, make_tokenizer
from test_rewriting import DROPPING, WORDS

from vapo_megatron.agents.episodes import Agents, episode_metrics, is_whole
from vapo_megatron.config.data import DataConfig, FieldNames
from vapo_megatron.config.rollout import EpisodeConfig, RolloutConfig, SamplingConfig
from vapo_megatron.data.prompts import train_prompts
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GroupRequest

verifiers = pytest.importorskip("verifiers", reason="`make test-verifiers` installs it")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    words = [*WORDS, "<answer>", "</answer>", *(str(number) for number in range(1000))]
    return make_tokenizer(tmp_path_factory.mktemp("words"), DROPPING, words)


def play(
    tokenizer: TextTokenizer, name: str, prompt: Prompt, script: list[str], **limits: Any
) -> Sample:
    """An episode of the environment of this name, in which the policy writes the script, turn by
    turn."""
    fresh_engine()
    Engine.script = [[*tokenizer.encode_response(text), tokenizer.eos_id] for text in script]
    episode = EpisodeConfig.model_validate({"max_tokens": 600} | limits)
    config = RolloutConfig(agent=f"verifiers:{name}", episode=episode)
    stub = Engine
    sampling = SamplingConfig(max_new_tokens=12)
    client: Any = stub
    with Dispatcher(
        [EngineAddress("http://stub", "")], config, [tokenizer.eos_id], client=client
    ) as dispatcher:
        agents = Agents(dispatcher, tokenizer, config)
        try:
            (sample,) = dispatcher.loop.run(
                agents.generate(GroupRequest(prompt, 1, sampling, 12, 11, 0))
            )
        finally:
            agents.close()
    assert is_whole([sample]) and not Engine.script
    return sample


def written(tokenizer: TextTokenizer, sample: Sample) -> str:
    mask = slice(None) if sample.loss_mask is None else sample.loss_mask
    return tokenizer.decode_all(sample.response_ids[mask].tolist())


def test_their_reasoning_gym_grades_what_the_policy_wrote(
    tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ReasoningGymEnv of verifiers on tasks of reasoning-gym: rows as docs/agents.md has them
    written, then played."""
    environment = verifiers.ReasoningGymEnv(
        "leg_counting", num_train_examples=3, num_eval_examples=1, seed=5
    )
    monkeypatch.setitem(sys.modules, "legs", SimpleNamespace(load_environment=lambda: environment))
    environment.get_dataset().to_json(tmp_path / "legs.jsonl")
    fields = FieldNames.model_validate(
        {"problem": "question", "answer": "answer", "extra": ["prompt", "task"]}
    )
    data = DataConfig(train=tmp_path / "legs.jsonl", fields=fields, max_prompt_tokens=600)
    prompts = train_prompts(data, tokenizer)
    assert len(prompts) == 3
    for number, prompt in enumerate(prompts):
        entry = environment.rg_dataset[number]
        for answer in (entry["answer"], "0"):
            text = f"<answer> {answer} </answer>"
            sample = play(tokenizer, "legs", prompt, [text])
            assert sample.reward == environment.rg_dataset.score_answer(answer=answer, entry=entry)
            assert (sample.reward == 1) == (answer == entry["answer"])
            assert written(tokenizer, sample) == f"{text} <eos>" and sample.loss_mask is None
            asked = tokenizer.messages_text(prompt.extra["prompt"])
            assert "step-by-step" in asked and entry["question"].split()[-1] in asked
            assert sample.prompt.token_ids == tuple(tokenizer.encode_response(asked)), (
                "its own system prompt"
            )
            assert Engine.prompts == [list(sample.prompt.token_ids)]


def add(a: str) -> str:
    """Add one.

    Args:
        a: a word with a number.
    """
    return f"w{int(a[1:]) + 1}"


async def right_by_tool(completion: Any, answer: str, **_: Any) -> float:
    """Whether the tool was asked, and the last message is what it said."""
    return float(
        [m["role"] for m in completion[1:2]] == ["tool"] and completion[-1]["content"] == answer
    )


def test_their_tools_are_called_and_tool_output_is_not_trained(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ToolEnv of verifiers, which runs the tool itself."""
    from datasets import Dataset

    rows = Dataset.from_list([{"question": "w3 w4", "answer": "w5"}])
    rubric = verifiers.Rubric(funcs=[right_by_tool])
    environment = verifiers.ToolEnv(tools=[add], dataset=rows, rubric=rubric, max_turns=4)
    monkeypatch.setitem(
        sys.modules, "adding", SimpleNamespace(load_environment=lambda: environment)
    )
    prompt = Prompt("row", "w3 w4", "w5", tuple(tokenizer.encode_prompt("w3 w4")), cursor=7)
    sample = play(tokenizer, "adding", prompt, ["add w4", "w5"], tool_parser="qwen25")
    assert sample.reward == 1.0 and episode_metrics([sample])["agent/turns"] == 2
    assert written(tokenizer, sample) == "add w4 <eos> w5 <eos>"
    assert sample.loss_mask is not None and not sample.segment_starts
    observed = tokenizer.decode_all(sample.response_ids[~sample.loss_mask].tolist())
    assert observed == "<bos> tool w5 <eos> <bos> assistant"
    assert "<bos> tool add <eos>" in tokenizer.decode_all(list(sample.prompt.token_ids)), (
        "the tool was offered"
    )
    for script, reward in ((["w5"], 0.0), (["add w6", "w5"], 1.0), (["add w4", "w6"], 0.0)):
        assert play(tokenizer, "adding", prompt, script, tool_parser="qwen25").reward == reward


def test_an_environment_of_verifiers_is_played_by_its_name(tokenizer: TextTokenizer) -> None:
    prompt = Prompt("row", "w3 w4", "w9", tuple(tokenizer.encode_prompt("w3 w4")), cursor=7)
    sample = play(tokenizer, "sums_for_verifiers", prompt, ["w1 w2", "w6"])
    assert sample.reward == 0.5 and episode_metrics([sample])["agent/turns"] == 2
    assert sample.loss_mask is not None
    assert "user w5 w5 <eos>" in tokenizer.decode_all(
        sample.response_ids[~sample.loss_mask].tolist()
    )
