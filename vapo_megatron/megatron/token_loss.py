"""How a loss meets the layout: it gets a model's outputs at local positions, and tensors over response tokens there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.data.microbatch import MicroBatch
from vapo_megatron.data.zigzag import local_positions
from vapo_megatron.megatron.mesh import Mesh


class TokenLoss(Protocol):
    """What one optimizer step minimises, as a sum over local positions.

    sums and maxima name the metrics it returns: sums are added up over all ranks and micro-batches, maxima compared.
    """

    @property
    def sums(self) -> Sequence[str]: ...
    @property
    def maxima(self) -> Sequence[str]: ...

    def __call__(self, outputs: Tensor, local: "LocalTokens") -> tuple[Tensor, dict[str, Tensor]]:
        """outputs: [t, 2] log-probs and entropies, or [t, n] of the value head, float32, of the local positions; where
        no response token is, the loss must have weight 0. Returns the local sum (denominators are already in its
        weights) and the metrics, detached scalars.
        """


class LocalTokens(Protocol):
    """The t positions of a model's outputs, as a loss sees them; it need not know how sequences are cut."""

    def gather(self, values: Tensor) -> Tensor:
        """A tensor over response tokens [T] at these positions [t]; 0 where no response token is."""

    def sequence_mean(self, x: Tensor) -> Tensor:
        """The mean of x [t] over the whole response that each position belongs to [t]; 0 where no response token is.

        Carries no gradient. Collective: to be called on all ranks or on none.
        """


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
        owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        owner = owner[local_positions(lengths, self.mesh.cp_size, self.mesh.cp_rank)].to(self.device)
        found = (self.microbatch.response_index >= 0).to(self.device)
        sums = torch.zeros(2, len(lengths), dtype=torch.float64, device=self.device)
        sums.index_add_(1, owner, torch.stack((torch.where(found, x, 0), found)).double())
        if self.mesh.cp_size > 1:
            dist.all_reduce(sums, group=self.mesh.pg.cp)
        return torch.where(found, (sums[0] / sums[1].clamp(min=1))[owner], 0).to(x.dtype)
