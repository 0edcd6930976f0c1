"""`plan --simulate`: which rollout mode suits a plan. Each mode is a scenario (simulation.py)."""

import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from statistics import NormalDist, mean
from typing import Any

import numpy as np

from vapo_megatron.config.rollout import AsynchronousConfig, PartialResponsesConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.operations.plan.inputs import Lengths
from vapo_megatron.operations.plan.plan import Plan, make_plan
from vapo_megatron.operations.plan.rollout import (
    BETWEEN_PROMPTS,
    decode_seconds,
    drawn_prompts,
    prefill_seconds,
)
from vapo_megatron.operations.plan.simulation import Scenario, simulate
from vapo_megatron.rollout.ledger import step_rule

_NORMAL = NormalDist()
# Phases of a plan in which engines work, or that are no part of a step of a trainer which shares
# its GPUs with none.
_OF_ENGINES = ("rollout", "verify", "weight_sync")
_RESPONSES_A_MINUTE = 1_200_000  # simulated on one core
_TICKS = 60  # in the time of a mean response


@cache  # each mode draws the same groups
def drawn_lengths(lengths: Lengths, responses: int, seed: int, number: int) -> np.ndarray:
    """Tokens of the responses of a group; those to one prompt are long together."""
    random = np.random.default_rng((seed, number))
    shared = random.standard_normal()
    apart = random.standard_normal(responses)
    places = math.sqrt(BETWEEN_PROMPTS) * shared + math.sqrt(1 - BETWEEN_PROMPTS) * apart
    places = np.array([_NORMAL.cdf(place) for place in places.tolist()])
    return np.maximum(1.0, np.round(lengths.longest * places**lengths.exponent))


def scenario_of(
    plan: Plan, partial: bool = False, staleness: int = 0, engine_gpus: int | None = None
) -> Scenario:
    """A plan's run in some mode.

    Args:
        partial: unfinished responses continue in the next step.
        staleness: steps that engines work ahead.
        engine_gpus: GPUs of separate engines, which get weights over the network once; None: as
            the plan says.

    Raises:
        BadInput: the trainer cannot be laid out over the other GPUs or does not fit them, or no
            response fits a cache.
    """
    config = plan.config
    lengths = plan.lengths
    engine = plan.memory.engine
    trainer = plan
    count = plan.engines
    sync = plan.time.phases["weight_sync"]
    if engine_gpus is not None:
        trainer = make_plan(config, plan.world - engine_gpus)
        actor = plan.models["actor"]
        engine = replace(engine, taken=0.0)
        count = engine_gpus // config.rollout.tp
        sync = (
            trainer.time.phases["weight_sync"]
            + actor.spec.parameter_count() * actor.width / plan.hardware.network
        )
    at_once = int(engine.at_once(lengths.running))
    if not trainer.fits or not at_once:
        raise BadInput(
            f"{trainer.world} GPUs are too few for the trainer, or an engine's cache is for a "
            f"response"
        )
    if staleness:
        ahead = config.rollout.asynchronous.weight_sync
    else:
        ahead = "auto"
    if partial:
        oversampling = config.rollout.partial_responses.oversampling or 1.5
    else:
        oversampling = None
    changes = {
        "asynchronous": AsynchronousConfig(max_staleness=staleness, weight_sync=ahead),
        "partial_responses": PartialResponsesConfig(oversampling=oversampling),
    }
    rollout = config.rollout.model_copy(update=changes)
    sampling = config.algorithm.dynamic_sampling
    if sampling.enabled:
        share = config.plan.informative_share
    else:
        share = 1.0
    seconds = sum(value for phase, value in trainer.time.phases.items() if phase not in _OF_ENGINES)
    tokens = config.samples * lengths.sample

    @cache
    def decode(running: int, context: int) -> float:
        return decode_seconds(engine, running, context)

    return Scenario(
        rule=step_rule(config.batch, sampling, 1, rollout),
        sync_mode=rollout.sync_mode("float32" if engine.width == 4 else "bfloat16", True),
        engines=count,
        at_once=at_once,
        decode_seconds=lambda running, context: decode(running, round(context / 64) * 64),
        prefill_seconds=lambda unread: prefill_seconds(engine, unread),
        prompt_tokens=max(1, round(lengths.prompt)),
        lengths_of=lambda number: drawn_lengths(
            lengths, config.batch.samples_per_prompt, config.run.seed, number
        ),
        trainer_seconds=lambda trained: seconds * trained / tokens,
        sync_seconds=sync,
        grade_seconds=config.plan.grade_seconds,
        grade_workers=config.reward.workers,
        tick=lengths.mean * decode_seconds(engine, at_once, lengths.running) / _TICKS,
        is_informative=lambda number: int((number + 1) * share) > int(number * share),
        turns=config.plan.turns,
        tool_seconds=config.plan.tool_seconds,
    )


def modes(plan: Plan) -> list[dict[str, Any]]:
    """Synchronous and with partial responses on the GPUs as planned, asynchronous with the
    best-looking split of GPUs.

    An asynchronous run is simulated as it is configured, and with a staleness of one and two.
    engines_unused: tokens a second that engines fall short of their full rate; age: mean weight
        syncs between drawing and training.
    """
    rollout = plan.config.rollout
    own_gpus = len(rollout.external_urls) * rollout.tp or None
    runs: dict[str, tuple[int | None, Scenario]] = {}
    if own_gpus is None:
        runs["synchronous"] = None, scenario_of(plan)
        runs["partial responses"] = None, scenario_of(plan, partial=True)
    for staleness in sorted({1, 2, rollout.asynchronous.max_staleness} - {0}):
        if own_gpus:
            splits = [(own_gpus, scenario_of(plan, staleness=staleness))]
        else:
            splits = list(_splits(plan, staleness))
        if splits:
            runs[f"asynchronous, max_staleness {staleness}"] = min(
                splits, key=lambda split: _bound(split[1], plan)
            )
    size = plan.config.batch
    sampling = plan.config.algorithm.dynamic_sampling
    responses = drawn_prompts(size.prompts_per_step, sampling, plan.config.plan.informative_share)
    responses *= size.samples_per_prompt * sum(
        2 + s.rule.oldest + s.steps for _, s in runs.values()
    )
    time = f"about {responses / _RESPONSES_A_MINUTE:.1f} minutes"
    print(
        f"simulating {responses:,.0f} responses in {len(runs)} modes: {time}",
        file=sys.stderr,
        flush=True,
    )
    rows = []
    for name, (gpus, scenario) in runs.items():
        outcome = simulate(scenario)
        seconds = sum(outcome.seconds)
        tokens = sum(outcome.tokens)
        shares = {
            "engines_unused": max(0.0, 1 - tokens / seconds / full_rate(scenario, plan.lengths)),
            "trainer_idle": sum(outcome.waited) / seconds,
        }
        rows.append(
            {
                "mode": name,
                "engine_gpus": gpus,
                "step": outcome.step,
                **shares,
                "age": mean(outcome.ages),
            }
        )
    return rows


def _splits(plan: Plan, staleness: int) -> Iterator[tuple[int, Scenario]]:
    """Each number of GPUs that engines can have for themselves, whole nodes remaining for the
    trainer."""
    node = plan.hardware.gpus_per_node
    for gpus in range(plan.config.rollout.tp, plan.world, plan.config.rollout.tp):
        if plan.world <= node or (plan.world - gpus) % node == 0:
            with suppress(BadInput):
                yield gpus, scenario_of(plan, staleness=staleness, engine_gpus=gpus)


def full_rate(scenario: Scenario, lengths: Lengths) -> float:
    """Tokens a second of engines that are always full."""
    return (
        scenario.engines
        * scenario.at_once
        / scenario.decode_seconds(scenario.at_once, lengths.running)
    )


def _bound(scenario: Scenario, plan: Plan) -> float:
    """Seconds of a step at least: the longer of training, and of decoding with engines that are
    always full."""
    samples = plan.config.samples
    lengths = plan.lengths
    decoding = samples * lengths.mean / full_rate(scenario, lengths)
    return max(decoding, scenario.trainer_seconds(samples * lengths.sample)) + scenario.sync_seconds
