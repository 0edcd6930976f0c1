"""Which mode would suit a cluster: each simulated, with engines that live and with engines that fail."""

from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from vapo_megatron.errors import BadInput
from vapo_megatron.operations.plan.plan import Plan
from vapo_megatron.operations.plan.tables import table_of
from vapo_megatron.operations.twin.planned import (
    lengths_of,
    looks_like,
    on_own_gpus,
    on_shared_gpus,
    splits,
)
from vapo_megatron.operations.twin.run import Outcome, simulate
from vapo_megatron.operations.twin.scenario import Failures, Scenario

# Splits that are simulated of all that can be laid out: those that look best by sums.
_SIMULATED_SPLITS = 3
_STALENESS = (1, 2)


@dataclass(frozen=True)
class Mode:
    """A way to run, and what it is like. engine_gpus: engines' own; None: they share the trainer's."""

    name: str
    engine_gpus: int | None
    outcome: Outcome
    failing: Outcome

    def as_json(self) -> dict[str, Any]:
        """In seconds, shares and weight syncs."""
        outcome = self.outcome
        return {
            "mode": self.name,
            "engine_gpus": self.engine_gpus,
            "step": outcome.step,
            "step_error": outcome.step_error,
            "engines_idle": outcome.engines_idle,
            "trainer_idle": outcome.trainer_idle,
            "age_mean": outcome.mean("rollout/age_mean"),
            "age_max": outcome.largest("rollout/age_max"),
            "groups": dict(outcome.counts),
            "with_failures": {
                "step": self.failing.step,
                "step_error": self.failing.step_error,
                "engines_failed": self.failing.failures,
            },
        }


def modes(plan: Plan) -> list[Mode]:
    """Synchronous (with windows, if the run has any) and with partial responses on the GPUs as planned; asynchronous
    with engines of their own.

    Raises:
        BadInput: plan.simulation.engine_gpus leaves the trainer no layout, or none that fits, or a step takes longer
            than rollout.collect_timeout_s.
    """
    length_of, given = lengths_of(plan).draw, plan.config.plan.simulation.engine_gpus
    if given is not None and on_own_gpus(plan, given, _STALENESS[0], length_of) is None:
        raise BadInput(
            f"plan.simulation.engine_gpus={given} of {plan.world}: rollout.tp={plan.config.rollout.tp} does not divide "
            "them, or the trainer has no layout that fits the others: give another number, or leave it out"
        )
    found, windows = [], plan.config.rollout.windows
    synchronous = "synchronous" if windows == 1 else f"{windows} windows"
    for name, partial in ((synchronous, False), ("partial responses", True)):
        scenario = on_shared_gpus(plan, partial, length_of)
        found.append(_mode(plan, name, None, scenario, simulate(scenario)))
    for staleness in sorted({*_STALENESS, plan.config.rollout.asynchronous.max_staleness} - {0}):
        tried = {
            gpus: on_own_gpus(plan, gpus, staleness, length_of)
            for gpus in (splits(plan) if given is None else (given,))
        }
        possible = {gpus: scenario for gpus, scenario in tried.items() if scenario is not None}
        likely = sorted(possible, key=lambda gpus: looks_like(possible[gpus], plan))[:_SIMULATED_SPLITS]
        if likely:
            outcomes = {gpus: simulate(possible[gpus]) for gpus in likely}
            best = min(outcomes, key=lambda gpus: outcomes[gpus].step)
            name = f"asynchronous, max_staleness {staleness}"
            found.append(_mode(plan, name, best, possible[best], outcomes[best]))
    return found


def _mode(plan: Plan, name: str, gpus: int | None, scenario: Scenario, outcome: Outcome) -> Mode:
    given = plan.config.plan.simulation
    failures = Failures(given.engine_hours_between_failures * 3600, given.restart_seconds, plan.config.run.seed)
    return Mode(name, gpus, outcome, simulate(replace(scenario, failures=failures)))


def show(plan: Plan, found: list[Mode], console: Console) -> None:
    """Print the table, and what it rests on."""
    headings = "GPUs", "s a step", "engines idle", "trainer idle", "age of tokens", "s with failures", "engines failed"
    table = table_of("Simulated, in steady state", ["", *headings])
    for mode in found:
        row, own = mode.as_json(), mode.engine_gpus
        table.add_row(
            mode.name,
            f"{plan.world} shared" if own is None else f"{plan.world - own} + {own} engines'",
            f"{row['step']:.1f} ± {row['step_error']:.1f}",
            f"{row['engines_idle']:.0%}",
            f"{row['trainer_idle']:.0%}",
            f"{row['age_mean']:.2f}, at most {row['age_max']:.0f}",
            f"{row['with_failures']['step']:.1f} ± {row['with_failures']['step_error']:.1f}",
            f"{row['with_failures']['engines_failed']}",
        )
    console.print(table)
    if all(mode.engine_gpus is None for mode in found):
        console.print(f"no split of {plan.world} GPUs between trainer and engines fits with the layouts of the config")
    for line in assumptions(plan):
        console.print(f"  - {line}", soft_wrap=True)


def assumptions(plan: Plan) -> list[str]:
    """One line each."""
    given = plan.config.plan.simulation
    tail = "the plan's tail" if given.response_spread is None else f"log-normal, sigma {given.response_spread:g}"
    return [
        f"{given.steps} steps (± standard error) of the run's own scheduling; engines and trainer take the seconds of "
        "the plan, the trainer in proportion to a step's tokens (plan.simulation.steps)",
        f"response lengths: {tail}, half of the variance between prompts (plan.simulation.response_spread)",
        "engines with GPUs of their own get their weights over the network once, and keep no part of the trainer",
        f"each engine fails every {given.engine_hours_between_failures:g} h on average and is back after "
        f"{given.restart_seconds:g} s, at the next weight sync (plan.simulation.*)",
    ]
