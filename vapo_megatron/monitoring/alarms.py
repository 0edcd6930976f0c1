"""Trouble that the metrics of a step give away, each in one line."""

import math
from collections.abc import Callable, Iterable, Mapping

from vapo_megatron.config.monitoring import AlarmsConfig
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.metrics import Stat

Metrics = Mapping[str, float | None]


class Alarms:
    """Watches the metrics of one step after the other.

    history are the rows before this attempt of the run (read_metrics), so that a resumed run measures collapses against
    the same first steps.
    """

    def __init__(self, config: AlarmsConfig, history: Iterable[Metrics] = ()) -> None:
        self._config = config
        self._references = {names.ENTROPY: Stat(), names.LENGTH: Stat()}
        self.active: frozenset[str] = frozenset()
        for row in history:
            self.check(row)

    def check(self, metrics: Metrics) -> list[str]:
        """One line for each trouble that was not there a step before; `active` names those that hold now.

        A metric that is absent raises no alarm; one that is NaN, infinite or None does if it is a gradient norm.
        """
        found = {kind: text for kind, text in self._found(metrics)}
        fresh = [text for kind, text in found.items() if kind not in self.active]
        self.active = frozenset(found)
        for name, stat in self._references.items():
            value = metrics.get(name)
            if value is not None and math.isfinite(value) and stat.count < self._config.reference_steps:
                stat.add(value)
        return fresh

    def _found(self, metrics: Metrics) -> Iterable[tuple[str, str]]:
        config = self._config
        for name in (names.ACTOR_GRAD_NORM, names.CRITIC_GRAD_NORM):
            if name in metrics and not _is_finite(metrics[name]):
                yield name, f"{name} is not finite: the update of this step is lost or harmful"
        for name in metrics:
            if name.startswith(names.CRITIC_FAULT):
                fault = name.removeprefix(names.CRITIC_FAULT)
                yield name, f"the critic's values show the fault '{fault}': docs/critic.md says what it is"
        yield from self._collapse(metrics, names.ENTROPY, config.entropy_collapse, "the policy stopped exploring")
        yield from self._collapse(metrics, names.LENGTH, config.length_collapse, "responses are losing their reasoning")
        limits: tuple[tuple[str, float, Callable[[float], str]], ...] = (
            (
                names.TRAIN_INFER_KL,
                config.train_infer_kl,
                lambda v: f"{v:.3g} nats: the engine samples from another policy",
            ),
            (names.TRUNCATED, config.truncated_share, lambda v: f"{v:.0%}: responses hit the token limit"),
            (
                names.FAILED_GRADES,
                config.failed_grades,
                lambda v: f"{v:.0%}: verifications fail, their rewards are no grades",
            ),
            (
                names.FRAC_ZERO_STD_GROUPS,
                config.frac_zero_std_groups,
                lambda v: f"{v:.0%}: nearly no group tells apart",
            ),
        )
        for name, limit, describe in limits:
            value = metrics.get(name)
            if value is not None and value > limit:
                yield name, f"{name} is {describe(value)} (limit {limit:g})"

    def _collapse(self, metrics: Metrics, name: str, share: float, meaning: str) -> Iterable[tuple[str, str]]:
        value, reference = metrics.get(name), self._references[name]
        if value is None or reference.count < self._config.reference_steps or value >= share * reference.mean:
            return
        yield name, f"{name} fell to {value:.3g} from {reference.mean:.3g} at first: {meaning}"


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
