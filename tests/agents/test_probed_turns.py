"""`vapo-megatron critic` with agents: an episode is repeated up to a turn and goes on from
there."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from stand_ins import Critic
from stub_episodes import TEMPLATE, WRITTEN, Engine, Moody, fresh_engine, make_tokenizer
from tiny_runs import make_model, train_config, write_config
from transformers import AutoConfig, AutoModelForTokenClassification

from vapo_megatron.agents.episodes import Agents
from vapo_megatron.agents.recording import recorded_turns
from vapo_megatron.algorithms.critic_probes import Probes, figures
from vapo_megatron.algorithms.gae import monte_carlo_returns
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.critic_probes import CriticProbesConfig, ProbedRunConfig
from vapo_megatron.config.load import load_config
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import EpisodeConfig, RolloutConfig, SamplingConfig
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.errors import RunFailed
from vapo_megatron.operations.critic_lab.command import probe_critic, probed
from vapo_megatron.operations.critic_lab.probe_rollouts import Drawn, draw
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GroupRequest, response_seed

TURNS = 3
PROMPTS = 4
RESPONSES = 2
AGAIN = 5
SEED = 9
QUANTILES = (0.0, 0.4, 0.7)  # before turns 0, 1 and 2


class Counted:
    """Three turns, each of which earns 1 if its first word has an even number."""

    def __init__(self) -> None:
        self.left = TURNS

    async def reset(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return list(task["messages"])

    def observation(self) -> str:
        return f"w{self.left}"

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        self.left -= 1
        earned = float(int(message["content"].split()[0][1:]) % 2 == 0)
        return [{"role": "user", "content": self.observation()}], earned, self.left == 0


class Changing(Moody, Counted):
    """Cannot be repeated."""


class Impatient(Counted):
    """Ends an episode that it has seen before at once."""

    episodes = 0

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        Impatient.episodes += self.left == TURNS
        messages, earned, done = await super().step(message)
        return messages, earned, done or Impatient.episodes > PROMPTS * RESPONSES


class Choosy(Counted):
    """Breaks one episode in all of those that are drawn first, and one of those that go on."""

    breaks: ClassVar[list[int]] = []
    episodes = 0

    async def reset(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        Choosy.episodes += 1
        if Choosy.episodes in Choosy.breaks:
            raise KeyError("of the user's")
        return await super().reset(task)


async def aside(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    """Asks something else between two turns of a conversation, which is a segment of its own."""

    async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
        answer = await http_client.post(f"{base_url}/chat/completions", json={"messages": messages})
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message

    messages = list(task["messages"])
    messages += [await ask(messages), {"role": "user", "content": "w1"}]
    await ask([{"role": "user", "content": "w2"}])
    await ask(messages)
    return 1.0


class WatchedAgents(Agents):
    """Keeps the turns of the episodes that are drawn first, by their seeds."""

    turns: dict[int, list[Sample]]

    async def generate(self, group: GroupRequest) -> list[Sample]:
        samples = await super().generate(group)
        if not group.begun:
            self.turns |= {sample.seed: recorded_turns(sample) for sample in samples}
        return samples


@contextmanager
def agents_of(tokenizer: TextTokenizer, name: str) -> Iterator[tuple[Dispatcher, WatchedAgents]]:
    fresh_engine()
    config = RolloutConfig(agent=f"{__name__}:{name}", episode=EpisodeConfig(max_tokens=200))
    stub: Any = Engine
    with Dispatcher(
        [EngineAddress("http://stub", "")], config, [tokenizer.eos_id], client=stub
    ) as dispatcher:
        agents = WatchedAgents(dispatcher, tokenizer, config)
        agents.turns = {}
        yield dispatcher, agents
        agents.close()


def drawn_with(tokenizer: TextTokenizer, name: str) -> tuple[Drawn, WatchedAgents, Any]:
    config: Any = SimpleNamespace(
        critic_probes=CriticProbesConfig(
            prompts=PROMPTS,
            responses_per_prompt=RESPONSES,
            quantiles=QUANTILES,
            continuations=AGAIN,
            seed=SEED,
        ),
        sampling=SamplingConfig(max_new_tokens=12),
        reward=RewardConfig(),
        algorithm=AlgorithmConfig(),
    )
    prompts = [
        Prompt(f"p{n}", f"w{n}", "", tuple(tokenizer.encode_prompt(f"w{n}")), n)
        for n in range(PROMPTS)
    ]
    unasked: Any = None
    with agents_of(tokenizer, name) as (dispatcher, agents):
        phase = lambda name, total: nullcontext(lambda _: None)  # noqa: E731
        return (
            draw(config, prompts, dispatcher, tokenizer, unasked, phase, agents),
            agents,
            config.critic_probes,
        )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("words"), TEMPLATE)


def even(tokenizer: TextTokenizer, token: int) -> bool:
    return int(tokenizer.decode([token])[1:]) % 2 == 0


def written(drawn: Drawn) -> list[list[int]]:
    """What the policy wrote in each continuation, the repeated turns included."""
    batch = drawn.batch
    assert batch.loss_mask is not None
    places = zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)
    return [batch.tokens[a:b][batch.loss_mask[a:b]].tolist() for a, b in places]


def test_turns_before_the_state_are_repeated_and_others_redrawn(
    tokenizer: TextTokenizer,
) -> None:
    drawn, agents, _ = drawn_with(tokenizer, "Counted")
    assert len(agents.turns) == PROMPTS * RESPONSES
    states = [
        (p, r, turn) for p in range(PROMPTS) for r in range(RESPONSES) for turn in range(TURNS)
    ]
    assert drawn.positions.tolist() == drawn.places.tolist() == [turn for _, _, turn in states]
    assert drawn.prompts.tolist() == [p for p, _, _ in states]
    assert (drawn.starts - drawn.batch.response_cu_seqlens[:-1]).tolist() == [
        turn * WRITTEN for _, _, turn in states for _ in range(AGAIN)
    ]
    texts = written(drawn)
    for number, (p, r, turn) in enumerate(states):
        before = [t.response_ids.tolist() for t in agents.turns[response_seed(SEED, p, r)]]
        repeated = [token for ids in before[:turn] for token in ids]
        group = texts[number * AGAIN : (number + 1) * AGAIN]
        for ids in group:
            assert len(ids) == TURNS * WRITTEN and ids[: turn * WRITTEN] == repeated
            assert ids[turn * WRITTEN : (turn + 1) * WRITTEN] != before[turn], (
                "not the response that was drawn first"
            )
        assert len({tuple(ids) for ids in group}) == AGAIN
    asked = PROMPTS * RESPONSES * TURNS + AGAIN * sum(TURNS - turn for _, _, turn in states)
    assert Engine.calls == asked, "engines write nothing that is repeated"


def test_turn_values_are_of_first_states_and_returns_of_the_rest(
    tokenizer: TextTokenizer,
) -> None:
    drawn, agents, probes = drawn_with(tokenizer, "Counted")
    firsts = [[even(tokenizer, ids[n * WRITTEN]) for n in range(TURNS)] for ids in written(drawn)]
    turns = drawn.positions.repeat_interleave(AGAIN).tolist()
    follow = torch.tensor(
        [float(sum(first[turn:])) for first, turn in zip(firsts, turns, strict=True)]
    )
    earned = torch.tensor(
        [float(sum(first[:turn])) for first, turn in zip(firsts, turns, strict=True)]
    )
    assert follow.unique().numel() > 2 and earned.any(), "there is something to see"
    returns = monte_carlo_returns(
        drawn.batch.rewards, drawn.batch.response_cu_seqlens, 1.0, drawn.batch.turn_rewards
    )
    assert returns[drawn.starts].tolist() == follow.tolist()
    # What stands at other tokens says nothing
    values = torch.full((drawn.batch.response_tokens,), 100.0)
    values[drawn.starts] = follow
    report = probed(drawn, values, 1.0, probes)
    assert report.figures["bias"].estimate == pytest.approx(0, abs=1e-6)
    assert report.figures["correlation"].estimate > 0.9
    # The mean of the other episodes of a prompt, less what this one had earned before.
    by_prompt = [
        [
            sum(
                even(tokenizer, int(turn.response_ids[0]))
                for turn in agents.turns[response_seed(SEED, p, r)]
            )
            for r in range(RESPONSES)
        ]
        for p in range(PROMPTS)
    ]
    others = [
        by_prompt[p][1 - r] for p in range(PROMPTS) for r in range(RESPONSES) for _ in range(TURNS)
    ]
    assert drawn.siblings.tolist() == others
    siblings = drawn.siblings - earned.view(-1, AGAIN)[:, 0]
    facts = (follow.view(-1, AGAIN).mean(1), follow.view(-1, AGAIN), siblings)
    right = figures(
        Probes(*facts, drawn.prompts, drawn.positions, drawn.places), torch.ones(1, len(siblings))
    )
    assert report.figures["explained_group"].estimate == pytest.approx(
        float(right["explained_group"])
    )


def test_state_is_found_by_its_turn_among_several_segments(
    tokenizer: TextTokenizer,
) -> None:
    drawn, agents, _ = drawn_with(tokenizer, "aside")
    assert drawn.batch.segments is not None
    # The segment of the turn between stands first, because that of the others ends last.
    expected = [
        {0: WRITTEN, 1: 0, 2: 2 * WRITTEN}[turn]
        for turn in drawn.positions.tolist()
        for _ in range(AGAIN)
    ]
    assert (drawn.starts - drawn.batch.response_cu_seqlens[:-1]).tolist() == expected
    first = agents.turns[response_seed(SEED, 0, 0)]
    for ids in written(drawn)[2 * AGAIN : 3 * AGAIN]:  # the state before the last turn
        assert ids[: 2 * WRITTEN] == [
            *first[1].response_ids.tolist(),
            *first[0].response_ids.tolist(),
        ]


@pytest.mark.parametrize("name", ["Changing", "Impatient"])
def test_an_agent_that_takes_another_way_is_refused_by_name(
    tokenizer: TextTokenizer, name: str
) -> None:
    with pytest.raises(
        RunFailed, match=r"rollout\.agent: an episode of row p\d, repeated .* took another way"
    ):
        drawn_with(tokenizer, name)


def test_states_whose_episodes_break_are_left_out(tokenizer: TextTokenizer) -> None:
    # An episode of prompt 1, and a continuation of the first state
    Choosy.episodes = 0
    Choosy.breaks = [3, 8 + 1]
    drawn, agents, _ = drawn_with(tokenizer, "Choosy")
    broken = {name: count for name, count in agents.broken_metrics(6).items() if count}
    assert broken == {"agent/broken": 2 / (2 + 6), "agent/broken_error": 2}
    assert not any(agents.broken_metrics(0).values()), "counted from the last call on"
    assert len(drawn.places) == (PROMPTS - 1) * RESPONSES * TURNS - 1
    assert drawn.prompts.unique().tolist() == [0, 1, 2] and drawn.places.tolist()[:3] == [1, 2, 0]
    assert drawn.batch.samples == len(drawn.places) * AGAIN
    Choosy.episodes = 0
    Choosy.breaks = [1, 3, 5]
    with pytest.raises(RunFailed, match="episodes broke in 3 of 4 groups"):
        drawn_with(tokenizer, "Choosy")


def test_the_command_plays_the_agent_of_the_run(
    tmp_path: Path,
    use_engines: Callable[[Any], None],
    critic: Critic,
    capfd: pytest.CaptureFixture[str],
) -> None:
    saved = tmp_path / "runs" / "tiny" / "hf" / "final"
    policy = make_model(saved / "actor")
    values = AutoConfig.from_pretrained(policy, num_labels=1)
    AutoModelForTokenClassification.from_config(values, dtype=torch.float32).save_pretrained(
        saved / "critic"
    )
    settings = train_config(tmp_path, policy) | {"actor": {}, "critic": {}}
    settings["cluster"]["ranks"] = 1
    settings["data"]["prompt"] = {"chat_template": True}
    settings["rollout"] = {"agent": f"{__name__}:Turns", "episode": {"max_tokens": 100}}

    @contextmanager
    def stand_in(
        model: Any, rollout: RolloutConfig, devices: Sequence[Any], ends: Any, *_: Any
    ) -> Iterator[Any]:
        fresh_engine()
        stub: Any = Engine
        with Dispatcher(
            [EngineAddress("http://stub", "")], rollout, ends, client=stub
        ) as dispatcher:
            yield dispatcher

    use_engines(stand_in)
    small = (
        "prompts=3",
        "responses_per_prompt=2",
        "continuations=2",
        "quantiles=[0,0.5]",
        "bootstrap=100",
    )
    overrides = [f"critic_probes.{key}" for key in small]
    probe_critic(
        load_config(
            ProbedRunConfig, write_config(tmp_path / "c.yaml", settings), overrides, PRESETS
        )
    )
    (drawn,) = critic.asked
    assert drawn.positions.tolist() == [0, 1] * 6
    page = (tmp_path / "runs/tiny/critic_probes/report.md").read_text()
    assert "| turns before |" in page and "| states | 12 continued |" in page
    assert str(tmp_path) in capfd.readouterr().out


class Turns(Counted):
    """Two turns, whatever is written."""

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        self.left -= 1
        return [{"role": "user", "content": "plus"}], 0.5, self.left == 1
