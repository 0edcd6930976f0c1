"""The alarms of a run: rules over its metrics, checked after each step."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median

from vapo_megatron.config.run import AlarmsConfig
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.history import History, Metrics

_RECENT = 3  # newest steps, whose median is compared
_REFERENCE = 8  # the fewest steps before them that they are compared with
_WINDOW = 50  # and the most
_BROKEN = 0.05
_FEWER_TURNS = 0.3
_ENTROPY_TIMES = 3.5  # times the usual entropy
_ENTROPY = 4.0  # nats per token
_ACCURACY = 0.4  # of its best
_GAIN = -0.05  # critic/gain, share of the returns' variance
# Critic/trust: noise reaches 0.04; accuracy above which there is little to explain
_TRUST = 0.05
_SOLVED = 0.95
_BIAS = 0.5  # difference of the values' bias along the response
_FALL = 0.05  # of an evaluation below the best one
_GAP = 0.05  # mean KL of the trainer's policy to the rollout policy, nats per token
_GAP_TIMES = 10.0  # times the usual KL
_GRADIENT_TIMES = 8.0  # times the usual gradient norm
_TRUNCATED = 0.5  # share of responses
_FAILED = 0.05  # share of responses
_COPIED = 0.1  # share of correct responses
_FIRST = 8  # steps, of a window, that the newest are compared with where a change may be slow
_HALF = 0.5
_DOUBLE = 2.0  # of the length and of the accuracy
_GAINED = 0.1  # accuracy: below it, doubling is chance
_STUCK = 10  # steps without anything to learn from
_NO_GRADIENT = 1e-12
_EVALUATIONS = 2  # in a row that have to be below the best one
_CURVE = 20  # steps whose mean accuracy or reward is compared: single steps say little
_QUARTILE = NormalDist().inv_cdf(0.75)


Rule = Callable[[History], str | None]


@dataclass(frozen=True)
class Alarm:
    """A fault that shows in the metrics. The rule describes the fault at a history's newest row, or
    returns None. docs/alarms.md prints the texts; remedy says where to look or what to change
    first."""

    name: str
    rule: Rule
    threshold: str
    meaning: str
    remedy: str


ALARMS: list[Alarm] = []


def _alarm(threshold: str, remedy: str) -> Callable[[Rule], Rule]:
    """Adds a rule to ALARMS; its docstring is the alarm's meaning."""

    def add(rule: Rule) -> Rule:
        ALARMS.append(
            Alarm(
                rule.__name__,
                rule,
                threshold,
                " ".join((rule.__doc__ or "").split()).rstrip("."),
                remedy,
            )
        )
        return rule

    return add


@_alarm(
    "`actor/entropy` above 4 nats, or over 8 steps above 3.5 times the median before",
    "read `samples/`; go back to the last good checkpoint with a lower `actor.optimizer.lr`; "
    "right after the first update: a broken weight sync",
)
def entropy_explosion(history: History) -> str | None:
    """The policy writes noise, or is about to."""
    now = history.newest.get(names.ENTROPY)
    if now is not None and now > _ENTROPY:
        return f"entropy is {now:.3g} nats: text of near random tokens (limit {_ENTROPY:g})"
    recent = history.recent(names.ENTROPY, _REFERENCE)
    # All of them: what rises slowly would carry a window along.
    before = history.before(names.ENTROPY, _REFERENCE, _REFERENCE)
    if recent is None or not before:
        return None
    usual = median(before)
    if recent <= _ENTROPY_TIMES * usual or recent <= usual + 3 * _deviation(before):
        return None
    return f"entropy rose to {recent:.3g} nats from {usual:.3g}"


@_alarm(
    "`accuracy/mean` of 20 steps below 0.4 of its best 20 steps",
    "go back to a checkpoint before the fall, with a lower `actor.optimizer.lr`; read `samples/`",
)
def accuracy_collapse(history: History) -> str | None:
    """The policy has lost a skill that it had."""
    best = history.highest(names.ACCURACY, _CURVE)
    values = history.values(names.ACCURACY)
    if best is None or len(values) < 2 * _CURVE:
        return None
    recent = fmean(values[-_CURVE:])
    if recent >= _ACCURACY * best:
        return None
    return f"accuracy fell to {recent:.3f} from {best:.3f} (means of {_CURVE} steps)"


@_alarm(
    "`critic/gain` below -0.05 (median of 8 steps)",
    "more `value_pretraining`; a higher `critic.optimizer.lr`; or a group estimator",
)
def value_below_baseline(history: History) -> str | None:
    """The critic explains less of the returns than the free baselines (critic.md)."""
    gain = history.recent(names.CRITIC_GAIN, _REFERENCE)
    if gain is None or gain >= _GAIN:
        return None
    return (
        f"the critic explains {-gain:.3f} less of the returns' variance than the best free baseline"
    )


@_alarm(
    f"`critic/trust` below {_TRUST} (median of {_CURVE} steps) with an accuracy below {_SOLVED}",
    "a higher `critic.optimizer.lr`; a `critic.kind` that can learn more; or `reinforce_direct`, "
    "which has no critic",
)
def critic_untrusted(history: History) -> str | None:
    """Past returns do not follow the critic's values, so that it costs time and improves no
    advantage."""
    trust = history.recent(names.TRUST, _CURVE)
    accuracy = history.recent(names.ACCURACY, _CURVE)
    if trust is None or trust >= _TRUST or (accuracy is not None and accuracy >= _SOLVED):
        return None
    return (
        f"trust in the critic is {trust:.3f}: over {_CURVE} steps it has earned no place in the "
        f"advantages"
    )


@_alarm(
    "`critic/value_bias_*` differ by more than 0.5 along the response (medians of 3 steps)",
    "`algorithm.advantage.lambda_critic` 1; value pretraining until `stop_bias`",
)
def value_bias(history: History) -> str | None:
    """The values' bias changes along the response, so the critic's error alone pushes one end of
    it."""
    biases = {p: history.recent(f"{names.VALUE_BIAS}{p}", _RECENT) for p in names.BIAS_POSITIONS}
    measured = {p: bias for p, bias in biases.items() if bias is not None}
    if len(measured) < 2:
        return None
    low = min(measured, key=measured.__getitem__)
    high = max(measured, key=measured.__getitem__)
    if measured[high] - measured[low] <= _BIAS:
        return None
    return (
        f"values are off by {measured[low]:+.3f} at {low} % of the response and by "
        f"{measured[high]:+.3f} at {high} %"
    )


@_alarm("a `critic/fault_<name>` in the step", "critic.md says what each is")
def critic_fault(history: History) -> str | None:
    """The critic's values have the signature of a fault."""
    shown = (
        name
        for name, value in history.newest.items()
        if name.startswith(names.CRITIC_FAULT) and value
    )
    faults = sorted(name.removeprefix(names.CRITIC_FAULT) for name in shown)
    return f"the critic's values show: {', '.join(faults)}" if faults else None


@_alarm(
    "avg@k of two evaluations in a row 0.05 below the best, with a higher reward than then",
    "read `samples/` of the last steps and the verifier's reasons; take the best checkpoint; more "
    "data",
)
def evaluation_falls(history: History) -> str | None:
    """The reward rises without better answers to new problems: training problems are memorised, the
    verifier is deceived, or the gain is in probability that evaluation.top_p cuts off."""
    for name in history.named(names.EVALUATION):
        # Lengths, shares of truncated responses and pass@k fall in healthy runs.
        if names.AVERAGE not in name:
            continue
        values = history.values(name)
        if len(values) <= _EVALUATIONS:
            continue
        best = max(range(len(values)), key=values.__getitem__)
        last = values[-_EVALUATIONS:]
        then = history.around(names.REWARD, name, best, _CURVE)
        now = history.around(names.REWARD, name, len(values) - 1, _CURVE)
        if then is None or now is None or now <= then or max(last) >= values[best] - _FALL:
            continue
        return (
            f"{name} fell to {last[-1]:.3f} from {values[best]:.3f} while reward rose to {now:.3f} "
            f"from {then:.3f}"
        )
    return None


@_alarm(
    "`actor/train_infer_kl` above 0.05 nats, or 10 times its median of 50 steps",
    "weight_sync.md; a jump: a wrong sync; a slow rise: the engine's precision (FP8)",
)
def train_infer_gap(history: History) -> str | None:
    """Engine and trainer compute different policies."""
    now = history.newest.get(names.TRAIN_INFER_KL)
    if now is None or not math.isfinite(now):
        return None
    if now > _GAP:
        return f"KL of trainer to engine is {now:.3g} nats per token (limit {_GAP:g})"
    recent = history.recent(names.TRAIN_INFER_KL, _RECENT)
    before = history.before(names.TRAIN_INFER_KL, _RECENT, _REFERENCE, _WINDOW)
    floor = _GAP / 10
    if recent is None or not before or recent <= max(floor, _GAP_TIMES * median(before)):
        return None
    return f"KL of trainer to engine rose to {recent:.3g} nats per token from {median(before):.3g}"


@_alarm(
    "`actor/grad_norm` or `critic/grad_norm` not finite, or above 8 times its median of 50 steps",
    "once: nothing. Again and again: a lower learning rate; read the step's `samples/`",
)
def gradient_spike(history: History) -> str | None:
    """A batch is too extreme for the model, or numbers overflow."""
    for name in (names.ACTOR_GRAD_NORM, names.CRITIC_GRAD_NORM):
        if name not in history.newest:
            continue
        now = history.newest[name]
        if now is None or not math.isfinite(now):
            return f"{name} is not finite"
        before = [value for value in history.before(name, 1, 0, _WINDOW) if value > 0]
        if len(before) < _REFERENCE:
            continue
        usual = median(before)
        if now > _GRADIENT_TIMES * usual and now > usual + 6 * _deviation(before):
            return f"{name} is {now:.3g}, usually {usual:.3g}"
    return None


@_alarm(
    "`skipped_updates/total` above `skipped_updates/unfinished`",
    "`skipped_updates/<cause>` in the row says why; operations.md says what to look at",
)
def skipped_updates(history: History) -> str | None:
    """Updates that would have harmed a model were skipped (operations.md)."""
    expected = names.SKIPPED_UPDATES, names.UNFINISHED
    total, unfinished = (history.newest.get(name) or 0.0 for name in expected)
    skipped = total - unfinished
    if not skipped:
        return None
    named = (
        name for name, value in history.newest.items() if name.startswith(names.SKIPPED) and value
    )
    causes = (name.removeprefix(names.SKIPPED) for name in named if name not in expected)
    return f"{skipped:.0f} skipped: {', '.join(sorted(causes))}"


@_alarm(
    "`response_length/truncated` above 0.5 (median of 3 steps)",
    "a larger `sampling.max_new_tokens`; where `response_length/repeated` is high, a lower "
    "`actor.optimizer.lr`",
)
def truncated_text(history: History) -> str | None:
    """Responses hit the token limit and count as wrong."""
    return _above(history, names.TRUNCATED, _TRUNCATED, _RECENT, "of responses are truncated")


@_alarm(
    "`reward/failed` above 0.05",
    "the verifier's reasons in `samples/`; `reward.response_timeout_s`",
)
def failed_grades(history: History) -> str | None:
    """Verifications fail, so their rewards say nothing about the responses."""
    return _above(history, names.FAILED_GRADES, _FAILED, 1, "of verifications failed")


@_alarm(
    "`agent/broken` above 0.05 (median of 3 steps)",
    "`agent/broken_<cause>` says why, the warnings name rows; `rollout.episode`, the agent and "
    "its tools",
)
def broken_episodes(history: History) -> str | None:
    """Episodes break, and their groups are replaced."""
    return _above(history, names.AGENT_BROKEN, _BROKEN, _RECENT, "of episodes broke")


@_alarm(
    f"`agent/turns` beyond the first (median of 3 steps) below {_FEWER_TURNS:g} x the median of up "
    "to 50 before",
    "`samples/`: does the agent answer without its tools; `agent/tool_errors`, the reward of such "
    "answers",
)
def tools_unused(history: History) -> str | None:
    """Agents answer at once and no longer use their tools."""
    recent = history.recent(names.AGENT_TURNS, _RECENT)
    before = history.before(names.AGENT_TURNS, _RECENT, _REFERENCE, _WINDOW)
    if recent is None or not before or recent - 1 >= _FEWER_TURNS * (median(before) - 1):
        return None
    return f"{recent:.1f} turns an episode, {median(before):.1f} before"


@_alarm(
    f"`accuracy/copied` above {_COPIED} (median of {_RECENT} steps)",
    "`report` shows such responses first; check the verifier: it accepts the question as its "
    "answer",
)
def copied_answers(history: History) -> str | None:
    """Correct responses restate the problem: the policy is rewarded for copying."""
    return _above(
        history, names.COPIED, _COPIED, _RECENT, "of correct responses restate the problem"
    )


@_alarm(
    f"over {_RECENT} steps `response_length/mean` at most half, and `accuracy/mean` at least "
    f"twice, what both were in the first {_FIRST} of the {_WINDOW} steps before",
    "read `samples/`: a shortcut, such as restating the problem, looks like this; so does a policy "
    "that learns to stop",
)
def length_collapse(history: History) -> str | None:
    """Accuracy doubles while responses halve: the policy may have found a shortcut past the
    verifier."""
    length = history.recent(names.LENGTH, _RECENT)
    accuracy = history.recent(names.ACCURACY, _RECENT)
    lengths = history.before(names.LENGTH, _RECENT, _RECENT, _WINDOW)[:_FIRST]
    accuracies = history.before(names.ACCURACY, _RECENT, _RECENT, _WINDOW)
    if length is None or accuracy is None or not lengths or not accuracies:
        return None
    longer = median(lengths)
    lower = median(accuracies[:_FIRST])
    if length > _HALF * longer:
        return None
    # Accuracies of few responses jump: it has to be higher than in any of the steps before.
    if accuracy < max(_DOUBLE * lower, lower + _GAINED) or accuracy <= max(accuracies):
        return None
    return (
        f"responses went from {longer:.0f} to {length:.0f} tokens while accuracy went from "
        f"{lower:.3f} to {accuracy:.3f}"
    )


@_alarm(
    f"over {_STUCK} steps: no gradient (`actor/grad_norm` 0), or the same reward for all responses "
    "with `accuracy/mean` 0 or 1",
    "accuracy 0: read `samples/`, check `reward.answer_format` and the ground truths, try easier "
    "problems; accuracy 1: harder problems",
)
def nothing_learnt(history: History) -> str | None:
    """The reward does not vary, so that no update teaches the policy anything."""
    norms = history.values(names.ACTOR_GRAD_NORM)[-_STUCK:]
    if len(norms) == _STUCK and max(norms) <= _NO_GRADIENT:
        return f"the policy's gradient was 0 for {_STUCK} steps"
    accuracies = history.values(names.ACCURACY)[-_STUCK:]
    lowest = history.values(names.REWARD_MIN)[-_STUCK:]
    highest = history.values(names.REWARD_MAX)[-_STUCK:]
    if len(accuracies) < _STUCK or len(set(accuracies)) > 1 or accuracies[0] not in (0.0, 1.0):
        return None
    same = history.values(names.FRAC_ZERO_STD_GROUPS)[-_STUCK:]
    alike = lowest == highest if lowest else len(same) == _STUCK and min(same) == 1
    if not alike:
        return None  # such as scores that no response is correct by
    return f"accuracy was {accuracies[0]:.0f} for {_STUCK} steps and all rewards were alike"


def _deviation(values: Sequence[float]) -> float:
    """Median absolute deviation, scaled to the standard deviation of normal values."""
    middle = median(values)
    return median(abs(value - middle) for value in values) / _QUARTILE


def _above(history: History, name: str, limit: float, steps: int, what: str) -> str | None:
    recent = history.recent(name, steps)
    return (
        f"{recent:.0%} {what} (limit {limit:.0%})"
        if recent is not None and recent > limit
        else None
    )


class Alarms:
    """Checks the metrics of each step.

    history: the rows before this attempt of the run (read_metrics), so that a resumed run compares
        with the same steps
    and reports nothing twice.
    """

    def __init__(self, config: AlarmsConfig, history: Iterable[Metrics] = ()) -> None:
        self._stop = config.stop
        self._history = History(history)
        self._watched = [alarm for alarm in ALARMS if alarm.name not in config.off]
        self.active = {
            alarm.name for alarm in ALARMS if self._history.newest.get(names.ALARM + alarm.name)
        }
        self.stopping: str | None = None

    def check(self, row: Metrics) -> dict[str, str]:
        """New alarms after the row of a step: texts by alarm, only for alarms that did not hold one
        step earlier.

        `active` are all that hold now; `stopping` is the first of them that ends the run, with its
        text. Absent metrics raise no alarm.
        """
        self._history.add(row)
        holding = {
            alarm.name: text for alarm in self._watched if (text := alarm.rule(self._history))
        }
        stops = [f"{name}: {text}" for name, text in holding.items() if name in self._stop]
        self.stopping = stops[0] if stops else None
        fresh = {name: text for name, text in holding.items() if name not in self.active}
        self.active = set(holding)
        return fresh

    def metrics(self) -> dict[str, float]:
        """The metrics of the step's row: 1 for each alarm that holds."""
        return {names.ALARM + name: 1.0 for name in sorted(self.active)}
