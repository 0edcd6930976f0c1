"""Data parallelism of a model: flat buffers of weights and gradients, and which traffic goes on beside the work.

With optimizer.overlap a bucket of gradients is summed as soon as the last micro-batch's backward pass has filled it, a
bucket of updated weights gathered when the next forward pass reaches its layers.
"""

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from vapo_megatron.config.model import OptimizerSettings, TrainableConfig
from vapo_megatron.megatron.mesh import Mesh
from vapo_megatron.megatron.platform import Platform, current_platform
from vapo_megatron.megatron.precision import keeps_fp8

BUCKET_ELEMENTS: int | None = None  # gradients that are summed together; none: Megatron's choice, 40 million and up


def wrap(
    chunks: Sequence[Any], section: TrainableConfig, transformer: Any, mesh: Mesh
) -> list[DistributedDataParallel]:
    """Collective: a model's loaded chunks with their buffers; their weights are those of data-parallel rank 0.

    transformer, Megatron's config of the model, gets the hook that keeps gradients from being summed before the last
    micro-batch.
    """
    settings, platform = section.optimizer, current_platform()
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=settings.distributed,
        overlap_grad_reduce=overlaps(settings, platform),
        overlap_param_gather=settings.distributed and overlaps(settings, platform),
        bucket_size=BUCKET_ELEMENTS,
        fp8_param_gather=section.precision.fp8_param_gather,
    )
    wrapped = [
        DistributedDataParallel(
            config=transformer, ddp_config=config, module=chunk, disable_bucketing=index > 0, pg_collection=mesh.pg
        )
        for index, chunk in enumerate(chunks)
    ]
    # A parameter kept in FP8 cannot be sent as it is; every rank has read the same files.
    if not any(keeps_fp8(parameter) for chunk in chunks for parameter in chunk.parameters()):
        for chunk in wrapped:
            chunk.broadcast_params()
    if config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def sum_model_grads(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients without its division by tokens: the loss weights hold the denominators."""
    finalize_model_grads(model, None, **kwargs)


def overlaps(settings: OptimizerSettings, platform: Platform) -> bool:
    """Whether gradients are summed beside the backward pass, and weights gathered beside the forward pass."""
    return platform.is_cuda if settings.overlap == "auto" else settings.overlap
