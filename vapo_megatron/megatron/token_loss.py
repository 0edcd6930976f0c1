"""The interface between a loss and the layout (a model's outputs at local positions), and sums over
ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.microbatch import MicroBatch, Share, local_positions
from vapo_megatron.megatron.mesh import Mesh
from vapo_megatron.megatron.platform import current_platform


class TokenLoss(Protocol):
    """The objective of one optimizer step, as a sum over local positions. sums and maxima name the
    metrics it returns: sums are added up over all ranks and micro-batches, maxima compared."""

    @property
    def sums(self) -> Sequence[str]: ...
    @property
    def maxima(self) -> Sequence[str]: ...

    def __call__(self, outputs: Tensor, local: "LocalTokens") -> tuple[Tensor, dict[str, Tensor]]:
        """outputs: [t, 2] log-probs and entropies, or [t, n] of the value head, float32, of the
        local positions; where no response token is, the loss must have weight 0. Returns the local
        sum (denominators are already in its weights) and the metrics, detached scalars."""


class LocalTokens(Protocol):
    """The t positions of a model's outputs as a loss sees them, however sequences are sharded."""

    def gather(self, values: Tensor) -> Tensor:
        """A tensor over response tokens [T] at these positions [t]; 0 where no response token
        is."""

    def sequence_mean(self, x: Tensor) -> Tensor:
        """The mean of x [t] over the whole response that each position belongs to [t]; 0 where no
        response token is. Carries no gradient. Collective: to be called on all ranks or on none."""


@dataclass(frozen=True)
class PackedTokens:
    """LocalTokens of a micro-batch, of which each rank of a context-parallel group holds a part."""

    microbatch: MicroBatch
    mesh: Mesh
    device: torch.device

    def gather(self, values: Tensor) -> Tensor:
        return self.microbatch.gather(values).to(self.device)

    @torch.no_grad()
    def sequence_mean(self, x: Tensor) -> Tensor:
        lengths = list(self.microbatch.lengths)
        owners = torch.tensor(self.microbatch.owners)  # a response may lie in several sequences
        responses = int(owners.max()) + 1
        owner = owners.repeat_interleave(torch.tensor(lengths))
        owner = owner[local_positions(lengths, self.mesh.cp_size, self.mesh.cp_rank)].to(
            self.device
        )
        is_response = (self.microbatch.response_index >= 0).to(self.device)
        sums = torch.zeros(2, responses, dtype=torch.float64, device=self.device)
        sums.index_add_(
            1, owner, torch.stack((torch.where(is_response, x, 0), is_response)).double()
        )
        if self.mesh.cp_size > 1:
            dist.all_reduce(sums, group=self.mesh.pg.cp)
        return torch.where(is_response, (sums[0] / sums[1].clamp(min=1))[owner], 0).to(x.dtype)


@dataclass
class StepResult:
    """The result of one optimizer step, the same on every rank. updated: false where the step was
    refused."""

    grad_norm: float
    lr: float
    metrics: dict[str, float] = field(default_factory=dict)
    outputs: Tensor | None = None
    updated: bool = True


def sum_over_ranks(values: Tensor) -> Tensor:
    """Collective: sum of CPU tensors over all ranks."""
    return _over_ranks(values, dist.ReduceOp.SUM)


def largest_over_ranks(*values: float) -> list[float]:
    """Collective: the maximum over ranks of each value."""
    largest: list[float] = _over_ranks(torch.tensor(values), dist.ReduceOp.MAX).tolist()
    return largest


def _over_ranks(values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    moved = values.to(current_platform().device)
    dist.all_reduce(moved, op=op)
    return moved.cpu()


def in_place(
    mesh: Mesh,
    batch: ExperienceBatch,
    samples: Sequence[int],
    parts: Sequence[tuple[MicroBatch, Tensor]],
    width: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Collective: outputs of micro-batches of some samples, put at their response tokens of a
    batch, [T, width]. For a Share, on the ranks that have its outputs (each context-parallel rank
    those of its batch of parts), and [0, width] on the others."""
    if isinstance(samples, Share) and not mesh.is_output_rank:
        return torch.zeros(0, width, dtype=dtype)
    outputs = torch.zeros(batch.response_tokens, width, dtype=dtype)
    for microbatch, part in parts:
        microbatch.scatter(outputs, part.cpu())
    return outputs if isinstance(samples, Share) else sum_over_ranks(outputs)


class MetricTotals:
    """Sums and maxima of a loss's metrics: over micro-batches on the device, and over ranks at the
    end."""

    def __init__(self, loss: TokenLoss, device: torch.device) -> None:
        self._sums = {name: torch.zeros((), device=device) for name in loss.sums}
        self._maxima = {name: torch.full((), float("-inf"), device=device) for name in loss.maxima}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add the metrics of one micro-batch."""
        for name, total in self._sums.items():
            total += metrics[name]
        for name, largest in self._maxima.items():
            self._maxima[name] = torch.maximum(largest, metrics[name])

    def over_ranks(self) -> dict[str, float]:
        """Collective: the metrics over all ranks, the same on each. Waits for the device."""
        totals: dict[str, float] = {}
        for metrics, op in ((self._sums, dist.ReduceOp.SUM), (self._maxima, dist.ReduceOp.MAX)):
            if metrics:
                values = _over_ranks(torch.stack([value.cpu() for value in metrics.values()]), op)
                totals |= dict(zip(metrics, values.tolist(), strict=True))
        return totals


def samples_done(samples: int, on_done: Callable[[int], None] | None) -> Callable[[float], None]:
    """From the share of the work that is done, 0 to 1, to the number of samples done since the last
    call."""
    reported = 0

    def on_forward(share: float) -> None:
        nonlocal reported
        if on_done is not None:
            done = round(share * samples)
            on_done(done - reported)
            reported = done

    return on_forward
