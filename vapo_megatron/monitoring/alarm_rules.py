"""The alarms of a run: when each holds, what it means (its rule's docstring), what to look at or change first.

Rules are pure functions of the metrics so far. They return what is wrong after the newest row, or None.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

from scipy.stats import median_abs_deviation

from vapo_megatron.config.monitoring import AlarmsConfig
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.history import History, grows_steadily

_EVALUATIONS = 2  # in a row that have to be below the best one
_CURVE = 20  # steps whose mean accuracy or reward is compared: single steps say little
_SURE_ACCURACY = 0.9  # from here on a policy without entropy is one that has solved its problems
_deviation = partial(median_abs_deviation, scale="normal")  # as the standard deviation of normal values

Rule = Callable[[History, AlarmsConfig], str | None]


@dataclass(frozen=True)
class Alarm:
    """Trouble that metrics give away.

    Attributes:
        name: key of monitoring.alarms.actions, and metric alarm/<name>.
        rule: what is wrong after the newest row of a history, or None.
        threshold: when it holds; {key} stands for that key of monitoring.alarms.
        meaning: of the trouble, for a person.
        remedy: what to look at or change first.
    """

    name: str
    rule: Rule
    threshold: str
    meaning: str
    remedy: str


ALARMS: list[Alarm] = []


def _alarm(threshold: str, remedy: str) -> Callable[[Rule], Rule]:
    """Makes an alarm of a rule, under its name."""

    def add(rule: Rule) -> Rule:
        ALARMS.append(Alarm(rule.__name__, rule, threshold, (rule.__doc__ or "").rstrip("."), remedy))
        return rule

    return add


@_alarm(
    "`response_length/mean` below {length_collapse} of its highest ({reference_steps} steps each)",
    "look at `critic/value_bias_*`; value pretraining on; `algorithm.shaping` off",
)
def length_collapse(history: History, config: AlarmsConfig) -> str | None:
    """Responses lose their reasoning: the critic, or a length penalty, pushes towards early ends."""
    recent = history.recent(names.LENGTH, config.reference_steps)
    longest = history.highest(names.LENGTH, config.reference_steps)
    if recent is None or longest is None or recent >= config.length_collapse * longest:
        return None
    return f"responses fell to {recent:.4g} tokens from {longest:.4g}"


@_alarm(
    "`actor/entropy` below {entropy_collapse} of its first {reference_steps} steps, accuracy below 0.9",
    "a lower `actor.optimizer.lr`; a higher `algorithm.policy_loss.clip_high`",
)
def entropy_collapse(history: History, config: AlarmsConfig) -> str | None:
    """The policy stopped exploring before it could do what it is asked."""
    recent, all_values = history.recent(names.ENTROPY, config.recent_steps), history.values(names.ENTROPY)
    accuracy = history.recent(names.ACCURACY, config.recent_steps)
    if recent is None or len(all_values) < config.reference_steps + config.recent_steps:
        return None
    first = median(all_values[: config.reference_steps])
    if recent >= config.entropy_collapse * first or (accuracy is not None and accuracy >= _SURE_ACCURACY):
        return None
    return f"entropy fell to {recent:.3g} nats from {first:.3g} at first"


@_alarm(
    "`actor/entropy` above {entropy_max} nats, or over {reference_steps} steps above {entropy_explosion} times the "
    "median before",
    "read `samples/`; go back to the last good checkpoint with a lower `actor.optimizer.lr`; "
    "right after the first update: a broken weight sync",
)
def entropy_explosion(history: History, config: AlarmsConfig) -> str | None:
    """The policy writes noise, or is on the way there."""
    now = history.newest.get(names.ENTROPY)
    if now is not None and now > config.entropy_max:
        return f"entropy is {now:.3g} nats: text of near random tokens (limit {config.entropy_max:g})"
    recent = history.recent(names.ENTROPY, config.reference_steps)
    # All of them: what rises slowly would carry a window along.
    before = history.before(names.ENTROPY, config.reference_steps, config.reference_steps)
    if recent is None or not before:
        return None
    usual = median(before)
    if recent <= config.entropy_explosion * usual or recent <= usual + 3 * _deviation(before):
        return None
    return f"entropy rose to {recent:.3g} nats from {usual:.3g}"


@_alarm(
    "`accuracy/mean` of 20 steps below {accuracy_collapse} of its best 20 steps",
    "go back to a checkpoint before the fall, with a lower `actor.optimizer.lr`; read `samples/`",
)
def accuracy_collapse(history: History, config: AlarmsConfig) -> str | None:
    """What the policy could do before it cannot do any more."""
    best, values = history.highest(names.ACCURACY, _CURVE), history.values(names.ACCURACY)
    if best is None or len(values) < 2 * _CURVE:
        return None
    recent = fmean(values[-_CURVE:])
    if recent >= config.accuracy_collapse * best:
        return None
    return f"accuracy fell to {recent:.3f} from {best:.3f} (means of {_CURVE} steps)"


@_alarm(
    "`critic/gain` below {critic_gain} (median of {reference_steps} steps)",
    "more `value_pretraining`; a higher `critic.optimizer.lr`; or a group estimator",
)
def value_below_baseline(history: History, config: AlarmsConfig) -> str | None:
    """The critic explains less of the returns than what is free (critic.md)."""
    gain = history.recent(names.CRITIC_GAIN, config.reference_steps)
    if gain is None or gain >= config.critic_gain:
        return None
    return f"the critic explains {-gain:.3f} less of the returns' variance than the best free baseline"


@_alarm(
    "`critic/value_bias_*` differ by more than {value_bias} along the response (medians of {recent_steps} steps)",
    "`algorithm.advantage.lambda_critic` 1; value pretraining until `stop_bias`",
)
def value_bias(history: History, config: AlarmsConfig) -> str | None:
    """The values' bias grows along the response: one end of it is pushed by the critic's error alone."""
    biases = {p: history.recent(f"{names.VALUE_BIAS}{p}", config.recent_steps) for p in names.BIAS_POSITIONS}
    known = {p: bias for p, bias in biases.items() if bias is not None}
    if len(known) < 2:
        return None
    low, high = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    if known[high] - known[low] <= config.value_bias:
        return None
    return f"values are off by {known[low]:+.3f} at {low} % of the response and by {known[high]:+.3f} at {high} %"


@_alarm(
    "a `critic/fault_<name>` in the step",
    "critic.md says what each is",
)
def critic_fault(history: History, config: AlarmsConfig) -> str | None:
    """The critic's values have the signature of a fault."""
    shown = (name for name, value in history.newest.items() if name.startswith(names.CRITIC_FAULT) and value)
    faults = sorted(name.removeprefix(names.CRITIC_FAULT) for name in shown)
    return f"the critic's values show: {', '.join(faults)}" if faults else None


@_alarm(
    "two evaluations in a row {evaluation_fall} below the best, with a higher reward than then",
    "read `samples/` of the last steps and the verifier's reasons; take the best checkpoint; more data",
)
def evaluation_falls(history: History, config: AlarmsConfig) -> str | None:
    """The reward is being gamed, or the training problems are learnt by heart."""
    for name in history.named(names.EVALUATION):
        values = history.values(name)
        if len(values) <= _EVALUATIONS:
            continue
        best = max(range(len(values)), key=values.__getitem__)
        last = values[-_EVALUATIONS:]
        then = history.around(names.REWARD, name, best, _CURVE)
        now = history.around(names.REWARD, name, len(values) - 1, _CURVE)
        if then is None or now is None or now <= then or max(last) >= values[best] - config.evaluation_fall:
            continue
        return f"{name} fell to {last[-1]:.3f} from {values[best]:.3f} while reward rose to {now:.3f} from {then:.3f}"
    return None


@_alarm(
    "`actor/train_infer_kl` above {train_infer_kl} nats, or {train_infer_jump} times its median of {window_steps} "
    "steps",
    "weight_sync.md; a jump: a wrong sync; a slow rise: the engine's precision (FP8)",
)
def train_infer_gap(history: History, config: AlarmsConfig) -> str | None:
    """Engine and trainer do not compute the same policy."""
    now = history.newest.get(names.TRAIN_INFER_KL)
    if now is None or not math.isfinite(now):
        return None
    if now > config.train_infer_kl:
        return f"KL of trainer to engine is {now:.3g} nats per token (limit {config.train_infer_kl:g})"
    recent = history.recent(names.TRAIN_INFER_KL, config.recent_steps)
    before = history.before(names.TRAIN_INFER_KL, config.recent_steps, config.reference_steps, config.window_steps)
    floor = config.train_infer_kl / 10
    if recent is None or not before or recent <= max(floor, config.train_infer_jump * median(before)):
        return None
    return f"KL of trainer to engine rose to {recent:.3g} nats per token from {median(before):.3g}"


@_alarm(
    "`actor/clip_fraction_low` and `_high` above {clipped_share} together (medians of {recent_steps} steps)",
    "a lower `actor.optimizer.lr`; fewer updates per rollout (`algorithm.update`)",
)
def clipped_share(history: History, config: AlarmsConfig) -> str | None:
    """Updates go too far from the policy that sampled."""
    parts = [history.recent(name, config.recent_steps) for name in (names.CLIP_LOW, names.CLIP_HIGH)]
    share = sum(part for part in parts if part is not None)
    if share <= config.clipped_share:
        return None
    return f"{share:.1%} of tokens are clipped (limit {config.clipped_share:.0%})"


@_alarm(
    "`actor/grad_norm` or `critic/grad_norm` not finite, or above {gradient_spike} times its median of "
    "{window_steps} steps",
    "once: nothing. Again and again: a lower learning rate; read the step's `samples/`",
)
def gradient_spike(history: History, config: AlarmsConfig) -> str | None:
    """A batch that the model cannot bear, or numbers that overflow."""
    for name in (names.ACTOR_GRAD_NORM, names.CRITIC_GRAD_NORM):
        if name not in history.newest:
            continue
        now = history.newest[name]
        if now is None or not math.isfinite(now):
            return f"{name} is not finite"
        before = [value for value in history.before(name, 1, 0, config.window_steps) if value > 0]
        if len(before) < config.reference_steps:
            continue
        usual = median(before)
        if now > config.gradient_spike * usual and now > usual + 6 * _deviation(before):
            return f"{name} is {now:.3g}, usually {usual:.3g}"
    return None


@_alarm(
    "`skipped_updates/total` above `skipped_updates/unfinished`",
    "`skipped_updates/<cause>` in the row says why; robustness.md says what to look at",
)
def skipped_updates(history: History, config: AlarmsConfig) -> str | None:
    """Updates would have harmed a model, and were not made (robustness.md)."""
    expected = names.SKIPPED_UPDATES, names.UNFINISHED
    total, unfinished = (history.newest.get(name) or 0.0 for name in expected)
    skipped = total - unfinished
    if not skipped:
        return None
    named = (name for name, value in history.newest.items() if name.startswith(names.SKIPPED) and value)
    causes = (name.removeprefix(names.SKIPPED) for name in named if name not in expected)
    return f"{skipped:.0f} skipped: {', '.join(sorted(causes))}"


@_alarm(
    "`response_length/truncated` above {truncated_share} (median of {recent_steps} steps)",
    "a larger `sampling.max_new_tokens`; if `repeated_text` holds as well, that one first",
)
def truncated_text(history: History, config: AlarmsConfig) -> str | None:
    """Responses end for want of room, and count as wrong."""
    return _above(history, names.TRUNCATED, config.truncated_share, config.recent_steps, "of responses are truncated")


@_alarm(
    "`response_length/repeated` above {repeated_share} (median of {recent_steps} steps)",
    "read `samples/`; a lower `actor.optimizer.lr`; `algorithm.shaping.soft_overlong`",
)
def repeated_text(history: History, config: AlarmsConfig) -> str | None:
    """Responses run in circles."""
    return _above(
        history, names.REPEATED, config.repeated_share, config.recent_steps, "of tokens repeat what was written before"
    )


@_alarm(
    "`reward/frac_zero_std_groups` above {frac_zero_std_groups} (mean of {reference_steps} steps)",
    "`tools/grade.py` on some samples; other problems; `algorithm.dynamic_sampling`",
)
def groups_without_signal(history: History, config: AlarmsConfig) -> str | None:
    """Problems are too hard or too easy for this policy, or the verifier grades all alike."""
    values = history.values(names.FRAC_ZERO_STD_GROUPS)[-config.reference_steps :]
    if len(values) < config.reference_steps or fmean(values) <= config.frac_zero_std_groups:
        return None
    return f"{fmean(values):.0%} of groups have one reward for all their responses"


@_alarm(
    "`reward/failed` above {failed_grades}",
    "the verifier's reasons in `samples/`; `reward.response_timeout_s`",
)
def failed_grades(history: History, config: AlarmsConfig) -> str | None:
    """Verifications fail: their rewards are no grades."""
    return _above(history, names.FAILED_GRADES, config.failed_grades, 1, "of verifications failed")


@_alarm(
    "`throughput/rollout` below {slow_engine} of its median of {window_steps} steps",
    "the engines' logs in `logs/`; `vapo-megatron doctor`",
)
def slow_engine(history: History, config: AlarmsConfig) -> str | None:
    """An engine is stuck, throttled or shares its device."""
    recent = history.recent(names.ROLLOUT_SPEED, config.recent_steps)
    before = history.before(names.ROLLOUT_SPEED, config.recent_steps, config.reference_steps, config.window_steps)
    if recent is None or not before or recent >= config.slow_engine * median(before):
        return None
    return f"engines write {recent:,.0f} tokens per second, usually {median(before):,.0f}"


@_alarm(
    "`rollout/engine_failures` above 0",
    "the logs named in the console, `logs/engine_*.ended*.log`: memory, the device",
)
def engine_failures(history: History, config: AlarmsConfig) -> str | None:
    """An engine died, stood still or computed something else, and was started again (operations.md)."""
    failures = history.newest.get(names.ENGINE_FAILURES)
    return f"{failures:.0f} engine failures since the last weight sync" if failures else None


@_alarm(
    "`memory/host_used` above {host_memory_used}, or `memory/process_gib` of rank 0 up by {host_memory_growth} "
    "within {window_steps} steps and growing in every fifth of them",
    "fewer `reward.workers`; start again with `run.resume=auto` before it happens",
)
def host_memory(history: History, config: AlarmsConfig) -> str | None:
    """The system will end a process for memory."""
    used = history.newest.get(names.HOST_MEMORY_USED)
    if used is not None and used > config.host_memory_used:
        return f"{used:.0%} of the host's memory is used (limit {config.host_memory_used:.0%})"
    values = history.before(names.PROCESS_MEMORY, 0, config.window_steps, config.window_steps)
    if not values or not grows_steadily(values, 5):
        return None
    part = len(values) // 5
    first, last = median(values[:part]), median(values[-part:])
    if last <= (1 + config.host_memory_growth) * first:
        return None
    return f"memory of rank 0 grew to {last:.2f} GiB from {first:.2f} within {len(values)} steps, and goes on growing"


def _above(history: History, name: str, limit: float, steps: int, what: str) -> str | None:
    recent = history.recent(name, steps)
    return f"{recent:.0%} {what} (limit {limit:.0%})" if recent is not None and recent > limit else None
