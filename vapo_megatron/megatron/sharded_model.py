"""One model's shards on this rank: weights, gradients and optimizer state, and which of them are
onloaded."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor, UntypedStorage

from vapo_megatron.config.model import ModelConfig, TrainableConfig
from vapo_megatron.megatron.adapters import add_adapters, freeze_base
from vapo_megatron.megatron.layer_spec import freeze_attention
from vapo_megatron.megatron.mesh import Mesh, check_model_layout
from vapo_megatron.megatron.model import build_model, transformer_config
from vapo_megatron.megatron.offload import Offloader, Part, bytes_of, distinct_storages
from vapo_megatron.megatron.optimizer import (
    GuardedStep,
    make_optimizer,
    optimizer_tensors,
    sum_model_grads,
    wrap,
)
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.precision import check_trainable, drop_fp8_copies
from vapo_megatron.megatron.token_loss import sum_over_ranks
from vapo_megatron.models.spec import Head, ModelSpec
from vapo_megatron.weights.mapping import ADAPTER


class ShardedModel:
    """One sharded model, with its optimizer unless it is frozen (a reference policy)."""

    def __init__(
        self,
        spec: ModelSpec,
        model: ModelConfig,
        config: TrainableConfig,
        mesh: Mesh,
        head: Head,
        *,
        name: str,
        seed: int,
    ) -> None:
        """Build the shards, uninitialised; load weights and then call prepare(), or freeze().

        Args:
            name: "actor", "critic" or "reference".
            seed: of Megatron's generators (weights come from files; dropout is 0).
        """
        check_model_layout(spec, config.layout, name)
        check_trainable(spec, model, config, name, current_platform())
        self.spec = spec
        self.config = config
        self.mesh = mesh
        self.head = head
        self.name = name
        self.dtype: torch.dtype = getattr(torch, model.dtype)
        tensor_parallel.model_parallel_cuda_manual_seed(
            seed, force_reset_rng=True, tp_rank=mesh.tp_rank, ep_rank=mesh.ep_rank, etp_rank=0
        )
        self.transformer = transformer_config(spec, model, config)
        adapted = config.kind == "adapter"
        self._chunks = build_model(
            spec,
            self.transformer,
            mesh,
            head,
            attention=model.attention,
            adapters=adapted,
            logprob_kernel=model.logprob_kernel,
        )
        self.adapter = model.adapter if adapted else None
        if self.adapter is not None:
            add_adapters(self._chunks, spec, self.adapter, mesh, self.transformer, seed)
        self.wrapped: list[Any] = []
        self._optimizer: Any = None
        self.scheduler: Any = None
        self._gathering = False
        platform = current_platform()
        # A reference works once a step: it always makes room where room is short.
        asked = "auto" if name == "reference" and config.offload == "never" else config.offload
        self._sleeps = asked == "always" or (asked == "auto" and platform.is_cuda)
        self.offloader = Offloader(self._tensors, platform, self._sleeps, self._before_offload)
        # Frozen weights that two models share, held once; the memory plan treats them as a third
        # model.
        self.base: Offloader | None = None
        self._shared: set[int] = set()

    def share_base(self, actor: "ShardedModel") -> Offloader:
        """Use the frozen weights of an actor with adapters in place of this critic's, which come
        from the same files at the same layout. Call once, before this model's weights are loaded
        and while the actor's are onloaded."""
        shared: list[Tensor] = []
        for mine, theirs in zip(self._chunks, actor.chunks, strict=True):
            frozen = dict(theirs.named_parameters())
            for name, parameter in mine.named_parameters():
                if ADAPTER not in name and not name.startswith("output_layer."):
                    parameter.data = frozen[name].data
                    shared += [parameter, frozen[name]]

        def before_release() -> None:
            self._before_offload()
            actor._before_offload()

        def tensors(part: Part) -> Iterator[Tensor]:
            return iter([parameter.data for parameter in shared] if part == "weights" else [])

        self._shared = actor._shared = {id(parameter) for parameter in shared}
        sleeps = self._sleeps and actor._sleeps
        self.base = actor.base = Offloader(tensors, current_platform(), sleeps, before_release)
        return self.base

    def prepare(self, without_attention: bool = False) -> None:
        """Wrap the loaded shards for data parallelism and make the optimizer. Call once, after
        loading.
        without_attention: the attention modules keep their weights."""
        if self.adapter is not None:
            freeze_base(self._chunks, self.head)
        for chunk in self._chunks if without_attention else ():
            freeze_attention(chunk)
        self.wrapped = wrap(self._chunks, self.config, self.transformer, self.mesh)
        self._optimizer, self.scheduler = make_optimizer(
            self.config, self.wrapped, self.mesh, self.dtype
        )
        self._step = GuardedStep(self._optimizer)
        self.scheduler.step(0)
        self.transformer.grad_scale_func = self._optimizer.scale_loss
        self.transformer.finalize_model_grads_func = sum_model_grads

    def freeze(self) -> None:
        """Never train this model: no gradients, no optimizer."""
        for chunk in self._chunks:
            chunk.requires_grad_(False)

    @property
    def chunks(self) -> list[Any]:
        """This rank's shards, one a virtual pipeline stage, with their weights onloaded and
        complete. Collective after a train_step whose gather of updated weights is still pending
        (optimizer.overlap)."""
        self.finish_gathering()
        self.require("weights")
        return self._chunks

    @property
    def optimizer(self) -> Any:
        """Megatron's optimizer with its states onloaded; None for a model that is not trained."""
        if self._optimizer is not None:
            self.offloader.require("optimizer")
        return self._optimizer

    @property
    def updates(self) -> int:
        """Optimizer steps made, earlier attempts included."""
        return int(self.scheduler.num_steps)

    def head_has_gradient(self) -> bool:
        """Collective: whether the last train_step gave the head a gradient."""
        largest = torch.zeros(1)
        for chunk in self._chunks:
            for parameter in chunk.output_layer.parameters() if chunk.post_process else ():
                gradient = getattr(parameter, "main_grad", None)
                if parameter.requires_grad and gradient is not None:
                    largest = torch.maximum(largest, gradient.detach().abs().max().float().cpu())
        return bool(sum_over_ranks(largest) > 0)

    @torch.no_grad()
    def copy_from(self, other: "ShardedModel") -> None:
        """Copy the weights of a model of the same spec, head and layout, shard by shard."""
        for mine, theirs in zip(self.chunks, other.chunks, strict=True):
            for parameter, source in zip(mine.parameters(), theirs.parameters(), strict=True):
                parameter.copy_(source)

    def weights_on_host(self) -> list[Tensor]:
        """A copy of this rank's weights, byte by byte."""
        return [bytes_of(storage).to("cpu", copy=True) for storage in self._weights()]

    def put_weights(self, copy: Sequence[Tensor]) -> None:
        """Restore weights from weights_on_host(). The optimizer keeps its own main weights."""
        for storage, kept in zip(self._weights(), copy, strict=True):
            bytes_of(storage).copy_(kept)
        drop_fp8_copies(self._chunks)

    def _weights(self) -> list[UntypedStorage]:
        assert self.chunks  # complete, and on the device
        return list(distinct_storages(self._tensors("weights")).values())

    def _tensors(self, part: Part) -> Iterator[Tensor]:
        """The tensors of a part."""
        buffers = [
            b for chunk in self.wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        if part == "weights":
            yield from (b.param_data for b in buffers if b.param_data is not None)
            for chunk in self._chunks:
                yield from (p.data for p in chunk.parameters() if id(p) not in self._shared)
        elif part == "gradients":
            yield from (b.grad_data for b in buffers)
        elif self._optimizer is not None:
            yield from optimizer_tensors(self._optimizer)

    def require(self, *parts: Part) -> None:
        """Raise unless these parts are onloaded."""
        self.offloader.require(*parts)
        if self.base is not None:
            self.base.require("weights")

    def _before_offload(self) -> None:
        self.finish_gathering()
        drop_fp8_copies(self._chunks)

    def finish_gathering(self) -> None:
        """Collective: wait for the gather of updated weights that a train_step left pending
        (optimizer.overlap)."""
        if self._gathering:
            self._gathering = False
            for chunk in self.wrapped:
                chunk.start_param_sync(force_sync=True)
            drop_fp8_copies(self._chunks)
