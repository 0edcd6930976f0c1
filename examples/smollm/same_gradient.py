"""Do both programs compute the same gradient? python same_gradient.py SETTINGS.json, by the Python
of .venv-trl; `make smollm-trl` calls it before it trains.

TRL takes one step. Its prompts, responses and rewards then go through vapo_megatron's formulas, on
the same weights in plain transformers, one response at a time and without padding. The file `out`
gets the norms of both gradients, the norm of their difference, and TRL's prompts as token ids.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from examples.smollm.trl_side import trainer_of
from vapo_megatron.algorithms.advantages import grpo
from vapo_megatron.algorithms.aggregation import token_weights
from vapo_megatron.algorithms.policy_loss import ppo_clip

CLIP = 0.2
# What TRL adds to the standard deviation of a group's rewards; ours adds 1e-6.
TRL_EPS = 1e-4

Gradient = dict[str, Tensor]


def parity(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs within almost every group, so that no gradient is 0."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def step_of_trl(trainer: GRPOTrainer) -> tuple[dict[str, Any], Gradient]:
    """The batch of TRL's only step, and its gradient before clipping."""
    batch: dict[str, Any] = {}
    gradient: Gradient = {}
    score = trainer._generate_and_score_completions
    clip = trainer.accelerator.clip_grad_norm_

    def scored(inputs: Any) -> dict[str, Any]:
        batch.update(score(inputs))
        return batch

    def clipped(*args: Any, **kwargs: Any) -> Any:
        for name, parameter in trainer.model.named_parameters():
            gradient[name] = parameter.grad.detach().clone()
        return clip(*args, **kwargs)

    trainer._generate_and_score_completions = scored
    trainer.accelerator.clip_grad_norm_ = clipped
    trainer.train()
    return dict(batch), gradient


def gradient_of_ours(
    model: torch.nn.Module, prompts: list[Tensor], responses: list[Tensor], group: int
) -> Gradient:
    """The gradient of GRPO as vapo_megatron computes it, of int64 token ids."""
    rewards = torch.tensor(parity([response.tolist() for response in responses]))
    group_ids = torch.arange(len(responses)) // group
    advantages = grpo(rewards, group_ids, eps=TRL_EPS)
    lengths = torch.tensor([response.numel() for response in responses])
    weights = token_weights(lengths, "token_mean")
    for prompt, response, advantage, weight in zip(
        prompts, responses, advantages, weights, strict=True
    ):
        logits = model(torch.cat([prompt, response])[None]).logits[0, prompt.numel() - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        old_logprobs = logprobs.detach()
        losses = ppo_clip(logprobs, old_logprobs, advantage.expand_as(logprobs), CLIP, CLIP)
        (weight * losses.sum()).backward()
    gradient: Gradient = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradient[name] = parameter.grad
    return gradient


def norm(gradient: Gradient) -> float:
    """The norm over all parameters."""
    squares = [float(part.double().square().sum()) for part in gradient.values()]
    return sum(squares) ** 0.5


def rows_of(ids: Tensor, mask: Tensor) -> list[Tensor]:
    """Padded [S, T] ids as a list, without the padding."""
    return [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]


def main(settings: Mapping[str, Any]) -> None:
    """Take TRL's step, compute ours, write both norms and their difference."""
    trainer = trainer_of(settings, parity, [])
    batch, theirs = step_of_trl(trainer)
    prompts = rows_of(batch["prompt_ids"], batch["prompt_mask"])
    responses = rows_of(batch["completion_ids"], batch["completion_mask"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    ours = gradient_of_ours(model, prompts, responses, settings["group"])
    difference = {name: ours[name] - theirs[name] for name in ours}
    result = {
        "norm_of_ours": norm(ours),
        "norm_of_trl": norm(theirs),
        "norm_of_difference": norm(difference),
        "responses": len(responses),
        "response_tokens": sum(map(len, responses)),
        "prompts": [prompt.tolist() for prompt in prompts[:: settings["group"]]],
    }
    Path(settings["out"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
