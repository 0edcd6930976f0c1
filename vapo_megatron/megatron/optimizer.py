"""AdamW on Megatron's distributed optimizer, its learning-rate schedule, and the buffers for data
parallelism.

With optimizer.overlap, a bucket of gradients is summed as soon as the last micro-batch's backward
pass has filled it, and a bucket of updated weights is gathered when the next forward pass reaches
its layers.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from vapo_megatron.config.model import OptimizerSettings, TrainableConfig
from vapo_megatron.megatron.mesh import Mesh
from vapo_megatron.megatron.platform import current_platform

BUCKET_ELEMENTS: int | None = (
    None  # gradients that are summed together; none: Megatron's choice, 40 million and up
)


def wrap(
    chunks: Sequence[Any], section: TrainableConfig, transformer: Any, mesh: Mesh
) -> list[DistributedDataParallel]:
    """Collective: wrap a model's loaded chunks for data parallelism; all ranks get the weights of
    data-parallel rank 0. Megatron's config of the model gets the hook that keeps gradients from
    being summed before the last micro-batch."""
    asked = section.optimizer.overlap
    overlapped = current_platform().is_cuda if asked == "auto" else asked
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlapped,
        overlap_param_gather=overlapped,
        bucket_size=BUCKET_ELEMENTS,
    )
    wrapped = [
        DistributedDataParallel(
            config=transformer,
            ddp_config=config,
            module=chunk,
            disable_bucketing=index > 0,
            pg_collection=mesh.pg,
        )
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    if config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def sum_model_grads(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's gradient reduction without its division by tokens: the loss weights hold the
    denominators."""
    finalize_model_grads(model, None, **kwargs)


BETAS = (0.9, 0.95)  # decay of the first and the second moment
# "Constant" still wants a length; longer than any run.
_ENDLESS = 1 << 40


def make_optimizer(
    section: TrainableConfig, chunks: list[DistributedDataParallel], mesh: Mesh, dtype: torch.dtype
) -> tuple[Any, OptimizerParamScheduler]:
    """The optimizer over a model's wrapped chunks, and its scheduler (one step an optimizer
    step)."""
    settings = section.optimizer
    fp8 = section.precision.fp8
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            use_distributed_optimizer=True,
            overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
            fp8_recipe=None if fp8 == "none" else fp8,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
        ),
        chunks,
        use_gloo_process_groups=False,
        pg_collection=mesh.pg,
    )
    return optimizer, make_scheduler(settings, optimizer)


def make_scheduler(settings: OptimizerSettings, optimizer: Any) -> OptimizerParamScheduler:
    """The learning-rate schedule of an optimizer."""
    return OptimizerParamScheduler(
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


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Main weights and moments of Megatron's optimizer, or of every optimizer in a chain."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)  # none where this rank has nothing to optimise
        if inner is None:
            continue
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


class GuardedStep:
    """Splits an optimizer's step in two: first gradients, their norm and the clip, then the
    weights. Megatron's own step runs, and `accepts` is asked before it writes anything
    (step_with_ready_grads)."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._apply = optimizer.step_with_ready_grads
        name = "get_grad_norm" if hasattr(optimizer, "chained_optimizers") else "clip_grad_norm"
        self._measure: Callable[..., float] = getattr(optimizer, name)
        setattr(optimizer, name, self._measured)
        optimizer.step_with_ready_grads = self._apply_if_accepted
        self._accepts: Callable[[float], bool] = lambda norm: True
        self._norms: list[float] = []

    def __call__(self, accepts: Callable[[float], bool]) -> tuple[float, bool]:
        """Collective: returns the gradient norm before the clip, and whether the step was made, the
        same on all ranks."""
        self._accepts = accepts
        self._norms.clear()
        updated, _, _ = self._optimizer.step()
        return self._norms[0], bool(updated)

    def _measured(self, *args: Any) -> float:
        self._norms.append(float(self._measure(*args)))
        return self._norms[-1]

    def _apply_if_accepted(self) -> bool:
        if not self._norms:  # optimizer.clip_grad=0: no norm was computed yet
            self._norms.append(float(self._optimizer.get_grad_norm()))
        return bool(self._accepts(self._norms[0]) and self._apply())
