"""Which mode would suit a cluster: what a plan knows of a run as a scenario, and each mode simulated."""

import hashlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import NormalDist
from typing import Any

from rich.console import Console

from vapo_megatron.config.rollout import AsynchronousConfig, PartialResponsesConfig, RolloutConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.operations.plan.command import table_of
from vapo_megatron.operations.plan.inputs import Lengths
from vapo_megatron.operations.plan.plan import Plan, make_plan
from vapo_megatron.operations.plan.rollout import (
    BETWEEN_PROMPTS,
    PlannedEngine,
    decode_seconds,
    drawn_prompts,
    prefill_seconds,
    reached_speed,
)
from vapo_megatron.operations.twin.run import Outcome, simulate
from vapo_megatron.operations.twin.scenario import Scenario

_NORMAL = NormalDist()


@dataclass(frozen=True)
class ResponseLengths:
    """A distribution of lengths.

    Attributes:
        shape: mean and longest, and the tail where no spread is given.
        spread: sigma of a log-normal distribution with this mean once it is cut at the longest.
    """

    shape: Lengths
    spread: float | None = None

    def draw(self, prompt: int, seed: int) -> int:
        """Tokens of the response to a prompt with a seed; those to one prompt are long together."""
        shared, apart = math.sqrt(BETWEEN_PROMPTS), math.sqrt(1 - BETWEEN_PROMPTS)
        place = shared * _NORMAL.inv_cdf(_uniform(prompt)) + apart * _NORMAL.inv_cdf(_uniform(seed))
        longest = self.shape.longest
        if self.spread is None:
            length = longest * _NORMAL.cdf(place) ** self.shape.exponent
        else:
            length = self._median * math.exp(self.spread * place)
        return max(1, min(longest, round(length)))

    @cached_property
    def _median(self) -> float:
        assert self.spread is not None
        low, high = 0.0, float(self.shape.longest)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean(middle) < self.shape.mean else (low, middle)
        return high

    def _mean(self, median: float) -> float:
        """Of the log-normal distribution with this median, cut at the longest."""
        assert self.spread is not None
        longest, edge = self.shape.longest, math.log(self.shape.longest / median) / self.spread
        below = median * math.exp(self.spread**2 / 2) * _NORMAL.cdf(edge - self.spread)
        return below + longest * (1 - _NORMAL.cdf(edge))


def _uniform(number: int) -> float:
    """A number in (0, 1) that follows from another one."""
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") + 0.5) / 2**64


# Phases of a plan in which engines work, or that are no part of a step of a trainer which shares its GPUs with none.
_OF_ENGINES = ("rollout", "verify", "weight_sync")


class PlannedSpeed:
    """An engine as fast as a plan takes it to be."""

    def __init__(self, engine: PlannedEngine, lengths: Lengths) -> None:
        """Raises BadInput where its cache does not hold one response."""
        self.at_once = int(engine.at_once(lengths.running))
        if self.at_once < 1:
            raise BadInput(
                f"an engine of {engine.config.tp} GPUs has a KV cache of {max(0, engine.cache_tokens)} tokens, too few "
                "for one response: take a larger rollout.tp, or rollout.mem_fraction_static"
            )
        reached = reached_speed(engine)
        self._decode = cache(lambda running, context: decode_seconds(engine, running, context) / reached)
        self._prefill = cache(lambda tokens: prefill_seconds(engine, tokens) / reached)

    def decode_seconds(self, running: float, context: float) -> float:
        """As EngineSpeed's; linear between whole multiples of 64 tokens."""
        low = context // 64 * 64
        below, above = self._decode(running, low), self._decode(running, low + 64)
        return below + (above - below) * (context - low) / 64

    def prefill_seconds(self, tokens: float) -> float:
        """As EngineSpeed's."""
        return self._prefill(tokens)


def on_shared_gpus(plan: Plan, partial: bool, length_of: Callable[[int, int], int]) -> Scenario:
    """Trainer and engines take turns, as the plan says; partial: what is not finished goes on in the next step."""
    rollout = _rollout(plan.config.rollout, 0, partial)
    return _scenario(plan, plan, plan.memory.engine, plan.world, rollout, length_of, plan.time.phases["weight_sync"])


def on_own_gpus(
    plan: Plan, engine_gpus: int, staleness: int, length_of: Callable[[int, int], int], fits: bool = True
) -> Scenario | None:
    """Engines have so many of the GPUs, the trainer the rest; None where that cannot be laid out, or does not fit.

    Weights go over the network, once. fits: refuse what has no room.
    """
    if plan.config.rollout.external_urls:
        trainer, sync = plan, plan.time.phases["weight_sync"]
    else:
        trainers, actor = plan.world - engine_gpus, plan.models["actor"]
        if engine_gpus % plan.config.rollout.tp or trainers < 1:
            return None
        try:
            trainer = make_plan(plan.config, trainers)
        except BadInput:
            return None
        sync = trainer.time.phases["weight_sync"] + actor.spec.parameter_count() * actor.width / plan.hardware.network
    if fits and not trainer.fits:
        return None
    engine = replace(plan.memory.engine, taken=0.0)
    return _scenario(
        plan, trainer, engine, engine_gpus, _rollout(plan.config.rollout, staleness, False), length_of, sync
    )


def splits(plan: Plan) -> Iterator[int]:
    """GPUs that engines may have for themselves."""
    tp, node = plan.config.rollout.tp, plan.hardware.gpus_per_node
    if plan.config.rollout.external_urls:
        return iter((plan.engines * tp,))
    return (gpus for gpus in range(tp, plan.world, tp) if plan.world <= node or (plan.world - gpus) % node == 0)


def full_rate(scenario: Scenario, lengths: Lengths) -> float:
    """Tokens a second of engines that are always full."""
    speed = scenario.speed
    return scenario.engines * speed.at_once / speed.decode_seconds(speed.at_once, lengths.running)


def looks_like(scenario: Scenario, plan: Plan) -> float:
    """Seconds of a step as sums say them, to choose what to simulate: the longer of training, and of decoding with
    engines that are always full."""
    samples, lengths = plan.config.samples, plan.lengths
    decoding = samples * lengths.mean / full_rate(scenario, lengths)
    return max(decoding, scenario.trainer_seconds(round(samples * lengths.sample))) + scenario.sync_seconds


def lengths_of(plan: Plan) -> ResponseLengths:
    """As the config says."""
    return ResponseLengths(plan.lengths, plan.config.plan.simulation.response_spread)


def _rollout(config: RolloutConfig, staleness: int, partial: bool) -> RolloutConfig:
    ahead = config.asynchronous.weight_sync if staleness else "auto"
    modes = {
        "asynchronous": AsynchronousConfig(max_staleness=staleness, weight_sync=ahead),
        "partial_responses": PartialResponsesConfig(
            oversampling=(config.partial_responses.oversampling or 1.5) if partial else None
        ),
        "windows": 1 if staleness or partial else config.windows,
    }
    return config.model_copy(update=modes)


def _scenario(
    plan: Plan,
    trainer: Plan,
    engine: PlannedEngine,
    gpus: int,
    rollout: RolloutConfig,
    length_of: Callable[[int, int], int],
    sync_seconds: float,
) -> Scenario:
    config, lengths = plan.config, plan.lengths
    mean_tokens = config.samples * lengths.sample
    seconds = sum(value for phase, value in trainer.time.phases.items() if phase not in _OF_ENGINES)
    dtype = "float32" if engine.width == 4 else "bfloat16"
    return Scenario(
        rollout=rollout,
        batch=config.batch,
        sampling=config.algorithm.dynamic_sampling,
        max_new_tokens=lengths.longest,
        sync_mode=rollout.sync_mode(dtype, True),
        engines=gpus // config.rollout.tp,
        speed=PlannedSpeed(engine, lengths),
        prompt_tokens=max(1, round(lengths.prompt)),
        length_of=length_of,
        trainer_seconds=lambda tokens: seconds * tokens / mean_tokens,
        sync_seconds=sync_seconds,
        grade_seconds=config.plan.grade_seconds,
        grade_workers=config.reward.workers,
        informative_share=config.plan.informative_share if config.algorithm.dynamic_sampling.enabled else 1.0,
        steps=config.plan.simulation.steps,
        seed=config.run.seed,
    )


_STALENESS = (1, 2)
# Responses that are simulated a second, on a busy core.
_RESPONSES_A_SECOND = 8000


@dataclass(frozen=True)
class Mode:
    """A way to run, and what it is like.

    Attributes:
        name: for people.
        engine_gpus: engines' own; None: they share the trainer's.
        outcome: of its simulation.
        full_rate: tokens a second of its engines while all of them are full.
    """

    name: str
    engine_gpus: int | None
    outcome: Outcome
    full_rate: float

    def as_json(self) -> dict[str, Any]:
        """In seconds, shares and weight syncs."""
        outcome = self.outcome
        return {
            "mode": self.name,
            "engine_gpus": self.engine_gpus,
            "step": outcome.step,
            "step_error": outcome.step_error,
            "engines_unused": 1 - outcome.tokens_per_second / self.full_rate,
            "trainer_idle": outcome.trainer_idle,
            "age_mean": outcome.mean("rollout/age_mean"),
            "age_max": outcome.largest("rollout/age_max"),
            "groups": dict(outcome.counts),
        }


def modes(plan: Plan) -> list[Mode]:
    """Synchronous (with windows, if the run has any) and with partial responses on the GPUs as planned; asynchronous
    with engines of their own. An asynchronous run is simulated as it is configured, and with one weight sync more.

    Raises:
        BadInput: plan.simulation.engine_gpus leaves the trainer no layout, or none that fits, or a step takes longer
            than rollout.collect_timeout_s.
    """
    length_of, own_gpus = lengths_of(plan).draw, plan.config.plan.simulation.engine_gpus
    if own_gpus is not None and on_own_gpus(plan, own_gpus, _STALENESS[0], length_of) is None:
        raise BadInput(
            f"plan.simulation.engine_gpus={own_gpus} of {plan.world}: rollout.tp={plan.config.rollout.tp} does not "
            "divide them, or the trainer has no layout that fits the others: give another number, or leave it out"
        )
    if (seconds := _seconds_needed(plan)) > 10:
        print(f"simulating: about {seconds:.0f} s", file=sys.stderr, flush=True)
    simulated, windows = [], plan.config.rollout.windows
    if not plan.config.rollout.external_urls:
        synchronous = "synchronous" if windows == 1 else f"{windows} windows"
        for name, partial in ((synchronous, False), ("partial responses", True)):
            simulated.append(_mode(plan, name, None, on_shared_gpus(plan, partial, length_of)))
    for staleness in sorted({*_STALENESS, plan.config.rollout.asynchronous.max_staleness} - {0}):
        possible = {
            gpus: scenario
            for gpus in (splits(plan) if own_gpus is None else (own_gpus,))
            if (scenario := on_own_gpus(plan, gpus, staleness, length_of)) is not None
        }
        if possible:
            likely = min(possible, key=lambda gpus: looks_like(possible[gpus], plan))
            simulated.append(_mode(plan, f"asynchronous, max_staleness {staleness}", likely, possible[likely]))
    return simulated


def _seconds_needed(plan: Plan) -> float:
    """About how long modes() takes."""
    drawn = drawn_prompts(
        plan.config.batch.prompts_per_step, plan.config.algorithm.dynamic_sampling, plan.config.plan.informative_share
    )
    steps = 2 + len(_STALENESS), plan.config.plan.simulation.steps + 3
    return math.prod(steps) * drawn * plan.config.batch.samples_per_prompt / _RESPONSES_A_SECOND


def _mode(plan: Plan, name: str, gpus: int | None, scenario: Scenario) -> Mode:
    return Mode(name, gpus, simulate(scenario), full_rate(scenario, plan.lengths))


def show(plan: Plan, simulated: list[Mode], console: Console) -> None:
    """Print the table, and what it rests on."""
    gpus = plan.world + len(plan.config.rollout.external_urls) * plan.config.rollout.tp
    headings = "GPUs", "s a step", "engines unused", "trainer idle", "age of tokens"
    table = table_of("Simulated, in steady state", ["", *headings])
    for mode in simulated:
        row, engines = mode.as_json(), mode.engine_gpus
        table.add_row(
            mode.name,
            f"{plan.world} shared" if engines is None else f"{gpus - engines} + {engines} engines'",
            f"{row['step']:.1f} ± {row['step_error']:.1f}",
            f"{row['engines_unused']:.0%}",
            f"{row['trainer_idle']:.0%}",
            f"{row['age_mean']:.2f}, at most {row['age_max']:.0f}",
        )
    console.print(table)
    if all(mode.engine_gpus is None for mode in simulated):
        console.print(f"no split of {plan.world} GPUs between trainer and engines fits with the layouts of the config")
    for line in assumptions(plan):
        console.print(f"  - {line}", soft_wrap=True)


def assumptions(plan: Plan) -> list[str]:
    """One line each."""
    asked = plan.config.plan.simulation
    tail = "the plan's tail" if asked.response_spread is None else f"log-normal, sigma {asked.response_spread:g}"
    return [
        f"{asked.steps} steps (± standard error) of the run's own scheduling; engines and trainer take the seconds of "
        "the plan, the trainer in proportion to a step's tokens (plan.simulation.steps)",
        "engines unused: tokens a second, less than those of engines that are full all the time",
        f"response lengths: {tail}, half of the variance between prompts (plan.simulation.response_spread)",
        "engines with GPUs of their own get their weights over the network once, and keep no part of the trainer",
    ]
