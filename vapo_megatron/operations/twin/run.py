"""The steps of a run, simulated: the trainer takes groups, works for a while, and hands its weights over."""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import stdev
from typing import Any, Self, cast

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import SamplingConfig
from vapo_megatron.data.prompts import PromptSource
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.engines.ledger import DROPPED
from vapo_megatron.engines.stream import GRADED_AT_ONCE
from vapo_megatron.errors import BadInput, TryAgain
from vapo_megatron.operations.twin.engine import SimulatedEngines
from vapo_megatron.operations.twin.scenario import Scenario, VirtualLoop
from vapo_megatron.training.collect import step_rule
from vapo_megatron.training.rollouts import Rollouts, Waits, age_metrics

WAIT = "time/wait_for_engines"
_PROMPTS = 4096
_INFORMATIVE, _ALIKE = "informative", "alike"


@dataclass
class Outcome:
    """What a run is like once it has settled: the first steps, which have nothing from before them, are left out.

    Attributes:
        step_seconds: from one step's groups to the next one's, after those.
        rows: of each of them, the metrics that a run writes: idle shares and ages of tokens.
        counts: of the ledger, over all steps.
        under_way: groups neither trained nor dropped at the end.
        tokens: of the responses of each of those steps.
    """

    step_seconds: list[float] = field(default_factory=list)
    rows: list[dict[str, float]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    under_way: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def step(self) -> float:
        """Mean seconds of a step."""
        return sum(self.step_seconds) / len(self.step_seconds)

    @property
    def step_error(self) -> float:
        """Standard error of that mean, as if steps did not depend on one another; 0 of a single one."""
        seconds = self.step_seconds
        return stdev(seconds) / math.sqrt(len(seconds)) if len(seconds) > 1 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Response tokens of the steps over their seconds."""
        return sum(self.tokens) / sum(self.step_seconds)

    @property
    def engines_idle(self) -> float:
        """Share of the time in which an engine has nothing at all to do; one with a single response is busy."""
        return max(0.0, self.mean("throughput/engines_idle"))

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which the trainer waits, for groups or for engines that are to get its weights."""
        waited = sum(row[WAIT] for row in self.rows) / sum(self.step_seconds)
        return self.mean("throughput/trainer_idle") + waited

    def mean(self, metric: str) -> float:
        """Of a metric, over time."""
        weighted = zip(self.step_seconds, self.rows, strict=True)
        return sum(seconds * row[metric] for seconds, row in weighted) / sum(self.step_seconds)

    def largest(self, metric: str) -> float:
        """Of a metric."""
        return max(row[metric] for row in self.rows)

    @property
    def is_closed(self) -> bool:
        """Whether each group that was drawn is trained, dropped or on its way."""
        gone = self.counts["trained"] + sum(self.counts[reason] for reason in DROPPED)
        return self.counts["drawn"] == gone + self.under_way


class SimulatedRollouts(Rollouts):
    """Rollouts of made-up prompts, whose responses are graded by workers that only take their time."""

    _grade_seconds: float
    _free_at: list[float]

    @classmethod
    def of(cls, scenario: Scenario, engines: Any) -> Self:
        """engines: simulated ones, or others that know of nothing but a scenario."""
        share, nobody = scenario.informative_share, cast(Any, None)
        prompts = [
            Prompt(
                str(number),
                "",
                _INFORMATIVE if int((number + 1) * share) > int(number * share) else _ALIKE,
                (number, *[0] * (scenario.prompt_tokens - 1)),
            )
            for number in range(_PROMPTS)
        ]
        source, sampling = PromptSource(prompts, scenario.seed), SamplingConfig(max_new_tokens=scenario.max_new_tokens)
        rollouts = cls(engines, nobody, sampling, RewardConfig(), scenario.seed, prompts=source)
        most = GRADED_AT_ONCE * scenario.batch.samples_per_prompt
        rollouts._grade_seconds = scenario.grade_seconds
        rollouts._free_at = [0.0] * max(1, min(scenario.grade_workers, most))
        return rollouts

    def say_correct(self, samples: Sequence[Sample]) -> None:
        """One response to a prompt that is informative."""
        for sample in samples:
            sample.correct = sample.prompt.answer == _INFORMATIVE and sample.index == 0

    def _grade(self, samples: Sequence[Sample]) -> None:
        clock = cast(VirtualLoop, self.engines.dispatcher.loop)
        now = ends = clock.time()
        for _ in samples:
            end = max(now, self._free_at[0]) + self._grade_seconds
            heapq.heapreplace(self._free_at, end)
            ends = max(ends, end)
        self.say_correct(samples)
        clock.ends_at(ends)


class _Silent:
    """What Rollouts asks of a recorder between the steps."""

    timer = staticmethod(lambda _: nullcontext())


def simulate(scenario: Scenario) -> Outcome:
    """Run it.

    Raises:
        BadInput: a step takes longer than rollout.collect_timeout_s.
    """
    engines = SimulatedEngines(scenario)
    try:
        return steps(scenario, engines, engines.clock.sleep, SimulatedRollouts.of(scenario, engines))
    except TryAgain:  # what a run may do, and would do in vain
        raise BadInput(
            f"rollout.collect_timeout_s={scenario.rollout.collect_timeout_s:g}: the responses of a simulated step take "
            "longer, and so may a run's: raise it, or take more GPUs"
        ) from None
    finally:
        engines.close()


def steps(scenario: Scenario, engines: Any, sleep: Callable[[float], None], rollouts: Rollouts) -> Outcome:
    """As training/loop.py goes through them, over engines and a clock of any kind."""
    outcome, silent, waits = Outcome(), cast(Any, _Silent()), Waits()
    clock = engines.dispatcher.loop
    settled = 2 + step_rule(scenario.batch, scenario.sampling, 1, scenario.rollout).oldest
    last = settled + scenario.steps
    # There is a step beyond the last one, for which engines work ahead as for any other.
    rule = step_rule(scenario.batch, scenario.sampling, 2 * last, scenario.rollout)
    rollouts.begin(rule, scenario.batch.samples_per_prompt, 0)
    stream = rollouts.stream
    assert stream is not None
    taken, waited = clock.time(), 0.0
    for step in range(last):
        asked = clock.time()
        samples = [sample for group in stream.take(lambda _: None) for sample in group]
        written = sum(len(sample.response_ids) for sample in samples)
        tokens = written + sum(len(sample.prompt.token_ids) for sample in samples)
        row = age_metrics(samples, engines.version) | waits.row(asked, tokens, engines, stream.ledger)
        taken, seconds = clock.time(), clock.time() - taken
        if step >= settled:
            outcome.step_seconds.append(seconds)
            outcome.tokens.append(written)
            outcome.rows.append(row | {WAIT: waited})
        sleep(scenario.trainer_seconds(tokens))
        trained = clock.time()
        rollouts.prepare_sync(silent)
        waited = clock.time() - trained
        engines.update_weights()
        rollouts.advance()
    outcome.counts = stream.ledger.counts.copy()
    outcome.under_way = stream.ledger.in_flight + stream.ledger.graded
    rollouts.end()
    return outcome
