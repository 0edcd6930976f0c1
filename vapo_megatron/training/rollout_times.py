"""What engines that work ahead bring and cost: ages of tokens, and who waits for whom."""

from collections import Counter
from collections.abc import Sequence

from vapo_megatron.data.sample import Sample
from vapo_megatron.engines.engines import Engines
from vapo_megatron.engines.ledger import Ledger
from vapo_megatron.monitoring import names


def age_metrics(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Ages of tokens, in weight syncs since the weights that drew them, and the share of tokens of each.

    version: of the weights that are about to be trained.
    """
    tokens: Counter[int] = Counter()
    for sample in samples:
        trained = sample.window_start or 0  # in earlier steps
        for drawn_by, count in sample.versions:
            if count > trained:
                tokens[version - drawn_by] += count - trained
            trained = max(0, trained - count)
    total = tokens.total()
    row = {f"rollout/age_{age}_share": count / total for age, count in sorted(tokens.items())}
    mean = sum(age * count for age, count in tokens.items()) / total
    return row | {"rollout/age_mean": mean, "rollout/age_max": float(max(tokens))}


class Waits:
    """Times between one step's groups and the next one's."""

    def __init__(self) -> None:
        self._taken_at: float | None = None
        self._busy = 0.0

    def row(self, asked_at: float, tokens: int, engines: Engines, ledger: Ledger) -> dict[str, float]:
        """When a step's groups have just been taken: idle shares since the last time, and what is on its way.

        asked_at: when the trainer began to wait for them, by the dispatcher's clock. tokens: of their responses.
        """
        now, busy = engines.dispatcher.loop.time(), engines.dispatcher.busy_seconds()
        row = {"throughput/queued_groups": float(ledger.graded), "throughput/groups_in_flight": float(ledger.in_flight)}
        if self._taken_at is not None:
            seconds = now - self._taken_at
            row["throughput/trainer_idle"] = (now - asked_at) / seconds
            row["throughput/engines_idle"] = 1 - (busy - self._busy) / (seconds * engines.count)
            if ledger.rule.staleness:  # engines have generated all the time, not only while they were waited for
                row[names.ROLLOUT_SPEED] = tokens / seconds
        self._taken_at, self._busy = now, busy
        return row
