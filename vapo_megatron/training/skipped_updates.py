"""Optimizer updates that would harm a model: told by their numbers, skipped and counted; many in a row end the run."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.checkpoint.checkpoints import CheckpointName, latest_checkpoint
from vapo_megatron.checkpoint.manifest import write_json
from vapo_megatron.errors import RunFailed, TryAgain
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
RECORD_FILE = "skipped_updates.json"
_RESTARTS = 2  # from one checkpoint
MOST_IN_A_ROW = 10  # skipped updates of one model, after which the run goes back to its last checkpoint


class SkippedUpdates:
    """Judges every optimizer update of a run before it is made. The same on every rank."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        """state: what state() gave when the checkpoint was saved that the run goes on from."""
        self._in_row: Counter[str] = Counter((state or {}).get("in_row", {}))
        self._skipped: Counter[str] = Counter()
        self._last_cause = ""

    def accepts(self, model: str, grad_norm: float, metrics: Mapping[str, float]) -> bool:
        """Collective: whether to make an update of a model with this gradient norm and these parts of its loss."""
        losses = [value for name, value in metrics.items() if name.endswith("_loss")]
        cause_index = torch.tensor([CAUSES.index(cause) if (cause := _cause(grad_norm, losses)) else -1])
        # Norms of ranks that hold other shards may differ in the last bit.
        dist.all_reduce(cause_index, op=dist.ReduceOp.MAX)
        if cause_index.item() >= 0:
            self._skip(model, CAUSES[int(cause_index.item())])
            return False
        self._in_row[model] = 0
        return True

    def is_sound(self, batch: ShardedBatch) -> bool:
        """Collective: whether models may be trained on a scored batch: its numbers are finite, and there are any."""
        home, table = batch.own, batch.table
        finite = (home.rollout_logprobs, home.old_logprobs, home.ref_logprobs), (home.values,)
        logprobs, values = batch.summed(torch.tensor([not _are_finite(*tensors) for tensors in finite]).long()).tolist()
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
        """Whether a rollout, or a mini-batch of it, teaches a model anything; the same on every rank.

        Args:
            carries: bool [S], the samples that carry loss.
            signal: bool [S], those of them whose loss has a gradient.
            lacking: the cause where none of them has one.
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
        """What was skipped since the last call, in all and by cause. A batch counts as one."""
        taken, self._skipped = self._skipped, Counter()
        row = {names.SKIPPED_UPDATES: float(taken.total())}
        return row | {f"{names.SKIPPED}{cause}": float(number) for cause, number in sorted(taken.items())}

    @property
    def exhausted(self) -> bool:
        """Whether so many updates were skipped in a row that the run has to go back."""
        return max(self._in_row.values(), default=0) >= MOST_IN_A_ROW

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"in_row": dict(self._in_row)}

    def go_back(self, run_dir: Path, step: int, cursor: int | None) -> None:
        """On rank 0: end the run, to go on from its last checkpoint with prompts from cursor on; None: with the data
        that it had, which do not follow from a cursor.

        Raises:
            TryAgain: it may.
            RunFailed: there is no checkpoint, or it has gone back to it often enough.
        """
        checkpoint = latest_checkpoint(run_dir)
        skipped = f"{MOST_IN_A_ROW} skipped updates in a row at step {step} (the last one: {self._last_cause})"
        problem = f"{run_dir}: {skipped}"
        if checkpoint is None:
            raise RunFailed(f"{problem}, and no checkpoint to go back to: docs/robustness.md says what to look at")
        before = _read_record(run_dir)
        times = 1 + (before["times"] if before.get("checkpoint") == checkpoint.name else 0)
        if times > _RESTARTS:
            raise RunFailed(
                f"{problem}, as each of {times} times from {checkpoint}: docs/robustness.md says what to look at"
            )
        record = {"checkpoint": checkpoint.name, "times": times, "cursor": cursor or 0, "cause": self._last_cause}
        write_json(run_dir / RECORD_FILE, record)
        raise TryAgain(
            f"{problem}: start the same command again, with run.resume=auto; it goes on from {checkpoint} with "
            f"{'the same data' if cursor is None else 'other prompts'}"
        )

    def _skip(self, model: str, cause: str) -> None:
        self._in_row[model] += 1
        self._skipped[cause] += 1
        self._last_cause = f"{cause} of the {model}"


def _cause(grad_norm: float, losses: Sequence[float]) -> str | None:
    if not all(map(math.isfinite, losses)):
        return "nonfinite_loss"
    return None if math.isfinite(grad_norm) else "nonfinite_grad_norm"


def first_prompt(run_dir: Path, checkpoint: CheckpointName, cursor: int) -> int:
    """The prompt to go on with from a checkpoint saved at cursor: a later one where the run went back to it."""
    record = _read_record(run_dir)
    return max(cursor, record["cursor"]) if record.get("checkpoint") == str(checkpoint) else cursor


def _read_record(run_dir: Path) -> dict[str, Any]:
    path = run_dir / RECORD_FILE
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return record


def _are_finite(*tensors: Tensor | None) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor is not None)
