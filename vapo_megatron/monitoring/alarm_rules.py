"""When each alarm holds: pure functions of the metrics so far. They return what is wrong, or None."""

import math
from statistics import fmean, median

from vapo_megatron.config.monitoring import AlarmsConfig
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.history import History, deviation, grows_steadily

_EVALUATIONS = 2  # in a row that have to be below the best one
_CURVE = 20  # steps whose mean accuracy or reward is compared: single steps say little
_SURE_ACCURACY = 0.9  # from here on a policy without entropy is one that has solved its problems


def length_collapse(history: History, config: AlarmsConfig) -> str | None:
    """Responses became a fraction of what they were at their longest."""
    recent = history.recent(names.LENGTH, config.reference_steps)
    longest = history.highest(names.LENGTH, config.reference_steps)
    if recent is None or longest is None or recent >= config.length_collapse * longest:
        return None
    return f"responses fell to {recent:.4g} tokens from {longest:.4g}"


def entropy_collapse(history: History, config: AlarmsConfig) -> str | None:
    """The policy stopped exploring before it could do all it is asked."""
    recent, all_values = history.recent(names.ENTROPY, config.recent_steps), history.values(names.ENTROPY)
    accuracy = history.recent(names.ACCURACY, config.recent_steps)
    if recent is None or len(all_values) < config.reference_steps + config.recent_steps:
        return None
    first = median(all_values[: config.reference_steps])
    if recent >= config.entropy_collapse * first or (accuracy is not None and accuracy >= _SURE_ACCURACY):
        return None
    return f"entropy fell to {recent:.3g} nats from {first:.3g} at first"


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
    if recent <= config.entropy_explosion * usual or recent <= usual + 3 * deviation(before):
        return None
    return f"entropy rose to {recent:.3g} nats from {usual:.3g}"


def accuracy_collapse(history: History, config: AlarmsConfig) -> str | None:
    """What the policy could do before, it cannot any more."""
    best, values = history.highest(names.ACCURACY, _CURVE), history.values(names.ACCURACY)
    if best is None or len(values) < 2 * _CURVE:
        return None
    recent = fmean(values[-_CURVE:])
    if recent >= config.accuracy_collapse * best:
        return None
    return f"accuracy fell to {recent:.3f} from {best:.3f} (means of {_CURVE} steps)"


def value_below_baseline(history: History, config: AlarmsConfig) -> str | None:
    """The critic explains less of the returns than what is free."""
    gain = history.recent(names.CRITIC_GAIN, config.reference_steps)
    if gain is None or gain >= config.critic_gain:
        return None
    return f"the critic explains {-gain:.3f} less of the returns' variance than the best free baseline"


def value_bias(history: History, config: AlarmsConfig) -> str | None:
    """The values' bias differs along the response."""
    biases = {p: history.recent(f"{names.VALUE_BIAS}{p}", config.recent_steps) for p in names.BIAS_POSITIONS}
    known = {p: bias for p, bias in biases.items() if bias is not None}
    if len(known) < 2:
        return None
    low, high = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    if known[high] - known[low] <= config.value_bias:
        return None
    return f"values are off by {known[low]:+.3f} at {low} % of the response and by {known[high]:+.3f} at {high} %"


def critic_fault(history: History, config: AlarmsConfig) -> str | None:
    """The values of this step show the signature of a wrong critic (algorithms/critic_faults.py)."""
    faults = sorted(name.removeprefix(names.CRITIC_FAULT) for name in history.newest if _is_fault(name, history))
    return f"the critic's values show: {', '.join(faults)}" if faults else None


def evaluation_falls(history: History, config: AlarmsConfig) -> str | None:
    """Reward rises and evaluation falls: the reward is being gamed, or the data are learnt by heart."""
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


def clipped_share(history: History, config: AlarmsConfig) -> str | None:
    """Too many tokens are beyond the clip range: updates go too far from the policy that sampled."""
    parts = [history.recent(name, config.recent_steps) for name in (names.CLIP_LOW, names.CLIP_HIGH)]
    share = sum(part for part in parts if part is not None)
    if share <= config.clipped_share:
        return None
    return f"{share:.1%} of tokens are clipped (limit {config.clipped_share:.0%})"


def gradient_spike(history: History, config: AlarmsConfig) -> str | None:
    """A gradient norm is not finite, or far above what it usually is."""
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
        if now > config.gradient_spike * usual and now > usual + 6 * deviation(before):
            return f"{name} is {now:.3g}, usually {usual:.3g}"
    return None


def skipped_updates(history: History, config: AlarmsConfig) -> str | None:
    """Updates were skipped because they would have harmed a model."""
    skipped = history.newest.get(names.SKIPPED_UPDATES)
    if not skipped:
        return None
    named = (name for name, value in history.newest.items() if name.startswith(names.SICK) and value)
    causes = (name.removeprefix(names.SICK) for name in named if name != names.SKIPPED_UPDATES)
    return f"{skipped:.0f} skipped: {', '.join(sorted(causes))}"


def truncated_text(history: History, config: AlarmsConfig) -> str | None:
    """Responses hit the token limit."""
    return _above(history, names.TRUNCATED, config.truncated_share, config.recent_steps, "of responses are truncated")


def repeated_text(history: History, config: AlarmsConfig) -> str | None:
    """Responses run in circles."""
    return _above(
        history, names.REPEATED, config.repeated_share, config.recent_steps, "of tokens repeat what was written before"
    )


def groups_without_signal(history: History, config: AlarmsConfig) -> str | None:
    """Rewards do not differ within groups."""
    values = history.values(names.FRAC_ZERO_STD_GROUPS)[-config.reference_steps :]
    if len(values) < config.reference_steps or fmean(values) <= config.frac_zero_std_groups:
        return None
    return f"{fmean(values):.0%} of groups have one reward for all their responses"


def failed_grades(history: History, config: AlarmsConfig) -> str | None:
    """Verifications fail: rewards are not grades."""
    return _above(history, names.FAILED_GRADES, config.failed_grades, 1, "of verifications failed")


def slow_engine(history: History, config: AlarmsConfig) -> str | None:
    """Responses come at a fraction of the usual rate."""
    recent = history.recent(names.ROLLOUT_SPEED, config.recent_steps)
    before = history.before(names.ROLLOUT_SPEED, config.recent_steps, config.reference_steps, config.window_steps)
    if recent is None or not before or recent >= config.slow_engine * median(before):
        return None
    return f"engines write {recent:,.0f} tokens per second, usually {median(before):,.0f}"


def engine_failures(history: History, config: AlarmsConfig) -> str | None:
    """Engines were ended and started again."""
    failures = history.newest.get(names.ENGINE_FAILURES)
    return f"{failures:.0f} engine failures since the last weight sync" if failures else None


def host_memory(history: History, config: AlarmsConfig) -> str | None:
    """Memory of the host is nearly used up, or grows with every step."""
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


def _is_fault(name: str, history: History) -> bool:
    return name.startswith(names.CRITIC_FAULT) and bool(history.newest[name])
