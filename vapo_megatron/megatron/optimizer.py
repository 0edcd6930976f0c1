"""AdamW on Megatron's (distributed) optimizer, and its learning-rate schedule."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from vapo_megatron.config.model import TrainableConfig
from vapo_megatron.megatron.mesh import Mesh

# "Constant" still wants a length; longer than any run.
_ENDLESS = 1 << 40


def make_optimizer(
    section: TrainableConfig, chunks: list[DistributedDataParallel], mesh: Mesh, dtype: torch.dtype
) -> tuple[Any, OptimizerParamScheduler]:
    """The optimizer over a model's wrapped chunks, and its scheduler (one step an optimizer step)."""
    settings, fp8 = section.optimizer, section.precision.fp8
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            use_distributed_optimizer=settings.distributed,
            overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
            fp8_recipe=None if fp8 == "none" else fp8,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
        ),
        chunks,
        use_gloo_process_groups=False,
        pg_collection=mesh.pg,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr if settings.decay != "constant" else settings.lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=settings.decay_steps or _ENDLESS,
        lr_decay_style=settings.decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=_ENDLESS,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Main weights and moments of Megatron's optimizer, those of every optimizer in a chain."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(one, "optimizer", None)  # none where this rank has nothing to optimise
        if inner is None:
            continue
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
