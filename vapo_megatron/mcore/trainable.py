"""A model that is scored and trained: Megatron shards, optimizer and schedule under one roof.

Actor and critic are two of these, each with a mesh of its own. What is to be minimised comes in as a token loss, a
function of local tensors; everything about layout stays in here.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from vapo_megatron.config.model import ActorConfig, ModelConfig, TrainableConfig
from vapo_megatron.experience.balance import Cost, plan_microbatches
from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.experience.microbatch import MicroBatch, pack
from vapo_megatron.experience.zigzag import local_positions
from vapo_megatron.mcore.mesh import Mesh
from vapo_megatron.mcore.model import Head, build_model, check_model_layout, transformer_config
from vapo_megatron.mcore.optimizer import make_optimizer
from vapo_megatron.mcore.platform import current_platform
from vapo_megatron.weights.spec import ModelSpec


class TokenLoss(Protocol):
    """What one optimizer step minimises, as a sum over local positions.

    sums and maxima name the figures it returns: sums are added up over all ranks and micro-batches, maxima compared.
    """

    @property
    def sums(self) -> Sequence[str]: ...
    @property
    def maxima(self) -> Sequence[str]: ...

    def __call__(self, outputs: Tensor, local: "LocalTokens") -> tuple[Tensor, dict[str, Tensor]]:
        """outputs: [t, 2] log-probs and entropies, or [t, n] of the value head, float32, of the local positions; where
        no response token is, the loss must have weight 0. Returns the local sum (denominators are already in its
        weights) and the figures, detached scalars.
        """


class LocalTokens(Protocol):
    """The t positions of a model's outputs, as a loss sees them; it need not know how sequences are cut."""

    def take(self, values: Tensor) -> Tensor:
        """A tensor over response tokens [T] at these positions [t]; 0 where no response token is."""

    def sequence_mean(self, x: Tensor) -> Tensor:
        """The mean of x [t] over the whole response that each position belongs to [t]; 0 where no response token is.

        Carries no gradient. Collective: to be called on all ranks or on none.
        """


@dataclass(frozen=True)
class _Local:
    """LocalTokens of a micro-batch, of which each rank of a context-parallel group holds a part."""

    microbatch: MicroBatch
    mesh: Mesh
    device: torch.device

    def take(self, values: Tensor) -> Tensor:
        return self.microbatch.take(values).to(self.device)

    @torch.no_grad()
    def sequence_mean(self, x: Tensor) -> Tensor:
        lengths = list(self.microbatch.lengths)
        owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        owner = owner[local_positions(lengths, self.mesh.cp_size, self.mesh.cp_rank)].to(self.device)
        found = (self.microbatch.response_index >= 0).to(self.device)
        sums = torch.zeros(2, len(lengths), dtype=torch.float64, device=self.device)
        sums.index_add_(1, owner, torch.stack((torch.where(found, x, 0), found)).double())
        if self.mesh.cp_size > 1:
            dist.all_reduce(sums, group=self.mesh.pg.cp)
        return torch.where(found, (sums[0] / sums[1].clamp(min=1))[owner], 0).to(x.dtype)


@dataclass
class StepResult:
    """What one optimizer step reports, the same on every rank."""

    grad_norm: float
    lr: float
    figures: dict[str, float] = field(default_factory=dict)


class Trainable:
    """One sharded model; with its optimizer, unless it is frozen (a reference policy)."""

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
            name: the config section, "actor" or "critic".
            seed: of Megatron's generators (weights come from files; dropout is 0).
            temperature: what log-probs are computed at, as in sampling.
        """
        check_model_layout(spec, config.layout, name)
        self.spec, self.config, self.mesh, self.head, self.name = spec, config, mesh, head, name
        self.temperature, self.dtype = temperature, getattr(torch, model.dtype)
        _seed_megatron(seed, mesh)
        self.transformer = transformer_config(spec, model, config)
        self.chunks = build_model(
            spec,
            self.transformer,
            mesh,
            head,
            attention=model.attention,
            logprob_chunk=config.logprob_chunk if isinstance(config, ActorConfig) else 1,
        )
        self.wrapped: list[Any] = []
        self.optimizer: Any = None
        self.scheduler: Any = None

    def prepare(self, frozen: Sequence[str] = ()) -> None:
        """Wrap the loaded shards for data parallelism and make the optimizer. Call once, after loading.

        frozen: parts of parameters' names; those parameters keep their weights.
        """
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                if any(part in name for part in frozen):
                    parameter.requires_grad_(False)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=self.config.optimizer.distributed
        )
        self.wrapped = [
            DistributedDataParallel(
                config=self.transformer,
                ddp_config=ddp,
                module=chunk,
                disable_bucketing=index > 0,
                pg_collection=self.mesh.pg,
            )
            for index, chunk in enumerate(self.chunks)
        ]
        for chunk in self.wrapped:
            chunk.broadcast_params()
        self.optimizer, self.scheduler = make_optimizer(self.config.optimizer, self.wrapped, self.mesh, self.dtype)
        self.scheduler.step(0)
        self.transformer.grad_scale_func = self.optimizer.scale_loss
        self.transformer.finalize_model_grads_func = _sum_model_grads

    def freeze(self) -> None:
        """Never train this model: no gradients, no optimizer. Asleep it is held on the host."""
        for chunk in self.chunks:
            chunk.requires_grad_(False)

    @torch.no_grad()
    def copy_from(self, other: "Trainable") -> None:
        """Take the weights of a model of the same spec, head and layout, shard by shard. No communication."""
        for mine, theirs in zip(self.chunks, other.chunks, strict=True):
            for parameter, source in zip(mine.parameters(), theirs.parameters(), strict=True):
                parameter.copy_(source)

    def sleep(self) -> None:
        """GPU: gradients are dropped and optimizer states leave the device, to make room for the engines."""
        if self.optimizer is None:
            for chunk in self.chunks:
                chunk.to("cpu")
        elif current_platform().is_cuda:
            self.optimizer.offload_to_cpu()
            for chunk in self.wrapped:
                chunk.offload_grad_buffers()
            current_platform().empty_cache()

    def wake(self) -> None:
        """GPU: what sleep() moved comes back."""
        if self.optimizer is None:
            for chunk in self.chunks:
                chunk.to(current_platform().device)
        elif current_platform().is_cuda:
            self.optimizer.restore_from_cpu()
            for chunk in self.wrapped:
                chunk.restore_grad_buffers()

    @property
    def cost(self) -> Cost:
        """Work of a sequence: weights times tokens, and causal attention."""
        return Cost(
            float(self.spec.parameter_count()),
            float(self.spec.num_layers * self.spec.num_heads * self.spec.head_dim),
        )

    def microbatches(self, batch: ExperienceBatch, samples: Sequence[int]) -> list[MicroBatch]:
        """This rank's packed part of some samples of a batch."""
        layout, mesh = self.config.layout, self.mesh
        plan = plan_microbatches(
            samples,
            batch.lengths.tolist(),
            dp_size=mesh.dp_size,
            max_tokens=self.config.max_tokens_per_microbatch * layout.cp,
            cost=self.cost,
            alignment=layout.alignment,
            total_alignment=layout.total_alignment,
            multiple_of=layout.pp if layout.vpp else 1,
        )
        return [
            pack(batch, members, layout.alignment, layout.total_alignment, layout.cp, mesh.cp_rank)
            for members in plan[mesh.dp_rank]
        ]

    @torch.no_grad()
    def score(
        self,
        batch: ExperienceBatch,
        on_done: Callable[[int], None] | None = None,
        temperature: float | None = None,
        read: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Collective: outputs for every response token of a batch.

        Args:
            batch: what to score.
            on_done: is told of samples as they are done, going by this rank's share of the work.
            temperature: stands in for the model's own.
            read: from a value head's outputs [t, n] to values [t]; None takes the first.

        Returns:
            float32 [T, 2] log-probs and entropies, or [T, 1] values; the same on every rank.
        """
        result = torch.zeros(batch.response_tokens, 2 if self.head == "lm" else 1)
        microbatches = self.microbatches(batch, range(batch.samples))

        def collect(microbatch: MicroBatch, output: Tensor, non_loss_data: bool = True) -> None:
            if self.mesh.speaks:
                found = output[0].float()
                if self.head == "value":
                    found = (found[:, 0] if read is None else read(found))[:, None]
                microbatch.put(result, found.cpu())

        self._run(microbatches, collect, forward_only=True, temperature=temperature, on_forward=_shares(batch, on_done))
        return _sum_over_ranks(result)

    def train_step(self, batch: ExperienceBatch, samples: Sequence[int], loss: TokenLoss) -> StepResult:
        """Collective: one optimizer step on some samples of a batch."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        device = current_platform().device
        totals = {name: torch.zeros((), device=device) for name in loss.sums}
        totals |= {name: torch.full((), float("-inf"), device=device) for name in loss.maxima}

        def local_loss(microbatch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total, figures = loss(output[0].float(), _Local(microbatch, self.mesh, device))
            if self.mesh.speaks:
                for name in loss.sums:
                    totals[name] += figures[name]
                for name in loss.maxima:
                    totals[name] = torch.maximum(totals[name], figures[name])
            return total, torch.ones((), dtype=torch.int, device=device), {}

        self._run(self.microbatches(batch, samples), local_loss, forward_only=False)
        # Before the update, so that the first of n warm-up steps is made with lr / n and not with 0.
        self.scheduler.step(1)
        _, grad_norm, _ = self.optimizer.step()
        figures: dict[str, float] = {}
        if loss.sums:
            summed = _sum_over_ranks(torch.stack([totals[name].cpu() for name in loss.sums]))
            figures |= dict(zip(loss.sums, summed.tolist(), strict=True))
        if loss.maxima:
            largest = _over_ranks(torch.stack([totals[name].cpu() for name in loss.maxima]), dist.ReduceOp.MAX)
            figures |= dict(zip(loss.maxima, largest.tolist(), strict=True))
        return StepResult(float(grad_norm), float(self.optimizer.param_groups[0]["lr"]), figures)

    def _run(
        self,
        microbatches: list[MicroBatch],
        consume: Callable[..., Any],
        forward_only: bool,
        temperature: float | None = None,
        on_forward: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Megatron's schedule over this rank's micro-batches; consume gets (micro-batch, last stage's output), and
        on_forward the part of all forward passes that is done."""
        models = self.wrapped or self.chunks
        passes = itertools.count(1)
        for model in models:
            model.train(not forward_only)

        def forward_step(data: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            microbatch = next(data)
            on_forward(next(passes) / (len(microbatches) * len(models)))
            return self._forward(model, microbatch, temperature or self.temperature), partial(consume, microbatch)

        extra: dict[str, Any] = {}
        if self.mesh.pp_size > 1:
            extra["p2p_communicator"] = P2PCommunicator(self.mesh.pg.pp, self.transformer)
        many = len(models) > 1
        get_forward_backward_func(pp_size=self.mesh.pp_size, vp_size=self.config.layout.vpp)(
            forward_step_func=forward_step,
            data_iterator=[iter(microbatches) for _ in models] if many else iter(microbatches),
            model=models if many else models[0],
            num_microbatches=len(microbatches),
            seq_length=1,  # unread: sequence lengths vary
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            pg_collection=self.mesh.pg,
            **extra,
        )

    def _forward(self, model: Any, microbatch: MicroBatch, temperature: float) -> Tensor:
        device = current_platform().device
        core = model.module if isinstance(model, DistributedDataParallel) else model
        if self.head == "lm" and core.post_process:
            core.output_layer.labels = microbatch.labels[None].to(device)
            core.output_layer.rows = microbatch.response_rows.to(device)
            core.output_layer.temperature = temperature
        starts = torch.tensor((0, *microbatch.lengths), dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=max(microbatch.lengths),
            max_seqlen_kv=max(microbatch.lengths),
        )
        output: Tensor = model(
            microbatch.ids[None].to(device), microbatch.positions[None].to(device), None, packed_seq_params=packed
        )
        return output


def _shares(batch: ExperienceBatch, on_done: Callable[[int], None] | None) -> Callable[[float], None]:
    """From the part of the work that is done to numbers of samples that were not told of yet."""
    told = 0

    def on_forward(part: float) -> None:
        nonlocal told
        if on_done is not None:
            done = round(part * batch.samples)
            on_done(done - told)
            told = done

    return on_forward


def _seed_megatron(seed: int, mesh: Mesh) -> None:
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, force_reset_rng=True, tp_rank=mesh.tp_rank, ep_rank=0, etp_rank=mesh.tp_rank
    )


def _sum_model_grads(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients without its division by tokens: the loss weights hold the denominators."""
    finalize_model_grads(model, None, **kwargs)


def _over_ranks(values: Tensor, op: Any) -> Tensor:
    moved = values.to(current_platform().device)
    dist.all_reduce(moved, op=op)
    return moved.cpu()


def _sum_over_ranks(values: Tensor) -> Tensor:
    """Sum over all ranks of tensors to which each token's speaker alone contributes."""
    return _over_ranks(values, dist.ReduceOp.SUM)
