"""A reward model of the ablation's policy: scores whole solutions at their end token, and says -1
of every prefix.

VC-PPO (arXiv 2503.01491) finds that a critic which starts from a reward model undervalues early
tokens, since a reward model is trained at the end token alone and takes a prefix for a bad answer.
Here that is made explicit: the cold-start policy with a new scalar head is fitted, on the project's
own Megatron code, to the verifier's grade (+1 or -1) behind the end token and to -1 at every
position before it, both halves weighing the same. What comes out is a Hugging Face directory
(...ForTokenClassification with one label) for critic.init=reward_model.
"""

import random
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist
import typer

from examples.ablation.ablation_config import RewardModelConfig
from vapo_megatron.config.data import PromptTemplate
from vapo_megatron.config.load import load_config
from vapo_megatron.config.model import CriticConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.config.run_directory import make_run_dir
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.jsonl import read_rows
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import told_in_one_line
from vapo_megatron.megatron.mesh import make_mesh
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.rewards.math import grade_response
from vapo_megatron.run.ranks import start_ranks
from vapo_megatron.training.losses import ValueLoss
from vapo_megatron.training.sft import read_demonstrations
from vapo_megatron.weights.export import save_hf
from vapo_megatron.weights.load import load_hf

PREFIX_LABEL = -1.0
HELD_OUT = 512


def judged_solutions(config: RewardModelConfig) -> ExperienceBatch:
    """Demonstrations with the verifier's grade as reward, each one token longer than it is.

    Outputs at position j speak about token j + 1: the value behind the end token is that of a
    padding token after it.
    """
    tokenizer = TextTokenizer(Path(config.model.path), PromptTemplate())
    answers = {row["problem"]: row["answer"] for _, row in read_rows(config.problems)}
    samples = read_demonstrations(
        config.demonstrations,
        tokenizer.encode_prompt,
        tokenizer.encode_response,
        tokenizer.eos_id,
        sys.maxsize,
    )
    samples = samples[: HELD_OUT + config.steps * config.batch_size]
    for sample in samples:
        sample.correct = grade_response(
            answers[sample.prompt.problem], tokenizer.decode(sample.response_ids.tolist()), "hash"
        ).correct
        sample.reward = 1.0 if sample.correct else -1.0
        sample.response_ids = np.append(sample.response_ids, np.int32(tokenizer.pad_id))
        sample.rollout_logprobs = np.append(sample.rollout_logprobs, np.float32(0.0))
    return from_samples(samples)


def labels(batch: ExperienceBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """What each position should say, float32 [T], and whether it is behind an end token, bool
    [T]."""
    last = batch.response_cu_seqlens[1:] - 1
    targets = torch.full((batch.response_tokens,), PREFIX_LABEL)
    targets[last] = batch.rewards
    ends = torch.zeros(batch.response_tokens, dtype=torch.bool)
    ends[last] = True
    return targets, ends


def position_weights(
    batch: ExperienceBatch, ends: torch.Tensor, samples: list[int]
) -> torch.Tensor:
    """Weights of the squared errors of some samples, float32 [T]: ends and prefixes make up one
    half each."""
    chosen = torch.zeros(batch.samples, dtype=torch.bool)
    chosen[samples] = True
    tokens = chosen.repeat_interleave(batch.response_lengths)
    here, before = (tokens & ends).float(), (tokens & ~ends).float()
    return 0.5 * here / here.sum() + 0.5 * before / before.sum()


def metrics(critic: Trainable, batch: ExperienceBatch) -> dict[str, float]:
    """Collective: what the model says of held-out solutions."""
    values, (targets, ends) = critic.score(batch)[:, 0], labels(batch)
    agree = (values[ends] > 0) == (targets[ends] > 0)
    return {
        "reward_model/prefix_mean": float(values[~ends].mean()),
        "reward_model/prefix_std": float(values[~ends].std()),
        "reward_model/end_accuracy": float(agree.float().mean()),
        "reward_model/end_mean_correct": float(values[ends & (targets > 0)].mean()),
        "reward_model/end_mean_wrong": float(values[ends & (targets < 0)].mean()),
    }


def fit(config: RewardModelConfig, run_dir: Path) -> None:
    """Collective: fit, measure on solutions not seen, write hf/final/critic."""
    batch, source = judged_solutions(config), Path(config.model.path)
    spec, critic_config = read_spec(source), CriticConfig(optimizer=config.optimizer)
    mesh = make_mesh(critic_config.layout, "critic")
    critic = Trainable(
        spec, config.model, critic_config, mesh, "value", name="critic", seed=config.run.seed
    )
    load_hf(critic.chunks, spec, source, mesh, "value", value_head="new", seed=config.run.seed)
    critic.prepare()
    targets, ends = labels(batch)
    order = list(range(batch.samples))
    random.Random(config.run.seed).shuffle(order)
    held_out, training = order[:HELD_OUT], order[HELD_OUT:]
    with Recorder(
        run_dir, MonitoringConfig(tensorboard=False), is_main_rank=dist.get_rank() == 0
    ) as recorder:
        with recorder.phase("fit_reward_model", total=config.steps) as advance:
            for step in range(1, config.steps + 1):
                first = (step - 1) * config.batch_size
                samples = [
                    training[i % len(training)] for i in range(first, first + config.batch_size)
                ]
                loss = ValueLoss(
                    ValueLossConfig(), targets, targets, position_weights(batch, ends, samples)
                )
                result = critic.train_step(batch, samples, loss)
                recorder.add(
                    {"reward_model/loss": result.metrics["value_loss"], "critic/lr": result.lr}
                )
                advance(1)
                if step < config.steps:
                    recorder.write(step)
        recorder.add(metrics(critic, batch.select(held_out)))
        save_hf(
            critic.chunks, critic.spec, mesh, "value", source, run_dir / "hf" / "final" / "critic"
        )
        row = recorder.write(config.steps)
        recorder.console.closing(
            f"{config.run.name} finished", {name: f"{row[name]:.3f}" for name in sorted(row)}
        )


def main(
    config: Annotated[Path, typer.Argument(help="YAML, such as reward_model.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
) -> None:
    """Fit the reward model that vanilla PPO's critic starts from."""
    with told_in_one_line("reward_model"):
        settings = load_config(RewardModelConfig, config, overrides or [], config.parent)
        run_dir = make_run_dir(settings, settings.run)
        start_ranks(1, partial(fit, settings, run_dir), collective_timeout_s=600)


if __name__ == "__main__":
    typer.run(main)
