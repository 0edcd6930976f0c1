"""Values by regression in the steps of a run: reads the features of a batch and keeps the
statistics of past steps."""

import logging
from typing import Any

import torch
from torch import Tensor

from vapo_megatron.algorithms import calibration, regression
from vapo_megatron.algorithms.baselines import known_siblings_mean, leave_one_out
from vapo_megatron.algorithms.calibration import Moments
from vapo_megatron.algorithms.critic_metrics import Figures, explained, figures_of
from vapo_megatron.algorithms.prefix_features import entropy, surprise
from vapo_megatron.algorithms.prefix_tree import prefix_hashes, prefix_values
from vapo_megatron.algorithms.regression import Regressors
from vapo_megatron.algorithms.segments import to_tokens
from vapo_megatron.config.regression import RegressionConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.monitoring import names
from vapo_megatron.training.shards import ShardedBatch
from vapo_megatron.training.token_rewards import paid

_logger = logging.getLogger(__name__)


class ValueRegression:
    """The regression of a run, the same on every rank, and part of checkpoints.

    Attributes:
        config: the features.
        past: moments of past steps' returns on the features; None before the first step.
        predictions: the same on the values that were predicted for them; None until there were
            some.
    """

    def __init__(self, config: RegressionConfig, state: dict[str, Any] | None = None) -> None:
        """state: of a checkpoint."""
        self.config = config
        self._names: tuple[str, ...] = ()
        self.past: Moments | None = None
        self.predictions: Moments | None = None
        if state is not None:
            self._names = tuple(state["features"])
            self.past = Moments.from_state(state["past"])
            if state["predictions"]:
                self.predictions = Moments.from_state(state["predictions"])

    def state(self) -> dict[str, Any] | None:
        """For a checkpoint; None before the first step."""
        if self.past is None:
            return None
        if self.predictions is None:
            predictions = None
        else:
            predictions = self.predictions.state()
        return {
            "features": list(self._names),
            "past": self.past.state(),
            "predictions": predictions,
        }

    def begin(self, names_of_columns: tuple[str, ...]) -> None:
        """A step with these columns of x. Statistics of other ones say nothing of them, and are
        dropped."""
        if self.past is not None and self._names != names_of_columns:
            _logger.warning(
                "critic.regression has other features than the checkpoint: its statistics begin "
                "again"
            )
            self.past = None
            self.predictions = None
        self._names = names_of_columns

    def add(self, step: Moments, predicted: Moments | None) -> None:
        """Add a step and its predictions; earlier steps decay."""
        self.past = step if self.past is None else self.past.followed_by(step)
        if predicted is not None:
            earlier = self.predictions
            self.predictions = predicted if earlier is None else earlier.followed_by(predicted)


class States:
    """The states that get values: every token or, for credit by turns, the first token of a turn.

    Attributes:
        bounds: bounds of responses among states, int64 [S + 1].
    """

    def __init__(self, tokens: Tensor, turns: tuple[Tensor, Tensor] | None) -> None:
        """tokens: bounds of responses among tokens; turns: see gae.turn_bounds()."""
        self.bounds = tokens if turns is None else turns[1]
        self._turns = None if turns is None else turns[0]

    def of_tokens(self, columns: Tensor) -> Tensor:
        """What columns by token hold at the states: [..., T] -> [..., states]."""
        if self._turns is None:
            return columns
        return columns[..., self._turns[:-1]]

    def to_tokens(self, values: Tensor) -> Tensor:
        """The values of states for all of their tokens: [states] -> [T]."""
        if self._turns is None:
            return values
        return to_tokens(values, self._turns)


def regressed_values(
    batch: ShardedBatch,
    known: Tensor,
    history: ValueRegression,
    tracked: Tensor | None,
    turns: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, float, dict[str, float]]:
    """Collective: V~ of every token, float32 [local T], trust g, and metrics; the batch becomes
    part of the history.

    Args:
        batch: with shaped rewards; a critic's values, where it has some, are one more feature.
        known: bool [S], the responses that have a return: the others say nothing of later ones.
        history: past steps. Without any, V~ is the mean of the others and g is 0.
        tracked: float64 [S], the return of each response's prompt in earlier steps, for the feature
            history.
        turns: gae.turn_bounds() of the samples at home for credit by turns, else None.
    """
    local = batch.local
    table = batch.table
    assert table.shaped_rewards is not None, "rewards come before advantages"
    returns = table.shaped_rewards.double()
    states = States(local.response_cu_seqlens, turns)
    regressors, metrics = _regressors(batch, known, history, tracked, states)
    history.begin(regressors.names)
    past = history.past
    mine = batch.local_slice
    own = regressors._replace(by_response=regressors.by_response[:, mine])
    others = torch.zeros(batch.samples, dtype=torch.float64)
    others[known] = leave_one_out(returns[known], table.group_ids[known])
    trust = regression.trust(history.predictions)
    fit = None
    if past is None:
        total = to_tokens(others[mine], states.bounds)
    else:
        fit = regression.fitted(past, regressors.names, history.config.position)
        total = regression.predicted(own, states.bounds, fit)
    if known.any():
        sums = batch.gather_samples(calibration.response_sums(own.by_token, states.bounds))[known]
        step = calibration.moments(sums, returns[known], regressors.by_response[:, known])
        predicted = None
        if fit is not None:
            sums = batch.gather_samples(calibration.response_sums(total[None], states.bounds))[
                known
            ]
            none = torch.zeros(0, len(sums), dtype=torch.float64)
            predicted = calibration.moments(sums, returns[known], none)
            metrics |= _shares(batch, own, states, fit, known)
        history.add(step, predicted)
    # The rewards of earlier turns are known: only the remaining return is predicted.
    before = states.of_tokens(paid(local))
    values = (total - before).float()
    if known.any():
        rest = to_tokens(returns[mine], states.bounds) - before
        figures = Figures.read(batch.gather_samples(figures_of(values, rest, states.bounds)))
        metrics[names.EXPLAINED_CALIBRATED] = float(explained(figures.only(known)))
    return states.to_tokens(values), trust, metrics


def _regressors(
    batch: ShardedBatch,
    known: Tensor,
    history: ValueRegression,
    tracked: Tensor | None,
    states: States,
) -> tuple[Regressors, dict[str, float]]:
    """Collective: x of the states of this rank, by response of all samples, and metrics."""
    local = batch.local
    table = batch.table
    config = history.config
    returns = table.shaped_rewards
    assert returns is not None, "rewards come before advantages"
    if history.past is None:
        otherwise = 0.0
    else:
        otherwise = history.past.mean_return
    siblings = known_siblings_mean(returns, table.group_ids, known, otherwise)
    by_token: dict[str, Tensor] = {}
    by_response: dict[str, Tensor] = {}
    metrics: dict[str, float] = {}
    if local.values is not None:
        by_token["value"] = local.values + paid(local)
    if config.prefix:
        mine = batch.local_slice
        tree = prefix_values(
            response_hashes(local),
            local.response_cu_seqlens,
            table.group_ids[mine],
            returns[mine],
            known[mine],
            siblings[mine],
        )
        by_token["prefix"] = tree.values
        shared = int(batch.gather_samples(tree.shared).sum())
        behind = int((table.response_lengths - 1).clamp(min=0).sum())
        metrics[names.SHARED_PREFIX] = shared / max(1, behind)
    if config.surprise:
        by_token["surprise"] = surprise(local.rollout_logprobs, local.response_cu_seqlens)
    if config.entropy:
        assert local.entropies is not None, "the policy is scored before where entropies are read"
        by_token["entropy"] = entropy(local.entropies, local.response_cu_seqlens)
    if config.siblings:
        by_response["siblings"] = siblings
    if config.history:
        assert tracked is not None, "the run tracks the returns of its prompts"
        by_response["history"] = tracked
    columns = {name: states.of_tokens(column) for name, column in by_token.items()}
    count = int(states.bounds[-1])
    return Regressors.join(columns, by_response, count, batch.samples), metrics


def _shares(
    batch: ShardedBatch, own: Regressors, states: States, fit: calibration.Fit, known: Tensor
) -> dict[str, float]:
    """Collective: the share of the variance of returns that each feature explains."""
    assert batch.table.shaped_rewards is not None, "rewards come before advantages"
    parts = regression.contributions(own, states.bounds, fit)
    sums = batch.gather_samples(torch.stack(list(parts.values()), 1))[known]
    counts = batch.gather_samples(states.bounds.diff())[known]
    returns = batch.table.shaped_rewards[known]
    return {
        f"{names.REGRESSION_SHARE}{name}": float(
            regression.share_of_variance(added, counts, returns)
        )
        for name, added in zip(parts, sums.unbind(1), strict=True)
    }


def response_hashes(batch: ExperienceBatch) -> Tensor:
    """A hash of each response token's prefix, prompt and observations included: int64 [T]."""
    hashes = prefix_hashes(batch.tokens, batch.cu_seqlens)
    if batch.loss_mask is not None:
        return hashes[batch.loss_mask]
    within = torch.arange(len(batch.tokens)) - to_tokens(batch.cu_seqlens[:-1], batch.cu_seqlens)
    return hashes[within >= to_tokens(batch.prompt_lengths, batch.cu_seqlens)]


def first_states(batch: ExperienceBatch) -> Tensor:
    """A hash of what stands before each response's first token: int64 [S], 0 for an empty one."""
    bounds = batch.response_cu_seqlens
    filled = bounds.diff() > 0
    states = torch.zeros(batch.samples, dtype=torch.int64)
    states[filled] = response_hashes(batch)[bounds[:-1][filled]]
    return states
