"""AdamW on Megatron's (distributed) optimizer, and its learning-rate schedule."""

from collections.abc import Callable, Iterator
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
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
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


class GuardedStep:
    """Stands between the two halves of an optimizer's step: gradients, their norm and the clip; then weights.

    Megatron's own step runs, with the same numbers; where it would begin to write (step_with_ready_grads, which updates
    weights and moments of all optimizers of a chain and gathers them), `accepts` is asked first.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._apply = optimizer, optimizer.step_with_ready_grads
        name = "get_grad_norm" if hasattr(optimizer, "chained_optimizers") else "clip_grad_norm"
        self._measure: Callable[..., float] = getattr(optimizer, name)
        setattr(optimizer, name, self._measured)
        optimizer.step_with_ready_grads = self._apply_if_accepted
        self._accepts: Callable[[float], bool] = lambda norm: True
        self._norms: list[float] = []

    def __call__(self, accepts: Callable[[float], bool]) -> tuple[float, bool]:
        """Collective: the norm of the gradient before its clip, and whether the step was made.

        accepts has to say the same on every rank.
        """
        self._accepts = accepts
        self._norms.clear()
        updated, _, _ = self._optimizer.step()
        return self._norms[0], bool(updated)

    def _measured(self, *args: Any) -> float:
        self._norms.append(float(self._measure(*args)))
        return self._norms[-1]

    def _apply_if_accepted(self) -> bool:
        if not self._norms:  # optimizer.clip_grad=0: nobody has asked for it yet
            self._norms.append(float(self._optimizer.get_grad_norm()))
        return bool(self._accepts(self._norms[0]) and self._apply())
