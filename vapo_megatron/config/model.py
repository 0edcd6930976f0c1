"""Models of a run: sources, layouts and optimizers."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from vapo_megatron.config.base import Section
from vapo_megatron.config.regression import RegressionConfig


class LayoutConfig(Section):
    """Sharding of one model. The data-parallel size is ranks / (tp x pp x cp)."""

    tp: int = Field(1, ge=1, description="tensor-parallel size")
    pp: int = Field(1, ge=1, description="pipeline-parallel size")
    vpp: int | None = Field(
        None, ge=2, description="model chunks per pipeline rank (interleaved schedule)"
    )
    cp: int = Field(1, ge=1, description="context-parallel size (zig-zag)")
    ep: int = Field(
        1,
        ge=1,
        description="expert-parallel size: consecutive ranks of a stage, across tp, cp and dp",
    )
    sequence_parallel: bool = Field(
        False,
        description="shard norms and dropout along the sequence; needs tp > 1; auto: on if tp > 1",
    )

    @model_validator(mode="before")
    @classmethod
    def _chosen(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("sequence_parallel") != "auto":
            return values
        return values | {"sequence_parallel": values.get("tp", 1) not in (1, "1")}

    @model_validator(mode="after")
    def _consistent(self) -> "LayoutConfig":
        if self.vpp is not None and self.pp == 1:
            raise ValueError(f"vpp={self.vpp} needs pp > 1: set layout.pp or leave vpp out")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "sequence_parallel needs tp > 1: set layout.tp or leave sequence_parallel out"
            )
        if self.ep % self.tp and self.tp % self.ep:
            raise ValueError(f"ep={self.ep} and tp={self.tp}: one must divide the other")
        return self

    @property
    def model_size(self) -> int:
        """Ranks that hold one replica."""
        return self.tp * self.pp * self.cp

    @property
    def alignment(self) -> int:
        """A packed sequence is padded to a multiple of this many tokens (zig-zag halves for CP)."""
        if self.cp > 1:
            return 2 * self.cp
        return 1

    @property
    def total_alignment(self) -> int:
        """A packed micro-batch as a whole is padded to a multiple of this many tokens."""
        return self.alignment * self._sequence_shards

    @property
    def _sequence_shards(self) -> int:
        """Ranks that the sequence is split over by sequence parallelism."""
        if self.sequence_parallel:
            return self.tp
        return 1

    def aligned_to(self, rows: int) -> int:
        """total_alignment, with every rank's share of a micro-batch a multiple of `rows` tokens."""
        return math.lcm(self.total_alignment, rows * self.cp * self._sequence_shards)

    def longest_sample(self, max_tokens_per_microbatch: int, rows: int = 1) -> int:
        """Tokens of the longest sample that fits a micro-batch alone, with padding.

        rows: as in aligned_to.
        """
        alignment = self.aligned_to(rows)
        return max_tokens_per_microbatch * self.cp // alignment * alignment

    def describe(self, world_size: int) -> str:
        """Returns a short name such as 'TP2 PP1 CP1 DP1 SP'."""
        parts = [f"TP{self.tp}", f"PP{self.pp}"]
        if self.vpp:
            parts.append(f"VPP{self.vpp}")
        parts += [f"CP{self.cp}", f"DP{world_size // self.model_size}"]
        if self.ep > 1:
            parts.append(f"EP{self.ep}")
        if self.sequence_parallel:
            parts.append("SP")
        return " ".join(parts)


class OptimizerSettings(Section):
    """AdamW as in the papers: betas 0.9 and 0.95, no weight decay on norms and biases."""

    lr: float = Field(1e-6, gt=0, description="peak learning rate")
    warmup_steps: int = Field(
        10, ge=0, description="optimizer steps of linear warm-up from 0 to lr"
    )
    decay: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="learning rate after warm-up"
    )
    decay_steps: int | None = Field(
        None, ge=1, description="optimizer steps until min_lr; required unless constant"
    )
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the decay")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay, as in AdamW")
    eps: float = Field(
        1e-8, gt=0, description="Adam's epsilon, added to the root of the second moment"
    )
    clip_grad: float = Field(1.0, ge=0, description="global gradient-norm limit; 0 switches it off")
    overlap: bool | Literal["auto"] = Field(
        "auto",
        description="reduce gradients during the backward pass, and gather updated weights "
        "during the next forward pass; auto: on GPUs",
    )

    @model_validator(mode="after")
    def _decay_has_length(self) -> "OptimizerSettings":
        if self.decay != "constant" and self.decay_steps is None:
            raise ValueError(
                f"decay={self.decay} needs decay_steps: give the number of optimizer steps"
            )
        if self.decay_steps is not None and self.warmup_steps >= self.decay_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} is not below decay_steps={self.decay_steps}: "
                "lower it"
            )
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is above lr={self.lr}")
        return self


class RecomputeConfig(Section):
    """Activations that are recomputed in the backward pass instead of stored."""

    granularity: Literal["none", "selective", "full"] = Field(
        "none",
        description="selective: recompute core attention; full: recompute whole layers, in blocks",
    )
    layers: int = Field(
        1, ge=1, description="full: layers per block; only the block's input is stored"
    )


Fp8Recipe = Literal["none", "tensorwise", "blockwise"]

# FP8 kernels take this many rows at a time: 16 for cuBLAS, as many as share a scale for blocks.
_FP8_ROWS = {"none": 1, "tensorwise": 16, "blockwise": 128}


class PrecisionConfig(Section):
    """Compute precision. Heads, loss, gradient sums and optimizer states are always float32."""

    fp8: Fp8Recipe = Field(
        "none",
        description="compute matrix products in FP8 with one scale per tensor (tensorwise) or "
        "per block (blockwise)",
    )

    @property
    def rows(self) -> int:
        """A rank's tokens in a micro-batch are a multiple of this."""
        return _FP8_ROWS[self.fp8]


AdaptedLayer = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


class AdapterConfig(Section):
    """Low-rank adapters (LoRA), trained instead of the whole model (docs/lora.md)."""

    rank: int = Field(
        32, ge=1, description="rank of the product B A of each Hugging Face projection"
    )
    alpha: float = Field(
        32.0, gt=0, description="scale: the product B A is multiplied by alpha / rank"
    )
    layers: tuple[AdaptedLayer, ...] = Field(
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        min_length=1,
        description="linear layers with adapters, by Megatron's names; every expert has separate "
        "adapters",
    )


class TrainableConfig(Section):
    """Settings of both actor and critic."""

    kind: Literal["model", "adapter"] = Field(
        "model",
        description="model: train the whole model; adapter: low-rank adapters (model.adapter) on "
        "its frozen weights",
    )
    layout: LayoutConfig = LayoutConfig()
    optimizer: OptimizerSettings = OptimizerSettings()
    recompute: RecomputeConfig = RecomputeConfig()
    precision: PrecisionConfig = PrecisionConfig()
    max_tokens_per_microbatch: int = Field(
        16384, ge=1, description="padded tokens per packed micro-batch, at most"
    )
    share_prompts: bool = Field(
        False,
        description="compute the prompt of a group once for its responses in a micro-batch, in "
        "scoring and updates (docs/parallelism.md); needs PyTorch's attention and layout.cp=1. "
        "`plan` does not count what this saves",
    )
    offload: Literal["auto", "always", "never"] = Field(
        "auto",
        description="move model parts that a phase does not use to host memory; auto: on GPUs, "
        "those that `plan` sees no room for beside engine and activations",
    )

    @model_validator(mode="after")
    def _prompts_are_whole(self) -> "TrainableConfig":
        if self.share_prompts and self.layout.cp > 1:
            raise ValueError(
                f"share_prompts with layout.cp={self.layout.cp}: a context-parallel rank has "
                "chunks of sequences and no whole prompt, set layout.cp=1 or share_prompts=false"
            )
        return self

    @property
    def total_alignment(self) -> int:
        """A packed micro-batch as a whole is padded to a multiple of this many tokens."""
        return self.layout.aligned_to(self.precision.rows)

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest sample that fits a micro-batch alone, with padding."""
        return self.layout.longest_sample(self.max_tokens_per_microbatch, self.precision.rows)


def logits_rows(words: int) -> int:
    """Rows of fp32 logits that fit 512 MiB, on a rank with this many words of the vocabulary."""
    return max(1, (512 << 20) // (4 * words))


class ActorConfig(TrainableConfig):
    """The policy."""


class ProbeConfig(Section):
    """Head of a probe critic (kind=probe)."""

    layer: int | None = Field(
        None,
        ge=1,
        description="the policy's layer whose output the probe reads, from 1, on the last pipeline "
        "stage; none: the last one, after the final norm",
    )
    width: int = Field(256, ge=1, description="units of the hidden layer")


# Keys of the critic's section that apply to a probe; the others describe a model.
_PROBE_KEYS = ("kind", "probe", "regression", "optimizer", "head_init_std", "init_path")


class CriticConfig(TrainableConfig):
    """The value model: a backbone (the policy's or another) and a value head."""

    kind: Literal["model", "adapter", "probe", "regression"] = Field(  # type: ignore[assignment]
        "model",
        description="model: train the whole model; adapter: low-rank adapters (model.adapter) on "
        "its frozen weights; probe: a small head on the actor's hidden states, without a model "
        "or an extra pass; regression: no training, past steps' returns are regressed on features "
        "of the prefix",
    )
    probe: ProbeConfig = ProbeConfig()
    regression: RegressionConfig | None = Field(
        None,
        description="features of kind=regression. With another kind and advantage.calibration: "
        "regressors beside the critic's value, which otherwise has the siblings' mean alone",
    )
    optimizer: OptimizerSettings = OptimizerSettings(lr=2e-6)
    init: Literal["policy", "reward_model", "value_checkpoint"] = Field(
        "policy",
        description="policy: the backbone of the policy or of model_path, with a new head; "
        "otherwise: backbone and head of init_path",
    )
    init_path: str | None = Field(
        None, description="Hugging Face directory for reward_model and value_checkpoint"
    )
    model_path: str | None = Field(
        None,
        min_length=1,
        description="init=policy: Hugging Face directory of another language model for the "
        "backbone, for example a smaller one, with the policy's tokenizer; none: model.path",
    )
    head_init_std: float = Field(
        0.0, ge=0, description="init=policy: standard deviation of the new head; 0 is zeros"
    )
    freeze_attention: bool = Field(False, description="freeze the critic's attention modules (SAO)")
    privileged_field: str | None = Field(
        None,
        min_length=1,
        description="field of a training row that only the critic reads, before the prompt: an "
        "answer, a solution, an environment's hidden state (docs/critic.md)",
    )

    @model_validator(mode="before")
    @classmethod
    def _regression_has_features(cls, values: Any) -> Any:
        """With kind=regression the resolved config names the features, also those left as they
        are."""
        if isinstance(values, Mapping) and values.get("kind") == "regression":
            return {**values, "regression": values.get("regression") or {}}
        return values

    @model_validator(mode="after")
    def _init_has_path(self) -> "CriticConfig":
        if self.init != "policy" and not self.init_path:
            raise ValueError(
                f"init={self.init} needs init_path: the Hugging Face directory to start from"
            )
        if self.init == "policy" and self.init_path:
            raise ValueError("init=policy starts from model.path: leave init_path out, or set init")
        if self.init != "policy" and self.model_path:
            raise ValueError(
                f"model_path={self.model_path} with init={self.init}: backbone and head come from "
                "init_path, leave model_path out"
            )
        if self.kind != "probe" and self.probe != ProbeConfig():
            raise ValueError(
                f"probe with kind={self.kind}: only a probe has these keys, set kind=probe or "
                "remove them"
            )
        if self.kind == "probe":
            self._has_only_probe_keys()
        if self.kind == "regression":
            self._has_no_model_keys()
        return self

    def _has_no_model_keys(self) -> None:
        for name, field in type(self).model_fields.items():
            if name not in ("kind", "regression") and getattr(self, name) != field.get_default():
                raise ValueError(
                    f"{name} with kind=regression: it has no weights, leave it out (or all, by "
                    "critic=null before)"
                )

    def _has_only_probe_keys(self) -> None:
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name in _PROBE_KEYS or (name, value) == ("init", "value_checkpoint"):
                continue
            if value != field.get_default():
                raise ValueError(
                    f"{name} with kind=probe: a probe reads the actor's hidden states, leave it "
                    "out (or all, by critic=null before)"
                )


class ReferenceConfig(Section):
    """The reference model of the KL, such as a teacher (algorithm.kl.reference_path)."""

    layout: LayoutConfig | None = Field(
        None, description="sizes default to 1; none: the actor's layout"
    )


LogProbKernel = Literal["torch", "triton"]


class ModelConfig(Section):
    """The checkpoint that the policy starts from."""

    path: str = Field(
        min_length=1,
        description="Hugging Face directory of the policy: config.json, safetensors, tokenizer; or "
        "hub:OWNER/NAME@REVISION",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="compute data type of actor and critic"
    )
    adapter: AdapterConfig = AdapterConfig()
    attention: Literal["auto", "sdpa"] = Field(
        "auto", description="auto: Transformer Engine where it can be used, else PyTorch's SDPA"
    )
    logprob_kernel: LogProbKernel = Field(
        "torch",
        description="code that turns logits into log-probs and entropies; triton: fused kernels, "
        "on GPUs only (docs/gpu.md)",
    )
