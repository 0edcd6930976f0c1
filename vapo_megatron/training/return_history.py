"""The returns of past steps, which calibrated values and prompt baselines are computed from."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vapo_megatron.algorithms import calibration, tether
from vapo_megatron.algorithms.baselines import leave_one_out, tracked_values, with_responses
from vapo_megatron.config.regression import RegressionConfig
from vapo_megatron.monitoring import names
from vapo_megatron.training.regression import ValueRegression
from vapo_megatron.training.shards import ShardedBatch

# File of a checkpoint with the returns that ReturnHistory has tracked.
TRACKER_FILE = "tracked_returns.json"


class ReturnHistory:
    """Sums over the returns of past steps, the same on every rank, and part of checkpoints.

    Attributes:
        past: for advantage.calibration=values and trust.
        mixture: for advantage.calibration=tether, the weight of the critic's value, from 0 on.
        regression: for critic.regression; None without it.
        tracked: for advantage.tracker: by a prompt's key, the faded sum of its returns and of their
            number.
    """

    def __init__(
        self,
        state: list[Any] | None = None,
        tracked: bytes = b"",
        regression: RegressionConfig | None = None,
    ) -> None:
        """state and tracked: from a checkpoint; regression: the features, where values are
        regressed."""
        regressed = None
        self.past = None
        self.mixture = 0.0
        if state and isinstance(state[0], dict):
            regressed = state[0]
        elif state and isinstance(state[0], float):
            self.mixture = state[0]
        elif state:
            self.past = calibration.Moments.from_state(state)
        self.regression = None if regression is None else ValueRegression(regression, regressed)
        self.tracked: dict[str, Sequence[float]] = json.loads(tracked or b"{}")

    def state(self) -> list[Any]:
        """For a checkpoint; empty before the first step."""
        if self.regression is not None:
            regressed = self.regression.state()
            if regressed is None:
                return []
            return [regressed]
        if self.past is not None:
            return self.past.state()
        if self.mixture:
            return [self.mixture]
        return []

    def tracked_state(self) -> Callable[[], bytes]:
        """What makes a checkpoint's TRACKER_FILE of the history as it is now; empty without a
        tracker. A copy is quick, JSON of a million prompts takes seconds."""
        now = dict(self.tracked)
        return lambda: json.dumps(now).encode() if now else b""

    def add(self, step: calibration.Moments) -> None:
        """Add a step, and decay those before it."""
        self.past = step if self.past is None else self.past.followed_by(step)

    def mix(self, best: float | None) -> None:
        """Add a step whose best mixture was this, tether.best_mixture()."""
        self.mixture = tether.after_step(self.mixture, best)

    def track(
        self, keys: Tensor, returns: Tensor, known: Tensor, prior: float | None = None
    ) -> tuple[Tensor, float]:
        """Baselines of S responses from earlier steps' returns on their prompts; then adds these
        returns.

        Args:
            keys: int64 [S], of prompts.
            returns: [S].
            known: bool [S], the responses that have a return.
            prior: baseline of a prompt without a history; None: the mean of the other responses of
                the batch.

        Returns:
            float64 [S], 0 for responses without a return; the share of the others whose prompt has
            a history.
        """
        baselines = torch.zeros(len(keys), dtype=torch.float64)
        keys = keys[known]
        returns = returns[known]
        sums, weights = self._sums(keys)
        others = leave_one_out(returns, torch.arange(len(returns)))
        baselines[known] = tracked_values(sums, weights, others if prior is None else prior)

        prompts, owner, counts = keys.unique(return_inverse=True, return_counts=True)
        totals = torch.zeros(len(prompts), dtype=torch.float64)
        totals.index_add_(0, owner, returns.double())
        faded_sums, faded_weights = self._sums(prompts)
        after = with_responses(faded_sums, faded_weights, totals, counts.double())
        self.tracked |= zip(map(str, prompts.tolist()), torch.stack(after, 1).tolist(), strict=True)
        return baselines, float((weights > 0).double().sum() / max(1, len(weights)))

    def regressor(
        self, batch: ShardedBatch, known: Tensor
    ) -> tuple[Tensor | None, dict[str, float]]:
        """The return of each response's prompt in earlier steps, float64 [S], and metrics; then
        adds this step.

        None where values are not regressed on it. known: as in track().
        """
        if self.regression is None or not self.regression.config.history:
            return None, {}
        keys = batch.table.prompt_keys
        returns = batch.table.shaped_rewards
        assert keys is not None and returns is not None, "samples know their prompts and rewards"
        past = self.regression.past
        prior = 0.0 if past is None else past.mean_return
        tracked, share = self.track(keys, returns, known, prior)
        return tracked, {names.TRACKED: share}

    def _sums(self, keys: Tensor) -> Tensor:
        rows = [self.tracked.get(str(key), (0.0, 0.0)) for key in keys.tolist()]
        return torch.tensor(rows, dtype=torch.float64).view(-1, 2).t()
