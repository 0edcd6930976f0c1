"""One batch trained for three steps, cut as a split says: what has to be the same for all, and the
comparison."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import batches
import numpy as np
import torch
import torch.distributed as dist
from hf_models import write_model
from ranks import run_ranks
from torch import Tensor
from trainables import small_logit_chunks

from vapo_megatron.algorithms.aggregation import nll_weights, token_weights
from vapo_megatron.algorithms.gae import decoupled_gae, length_adaptive_lambda
from vapo_megatron.algorithms.segments import place_terminal, to_tokens
from vapo_megatron.config.model import (
    ActorConfig,
    AdapterConfig,
    CriticConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerSettings,
    RecomputeConfig,
)
from vapo_megatron.config.policy import KlConfig, PolicyLossConfig
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.megatron.mesh import Mesh, make_mesh
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.training.losses import NegativeLogLikelihood, PolicyLoss, ValueLoss
from vapo_megatron.weights.export import stream_adapters, stream_hf
from vapo_megatron.weights.load import load_hf

# Prompt and response tokens. Every second sample is rewarded: those with responses of one or two
# tokens, fewer than the context-parallel ranks that share them.
LENGTHS = [(5, 9), (3, 1), (1, 30), (7, 2), (2, 17), (1, 1), (4, 4)]
# Observations in samples: before the first, between, and after the last token of a response.
OBSERVED = {0: (0, 2), 4: (5, 3), 5: (1, 2)}
# Bounds of the policy loss of whole ratios.
BOUNDS: dict[str, float] = {"dual_clip": 3.0}
STEPS = 3
# Where a gradient is near 0, AdamW divides rounding errors by eps: a small one would magnify them.
OPTIMIZER = OptimizerSettings(lr=1e-2, warmup_steps=0, eps=1e-3)


@dataclass(frozen=True)
class Case:
    """A model, its loss and its data."""

    name: str
    loss: str
    family: str = "qwen3"
    tied: bool = False
    adapter: AdapterConfig | None = None

    @property
    def head(self) -> str:
        return "value" if self.loss.startswith("value") else "lm"


EXPERTS = AdapterConfig(rank=3, layers=("linear_fc1", "linear_fc2"))
CASES = {
    case.name: case
    for case in (
        Case("policy", "policy", tied=True),
        Case("value", "value"),
        Case("nll", "nll", family="qwen2"),
        Case("gspo", "gspo", family="llama"),
        Case("value-clipped", "value_clipped", tied=True),
        Case("nll-tied", "nll", tied=True),
        Case("terminal", "terminal"),
        Case("moe", "policy", family="qwen3_moe"),
        Case("glm", "policy", family="glm4_moe"),
        Case("latent", "policy", family="deepseek_v3"),
        Case("adapter", "policy", tied=True, adapter=AdapterConfig(rank=4, alpha=16)),
        Case("adapter-value", "value", family="qwen2", adapter=AdapterConfig(rank=3)),
        Case("adapter-moe", "value", family="qwen3_moe", adapter=AdapterConfig(rank=4, alpha=16)),
        # With alpha 16 one rounding of each weight moves a gradient by all of the bound, with 8 by
        # a third of it, as in the other cases.
        Case(
            "adapter-latent", "policy", family="deepseek_v3", adapter=AdapterConfig(rank=4, alpha=8)
        ),
        Case("adapter-experts", "policy", family="qwen3_moe", adapter=EXPERTS),
    )
}


@dataclass(frozen=True)
class Split:
    """How a batch and a model are cut."""

    world: int = 1
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    max_tokens: int = 1000
    optimizer: OptimizerSettings = OPTIMIZER
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    offload: str = "auto"
    dtype: str = "float32"

    def __str__(self) -> str:
        extras = [self.layout.describe(self.world).replace(" ", "-"), f"{self.max_tokens}tok"]
        extras += [self.recompute.granularity] * (self.recompute.granularity != "none")
        extras += ["overlap"] * (self.optimizer.overlap is True)
        extras += ["sleep"] * (self.offload == "always")
        extras += ["bf16"] * (self.dtype == "bfloat16")
        return "-".join(extras)


def make_batch() -> ExperienceBatch:
    """Seven samples, three of them correct, with the log-probs, values and advantages that a
    rollout has."""
    generator = torch.Generator().manual_seed(6)
    batch = batches.make_batch(LENGTHS, highest=-2.0, spread=6.0, observed=OBSERVED)
    bounds = batch.response_cu_seqlens
    total = batch.response_tokens
    values = torch.rand(total, generator=generator) * 0.5
    # The reward is on the last token alone: a layout that loses that token loses the reward.
    advantages, returns = decoupled_gae(
        place_terminal(batch.rewards, bounds, total),
        values,
        bounds,
        lam_policy=length_adaptive_lambda(batch.response_lengths, 0.5),
        lam_critic=1.0,
    )
    batch.values = values
    batch.advantages = advantages
    batch.returns = returns
    batch.ref_logprobs = batch.rollout_logprobs + torch.randn(total, generator=generator) * 0.3
    return batch


def make_loss(name: str, batch: ExperienceBatch) -> Any:
    """A loss with every term that can be on at once."""
    bounds = batch.response_cu_seqlens
    lengths = batch.response_lengths
    mean = to_tokens(token_weights(lengths, "token_mean"), bounds)
    if name == "nll":
        return NegativeLogLikelihood(mean)
    if name == "terminal":  # nothing but the tokens on which the rewards are
        return NegativeLogLikelihood(place_terminal(batch.rewards, bounds, batch.response_tokens))
    if name.startswith("value"):
        config = ValueLossConfig(kind="clipped" if name == "value_clipped" else "mse")
        return ValueLoss(config, batch.returns, batch.values, mean)
    shared: dict[str, Any] = {"entropy_coef": 0.01}
    if name == "gspo":
        config = PolicyLossConfig(kind="gspo", aggregation="sequence_mean", **shared)
    else:
        config = PolicyLossConfig(**BOUNDS, **shared)
    return PolicyLoss(
        config=config,
        kl=KlConfig(placement="loss", estimator="k3", coef=0.05),
        old_logprobs=batch.rollout_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        ref_logprobs=batch.ref_logprobs,
        advantages=batch.advantages,
        importance=torch.linspace(0.5, 1.5, batch.response_tokens),
        weights=to_tokens(token_weights(lengths, config.aggregation), bounds),
        nll_weights=to_tokens(nll_weights(lengths, batch.correct), bounds),
        mean_weights=mean,
    )


def make_models(folder: Path) -> dict[tuple[str, bool], Path]:
    """A directory for each family, tied or not, that a case asks for."""
    wanted = {(case.family, case.tied) for case in CASES.values()}
    return {
        (family, tied): write_model(folder / f"{family}-{tied}", family, tie_word_embeddings=tied)
        for family, tied in sorted(wanted)
    }


def train(
    models: dict[tuple[str, bool], Path],
    names: Sequence[str],
    split: Split,
    mutate: Callable[[str, Any, Split], Any] | None = None,
) -> dict[str, Any]:
    """On every rank: each case's metrics and gradient norm of each step, gradients of the last,
    weights after it.

    mutate may exchange a loss for a wrong one.
    """
    mesh = make_mesh(split.layout)
    return {name: _train_case(models, CASES[name], split, mesh, mutate) for name in names}


def _train_case(
    models: dict[tuple[str, bool], Path],
    case: Case,
    split: Split,
    mesh: Mesh,
    mutate: Callable[[str, Any, Split], Any] | None,
) -> dict[str, Any]:
    model_dir = models[case.family, case.tied]
    batch = make_batch()
    spec = read_spec(model_dir)
    shared: dict[str, Any] = {
        "layout": split.layout,
        "optimizer": split.optimizer,
        "recompute": split.recompute,
        "max_tokens_per_microbatch": split.max_tokens,
        "offload": split.offload,
        "kind": "adapter" if case.adapter else "model",
    }
    section = ActorConfig(**shared) if case.head == "lm" else CriticConfig(**shared)
    model = ModelConfig(
        path=str(model_dir), dtype=split.dtype, adapter=case.adapter or AdapterConfig()
    )  # type: ignore[arg-type]
    trainable = Trainable(
        spec, model, section, mesh, case.head, name="actor", seed=1, temperature=0.9
    )  # type: ignore[arg-type]
    load_hf(trainable.chunks, spec, model_dir, mesh, case.head)
    trainable.prepare()
    small_logit_chunks(trainable)
    loss = make_loss(case.loss, batch)
    if mutate is not None:
        loss = mutate(case.name, loss, split)
    steps = []
    for _ in range(STEPS):
        result = trainable.train_step(batch, range(batch.samples), loss)
        steps.append(result.metrics | {"grad_norm": result.grad_norm})
        gradients = named_gradients(trainable)
        if split.offload == "always":
            trainable.offloader.onload_only()
    scores = trainable.score(batch).numpy()
    weights = _tensors(trainable)
    if dist.get_rank() != 0:
        gradients = weights = {}
    return {"steps": steps, "gradients": gradients, "weights": weights, "scores": scores}


def _tensors(trainable: Trainable) -> dict[str, np.ndarray]:
    stream = stream_hf(trainable.chunks, trainable.spec, trainable.mesh, trainable.head)
    return {
        name: tensor.detach().float().numpy().copy() for bucket in stream for name, tensor in bucket
    }


def _adapters(trainable: Trainable) -> dict[str, np.ndarray]:
    if trainable.adapter is None:
        return {}
    stream = stream_adapters(trainable.chunks, trainable.spec, trainable.mesh, trainable.adapter)
    return {name: tensor.float().numpy().copy() for bucket in stream for name, tensor in bucket}


def gather_gradients(trainable: Trainable) -> None:
    """Collective: have all of main_grad on every rank, of which the reduction leaves each rank its
    part."""
    for wrapped in trainable.wrapped:
        for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
            for bucket in buffer.buckets:
                _gather_shards(bucket.grad_data, buffer.data_parallel_group)


@torch.no_grad()
def named_gradients(trainable: Trainable) -> dict[str, np.ndarray]:
    """Gradients of the last step by the names of the weights: they stand in for the weights in an
    export."""
    chunks = trainable.chunks
    gather_gradients(trainable)
    kept: list[tuple[Tensor, Tensor]] = []
    for chunk in chunks:
        for parameter in filter(lambda parameter: parameter.requires_grad, chunk.parameters()):
            kept.append((parameter, parameter.detach().clone()))
            parameter.copy_(parameter.main_grad)
    found = (
        _tensors(trainable)
        if trainable.adapter is None
        else _adapters(trainable) | _head(trainable)
    )
    for parameter, value in kept:
        parameter.copy_(value)
    return found


def _head(trainable: Trainable) -> dict[str, np.ndarray]:
    """A critic's, which is trained beside its adapters."""
    return {
        name: tensor for name, tensor in _tensors(trainable).items() if name.startswith("score.")
    }


def _gather_shards(data: Tensor, group: Any) -> None:
    """Each rank of the group has reduced its own part of a bucket: give all of it to all."""
    mine = data.view(group.size(), -1)[group.rank()].clone()
    dist.all_gather_into_tensor(data, mine, group=group)


def run_split(
    models: dict[tuple[str, bool], Path],
    names: Sequence[str],
    split: Split,
    mutate: Callable[[str, Any, Split], Any] | None = None,
) -> list[dict[str, Any]]:
    """What train() returned on every rank of a split."""
    return run_ranks(split.world, train, models, names, split, mutate, deadline=280)


def assert_same(found: list[dict[str, Any]], expected: dict[str, Any], rel: float = 1e-5) -> None:
    """Every rank's report equals the reference: metrics, norms and scores; gradients and weights,
    which rank 0 has."""
    for name, reference in expected.items():
        for rank, report in enumerate(found):
            for step, (metrics, wanted) in enumerate(
                zip(report[name]["steps"], reference["steps"], strict=True)
            ):
                for key, value in wanted.items():
                    error = abs(metrics[key] - value)
                    # A sum of parts that cancel has the rounding of the parts, not of the sum.
                    assert error <= rel * abs(value) + 0.1 * rel, (
                        f"{name}, rank {rank}, step {step}, {key}: {error}"
                    )
            _assert_close(
                report[name]["scores"], reference["scores"], rel, f"{name}, rank {rank}, scores"
            )
        for kind in ("gradients", "weights"):
            tensors = found[0][name][kind]
            assert tensors.keys() == reference[kind].keys()
            for key, tensor in tensors.items():
                _assert_close(tensor, reference[kind][key], rel, f"{name}, {kind} of {key}")


def _assert_close(found: np.ndarray, expected: np.ndarray, rel: float, what: str) -> None:
    error = np.abs(found - expected).max()
    size = np.abs(expected).max()
    assert error <= rel * size + 1e-8, f"{what}: {error:.2e} of {size:.2e}"
