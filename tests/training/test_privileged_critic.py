"""A critic that reads a field hidden from the policy: before each of its sequences, and nowhere
else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import in_segments, spread, whole_of, with_observation, with_segment
from hf_models import VOCAB
from ranks import run_ranks
from step_formulas import Critic, Response
from switch_rollout import config_of, state_of, write_models
from trainables import make_trainable

from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.monitoring.names import EXPLAINED_VARIANCE
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.models import load_models
from vapo_megatron.training.score import score, values
from vapo_megatron.training.updates import critic_step, update_critic, update_policy
from vapo_megatron.training.value_pretraining import measure

ROOM = {"actor.max_tokens_per_microbatch": 48, "critic.max_tokens_per_microbatch": 48}
ROOM |= {"algorithm.advantage.estimator": "gae"}


def samples() -> list[Sample]:
    """Six responses, among them one with an observation and one of three segments; each reads more,
    but one."""
    generator = torch.Generator().manual_seed(8)
    drawn = []
    for number, (hidden, prompt, response) in enumerate(
        [(4, 3, 9), (1, 2, 5), (0, 6, 4), (7, 1, 12), (3, 5, 1), (2, 2, 8)]
    ):
        ids = torch.randint(0, VOCAB, (hidden + prompt + response,), generator=generator).tolist()
        said = Prompt(
            str(number),
            "",
            "",
            tuple(ids[hidden : hidden + prompt]),
            privileged_ids=tuple(ids[:hidden]),
        )
        fields: Any = (ids[hidden + prompt :], [-2.0] * response, "stop", 0, 0)
        sample = Sample(
            said, number, 0, 0, *fields, reward=float(number % 2), correct=number % 2 == 1
        )
        sample = with_observation(sample, response - 1, 2) if number in (1, 3) else sample
        for after in (8, 4) if number == 3 else ():
            sample = with_segment(sample, after, 3)
        drawn.append(sample)
    return drawn


def hidden_from(batch: ExperienceBatch) -> ExperienceBatch:
    return replace(batch, privileged_tokens=None, privileged_lengths=None)


def by_hand(folder: Path, critic: Trainable) -> list[float]:
    """Values that transformers' backbone gives each segment with its privileged tokens written
    before its prompt."""
    model = Critic(folder / "policy", state_of(critic))
    found = []
    for sample in samples():
        parts = in_segments([sample]) if sample.loss_mask is not None else [sample]
        for part in parts:
            before = [*part.prompt.privileged_ids, *part.prompt.token_ids]
            whole = torch.tensor([*before, *part.response_ids.tolist()])
            read = model.values(
                Response(whole, len(before), 0.0, False, False, 0, torch.zeros(0), 0.0)
            )
            found += (
                read if part.loss_mask is None else read[torch.from_numpy(part.loss_mask)]
            ).tolist()
    return found


def one_step(folder: Path, switches: dict[str, Any], shown: bool) -> dict[str, Any]:
    """Collective: an iteration on the samples; what models said of them, and the weights after
    it."""
    config = config_of(folder, ROOM | switches)
    batch = from_samples(samples())
    models = load_models(config, None)
    critic = models.critic
    assert isinstance(critic, Trainable)
    seen: dict[str, Any] = {"by_hand": by_hand(folder, critic) if not switches else None}
    batch = batch if shown else hidden_from(batch)
    seen["alone"] = values(critic, batch, config.algorithm.value_loss).tolist()
    seen["microbatches"] = [
        sum(m.lengths) for m in critic.microbatches(batch, range(batch.samples))
    ]
    part = spread(batch).model_input(critic, range(batch.samples))
    seen["shares"] = [sum(m.lengths) for m in critic.microbatches(part.batch, part.share)]
    with Recorder(folder, MonitoringConfig(), is_main_rank=False) as recorder:
        sharded = spread(batch)
        score(models, sharded, config.algorithm, recorder)
        scored = whole_of(sharded)
        assert scored.values is not None and scored.old_logprobs is not None
        seen |= {"values": scored.values.numpy(), "logprobs": scored.old_logprobs.numpy()}
        estimate_advantages(sharded, config.algorithm, recorder)
        update_critic(models, sharded, config.algorithm, "1/1", recorder)
        assert sharded.local.advantages is not None
        # Else they follow from the values
        sharded.local.advantages = torch.ones_like(sharded.local.advantages)
        update_policy(models, sharded, config.algorithm, "1/1", recorder)
        seen["row"] = recorder.write(1)
    for model, phase in ((critic, "update_critic"), (models.actor, "update_policy")):
        models.memory.enter(phase)  # type: ignore[arg-type]
        seen[model.name] = {name: tensor.numpy() for name, tensor in state_of(model).items()}
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("privileged"))


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    return run_ranks(1, one_step, folder, {}, True)[0]


def test_values_are_those_of_sequences_with_it_before_the_prompt(seen: dict[str, Any]) -> None:
    assert seen["values"].tolist() == pytest.approx(seen["by_hand"], abs=1e-5)
    assert seen["alone"] == pytest.approx(seen["by_hand"], abs=1e-5)
    tokens = int(from_samples(samples()).table().critic_lengths.sum())
    for name in ("microbatches", "shares"):
        assert max(seen[name]) <= 48 and sum(seen[name]) >= tokens - 8, "budgets count it"


def test_its_update_computes_the_values_that_were_recorded(seen: dict[str, Any]) -> None:
    """The check of the first mini-batch (first_update_faults) would find values of other
    sequences."""
    assert not [name for name in seen["row"] if "fault" in name]
    assert seen["row"]["critic/value_loss"] > 0 and seen["row"]["critic/grad_norm"] > 0


def test_the_actor_is_the_same_to_the_bit(folder: Path, seen: dict[str, Any]) -> None:
    without = run_ranks(1, one_step, folder, {}, False)[0]
    assert np.array_equal(without["logprobs"], seen["logprobs"])
    assert all(
        np.array_equal(weight, seen["actor"][name]) for name, weight in without["actor"].items()
    )
    assert not np.allclose(without["values"], seen["values"], atol=1e-3)
    assert any(
        not np.array_equal(weight, seen["critic"][name])
        for name, weight in without["critic"].items()
    )


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"tp": 2, "sequence_parallel": True}, id="tp2", marks=pytest.mark.full),
        pytest.param({"cp": 2}, id="cp2"),
        pytest.param({}, id="dp2", marks=pytest.mark.full),
    ],
)
def test_layouts_agree(folder: Path, seen: dict[str, Any], layout: dict[str, Any]) -> None:
    for found in run_ranks(
        2, one_step, folder, {"critic.layout": layout, "critic.offload": "never"}, True
    ):
        assert np.allclose(found["values"], seen["values"], atol=2e-5)
        for name in ("critic/value_loss", "critic/grad_norm"):
            assert found["row"][name] == pytest.approx(seen["row"][name], rel=1e-4)


def coins(seed: int, shown: bool) -> ExperienceBatch:
    """Responses of random tokens to one prompt; a coin that the prompt does not show is their
    reward."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for number in range(32):
        ids = torch.randint(0, VOCAB, (6,), generator=generator).tolist()
        prompt = Prompt("0", "", "", (3, 4), privileged_ids=(20 + number % 2,))
        fields: Any = (ids, [-2.0] * 6, "stop", 0, 0)
        drawn.append(
            Sample(prompt, number, 0, 0, *fields, reward=float(number % 2), correct=number % 2 == 1)
        )
    batch = from_samples(drawn)
    batch.returns = batch.rewards.repeat_interleave(6)
    return batch if shown else hidden_from(batch)


def explained(folder: Path, shown: bool) -> float:
    critic = make_trainable(folder / "policy", "value", max_tokens_per_microbatch=64)
    train = spread(coins(1, shown))
    held_out = spread(coins(2, shown))
    config = ValueLossConfig()
    for batch in (train, held_out):
        batch.fill(selected=torch.ones(32, dtype=torch.bool))
    for _ in range(30):
        critic_step(critic, train, config)
    return measure(critic, held_out, config)[EXPLAINED_VARIANCE]


def test_a_critic_that_reads_it_explains_what_no_prompt_says(folder: Path) -> None:
    assert run_ranks(1, explained, folder, True)[0] > 0.9
    assert run_ranks(1, explained, folder, False)[0] < 0.1
