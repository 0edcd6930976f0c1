"""The alarms of a run: what each means, what to do first, and which of them hold."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vapo_megatron.config.monitoring import AlarmsConfig
from vapo_megatron.monitoring import alarm_rules as rules
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.history import History, Metrics


@dataclass(frozen=True)
class Alarm:
    """Trouble that metrics give away.

    Attributes:
        rule: what is wrong after the newest row of a history, or None.
        threshold: when it holds; {key} stands for that key of monitoring.alarms.
        meaning: of the trouble, for a person.
        remedy: what to look at or change first.
    """

    rule: Callable[[History, AlarmsConfig], str | None]
    threshold: str
    meaning: str
    remedy: str

    @property
    def name(self) -> str:
        """Of the alarm: key of monitoring.alarms.actions, and metric alarm/<name>."""
        return self.rule.__name__


ALARMS: tuple[Alarm, ...] = (
    Alarm(
        rules.length_collapse,
        "`response_length/mean` below {length_collapse} of its highest ({reference_steps} steps each)",
        "responses lose their reasoning: the critic, or a length penalty, pushes towards early ends",
        "look at `critic/value_bias_*`; value pretraining on; `algorithm.shaping` off",
    ),
    Alarm(
        rules.entropy_collapse,
        "`actor/entropy` below {entropy_collapse} of its first {reference_steps} steps, accuracy below 0.9",
        "the policy stopped exploring before it could do what it is asked",
        "a lower `actor.optimizer.lr`; a higher `algorithm.policy_loss.clip_high`",
    ),
    Alarm(
        rules.entropy_explosion,
        "`actor/entropy` above {entropy_max} nats, or over {reference_steps} steps above {entropy_explosion} times the "
        "median before",
        "the policy writes noise, or is on the way there",
        "read `samples/`; go back to the last good checkpoint with a lower `actor.optimizer.lr`; "
        "right after the first update: a broken weight sync",
    ),
    Alarm(
        rules.accuracy_collapse,
        "`accuracy/mean` of 20 steps below {accuracy_collapse} of its best 20 steps",
        "what the policy could do before it cannot do any more",
        "go back to a checkpoint before the fall, with a lower `actor.optimizer.lr`; read `samples/`",
    ),
    Alarm(
        rules.value_below_baseline,
        "`critic/gain` below {critic_gain} (median of {reference_steps} steps)",
        "the critic explains less of the returns than what is free (critic.md)",
        "more `value_pretraining`; a higher `critic.optimizer.lr`; or a group estimator",
    ),
    Alarm(
        rules.value_bias,
        "`critic/value_bias_*` differ by more than {value_bias} along the response (medians of {recent_steps} steps)",
        "the values' bias grows along the response: one end of it is pushed by the critic's error alone",
        "`algorithm.advantage.lambda_critic` 1; value pretraining until `stop_bias`",
    ),
    Alarm(
        rules.critic_fault,
        "a `critic/fault_<name>` in the step",
        "the critic's values have the signature of a fault",
        "critic.md says what each is",
    ),
    Alarm(
        rules.evaluation_falls,
        "two evaluations in a row {evaluation_fall} below the best, with a higher reward than then",
        "the reward is being gamed, or the training problems are learnt by heart",
        "read `samples/` of the last steps and the verifier's reasons; take the best checkpoint; more data",
    ),
    Alarm(
        rules.train_infer_gap,
        "`actor/train_infer_kl` above {train_infer_kl} nats, or {train_infer_jump} times its median of {window_steps} "
        "steps",
        "engine and trainer do not compute the same policy",
        "weight_sync.md; a jump: a wrong sync; a slow rise: the engine's precision (FP8)",
    ),
    Alarm(
        rules.clipped_share,
        "`actor/clip_fraction_low` and `_high` above {clipped_share} together (medians of {recent_steps} steps)",
        "updates go too far from the policy that sampled",
        "a lower `actor.optimizer.lr`; fewer updates per rollout (`algorithm.update`)",
    ),
    Alarm(
        rules.gradient_spike,
        "`actor/grad_norm` or `critic/grad_norm` not finite, or above {gradient_spike} times its median of "
        "{window_steps} steps",
        "a batch that the model cannot bear, or numbers that overflow",
        "once: nothing. Again and again: a lower learning rate; read the step's `samples/`",
    ),
    Alarm(
        rules.skipped_updates,
        "`sick/skipped_updates` above 0",
        "updates would have harmed a model, and were not made (robustness.md)",
        "`sick/<cause>` in the row says why; robustness.md says what to look at",
    ),
    Alarm(
        rules.truncated_text,
        "`response_length/truncated` above {truncated_share} (median of {recent_steps} steps)",
        "responses end for want of room, and count as wrong",
        "a larger `sampling.max_new_tokens`; if `repeated_text` holds as well, that one first",
    ),
    Alarm(
        rules.repeated_text,
        "`response_length/repeated` above {repeated_share} (median of {recent_steps} steps)",
        "responses run in circles",
        "read `samples/`; a lower `actor.optimizer.lr`; `algorithm.shaping.soft_overlong`",
    ),
    Alarm(
        rules.groups_without_signal,
        "`reward/frac_zero_std_groups` above {frac_zero_std_groups} (mean of {reference_steps} steps)",
        "problems are too hard or too easy for this policy, or the verifier grades all alike",
        "`tools/grade.py` on some samples; other problems; `algorithm.dynamic_sampling`",
    ),
    Alarm(
        rules.failed_grades,
        "`reward/failed` above {failed_grades}",
        "verifications fail: their rewards are no grades",
        "the verifier's reasons in `samples/`; `reward.response_timeout_s`",
    ),
    Alarm(
        rules.slow_engine,
        "`throughput/rollout` below {slow_engine} of its median of {window_steps} steps",
        "an engine is stuck, throttled or shares its device",
        "the engines' logs in `logs/`; `vapo-megatron doctor`",
    ),
    Alarm(
        rules.engine_failures,
        "`rollout/engine_failures` above 0",
        "an engine died, stood still or computed something else, and was started again (operations.md)",
        "the logs named in the console, `logs/engine_*.ended*.log`: memory, the device",
    ),
    Alarm(
        rules.host_memory,
        "`memory/host_used` above {host_memory_used}, or `memory/process_gib` of rank 0 up by {host_memory_growth} "
        "within {window_steps} steps and growing in every fifth of them",
        "the system will end a process for memory",
        "fewer `reward.workers`; start again with `run.resume=auto` before it happens",
    ),
)


class Alarms:
    """Watches the metrics of one step after the other.

    history are the rows before this attempt of the run (read_metrics), so that a resumed run compares with the same
    steps, and tells nothing twice.
    """

    def __init__(self, config: AlarmsConfig, history: Iterable[Metrics] = ()) -> None:
        self._config, self._history = config, History(history)
        self._watched = [alarm for alarm in ALARMS if getattr(config.actions, alarm.name) != "off"]
        self.active = {alarm.name for alarm in ALARMS if self._history.newest.get(names.ALARM + alarm.name)}
        self.stopping: str | None = None

    def check(self, row: Metrics) -> dict[str, str]:
        """What is wrong after the row of a step, by alarm; of those only that did not hold a step before.

        `active` are all that hold now; `stopping` is the first of them that is to stop the run, and its text. A metric
        that is absent raises no alarm.
        """
        self._history.add(row)
        found = {alarm.name: text for alarm in self._watched if (text := alarm.rule(self._history, self._config))}
        stops = [f"{name}: {text}" for name, text in found.items() if getattr(self._config.actions, name) == "stop"]
        self.stopping = stops[0] if stops else None
        fresh = {name: text for name, text in found.items() if name not in self.active}
        self.active = set(found)
        return fresh

    def metrics(self) -> dict[str, float]:
        """For the row of the step: 1 for each alarm that holds."""
        return {names.ALARM + name: 1.0 for name in sorted(self.active)}
