"""A model that is scored and trained: Megatron shards, optimizer and schedule.

Actor and critic are two of these, each with its own mesh. The objective is given as a token loss, a function of local
tensors; all layout stays inside this module.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor, UntypedStorage

from vapo_megatron.config.model import ModelConfig, TrainableConfig
from vapo_megatron.data.balance import Cost, MicrobatchPlan, plan_microbatches
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.microbatch import MicroBatch, Packed, Share, planned_lengths
from vapo_megatron.megatron.adapters import add_adapters, freeze_base, without_adapters
from vapo_megatron.megatron.layer_spec import freeze_attention
from vapo_megatron.megatron.mesh import Mesh, check_model_layout
from vapo_megatron.megatron.model import build_model, transformer_config
from vapo_megatron.megatron.offload import Offloader, Part, bytes_of, distinct_storages
from vapo_megatron.megatron.optimizer import GuardedStep, make_optimizer, optimizer_tensors, sum_model_grads, wrap
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.precision import check_trainable, drop_fp8_copies
from vapo_megatron.megatron.schedule import Schedule
from vapo_megatron.megatron.token_loss import (
    MetricTotals,
    PackedTokens,
    StepResult,
    TokenLoss,
    in_place,
    samples_done,
    sum_over_ranks,
)
from vapo_megatron.weights.mapping import ADAPTER
from vapo_megatron.weights.spec import Head, ModelSpec


class Trainable:
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
        temperature: float = 1.0,
    ) -> None:
        """Build the shards, uninitialised; load weights and then call prepare(), or freeze().

        Args:
            name: "actor", "critic" or "reference".
            seed: of Megatron's generators (weights come from files; dropout is 0).
            temperature: what log-probs are computed at, as in sampling.
        """
        check_model_layout(spec, config.layout, name)
        check_trainable(spec, model, config, name, current_platform())
        self.spec, self.config, self.mesh, self.head, self.name = spec, config, mesh, head, name
        self.temperature, self.dtype = temperature, getattr(torch, model.dtype)
        tensor_parallel.model_parallel_cuda_manual_seed(
            seed, force_reset_rng=True, tp_rank=mesh.tp_rank, ep_rank=mesh.ep_rank, etp_rank=0
        )
        self.transformer = transformer_config(spec, model, config)
        adapted = config.kind == "adapter"
        self._chunks = build_model(spec, self.transformer, mesh, head, attention=model.attention, adapters=adapted)
        self.adapter = model.adapter if adapted else None
        if self.adapter is not None:
            add_adapters(self._chunks, spec, self.adapter, mesh, self.transformer, seed)
        self._schedule = Schedule(spec, mesh, config.layout, self.transformer, head)
        self.wrapped: list[Any] = []
        self._optimizer: Any = None
        self.accepts: Callable[[str, float, dict[str, float]], bool] = lambda name, grad_norm, metrics: True
        self.scheduler: Any = None
        self._gathering = self._is_base = False
        platform = current_platform()
        # A reference works once a step: it always makes room where room is short.
        asked = "auto" if name == "reference" and config.offload == "never" else config.offload
        self._sleeps = asked == "always" or (asked == "auto" and platform.is_cuda)
        self.offloader = Offloader(self._tensors, platform, self._sleeps, self._before_offload)
        # Frozen weights that two models have in common, once in memory; a model of its own to the memory plan.
        self.base: Offloader | None = None
        self._shared: set[int] = set()

    def share_base(self, actor: "Trainable") -> Offloader:
        """Use the frozen weights of an actor with adapters in place of this critic's, which come from the same files at
        the same layout. Call once, before this model's weights are loaded and while the actor's are onloaded."""
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
        """Wrap the loaded shards for data parallelism and make the optimizer. Call once, after loading.
        without_attention: the attention modules keep their weights."""
        if self.adapter is not None:
            freeze_base(self._chunks, self.head)
        for chunk in self._chunks if without_attention else ():
            freeze_attention(chunk)
        self.wrapped = wrap(self._chunks, self.config, self.transformer, self.mesh)
        self._optimizer, self.scheduler = make_optimizer(self.config, self.wrapped, self.mesh, self.dtype)
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
        """This rank's shards, one a virtual pipeline stage, with their weights onloaded and complete. Collective after
        a train_step whose gather of updated weights is still pending (optimizer.overlap)."""
        self._finish_gathering()
        self._require("weights")
        return self._chunks

    @property
    def optimizer(self) -> Any:
        """Megatron's optimizer with its states onloaded; None for a model that is not trained."""
        if self._optimizer is not None:
            self.offloader.require("optimizer")
        return self._optimizer

    @property
    def updates(self) -> int:
        """Optimizer steps made so far, earlier attempts included."""
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
    def copy_from(self, other: "Trainable") -> None:
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
        buffers = [b for chunk in self.wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        if part == "weights":
            yield from (b.param_data for b in buffers if b.param_data is not None)
            for chunk in self._chunks:
                yield from (p.data for p in chunk.parameters() if id(p) not in self._shared)
        elif part == "gradients":
            yield from (b.grad_data for b in buffers)
        elif self._optimizer is not None:
            yield from optimizer_tensors(self._optimizer)

    def _require(self, *parts: Part) -> None:
        self.offloader.require(*parts)
        if self.base is not None:
            self.base.require("weights")

    def _before_offload(self) -> None:
        self._finish_gathering()
        drop_fp8_copies(self._chunks)

    def _finish_gathering(self) -> None:
        if self._gathering:
            self._gathering = False
            for chunk in self.wrapped:
                chunk.start_param_sync(force_sync=True)
            drop_fp8_copies(self._chunks)

    @property
    def replays(self) -> bool:
        """Whether tokens go through the engine's experts where these are known. A critic and a reference policy have
        other weights, so their routers choose for themselves."""
        trained = self._optimizer is not None and not self._is_base
        return bool(self.spec.num_experts) and self.head == "lm" and trained

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """Compute with the frozen weights alone, without adapters: the policy that the run started from."""
        self._is_base = True
        try:
            with without_adapters(self._chunks):
                yield
        finally:
            self._is_base = False

    @property
    def cost(self) -> Cost:
        """Cost of a sequence: weights times tokens, plus causal attention."""
        return Cost(
            float(self.spec.active_parameter_count()),
            float(self.spec.num_layers * self.spec.num_heads * self.spec.head_dim),
        )

    def plan(self, lengths: Tensor, samples: Sequence[int], segments: Tensor | None = None) -> MicrobatchPlan:
        """Assigns samples to data-parallel ranks and micro-batches. lengths: int64 [S], of all samples by number;
        segments: int64 [S], sequences per sample, each padded on its own; None: one each."""
        layout = self.config.layout
        return plan_microbatches(
            samples,
            planned_lengths(lengths, segments, layout.alignment).numpy(),
            dp_size=self.mesh.dp_size,
            max_tokens=self.config.max_tokens_per_microbatch * layout.cp,
            cost=self.cost,
            alignment=layout.alignment,
            total_alignment=self.config.total_alignment,
            multiple_of=layout.pp if layout.vpp else 1,
        )

    def microbatches(self, batch: ExperienceBatch, samples: Sequence[int]) -> Packed:
        """This rank's part of some samples of a batch, or all of them if they are a Share; packed on demand."""
        share = samples
        if not isinstance(share, Share):
            lengths = batch.table().critic_lengths if self.name == "critic" else batch.lengths
            share = Share(self.plan(lengths, samples, batch.segments)[self.mesh.dp_rank], len(samples))
        layout, total = self.config.layout, self.config.total_alignment
        replayed = self.spec.experts_per_token if self.replays else 0
        how = (layout.alignment, total, layout.cp, self.mesh.cp_rank, replayed, self.name == "critic")
        return Packed(batch, share, *how)

    @torch.no_grad()
    def score(
        self,
        batch: ExperienceBatch,
        on_done: Callable[[int], None] | None = None,
        temperature: float | None = None,
        read: Callable[[Tensor], Tensor] | None = None,
        share: Share | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Collective: outputs for every response token of a batch: float32 [T, 2] log-probs and entropies, or [T, 1]
        values; the same on every rank, of a share on the ranks that have its outputs.

        Args:
            batch: what to score, the same on every rank unless there is a share.
            on_done: called with numbers of samples as they are done, going by this rank's share of the work.
            temperature: stands in for the model's own.
            read: from a value head's outputs [t, n] to values [t]; None takes the first.
            share: all of the batch, which is what this rank's part of a plan comes to.
            states: takes the last hidden states of a policy (see tap), [T, hidden] in its dtype.
        """
        self._require("weights")
        parts: list[tuple[MicroBatch, Tensor]] = []
        hidden: list[tuple[MicroBatch, Tensor]] = []
        samples = range(batch.samples) if share is None else share
        self._give_states(states is not None)
        microbatches = self.microbatches(batch, samples)

        def collect(microbatch: MicroBatch, output: Tensor, non_loss_data: bool = True) -> None:
            if self.mesh.is_output_rank:
                outputs = output[0].float()
                if self.head == "value":
                    outputs = (outputs[:, 0] if read is None else read(outputs))[:, None]
                elif states is not None:  # host memory takes them at once, of all micro-batches they are many
                    hidden.append((microbatch, outputs[:, 2:].to(self.dtype).cpu()))
                    outputs = outputs[:, :2].clone()
                parts.append((microbatch, outputs))

        self._schedule.run(
            self.wrapped or self._chunks,
            microbatches,
            collect,
            temperature or self.temperature,
            forward_only=True,
            on_forward=samples_done(batch.samples if share is None else share.of, on_done),
        )
        self._give_states(False)
        if states is not None:
            states.append(in_place(self.mesh, batch, samples, hidden, self.spec.hidden_size, self.dtype))
        return in_place(self.mesh, batch, samples, parts, 2 if self.head == "lm" else 1)

    def tap(self, layer: int) -> None:
        """Have score() give the output of this layer (from 1; one of the last stage's) as hidden states."""
        if self._chunks[-1].post_process:
            module = self._chunks[-1].decoder.layers[layer - self.spec.num_layers - 1]
            module.register_forward_hook(self._chunks[-1].output_layer.tap)

    def _give_states(self, on: bool) -> None:
        if self.head == "lm" and self._chunks[-1].post_process:
            self._chunks[-1].output_layer.gives_states = on

    def train_step(
        self, batch: ExperienceBatch, samples: Sequence[int], loss: TokenLoss, keep_outputs: bool = False
    ) -> StepResult:
        """Collective: one optimizer step on some samples of a batch. `accepts`, given the model's name, the gradient
        norm and the loss's metrics, may refuse it: weights, optimizer and schedule then stay as they are. Samples may
        be a Share of the batch that is this rank's alone. keep_outputs: also return what score() would have returned
        before the step for these samples, and 0 elsewhere."""
        kept: list[tuple[MicroBatch, Tensor]] | None = [] if keep_outputs else None
        totals = self._backward(batch, samples, loss, kept)
        self.offloader.require("optimizer")
        metrics = totals.over_ranks()
        grad_norm, updated = self._step(partial(self._accepts_update, metrics))
        self._gathering = self.wrapped[0].ddp_config.overlap_param_gather
        outputs = None
        if kept is not None:
            width = 2 if self.head == "lm" else self.spec.value_outputs
            outputs = in_place(self.mesh, batch, samples, kept, width)
        return StepResult(grad_norm, float(self._optimizer.param_groups[0]["lr"]), metrics, outputs, updated)

    def _accepts_update(self, metrics: dict[str, float], grad_norm: float) -> bool:
        if not self.accepts(self.name, grad_norm, metrics):
            return False
        # Before the update, so that the first of n warm-up steps is made with lr / n and not with 0.
        self.scheduler.step(1)
        return True

    def gradients(self, batch: ExperienceBatch, samples: Sequence[int], loss: TokenLoss) -> dict[str, float]:
        """Collective: train_step() without the update; returns the loss's metrics. Gradients are left in main_grad of
        the parameters, in fp32; for a model that was not prepared, in grad and for this rank's samples alone."""
        for chunk in self._chunks if not self.wrapped else ():
            for module in chunk.modules():
                if hasattr(module, "fuse_wgrad_accumulation"):  # Transformer Engine's: there is no main_grad to add to
                    module.fuse_wgrad_accumulation = False
        return self._backward(batch, samples, loss).over_ranks()

    def _backward(
        self,
        batch: ExperienceBatch,
        samples: Sequence[int],
        loss: TokenLoss,
        kept: list[tuple[MicroBatch, Tensor]] | None = None,
    ) -> MetricTotals:
        """Forward and backward passes over this rank's part of some samples; outputs are appended to `kept`."""
        self._require("weights", "gradients")
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        for owner in [self._optimizer] if self._optimizer is not None else self._chunks:
            owner.zero_grad(set_to_none=True)
        device = current_platform().device
        totals = MetricTotals(loss, device)

        def local_loss(microbatch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            if kept is not None and self.mesh.is_output_rank:
                kept.append((microbatch, output[0].detach().float()))
            total, metrics = loss(output[0].float(), PackedTokens(microbatch, self.mesh, device))
            if self.mesh.is_output_rank:
                totals.add(metrics)
            return total, torch.ones((), dtype=torch.int, device=device), {}

        models = self.wrapped or self._chunks
        self._schedule.run(models, self.microbatches(batch, samples), local_loss, self.temperature)
        return totals
