"""What a model computes in: refusals by name, Megatron's settings, alignment of packed tokens,
bfloat16 against float32, and recomputation. What needs a GPU is in test_gpu_precision.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import make_batch
from hf_models import write_model
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import run_ranks
from specs import SIZES, spec_of
from trainables import loss_of, make_trainable

from vapo_megatron.config.model import (
    ActorConfig,
    AdapterConfig,
    CriticConfig,
    LayoutConfig,
    ModelConfig,
    PrecisionConfig,
    TrainableConfig,
)
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.model import transformer_config
from vapo_megatron.megatron.platform import Platform, current_platform
from vapo_megatron.megatron.precision import (
    CAPABILITY,
    check_fused_layers,
    check_trainable,
    drop_fp8_copies,
    fp8_settings,
)
from vapo_megatron.models.registry import FAMILIES, read_spec
from vapo_megatron.models.spec import ModelSpec


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def spec(model_dir: Path) -> ModelSpec:
    return read_spec(model_dir)


@dataclass(frozen=True)
class Chip(Platform):
    """A GPU machine that is not there."""

    has_te: bool = True
    capability: tuple[int, int] = (9, 0)
    cuda: tuple[int, int] = (13, 0)

    @property
    def has_transformer_engine(self) -> bool:
        return self.has_te

    @property
    def compute_capability(self) -> tuple[int, int]:
        return self.capability

    @property
    def cuda_version(self) -> tuple[int, int]:
        return self.cuda


H100 = Chip("cuda", "nccl", "spawn")
A100 = Chip("cuda", "nccl", "spawn", capability=(8, 0))
ADA = Chip("cuda", "nccl", "spawn", capability=(8, 9))
BARE = Chip("cuda", "nccl", "spawn", has_te=False)
OLD_CUDA = Chip("cuda", "nccl", "spawn", cuda=(12, 8))


@pytest.mark.parametrize(
    "platform,section,model,words",
    [
        (current_platform(), {"precision": {"fp8": "tensorwise"}}, {}, "needs a CUDA GPU"),
        (BARE, {"precision": {"fp8": "tensorwise"}}, {}, "Transformer Engine, which is not usable"),
        (H100, {"precision": {"fp8": "tensorwise"}}, {"attention": "sdpa"}, "model.attention=sdpa"),
        (
            A100,
            {"precision": {"fp8": "tensorwise"}},
            {},
            "compute capability 8.9, this one has 8.0: choose none",
        ),
        (ADA, {"precision": {"fp8": "blockwise"}}, {}, "9.0, this one has 8.9: choose tensorwise"),
        (
            H100,
            {"precision": {"fp8": "tensorwise"}},
            {"dtype": "float32"},
            "set model.dtype=bfloat16",
        ),
        (H100, {"recompute": {"granularity": "full", "layers": 5}}, {}, "recompute.layers=5"),
        (
            H100,
            {"recompute": {"granularity": "full", "layers": 3}},
            {},
            "recompute.layers=3 does not divide the 4",
        ),
        (
            H100,
            {"recompute": {"granularity": "full", "layers": 2}, "layout": {"pp": 2, "vpp": 2}},
            {},
            "recompute.layers=2 is above the 1 layers",
        ),
        (
            H100,
            {"recompute": {"granularity": "full", "layers": 2}, "layout": {"pp": 3}},
            {},
            "recompute.layers=2 is above the 1 and 2 layers",
        ),
        (H100, {}, {"dtype": "float32"}, "set model.attention=sdpa, or bfloat16"),
        (
            OLD_CUDA,
            {"precision": {"fp8": "blockwise"}},
            {},
            "CUDA 12.9 or later, this one is for 12.8",
        ),
        (
            H100,
            {"share_prompts": True},
            {},
            "actor.share_prompts=true: Transformer Engine's attention knows no prompt",
        ),
        *(
            (
                H100,
                {"precision": {"fp8": recipe}, "layout": {"tp": 4}, "kind": kind},
                {},
                f"actor.precision.fp8={recipe}: a rank's part of "
                f"model.layers.{{layer}}.mlp.gate_proj.weight has shape [24, 32] with "
                "actor.layout.tp=4",
            )
            for recipe in CAPABILITY
            for kind in ("model", "adapter")
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    spec: ModelSpec, platform: Platform, section: dict[str, Any], model: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput) as refusal:
        check_trainable(
            spec,
            ModelConfig(path="m", **model),
            ActorConfig.model_validate(section),
            "actor",
            platform,
        )
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "told"), [("reference", "actor"), ("critic", "critic"), ("actor", "actor")]
)
def test_delta_nets_share_no_prompts(name: str, told: str) -> None:
    section = TrainableConfig(share_prompts=True)
    sdpa = ModelConfig(path="m", attention="sdpa")
    with pytest.raises(BadInput) as refusal:
        check_trainable(spec_of("qwen3_next"), sdpa, section, name, BARE)
    said = str(refusal.value)
    assert f"{told}.share_prompts=true: the delta nets of qwen3_next" in said
    assert said.endswith(f"set {told}.share_prompts=false") and "\n" not in said
    for platform in (BARE, H100):
        check_trainable(spec_of("deepseek_v3"), sdpa, section, name, platform)


@pytest.mark.parametrize("kind", ["model", "adapter"])
@pytest.mark.parametrize("recipe", CAPABILITY)
def test_what_can_work_is_not_refused(spec: ModelSpec, recipe: str, kind: str) -> None:
    """An adapter's rank is no multiple of anything: adapters are computed in bfloat16."""
    section = CriticConfig.model_validate({"precision": {"fp8": recipe}, "kind": kind})
    check_trainable(
        spec, ModelConfig(path="m", adapter=AdapterConfig(rank=5)), section, "critic", H100
    )


@pytest.mark.parametrize("recipe", CAPABILITY)
def test_megatron_takes_the_settings(recipe: str) -> None:
    precision = PrecisionConfig.model_validate({"fp8": recipe})
    config = TransformerConfig(
        num_layers=4, hidden_size=64, num_attention_heads=4, bf16=True, **fp8_settings(precision)
    )
    assert config.fp8_recipe == recipe
    assert config.fp8 == ("e4m3" if recipe == "blockwise" else "hybrid")


def test_what_is_made_of_fp8_weights_is_dropped() -> None:
    layer = torch.nn.Linear(2, 3)
    layer._fp8_workspaces = {"weight": torch.ones(3)}  # type: ignore[assignment]
    drop_fp8_copies([torch.nn.Sequential(layer)])
    assert layer._fp8_workspaces == {}


@pytest.mark.parametrize("fp8,rows", [("none", 1), ("tensorwise", 16), ("blockwise", 128)])
@pytest.mark.parametrize(
    "layout",
    [
        LayoutConfig(),
        LayoutConfig(tp=2),
        LayoutConfig(tp=2, cp=3, sequence_parallel=True),
        LayoutConfig(tp=4, cp=2, sequence_parallel=True),
    ],
)
def test_every_ranks_tokens_fit_the_recipe(layout: LayoutConfig, fp8: Any, rows: int) -> None:
    section = TrainableConfig(
        layout=layout, precision=PrecisionConfig(fp8=fp8), max_tokens_per_microbatch=2048
    )
    share = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    assert (
        section.total_alignment % (rows * share) == 0
        and section.total_alignment % layout.total_alignment == 0
    )
    longest = section.longest_sample
    assert longest % layout.alignment == 0
    assert longest <= 2048 * layout.cp < longest + section.total_alignment


class PaddedActor(ActorConfig):
    """An actor whose micro-batches are as long as blockwise FP8 wants them."""

    @property
    def total_alignment(self) -> int:
        return self.layout.aligned_to(128)


def norms(
    model_dir: Path, head: Any, fields: dict[str, Any], padded: bool = False, dtype: str = "float32"
) -> Any:
    """Gradient norm and loss metrics of three steps, and the rank's dtype of weights."""
    trainable = make_trainable(
        model_dir, head, dtype=dtype, max_tokens_per_microbatch=512 if padded else 40, **fields
    )
    if padded:
        trainable.config = PaddedActor.model_validate(trainable.config.model_dump())
    batch = make_batch()
    sizes = {len(m.ids) for m in trainable.microbatches(batch, range(batch.samples))}
    loss = loss_of(trainable, batch)
    results = []
    for _ in range(3):
        result = trainable.train_step(batch, range(batch.samples), loss)
        results.append((result.grad_norm, result.metrics))
    return results, sizes, str(next(trainable.chunks[0].parameters()).dtype)


def test_padding_for_a_recipe_weighs_nothing(model_dir: Path) -> None:
    layout = LayoutConfig(tp=2, cp=2, sequence_parallel=True)
    plain = run_ranks(1, norms, model_dir, "lm", {})[0][0]
    for results, sizes, _ in run_ranks(4, norms, model_dir, "lm", {"layout": layout}, True):
        assert all(size % 256 == 0 for size in sizes)
        for (norm, metrics), (expected_norm, expected) in zip(results, plain, strict=True):
            assert norm == pytest.approx(expected_norm, rel=2e-5)
            assert metrics["policy_loss"] == pytest.approx(
                expected["policy_loss"], rel=2e-5, abs=2e-6
            )


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (4, LayoutConfig(tp=2, pp=2, sequence_parallel=True)),
        pytest.param(
            8, LayoutConfig(tp=2, cp=2, pp=2, sequence_parallel=True), marks=pytest.mark.full
        ),
    ],
)
def test_bfloat16_is_float32_to_its_rounding(
    model_dir: Path, ranks: int, layout: LayoutConfig
) -> None:
    """One unit of bfloat16 is 2^-8; the norm of a gradient sums many independent roundings."""
    exact = run_ranks(1, norms, model_dir, "lm", {})[0][0]
    rounded = run_ranks(ranks, norms, model_dir, "lm", {"layout": layout}, False, "bfloat16")
    for results, _, dtype in rounded:
        assert dtype == "torch.bfloat16"
        assert results == rounded[0][0]  # whatever the rounding, it is the same on all ranks
        for (norm, metrics), (expected_norm, expected) in list(zip(results, exact, strict=True))[
            :2
        ]:
            assert norm == pytest.approx(expected_norm, rel=4 * 2**-8)
            assert norm != expected_norm
            assert metrics["update_entropy"] == pytest.approx(expected["update_entropy"], rel=2**-8)


@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param({"granularity": "selective"}, marks=pytest.mark.full),
        {"granularity": "full", "layers": 2},
    ],
)
def test_recomputation_changes_nothing(model_dir: Path, recompute: dict[str, Any]) -> None:
    layout = LayoutConfig(tp=2, sequence_parallel=True)
    plain = run_ranks(2, norms, model_dir, "lm", {"layout": layout})
    again = run_ranks(2, norms, model_dir, "lm", {"layout": layout, "recompute": recompute})
    for (found, _, _), (expected, _, _) in zip(again, plain, strict=True):
        for (norm, _), (expected_norm, _) in zip(found, expected, strict=True):
            assert norm == pytest.approx(expected_norm, rel=1e-6)


def test_recomputation_reaches_megatron(spec: ModelSpec) -> None:
    def config(**recompute: Any) -> Any:
        section = ActorConfig.model_validate({"recompute": recompute})
        return transformer_config(spec, ModelConfig(path="m"), section)

    selective = config(granularity="selective")
    assert (selective.recompute_granularity, selective.recompute_modules) == (
        "selective",
        ["core_attn"],
    )
    block = config(granularity="full", layers=3)
    assert (block.recompute_method, block.recompute_num_layers) == ("uniform", 3)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_fused_layers_refuse_what_they_would_leave_out(family: str) -> None:
    has_delta_nets = family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    latent = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")
    windows = ("gemma3_text", "gpt_oss", "olmo3")
    others = ("glm4", "minimax_m2", "ministral3", "smollm3")
    if has_delta_nets or family in (*others, *windows, *latent):
        with pytest.raises(BadInput, match=rf"which {family} has: set model.attention=sdpa"):
            check_fused_layers(spec_of(family, num_hidden_layers=4))
    else:
        check_fused_layers(spec_of(family))


def test_fused_layers_refuse_to_stretch_a_part_of_a_head() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

    def glm(share: float) -> ModelSpec:
        family = FAMILIES["glm4_moe"]
        sizes = {key: SIZES[key] for key in SIZES if key in family.config.model_fields}
        return family.spec({**sizes, "rope_scaling": scaling, "partial_rotary_factor": share})

    check_fused_layers(glm(1.0))
    with pytest.raises(BadInput, match="a stretch of a part of each head"):
        check_fused_layers(glm(0.5))
