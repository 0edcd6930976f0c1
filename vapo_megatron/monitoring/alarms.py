"""Which alarms of a run hold after each of its steps."""

from collections.abc import Iterable

from vapo_megatron.config.monitoring import AlarmsConfig
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.alarm_rules import ALARMS
from vapo_megatron.monitoring.history import History, Metrics


class Alarms:
    """Watches the metrics of one step after the other.

    history are the rows before this attempt of the run (read_metrics), so that a resumed run compares with the same
    steps, and tells nothing twice.
    """

    def __init__(self, config: AlarmsConfig, history: Iterable[Metrics] = ()) -> None:
        self._stop, self._history = config.stop, History(history)
        self._watched = [alarm for alarm in ALARMS if alarm.name not in config.off]
        self.active = {alarm.name for alarm in ALARMS if self._history.newest.get(names.ALARM + alarm.name)}
        self.stopping: str | None = None

    def check(self, row: Metrics) -> dict[str, str]:
        """What is wrong after the row of a step, by alarm; of those only that did not hold a step before.

        `active` are all that hold now; `stopping` is the first of them that is to stop the run, and its text. A metric
        that is absent raises no alarm.
        """
        self._history.add(row)
        found = {alarm.name: text for alarm in self._watched if (text := alarm.rule(self._history))}
        stops = [f"{name}: {text}" for name, text in found.items() if name in self._stop]
        self.stopping = stops[0] if stops else None
        fresh = {name: text for name, text in found.items() if name not in self.active}
        self.active = set(found)
        return fresh

    def metrics(self) -> dict[str, float]:
        """For the row of the step: 1 for each alarm that holds."""
        return {names.ALARM + name: 1.0 for name in sorted(self.active)}
