"""`vapo-megatron critic` on a tiny policy and a tiny value checkpoint."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_ins import Critic
from tiny_runs import make_model, train_config, write_config
from transformers import AutoConfig, AutoModelForTokenClassification

from vapo_megatron.algorithms.critic_probes import MEANING, Probes, figures
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.critic_probes import CriticProbesConfig, ProbedRunConfig
from vapo_megatron.config.load import load_config
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.sample import Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import BadInput
from vapo_megatron.operations.critic_lab import probe_rollouts
from vapo_megatron.operations.critic_lab.command import probe_critic, probed, values_on_ranks
from vapo_megatron.rollout.request import GenerationRequest


def make_critic(directory: Path, policy: Path) -> Path:
    """A value checkpoint of random weights."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(policy, num_labels=1)
    AutoModelForTokenClassification.from_config(config, dtype=torch.float32).save_pretrained(
        directory
    )
    return directory


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training config whose run has exported both models."""
    folder = tmp_path_factory.mktemp("critic")
    saved = folder / "runs" / "tiny" / "hf" / "final"
    policy = make_model(saved / "actor")
    make_critic(saved / "critic", policy)
    settings = train_config(folder, policy)
    settings["reward"] = {"verifier": "function", "function": "parity_grade:verify", "workers": 1}
    settings["cluster"]["ranks"] = 1
    settings["actor"] = settings["critic"] = {}
    return write_config(folder / "train.yaml", settings)


def load(config: Path, *overrides: str) -> ProbedRunConfig:
    small = (
        "prompts=4",
        "responses_per_prompt=2",
        "continuations=3",
        "quantiles=[0,0.5]",
        "bootstrap=100",
    )
    return load_config(
        ProbedRunConfig, config, [*(f"critic_probes.{key}" for key in small), *overrides], PRESETS
    )


class RandomEngines:
    """In place of engines: responses of random words, and the requests."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.answers: list[list[Sample]] = []

    def collect(self, request: GenerationRequest, on_done: Callable[[int], None]) -> list[Sample]:
        self.requests.append(request)
        generator = torch.Generator().manual_seed(len(self.requests))
        samples = []
        for group, prompt in enumerate(request.prompts):
            for index in range(request.samples_per_prompt):
                length = int(torch.randint(1, request.limit(group) + 1, (), generator=generator))
                ids = torch.randint(3, 12, (length,), generator=generator).tolist()
                reason: Any = "length" if length == request.limit(group) else "stop"
                samples.append(Sample(prompt, group, index, 0, ids, [-1.0] * length, reason, 0, 0))  # type: ignore[arg-type]
            on_done(request.samples_per_prompt)
        self.answers.append(samples)
        return samples


def test_states_are_continued_and_judged(
    config: Path, use_engines: Callable[[Any], None], critic: Critic, capfd: Any
) -> None:
    engines = RandomEngines()

    @contextmanager
    def stand_in(
        model: Any, rollout: Any, devices: Sequence[Any], *_: Any
    ) -> Iterator[RandomEngines]:
        assert model.path.endswith("hf/final/actor") and devices == [None]
        yield engines

    use_engines(stand_in)
    critic.values = values_on_ranks
    settings = load(config)
    tokenizer = TextTokenizer(Path(settings.run.directory) / "hf/final/actor", settings.data.prompt)
    probe_critic(settings)
    drawn, continued = engines.requests
    (responses, tails), ((seen,), batch) = engines.answers, (critic.asked, critic.asked[0].batch)
    ids = batch.tokens.tolist()
    wholes = list(pairwise(batch.cu_seqlens.tolist()))
    assert batch.truncated.tolist() == [tail.truncated for tail in tails] and not all(
        batch.truncated
    )
    assert (len(drawn.prompts), drawn.samples_per_prompt) == (4, 2)
    assert (len(continued.prompts), continued.samples_per_prompt) == (4 * 2 * 2, 3)
    assert continued.max_new_tokens is not None
    longest = settings.sampling.max_new_tokens
    for number, (start, limit) in enumerate(
        zip(continued.prompts, continued.max_new_tokens, strict=True)
    ):
        prompt = drawn.prompts[number // 4]
        assert start.token_ids[: len(prompt.token_ids)] == prompt.token_ids
        assert len(start.token_ids) - len(prompt.token_ids) == longest - limit
        assert number % 2 or limit == longest, "the first quantile is the prompt itself"
        before = responses[number // 2].response_ids[: longest - limit].tolist()
        assert list(start.token_ids[len(prompt.token_ids) :]) == before, (
            "what the response began with"
        )
        for place in range(3 * number, 3 * number + 3):
            whole = ids[slice(*wholes[place])][len(prompt.token_ids) :]
            assert tuple(ids[slice(*wholes[place])][: len(prompt.token_ids)]) == prompt.token_ids
            assert whole == before + tails[place].response_ids.tolist()
            correct = not tails[place].truncated and len(tokenizer.decode(whole).split()) % 2 == 0
            assert batch.correct[place] == correct, (
                "graded is the whole response, continuation and all"
            )
    before = [longest - limit for limit in continued.max_new_tokens for _ in range(3)]
    assert (seen.starts - seen.batch.response_cu_seqlens[:-1]).tolist() == before, (
        "the value belongs to the state"
    )
    assert (
        len({prompt.cursor for request in engines.requests for prompt in request.prompts}) == 4 + 16
    )
    folder = Path(settings.run.directory) / "critic_probes"
    page = (folder / "report.md").read_text()
    assert any(f"**Conclusion: {meaning}.**" in page for meaning in MEANING.values())
    assert "## Bias along the response" in page
    assert str(folder / "report.md") in capfd.readouterr().out


def test_privileged_field_reaches_the_critic_and_not_the_engines(
    config: Path, use_engines: Callable[[Any], None], critic: Critic, capfd: Any
) -> None:
    engines = RandomEngines()

    @contextmanager
    def stand_in(*_: Any) -> Iterator[RandomEngines]:
        yield engines

    use_engines(stand_in)
    overlong = "algorithm.shaping.soft_overlong={max_length: 8, cache_length: 7}"
    settings = load(config, "critic.privileged_field=answer", overlong)
    probe_critic(settings)
    tokenizer = TextTokenizer(Path(settings.run.directory) / "hf/final/actor", settings.data.prompt)
    (batch,) = [drawn.batch for drawn in critic.asked]
    assert batch.privileged_lengths.tolist() == [1] * batch.samples
    assert bool((batch.rewards < settings.reward.incorrect).any()), (
        "rewards are shaped, by whole responses"
    )
    starts = [prompt for prompt in engines.requests[1].prompts for _ in range(3)]
    assert batch.privileged_tokens.tolist() == [
        tokenizer.encode_response(start.answer)[0] for start in starts
    ]
    first = tuple(batch.tokens[: batch.prompt_lengths[0]].tolist())
    assert first == starts[0].token_ids == tuple(tokenizer.encode_prompt(starts[0].problem))
    with pytest.raises(BadInput, match=r"no field 'solution'.*critic\.privileged_field"):
        probe_critic(load(config, "critic.privileged_field=solution"))


AGENT = [
    "rollout.agent=no_such_module:run",
    "rollout.episode.max_tokens=100",
    "algorithm.advantage.credit=turn",
]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["critic_probes.checkpoint=step_000003"], "hf/step_000003/critic holds no critic"),
        (["critic_probes.checkpoint=null"], "critic.init=policy: a new head has learnt nothing"),
        (["critic_probes.set=none_such"], "critic_probes.set=none_such: data.eval has sums"),
        (["data.eval=[]"], "data.eval has no set"),
        (["preset=grpo"], "has no critic to probe"),
        (["preset=vapo_direct", "critic.kind=probe"], "critic.kind=probe: "),
        (
            ["algorithm.mask_function=examples.custom_functions.functions:until_the_code_ends"],
            "algorithm.mask_function: ",
        ),
        (
            [*AGENT, "algorithm.advantage.gamma=0.9"],
            "algorithm.advantage.gamma below 1 with credit=turn",
        ),
        (AGENT, "rollout.agent=no_such_module:run: cannot be imported"),
    ],
)
def test_what_cannot_be_probed_is_refused_in_one_line(
    config: Path, overrides: list[str], said: str, use_engines: Callable[[Any], None]
) -> None:
    use_engines(None)  # before any engine starts
    with pytest.raises(BadInput) as refused:
        probe_critic(load(config, *overrides))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_discounted_returns_leave_the_groups_mean_as_it_is() -> None:
    """What turns paid before a state is taken from the group's mean; a discount is none of that."""
    prompts = 20
    siblings = 4
    again = 4
    length = 100
    generator = torch.Generator().manual_seed(0)
    chances = torch.rand(prompts, generator=generator).repeat_interleave(siblings)
    rewards = (
        torch.rand(len(chances) * again, generator=generator) < chances.repeat_interleave(again)
    ).float()
    drawn = (torch.rand(len(chances), generator=generator) < chances).double()
    others = (
        (drawn.view(prompts, -1).sum(1, keepdim=True) - drawn.view(prompts, -1)) / (siblings - 1)
    ).flatten()
    bounds = torch.arange(len(rewards) + 1) * length
    batch = SimpleNamespace(
        rewards=rewards,
        response_cu_seqlens=bounds,
        turn_rewards=None,
        group_ids=torch.arange(len(chances)).repeat_interleave(again),
        response_lengths=torch.full((len(rewards),), length),
        truncated=torch.zeros(len(rewards), dtype=torch.bool),
    )
    number = torch.arange(prompts).repeat_interleave(siblings)
    states: Any = (
        batch,
        bounds[:-1] + 50,
        others,
        number,
        torch.full((len(chances),), 50),
        torch.zeros_like(number),
    )
    values = torch.zeros(len(rewards) * length)
    probes = CriticProbesConfig(continuations=again, bootstrap=100)
    report = probed(probe_rollouts.Drawn(*states, drawn), values, 0.99, probes)
    discounted = (rewards * 0.99 ** (length - 50 - 1)).double().view(-1, again)
    facts = Probes(
        torch.zeros(len(chances)).double(), discounted, others, number, states[4], states[5]
    )
    right = figures(facts, torch.ones(1, len(chances)))
    for name in ("explained_group", "knowable", "explained_position"):
        assert report.figures[name].estimate == pytest.approx(float(right[name])), name


def test_training_refuses_the_section(config: Path) -> None:
    with pytest.raises(BadInput, match=r"critic_probes\.prompts; it belongs to .*`critic`"):
        load_config(TrainConfig, config, ["critic_probes.prompts=4"], PRESETS)
