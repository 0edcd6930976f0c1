"""A model that is scored and trained: forward and backward passes over this rank's part of a batch.

Actor and critic are two of these, each with its own mesh. The objective is given as a token loss, a
function of local tensors; all layout stays inside this module.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from vapo_megatron.config.model import ModelConfig, TrainableConfig
from vapo_megatron.data.balance import Cost, MicrobatchPlan, plan_microbatches
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.microbatch import MicroBatch, Packed, Share, padded_lengths, planned_lengths
from vapo_megatron.data.shared_prompts import (
    SharedPrompts,
    plan_shared_prompts,
    prompt_numbers,
    shared_prompts,
)
from vapo_megatron.megatron.adapters import without_adapters
from vapo_megatron.megatron.mesh import Mesh
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.schedule import Schedule
from vapo_megatron.megatron.sharded_model import ShardedModel
from vapo_megatron.megatron.token_loss import (
    MetricTotals,
    PackedTokens,
    StepResult,
    TokenLoss,
    in_place,
    samples_done,
)
from vapo_megatron.models.spec import Head, ModelSpec


class Trainable(ShardedModel):
    """A sharded model that scores batches, and trains on them unless it is frozen (a reference
    policy).

    Attributes:
        accepts: given the model's name, a gradient norm and the loss's metrics, whether to make the
            update.
    """

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
        """As ShardedModel. temperature: of log-probs, as in sampling."""
        super().__init__(spec, model, config, mesh, head, name=name, seed=seed)
        self.temperature = temperature
        self._schedule = Schedule(spec, mesh, config.layout, self.transformer, head)
        self._is_base = False
        self.accepts: Callable[[str, float, dict[str, float]], bool] = (
            lambda name, grad_norm, metrics: True
        )

    @property
    def replays(self) -> bool:
        """Whether tokens go through the engine's experts where these are known. A critic and a
        reference policy have other weights, so their routers choose for themselves."""
        trained = self._optimizer is not None and not self._is_base
        return bool(self.spec.num_experts) and self.head == "lm" and trained

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """Compute with the frozen weights alone, without adapters: the policy that the run started
        from."""
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
            float(self.spec.attention_width),
        )

    @property
    def shares_prompts(self) -> bool:
        """Whether samples that begin alike compute their prompt once."""
        return self.config.share_prompts

    def plan(
        self,
        lengths: Tensor,
        samples: Sequence[int],
        segments: Tensor | None = None,
        shared: SharedPrompts | None = None,
    ) -> MicrobatchPlan:
        """Assigns samples to data-parallel ranks and micro-batches. lengths: int64 [S], of all
        samples by number;
        segments: int64 [S], sequences per sample, each padded on its own; None: one each.
        shared: of the same samples; None: each has its prompt itself."""
        layout = self.config.layout
        if shared is not None:
            return plan_shared_prompts(
                samples,
                planned_lengths(lengths, segments, layout.alignment).numpy(),
                shared,
                dp_size=self.mesh.dp_size,
                max_tokens=self.config.max_tokens_per_microbatch,
                cost=self.cost,
                total_alignment=self.config.total_alignment,
                multiple_of=layout.pp if layout.vpp else 1,
            )
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

    def padded(self, positions: Sequence[int]) -> list[int]:
        """Positions of the sequences of a micro-batch, with padding (padded_lengths)."""
        return padded_lengths(positions, self.config.layout.alignment, self.config.total_alignment)

    def microbatches(self, batch: ExperienceBatch, samples: Sequence[int]) -> Packed:
        """This rank's part of some samples of a batch, or all of them if they are a Share; packed
        on demand."""
        share = samples
        if not isinstance(share, Share):
            for_critic = self.name == "critic"
            lengths = batch.table().critic_lengths if for_critic else batch.lengths
            shared = None
            if self.shares_prompts:
                numbers = prompt_numbers(batch, for_critic)
                shared = shared_prompts(numbers, batch.table(), for_critic)
            plan = self.plan(lengths, samples, batch.segments, shared)
            share = Share(plan[self.mesh.dp_rank], len(samples))
        layout = self.config.layout
        total = self.config.total_alignment
        replayed = self.spec.experts_per_token if self.replays else 0
        how = (
            layout.alignment,
            total,
            layout.cp,
            self.mesh.cp_rank,
            replayed,
            self.name == "critic",
            self.shares_prompts,
        )
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
        """Collective: outputs for every response token of a batch: float32 [T, 2] log-probs and
        entropies, or [T, 1] values; the same on every rank, of a share on the ranks that have its
        outputs.

        Args:
            batch: what to score, the same on every rank unless there is a share.
            on_done: called with numbers of samples as they are done, going by this rank's share of
                the work.
            temperature: stands in for the model's own.
            read: from a value head's outputs [t, n] to values [t]; None takes the first.
            share: all of the batch, which is what this rank's part of a plan comes to.
            states: takes the last hidden states of a policy (see tap), [T, hidden] in its dtype.
        """
        self.require("weights")
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
                elif (
                    states is not None
                ):  # host memory takes them at once, of all micro-batches they are many
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
            states.append(
                in_place(self.mesh, batch, samples, hidden, self.spec.hidden_size, self.dtype)
            )
        return in_place(self.mesh, batch, samples, parts, 2 if self.head == "lm" else 1)

    def tap(self, layer: int) -> None:
        """Have score() give the output of this layer (from 1; one of the last stage's) as hidden
        states."""
        if self._chunks[-1].post_process:
            module = self._chunks[-1].decoder.layers[layer - self.spec.num_layers - 1]
            module.register_forward_hook(self._chunks[-1].output_layer.tap)

    def _give_states(self, on: bool) -> None:
        if self.head == "lm" and self._chunks[-1].post_process:
            self._chunks[-1].output_layer.gives_states = on

    def train_step(
        self,
        batch: ExperienceBatch,
        samples: Sequence[int],
        loss: TokenLoss,
        keep_outputs: bool = False,
    ) -> StepResult:
        """Collective: one optimizer step on some samples of a batch. `accepts`, given the model's
        name, the gradient norm and the loss's metrics, may refuse it: weights, optimizer and
        schedule then stay as they are. Samples may be a Share of the batch that is this rank's
        alone. keep_outputs: also return what score() would have returned before the step for these
        samples, and 0 elsewhere."""
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
        return StepResult(
            grad_norm, float(self._optimizer.param_groups[0]["lr"]), metrics, outputs, updated
        )

    def _accepts_update(self, metrics: dict[str, float], grad_norm: float) -> bool:
        if not self.accepts(self.name, grad_norm, metrics):
            return False
        # Before the update, so that the first of n warm-up steps is made with lr / n and not with
        # 0.
        self.scheduler.step(1)
        return True

    def gradients(
        self, batch: ExperienceBatch, samples: Sequence[int], loss: TokenLoss
    ) -> dict[str, float]:
        """Collective: train_step() without the update; returns the loss's metrics. Gradients are
        left in main_grad of the parameters, in fp32; for a model that was not prepared, in grad and
        for this rank's samples alone."""
        for chunk in self._chunks if not self.wrapped else ():
            for module in chunk.modules():
                # Transformer Engine's: there is no main_grad to add to
                if hasattr(module, "fuse_wgrad_accumulation"):
                    module.fuse_wgrad_accumulation = False
        return self._backward(batch, samples, loss).over_ranks()

    def _backward(
        self,
        batch: ExperienceBatch,
        samples: Sequence[int],
        loss: TokenLoss,
        kept: list[tuple[MicroBatch, Tensor]] | None = None,
    ) -> MetricTotals:
        """Forward and backward passes over this rank's part of some samples; outputs are appended
        to `kept`."""
        self.require("weights", "gradients")
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        for owner in [self._optimizer] if self._optimizer is not None else self._chunks:
            owner.zero_grad(set_to_none=True)
        device = current_platform().device
        totals = MetricTotals(loss, device)

        def local_loss(
            microbatch: MicroBatch, output: Tensor
        ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            if kept is not None and self.mesh.is_output_rank:
                kept.append((microbatch, output[0].detach().float()))
            total, metrics = loss(output[0].float(), PackedTokens(microbatch, self.mesh, device))
            if self.mesh.is_output_rank:
                totals.add(metrics)
            return total, torch.ones((), dtype=torch.int, device=device), {}

        models = self.wrapped or self._chunks
        self._schedule.run(models, self.microbatches(batch, samples), local_loss, self.temperature)
        return totals
