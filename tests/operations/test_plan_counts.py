"""Parameters and operations of real models, against transformers and PyTorch's own counter."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import write_model
from plans import hf_config, model_dir
from torch.utils.flop_counter import FlopCounterMode

from vapo_megatron.config.model import LayoutConfig, RecomputeConfig
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.rules import Rule
from vapo_megatron.operations.plan.inputs import Lengths
from vapo_megatron.operations.plan.models import can_be_cut
from vapo_megatron.operations.plan.rollout import forward_flops, training_flops
from vapo_megatron.operations.plan.shards import shard

REAL = (
    "qwen2.5-math-1.5b.derived.json",
    "qwen2.5-7b.derived.json",
    "qwen2.5-32b.json",
    "qwen3-8b.third-party-copy.json",
    "qwen3-30b-a3b.third-party-unsloth.json",
)
LAYOUTS = (
    LayoutConfig(),
    LayoutConfig(tp=2, sequence_parallel=True),
    LayoutConfig(pp=2),
    LayoutConfig(pp=8),
    LayoutConfig(pp=2, vpp=3),
    LayoutConfig(tp=2, pp=4, cp=2, sequence_parallel=True),
)


def on_meta(config: dict[str, Any]) -> Any:
    """transformers' own model of a config, without memory for its weights."""
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(kind(**config))


@pytest.mark.parametrize("name", REAL)
def test_parameters_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    spec = read_spec(model_dir(tmp_path, name))
    assert spec.parameter_count() == sum(p.numel() for p in on_meta(hf_config(name)).parameters())


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe(16))
def test_shards_add_up_to_the_model(tmp_path: Path, name: str, layout: LayoutConfig) -> None:
    spec = read_spec(model_dir(tmp_path, name))
    layout = layout.model_copy(update={"ep": 2 if spec.num_experts else 1})
    assert can_be_cut(spec, layout, 16)
    shards = [shard(spec, "lm", layout, stage) for stage in range(layout.pp)]
    # All ranks of one replica hold the cut parts once and the whole ones tp times.
    whole = sum(
        count * math.prod(rule.shard_shape(1))
        for layer, count in spec.kinds.items()
        for rule in layer.rules
        if is_whole(rule)
    )
    copies = (layout.tp - 1) * (whole + spec.hidden_size)
    tied_copy = spec.vocab_size * spec.hidden_size if spec.tied and layout.pp > 1 else 0
    held = sum(part.dense * layout.tp + part.expert * layout.ep for part in shards)
    assert held == spec.parameter_count() + copies + tied_copy


def is_whole(rule: Rule) -> bool:
    return rule.shard_shape(1) == rule.shard_shape(2)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_operations_are_those_that_pytorch_counts(tmp_path: Path, family: str) -> None:
    spec = read_spec(write_model(tmp_path, family))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    tokens = 48
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.long))
    flops = forward_flops(spec, "lm", tokens, tokens**2, tokens)
    # The counter sees the square of which causality leaves half.
    assert counter.get_total_flops() == flops.linear + 2 * flops.attention + flops.head


def test_a_token_pays_for_the_experts_it_goes_through(tmp_path: Path) -> None:
    spec = read_spec(model_dir(tmp_path, "qwen3-30b-a3b.third-party-unsloth.json"))
    flops = forward_flops(spec, "lm", 1, 0, 1)
    embedding = spec.vocab_size * spec.hidden_size
    norms = (
        spec.num_layers * (2 * spec.hidden_size + 2 * spec.attention.head_dim) + spec.hidden_size
    )
    assert flops.total == 2 * (spec.active_parameter_count() - embedding - norms)


def test_recomputation_costs_what_it_computes_again(tmp_path: Path) -> None:
    spec = read_spec(model_dir(tmp_path, "qwen2.5-7b.derived.json"))
    forward = forward_flops(spec, "lm", 1000, 1e6, 1000)
    layout = LayoutConfig()

    def total(**recompute: Any) -> float:
        return training_flops(spec, forward, layout, RecomputeConfig(**recompute)).total

    none = total()
    full = total(granularity="full")
    assert full - none == pytest.approx(forward.linear + forward.attention)
    assert total(granularity="selective") - none == pytest.approx(forward.attention)


@pytest.mark.parametrize("mean", [100.0, 512.0, 1024.0])
def test_lengths_have_the_mean_and_the_longest_that_they_state(mean: float) -> None:
    lengths = Lengths(prompt=0.0, mean=mean, longest=1024, longest_prompt=64)
    drawn = lengths.longest * torch.linspace(0, 1, 200_001, dtype=torch.float64) ** lengths.exponent
    assert float(drawn.mean()) == pytest.approx(mean, rel=1e-3)
    assert float((drawn**2).mean()) == pytest.approx(lengths.mean_square, rel=1e-3)
    # A response is seen at each of its lengths: those that run at one moment have weights drawn,
    # and half of them each.
    assert lengths.running == pytest.approx(float((drawn**2).sum() / (2 * drawn.sum())), rel=1e-3)
    for tokens in (10.0, 300.0, 900.0):
        assert lengths.still_running(tokens) == pytest.approx(
            float((drawn > tokens).double().mean()), abs=1e-3
        )
