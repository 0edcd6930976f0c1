"""What a model computes in: refusals by name, Megatron's settings, alignment of packed tokens, bfloat16 against
float32, and recomputation. What needs a GPU is in test_gpu_precision.py."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import make_batch
from hf_models import write_model
from megatron.core import fp8_utils
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import run_ranks
from trainables import loss_of, make_trainable

from vapo_megatron.checkpoint import dist_saver
from vapo_megatron.config.model import (
    ActorConfig,
    CriticConfig,
    LayoutConfig,
    ModelConfig,
    PrecisionConfig,
    TrainableConfig,
)
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron import precision
from vapo_megatron.megatron.model import transformer_config
from vapo_megatron.megatron.platform import Platform, current_platform
from vapo_megatron.megatron.precision import (
    CAPABILITY,
    check_trainable,
    drop_fp8_copies,
    fp8_settings,
)
from vapo_megatron.weights.spec import ModelSpec, read_spec


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
B200 = Chip("cuda", "nccl", "spawn", capability=(10, 0))
BARE = Chip("cuda", "nccl", "spawn", has_te=False)
OLD_CUDA = Chip("cuda", "nccl", "spawn", cuda=(12, 8))


@pytest.mark.parametrize(
    "platform,section,model,words",
    [
        (current_platform(), {"precision": {"fp8": "tensorwise"}}, {}, "needs a CUDA GPU"),
        (BARE, {"precision": {"fp8": "tensorwise"}}, {}, "Transformer Engine, which is not usable"),
        (H100, {"precision": {"fp8": "tensorwise"}}, {"attention": "sdpa"}, "model.attention=sdpa"),
        (A100, {"precision": {"fp8": "tensorwise"}}, {}, "compute capability 8.9, this one has 8.0: choose none"),
        (H100, {"precision": {"fp8": "mxfp8"}}, {}, "10.0, this one has 9.0: choose tensorwise or blockwise"),
        (H100, {"precision": {"fp8": "tensorwise"}}, {"dtype": "float32"}, "set model.dtype=bfloat16"),
        (H100, {"precision": {"fp8": "tensorwise", "bf16_layers": [5, 0]}}, {}, "bf16_layers=[5, 0]"),
        (H100, {"precision": {"fp8": "tensorwise"}, "layout": {"tp": 2}}, {}, "MLP columns a rank, 24"),
        (B200, {"precision": {"fp8": "mxfp8"}}, {}, "MLP columns a rank, 48, are no multiple of 32"),
        (current_platform(), {"precision": {"dtype": "bfloat16"}}, {"dtype": "float32"}, "actor.precision.dtype"),
        (BARE, {"recompute": {"granularity": "selective", "modules": ["layernorm"]}}, {}, "needs Transformer Engine"),
        (H100, {"recompute": {"granularity": "selective", "modules": ["mlp", "moe"]}}, {}, "has no experts"),
        (H100, {"recompute": {"granularity": "full", "layers": 5}}, {}, "recompute.layers=5"),
        (H100, {"recompute": {"granularity": "full", "layers": 3}}, {}, "recompute.layers=3 does not divide the 4"),
        (
            H100,
            {"recompute": {"granularity": "full", "layers": 2}, "layout": {"pp": 2, "vpp": 2}},
            {},
            "recompute.layers=2 is above the 1 layers",
        ),
        (H100, {}, {"dtype": "float32"}, "set model.attention=sdpa, or bfloat16"),
        (OLD_CUDA, {"precision": {"fp8": "blockwise"}}, {}, "CUDA 12.9 or later, this one is for 12.8"),
        (
            H100,
            {"precision": {"fp8": "blockwise"}, "layout": {"tp": 2, "sequence_parallel": True}},
            {},
            "hidden size, 32, is no multiple of 128",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    spec: ModelSpec, platform: Platform, section: dict[str, Any], model: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput) as refusal:
        check_trainable(spec, ModelConfig(path="m", **model), ActorConfig.model_validate(section), "actor", platform)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_experts_are_not_computed_again_in_fp8(spec: ModelSpec) -> None:
    """Megatron 0.16 asks its global state for a process group then, and ends with an assertion."""
    experts = spec.__class__(**{**spec.__dict__, "num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 32})
    recompute = {"granularity": "selective", "modules": ["moe"]}
    plain = ActorConfig.model_validate({"recompute": recompute})
    check_trainable(experts, ModelConfig(path="m"), plain, "actor", H100)
    fp8 = ActorConfig.model_validate({"recompute": recompute, "precision": {"fp8": "tensorwise"}})
    with pytest.raises(BadInput, match=r"modules=moe with actor\.precision\.fp8=tensorwise"):
        check_trainable(experts, ModelConfig(path="m"), fp8, "actor", H100)


@pytest.mark.parametrize("recipe", CAPABILITY)
def test_what_can_work_is_not_refused(spec: ModelSpec, recipe: str) -> None:
    chip = B200 if recipe == "mxfp8" else H100
    wide = spec if recipe != "mxfp8" else spec.__class__(**{**spec.__dict__, "ffn_size": 64})
    section = CriticConfig.model_validate({"precision": {"fp8": recipe}})
    check_trainable(wide, ModelConfig(path="m"), section, "critic", chip)


@pytest.mark.parametrize("recipe", CAPABILITY)
def test_megatron_takes_the_settings(recipe: str) -> None:
    precision = PrecisionConfig.model_validate({"fp8": recipe, "bf16_layers": [1, 2]})
    config = TransformerConfig(
        num_layers=4, hidden_size=64, num_attention_heads=4, bf16=True, **fp8_settings(precision)
    )
    assert config.fp8_recipe == recipe
    assert config.fp8 == ("e4m3" if recipe in ("blockwise", "mxfp8") else "hybrid")
    assert [layer for layer in range(4) if is_first_last_bf16_layer(config, layer)] == [0, 2, 3]


class Quantized(torch.Tensor):
    """Stands for a weight kept in FP8: no memory of its own, numbers and their transpose beside it."""

    _data: torch.Tensor
    turned: torch.Tensor | None

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "Quantized":
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16)
        made._data = values.clone()
        made.turned = values.t().contiguous()
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert func is torch.ops.aten.detach.default, func
        return args[0]

    def dequantize(self) -> torch.Tensor:
        return self._data.bfloat16() / 2

    def update_usage(self, rowwise_usage: bool, columnwise_usage: bool) -> None:
        assert rowwise_usage and not columnwise_usage
        self.turned = None


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """A layer whose weight is kept in FP8, as far as this package can tell."""
    monkeypatch.setattr(precision, "is_float8tensor", lambda tensor: isinstance(tensor, Quantized))
    monkeypatch.setattr(fp8_utils, "dequantize_fp8_tensor", Quantized.dequantize)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(Quantized(torch.arange(6, dtype=torch.uint8).view(2, 3)), requires_grad=False)
    layer.norm = torch.nn.Parameter(torch.ones(3))
    return layer


def test_what_is_made_of_fp8_weights_is_dropped(quantized: Any) -> None:
    quantized._fp8_workspaces = {"weight": torch.ones(3)}
    drop_fp8_copies([quantized])
    assert quantized._fp8_workspaces == {} and quantized.weight.turned is None
    assert quantized.weight._data.flatten().tolist() == list(range(6))


def test_a_checkpoint_holds_what_fp8_weights_stand_for(quantized: Any) -> None:
    """Weights in FP8 have no memory that could be asked for its address; what they are made of has."""
    weight = quantized.weight
    with pytest.raises(RuntimeError):
        weight.untyped_storage().data_ptr()
    live = {dist_saver._memory(parameter).untyped_storage().data_ptr() for parameter in quantized.parameters()}
    assert live == {tensor.untyped_storage().data_ptr() for tensor in (weight._data, quantized.norm)}
    copied = dist_saver._copied(weight, live)
    assert type(copied) is torch.Tensor and torch.equal(copied, torch.arange(6).view(2, 3).bfloat16() / 2)
    assert dist_saver._copied(quantized.norm, live).untyped_storage().data_ptr() not in live


@pytest.mark.parametrize("fp8,rows", [("none", 1), ("tensorwise", 16), ("mxfp8", 32), ("blockwise", 128)])
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
    section = TrainableConfig(layout=layout, precision=PrecisionConfig(fp8=fp8), max_tokens_per_microbatch=2048)
    share = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    assert section.total_alignment % (rows * share) == 0 and section.total_alignment % layout.total_alignment == 0
    longest = section.longest_sample
    assert longest % layout.alignment == 0
    assert longest <= 2048 * layout.cp < longest + section.total_alignment


class PaddedActor(ActorConfig):
    """An actor whose micro-batches are as long as blockwise FP8 wants them."""

    @property
    def total_alignment(self) -> int:
        return self.layout.aligned_to(128)


def norms(model_dir: Path, head: Any, fields: dict[str, Any], padded: bool = False, dtype: str = "float32") -> Any:
    """Gradient norm and loss metrics of three steps, and the rank's dtype of weights."""
    trainable = make_trainable(model_dir, head, dtype=dtype, max_tokens_per_microbatch=512 if padded else 40, **fields)
    if padded:
        trainable.config = PaddedActor.model_validate(trainable.config.model_dump())
    batch = make_batch()
    sizes = {len(m.ids) for m in trainable.microbatches(batch, range(batch.samples))}
    loss, results = loss_of(trainable, batch), []
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
            assert metrics["policy_loss"] == pytest.approx(expected["policy_loss"], rel=2e-5, abs=2e-6)


def test_bfloat16_is_float32_to_its_rounding(model_dir: Path) -> None:
    """One unit of bfloat16 is 2^-8; the norm of a gradient sums many independent roundings."""
    exact = run_ranks(1, norms, model_dir, "lm", {})[0][0]
    layout = LayoutConfig(tp=2, cp=2, pp=2, sequence_parallel=True)
    rounded = run_ranks(8, norms, model_dir, "lm", {"layout": layout}, False, "bfloat16")
    for results, _, dtype in rounded:
        assert dtype == "torch.bfloat16"
        assert results == rounded[0][0]  # whatever the rounding, it is the same on all ranks
        for (norm, metrics), (expected_norm, expected) in list(zip(results, exact, strict=True))[:2]:
            assert norm == pytest.approx(expected_norm, rel=4 * 2**-8)
            assert norm != expected_norm
            assert metrics["update_entropy"] == pytest.approx(expected["update_entropy"], rel=2**-8)


def test_a_critic_has_a_precision_of_its_own(model_dir: Path) -> None:
    fields = {"precision": {"dtype": "float32"}}
    (own, _, dtype), (plain, _, _) = (
        run_ranks(1, norms, model_dir, "value", f, False, d)[0] for f, d in ((fields, "bfloat16"), ({}, "float32"))
    )
    assert dtype == "torch.float32" and own == plain


@pytest.mark.parametrize(
    "recompute",
    [
        {"granularity": "selective", "modules": ["core_attn", "mlp"]},
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

    selective = config(granularity="selective", modules=("mlp",))
    assert (selective.recompute_granularity, selective.recompute_modules) == ("selective", ["mlp"])
    block = config(granularity="full", layers=3)
    assert (block.recompute_method, block.recompute_num_layers) == ("uniform", 3)


def test_flash_attention_is_there_where_its_kernels_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn-4, which SGLang asks for, brings a package flash_attn that Transformer Engine can take nothing of."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    assert not H100.has_flash_attention
    (tmp_path / "flash_attn_2_cuda.py").touch()
    importlib.invalidate_caches()
    assert H100.has_flash_attention and not current_platform().has_flash_attention
