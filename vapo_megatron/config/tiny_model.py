"""The shape of a small random model."""

from typing import Annotated, Literal

import typer
from pydantic import Field, model_validator

from vapo_megatron.config.base import Section


class TinyModel(Section):
    """The shape of a small model. vocab_size may exceed the tokenizer's; the remaining rows are
    padding."""

    family: str = Field(default="qwen3", description="a model type of docs/weights.md")
    vocab_size: int = Field(default=128, gt=0)
    layers: int = Field(default=2, gt=0)
    hidden_size: int = Field(default=128, gt=0)
    intermediate_size: int = Field(
        default=256, gt=0, description="per expert, in a model with experts"
    )
    heads: int = Field(default=4, gt=0)
    kv_heads: int = Field(default=2, gt=0)
    head_dim: int = Field(default=32, gt=0, multiple_of=2)
    experts: int = Field(default=8, gt=0, description="per layer; unused without experts")
    experts_per_token: int = Field(default=2, gt=1, description="unused without experts")
    max_positions: int = Field(default=512, gt=0)
    tied: bool = True
    rope_theta: float = Field(default=10_000.0, gt=0)
    initializer_range: float = Field(default=0.02, gt=0)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _heads_fit(self) -> "TinyModel":
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.family == "qwen2" and self.heads * self.head_dim != self.hidden_size:
            raise ValueError(
                f"a qwen2 model has head_dim = hidden_size / heads, not {self.head_dim} for "
                f"{self.hidden_size} / {self.heads}"
            )
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is above the {self.experts} experts"
            )
        return self


DtypeOption = Annotated[
    Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Unchanged if not given.")
]
ShardSizeOption = Annotated[
    float,
    typer.Option(
        "--shard-size",
        min=1e-6,
        max=1024.0,
        help="GiB of tensors per file; memory use grows with it.",
    ),
]
