"""Asynchronous steps as the twin says them, beside pairs that other systems publish.

    python -m benchmarks.published_pairs

benchmarks/published.yaml, `pairs`, has figures and settings. Each pair is simulated twice: with the seconds of the
plan, nothing fitted; and with engines and trainer that take what the synchronous step took which the pair names, so
that only the asynchronous one is foretold. The systems are others: vLLM, other schedules, other rules of staleness.
"""

from dataclasses import dataclass, replace
from typing import Any

import yaml

from benchmarks.published import ROOT, plan_of
from vapo_megatron.config.rollout import AsynchronousConfig
from vapo_megatron.operations.plan.plan import Plan
from vapo_megatron.operations.twin.modes import lengths_of, on_own_gpus, on_shared_gpus
from vapo_megatron.operations.twin.run import simulate
from vapo_megatron.operations.twin.scenario import EngineSpeed, Scenario

STEPS = 4


@dataclass(frozen=True)
class Scaled:
    """An engine that takes so many times as long."""

    speed: EngineSpeed
    factor: float

    @property
    def at_once(self) -> int:
        """As EngineSpeed's."""
        return self.speed.at_once

    def decode_seconds(self, running: float, context: float) -> float:
        """As EngineSpeed's."""
        return self.factor * self.speed.decode_seconds(running, context)

    def prefill_seconds(self, tokens: float) -> float:
        """As EngineSpeed's."""
        return self.factor * self.speed.prefill_seconds(tokens)


def scaled(scenario: Scenario, engines: float, trainer: float) -> Scenario:
    """Engines and trainer take so many times as long."""
    seconds = scenario.trainer_seconds
    return replace(
        scenario,
        speed=Scaled(scenario.speed, engines),
        trainer_seconds=lambda tokens: trainer * seconds(tokens),
    )


def synchronous(plan: Plan) -> Scenario:
    """Of a plan."""
    return replace(on_shared_gpus(plan, False, lengths_of(plan).draw), steps=STEPS)


def asynchronous(plan: Plan, pair: dict[str, Any], skipped: float = 0.0) -> Scenario:
    """Of a plan, in the settings of a pair; skipped: share of the trainer's time for phases that it leaves out."""
    ahead = AsynchronousConfig(max_staleness=1, weight_sync=pair["weight_sync"])
    config = plan.config.model_copy(update={"rollout": plan.config.rollout.model_copy(update={"asynchronous": ahead})})
    scenario = on_own_gpus(replace(plan, config=config), pair["engine_gpus"], 1, lengths_of(plan).draw, fits=False)
    assert scenario is not None, pair["name"]
    return scaled(replace(scenario, steps=STEPS), 1.0, 1 - skipped)


def skipped_share(plan: Plan, pair: dict[str, Any]) -> float:
    """Of the trainer's time, what phases take that a pair's asynchronous run leaves out."""
    phases = plan.time.phases
    trainer = sum(seconds for name, seconds in phases.items() if name not in ("rollout", "verify", "weight_sync"))
    return float(sum(phases.get(name, 0.0) for name in pair["skips"]) / trainer)


def row(pair: dict[str, Any], content: dict[str, Any]) -> str:
    """Of the table."""
    by_name = {entry["name"] + entry["source"]: entry for entry in content["rows"]}
    entry, told = by_name[pair["row"] + pair["source"]], by_name[pair["measured_on"] + pair["source"]]
    plan, base = plan_of(entry, content), plan_of(told, content)
    shared, ahead = simulate(synchronous(plan)), simulate(asynchronous(plan, pair, skipped_share(plan, pair)))
    as_told = simulate(synchronous(base))
    if "generation" in pair:
        waiting = as_told.mean("throughput/trainer_idle") * as_told.step
        engines = pair["generation"] / waiting
        trainer = pair["update"] / base.time.phases["update_policy"]
    else:
        engines = trainer = told["seconds"] / as_told.step
    foretold = simulate(scaled(asynchronous(plan, pair, skipped_share(plan, pair)), engines, trainer))
    source = content["sources"][pair["source"]]
    return (
        f"| {pair['name']} | {entry['seconds']:g} → {pair['seconds']:g} | {shared.step:.0f} → {ahead.step:.0f} | "
        f"{foretold.step:.0f} ({foretold.step / pair['seconds'] - 1:+.0%}) | {foretold.engines_idle:.0%} | "
        f"{foretold.trainer_idle:.0%} | {engines:.2f}, {trainer:.2f} | [{source['title']}]({source['url']}) |"
    )


def main() -> None:
    """Print the table."""
    content = yaml.safe_load((ROOT / "benchmarks" / "published.yaml").read_text())
    print(
        "| setting | published, s a step | simulated, nothing fitted | told the synchronous step: asynchronous | "
        "engines idle | trainer idle | factors of engines, trainer | source |\n|---|---|---|---|---|---|---|---|"
    )
    for pair in content["pairs"]:
        print(row(pair, content), flush=True)


if __name__ == "__main__":
    main()
