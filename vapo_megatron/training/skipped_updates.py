"""Skips and counts optimizer updates whose numbers would harm a model; many in a row end the
run."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.errors import RunFailed
from vapo_megatron.monitoring import names
from vapo_megatron.training.shards import ShardedBatch

UNFINISHED = names.UNFINISHED.removeprefix(names.SKIPPED)
# Why an update is skipped. The first that holds counts.
CAUSES = (
    "nonfinite_loss",
    "nonfinite_grad_norm",
    "nonfinite_reward",
    "nonfinite_logprobs",
    "nonfinite_values",
    "empty",
    "no_signal",
    UNFINISHED,
)
MOST_IN_A_ROW = 10  # skipped updates of one model, after which the run ends


class SkippedUpdates:
    """Judges every optimizer update of a run before it is made, alike on every rank."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        """state: state() of the checkpoint that the run resumes from."""
        self._in_row: Counter[str] = Counter((state or {}).get("in_row", {}))
        self._skipped: Counter[str] = Counter()
        self._last_cause = ""

    def accepts(self, model: str, grad_norm: float, metrics: Mapping[str, float]) -> bool:
        """Collective: whether to make an update of a model with this gradient norm and these parts
        of its loss."""
        losses = [value for name, value in metrics.items() if name.endswith("_loss")]
        cause_index = torch.tensor(
            [CAUSES.index(cause) if (cause := _cause(grad_norm, losses)) else -1]
        )
        # Norms of ranks that hold other shards may differ in the last bit.
        dist.all_reduce(cause_index, op=dist.ReduceOp.MAX)
        if cause_index.item() >= 0:
            self._skip(model, CAUSES[int(cause_index.item())])
            return False
        self._in_row[model] = 0
        return True

    def is_sound(self, batch: ShardedBatch) -> bool:
        """Collective: whether models may be trained on a scored batch: its numbers are finite, and
        there are any."""
        home = batch.local
        table = batch.table
        finite = (home.rollout_logprobs, home.old_logprobs, home.ref_logprobs), (home.values,)
        logprobs, values = batch.sum_over_ranks(
            torch.tensor([not _are_finite(*tensors) for tensors in finite]).long()
        ).tolist()
        sound = {
            "empty": batch.response_tokens > 0,
            "nonfinite_reward": _are_finite(table.rewards, table.greedy_rewards),
            "nonfinite_logprobs": not logprobs,
            "nonfinite_values": not values,
        }
        cause = next((name for name, holds in sound.items() if not holds), None)
        if cause is not None:
            self._skip("rollout", cause)
            return False
        self._in_row["rollout"] = 0
        return True

    def has_signal(self, carries: Tensor, signal: Tensor, lacking: str = "no_signal") -> bool:
        """Whether a rollout, or a mini-batch of it, teaches a model anything; the same on every
        rank.

        Args:
            carries: bool [S], the samples that carry loss.
            signal: bool [S], the subset whose loss has a gradient.
            lacking: the cause if that subset is empty.
        """
        if not carries.any():
            cause = "empty"
        elif not signal.any():
            cause = lacking
        else:
            return True
        self._skipped[cause] += 1
        return False

    def metrics(self) -> dict[str, float]:
        """The number of skipped updates since the last call, in total and by cause. A batch counts
        as one."""
        taken = self._skipped
        self._skipped = Counter()
        row = {names.SKIPPED_UPDATES: float(taken.total())}
        return row | {
            f"{names.SKIPPED}{cause}": float(number) for cause, number in sorted(taken.items())
        }

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"in_row": dict(self._in_row)}

    @property
    def exhausted(self) -> bool:
        """Whether so many updates in a row were skipped that the run has to end."""
        return max(self._in_row.values(), default=0) >= MOST_IN_A_ROW

    def end(self, run_dir: Path, step: int) -> NoReturn:
        """End the run for skipped updates. Raises RunFailed, on every rank."""
        raise RunFailed(
            f"{run_dir}: {MOST_IN_A_ROW} skipped updates in a row at step {step} (the last one: "
            f"{self._last_cause}): docs/operations.md says what to look at; run.resume=auto goes "
            "on from the last checkpoint",
            shared=True,
        )

    def _skip(self, model: str, cause: str) -> None:
        self._in_row[model] += 1
        self._skipped[cause] += 1
        self._last_cause = f"{cause} of the {model}"


def _cause(grad_norm: float, losses: Sequence[float]) -> str | None:
    if not all(map(math.isfinite, losses)):
        return "nonfinite_loss"
    if math.isfinite(grad_norm):
        return None
    return "nonfinite_grad_norm"


def _are_finite(*tensors: Tensor | None) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor is not None)
