"""A tiny policy or critic as a Trainable, a batch for it and losses on that batch, for tests on
forked ranks."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from hf_models import mesh_of

from vapo_megatron.config.model import ActorConfig, CriticConfig, ModelConfig, OptimizerSettings
from vapo_megatron.config.policy import KlConfig, PolicyLossConfig
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.spec import Head
from vapo_megatron.training.losses import PolicyLoss, ValueLoss
from vapo_megatron.weights.load import load_hf


def policy_loss(
    batch: ExperienceBatch,
    old_logprobs: torch.Tensor | None,
    kind: str = "ppo_clip",
    **switches: Any,
) -> PolicyLoss:
    """A clipped loss with positive NLL and entropy on random advantages."""
    total = batch.response_tokens
    zeros = torch.zeros(total)
    mean = torch.full((total,), 1 / total)
    correct = batch.correct.repeat_interleave(batch.response_lengths)
    return PolicyLoss(
        config=PolicyLossConfig.model_validate({"kind": kind, "entropy_coef": 0.01, **switches}),
        kl=KlConfig(),
        old_logprobs=old_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        ref_logprobs=zeros,
        advantages=torch.randn(total, generator=torch.Generator().manual_seed(6)),
        importance=torch.ones(total),
        weights=mean,
        nll_weights=correct / correct.sum(),
        mean_weights=mean,
    )


def value_loss(batch: ExperienceBatch) -> ValueLoss:
    """Squared error to random targets."""
    targets = torch.randn(batch.response_tokens, generator=torch.Generator().manual_seed(7))
    return ValueLoss(
        ValueLossConfig(), targets, targets, torch.full_like(targets, 1 / len(targets))
    )


def loss_of(trainable: Trainable, batch: ExperienceBatch) -> Any:
    """The loss that fits its head."""
    return (
        policy_loss(batch, batch.rollout_logprobs) if trainable.head == "lm" else value_loss(batch)
    )


def make_trainable(
    model_dir: Path,
    head: Head,
    *,
    dtype: str = "float32",
    optimizer: dict[str, Any] | None = None,
    temperature: float = 0.9,
    attention: str = "sdpa",
    adapter: dict[str, Any] | None = None,
    seed: int = 1,
    **section: Any,
) -> Trainable:
    """Collective: a loaded and prepared model, with adapters where their settings are given.
    section: fields of ActorConfig or CriticConfig."""
    section["kind"] = "model" if adapter is None else "adapter"
    adamw = OptimizerSettings.model_validate({"lr": 1e-2, "warmup_steps": 0, **(optimizer or {})})
    config = (ActorConfig if head == "lm" else CriticConfig).model_validate(
        {"optimizer": adamw, **section}
    )
    spec = read_spec(model_dir)
    mesh = mesh_of(config.layout)
    settings = {
        "path": str(model_dir),
        "dtype": dtype,
        "attention": attention,
        "adapter": adapter or {},
    }
    model = ModelConfig.model_validate(settings)
    name = "actor" if head == "lm" else "critic"
    trainable = Trainable(
        spec, model, config, mesh, head, name=name, seed=seed, temperature=temperature
    )
    load_hf(trainable.chunks, spec, model_dir, mesh, head, head_init_std=0.05, seed=3)
    trainable.prepare()
    return trainable


def weights_digest(trainable: Trainable) -> str:
    """Of every bit of this rank's weights."""
    digest = hashlib.sha256()
    for chunk in trainable.chunks:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def small_logit_chunks(trainable: Trainable) -> None:
    """Have a policy's head go through the few tokens of a test in several chunks."""
    if trainable.head == "lm" and trainable.mesh.is_last_stage:
        trainable.chunks[-1].output_layer.chunk = 7
