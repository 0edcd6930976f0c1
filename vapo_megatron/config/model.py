"""The models of a run: where they come from, how they are laid out over ranks, how they are optimised."""

from typing import Literal

from pydantic import Field, model_validator

from vapo_megatron.config.base import Section


class LayoutConfig(Section):
    """How one model is cut over ranks. Data parallelism takes what tp x pp x cp leave of the world."""

    tp: int = Field(1, ge=1, description="tensor-parallel size")
    pp: int = Field(1, ge=1, description="pipeline-parallel size")
    vpp: int | None = Field(None, ge=2, description="model chunks a pipeline rank holds (interleaved schedule)")
    cp: int = Field(1, ge=1, description="context-parallel size (zig-zag)")
    sequence_parallel: bool = Field(False, description="norms and dropout along the sequence; needs tp > 1")

    @model_validator(mode="after")
    def _consistent(self) -> "LayoutConfig":
        if self.vpp is not None and self.pp == 1:
            raise ValueError(f"vpp={self.vpp} needs pp > 1: set layout.pp or leave vpp out")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp > 1: set layout.tp or leave sequence_parallel out")
        return self

    @property
    def model_size(self) -> int:
        """Ranks that hold one replica."""
        return self.tp * self.pp * self.cp

    @property
    def alignment(self) -> int:
        """Every packed sequence is padded to a multiple of this many tokens (zig-zag halves of each CP rank)."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def total_alignment(self) -> int:
        """A packed micro-batch as a whole is padded to a multiple of this many tokens."""
        return self.alignment * (self.tp if self.sequence_parallel else 1)

    def longest_sample(self, max_tokens_per_microbatch: int) -> int:
        """Tokens of the longest sample that fits a micro-batch on its own, padding included."""
        room = max_tokens_per_microbatch * self.cp - (self.total_alignment - self.alignment)
        return room // self.alignment * self.alignment

    def describe(self, world_size: int) -> str:
        """A short name such as 'TP2 PP1 CP1 DP1 SP'."""
        dp = world_size // self.model_size
        vpp = f" VPP{self.vpp}" if self.vpp else ""
        return f"TP{self.tp} PP{self.pp}{vpp} CP{self.cp} DP{dp}" + (" SP" if self.sequence_parallel else "")


class OptimizerSettings(Section):
    """AdamW as the papers use it; weight decay spares norms and biases."""

    lr: float = Field(1e-6, gt=0, description="peak learning rate")
    warmup_steps: int = Field(10, ge=0, description="optimizer steps from 0 to lr, linear")
    decay: Literal["constant", "cosine", "linear"] = Field("constant", description="of the learning rate after warm-up")
    decay_steps: int | None = Field(None, ge=1, description="optimizer steps until min_lr; needed unless constant")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the decay")
    weight_decay: float = Field(0.1, ge=0, description="decoupled, as in AdamW")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    clip_grad: float = Field(1.0, ge=0, description="global gradient-norm limit; 0 switches it off")
    distributed: bool = Field(True, description="Megatron's distributed optimizer: states cut over data-parallel ranks")

    @model_validator(mode="after")
    def _decay_has_length(self) -> "OptimizerSettings":
        if self.decay != "constant" and self.decay_steps is None:
            raise ValueError(f"decay={self.decay} needs decay_steps: give the number of optimizer steps")
        if self.decay_steps is not None and self.warmup_steps >= self.decay_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} is not below decay_steps={self.decay_steps}: lower it")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is above lr={self.lr}")
        return self


class RecomputeConfig(Section):
    """Activations that are computed again in the backward pass rather than kept."""

    granularity: Literal["none", "selective", "full"] = Field(
        "none", description="selective: core attention alone; full: whole blocks of layers"
    )
    layers: int = Field(1, ge=1, description="full: layers in one recomputed block")


class TrainableConfig(Section):
    """What actor and critic share."""

    layout: LayoutConfig = LayoutConfig()
    optimizer: OptimizerSettings = OptimizerSettings()
    recompute: RecomputeConfig = RecomputeConfig()
    max_tokens_per_microbatch: int = Field(16384, ge=1, description="padded tokens of one packed micro-batch")


class ActorConfig(TrainableConfig):
    """The policy."""

    logprob_chunk: int = Field(1024, ge=1, description="rows of logits held at once, in fp32, on a rank")


class CriticConfig(TrainableConfig):
    """The value model: the policy's backbone and a scalar head, with a layout and an optimizer of its own."""

    optimizer: OptimizerSettings = OptimizerSettings(lr=2e-6)
    init: Literal["policy", "reward_model", "value_checkpoint"] = Field(
        "policy", description="policy: its backbone and a new head; else backbone and head of init_path"
    )
    init_path: str | None = Field(None, description="Hugging Face directory for reward_model and value_checkpoint")
    head_init_std: float = Field(0.0, ge=0, description="init=policy: standard deviation of the new head; 0 is zeros")
    freeze_attention: bool = Field(False, description="the critic's attention modules keep their weights (SAO)")

    @model_validator(mode="after")
    def _init_has_path(self) -> "CriticConfig":
        if self.init != "policy" and not self.init_path:
            raise ValueError(f"init={self.init} needs init_path: the Hugging Face directory to start from")
        if self.init == "policy" and self.init_path:
            raise ValueError("init=policy starts from model.path: leave init_path out, or set init")
        return self


class ModelConfig(Section):
    """The checkpoint everything starts from."""

    path: str = Field(description="Hugging Face directory of the policy: config.json, safetensors, tokenizer")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="compute type of actor and critic")
    attention: Literal["auto", "sdpa", "transformer_engine"] = Field(
        "auto", description="auto: Transformer Engine wherever it can be used, else PyTorch's"
    )
