"""Runs Megatron's schedule over the micro-batches of one rank: forward, backward, and traffic
between pipeline stages."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.data.microbatch import MicroBatch, Packed, Prefix
from vapo_megatron.logs import note_progress
from vapo_megatron.megatron.mesh import Mesh
from vapo_megatron.megatron.moe import replay_experts, replaying
from vapo_megatron.megatron.packed_attention import PackedSequences
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.models.spec import Head, ModelSpec
from vapo_megatron.weights.mapping import unwrapped


def packed_sequences(
    lengths: Sequence[int], device: torch.device, prefixes: Sequence[Prefix] | None = None
) -> PackedSequences:
    """Packed sequences for attention and rotary embedding. lengths: tokens of each over all
    context-parallel ranks, padding included. prefixes: as of MicroBatch."""
    starts = torch.tensor((0, *lengths), dtype=torch.int32, device=device).cumsum(
        0, dtype=torch.int32
    )
    longest = max(lengths)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        prefixes=prefixes,
    )


@dataclass(frozen=True)
class Schedule:
    """Runs micro-batches through the chunks of one model."""

    spec: ModelSpec
    mesh: Mesh
    layout: LayoutConfig
    transformer: Any
    head: Head

    def run(
        self,
        models: list[Any],
        microbatches: Packed,
        consume: Callable[..., Any],
        temperature: float,
        forward_only: bool = False,
        on_forward: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Collective. consume is called with (micro-batch, last stage's output), on_forward with
        the share of all forward passes that is done; models: this rank's chunks."""
        passes = itertools.count(1)
        for model in models:
            model.train(not forward_only)

        def forward_step(
            data: Iterator[MicroBatch], model: Any
        ) -> tuple[Tensor, Callable[..., Any]]:
            microbatch = next(data)
            note_progress()  # for the watchdog
            on_forward(next(passes) / (len(microbatches) * len(models)))
            return self._forward(model, microbatch, temperature), partial(consume, microbatch)

        extra: dict[str, Any] = {}
        if self.mesh.pp_size > 1:
            extra["p2p_communicator"] = P2PCommunicator(self.mesh.pg.pp, self.transformer)
        many = len(models) > 1
        with replaying(models if self.spec.num_experts else []):
            get_forward_backward_func(pp_size=self.mesh.pp_size, vp_size=self.layout.vpp)(
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
        core = unwrapped(model)
        if self.head == "lm" and core.post_process:
            core.output_layer.labels = microbatch.labels[None].to(device)
            core.output_layer.rows = microbatch.response_rows.to(device)
            core.output_layer.temperature = temperature
        if self.spec.num_experts:
            parts = self.mesh.tp_size if self.layout.sequence_parallel else 1
            experts = microbatch.experts
            if experts is not None:
                experts = experts.unflatten(1, (self.spec.num_layers, self.spec.experts_per_token))
            replay_experts(core, experts, self.mesh.tp_rank % parts, parts)
        ids = microbatch.ids[None].to(device)
        packed = packed_sequences(microbatch.lengths, device, microbatch.prefixes)
        # Rotary embeddings know positions
        output: Tensor = model(ids, None, None, packed_seq_params=packed)
        return output
