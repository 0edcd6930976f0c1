"""What a plan knows of a run, as a scenario: shared GPUs, or engines with GPUs of their own."""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import NormalDist

from vapo_megatron.config.rollout import AsynchronousConfig, RolloutConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.operations.plan.engines import PlannedEngine
from vapo_megatron.operations.plan.lengths import Lengths
from vapo_megatron.operations.plan.plan import Plan, make_plan
from vapo_megatron.operations.plan.rollout import BETWEEN_PROMPTS, decode_seconds, prefill_seconds, reached_speed
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
        shared, own = math.sqrt(BETWEEN_PROMPTS), math.sqrt(1 - BETWEEN_PROMPTS)
        place = shared * _NORMAL.inv_cdf(_uniform(prompt)) + own * _NORMAL.inv_cdf(_uniform(seed))
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
        self.at_once = int(engine.at_once(lengths.prompt + lengths.mean / 2))
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
    rollout = _mode(plan.config.rollout, 0, partial)
    return _scenario(plan, plan, plan.memory.engine, plan.world, rollout, length_of, plan.time.phases["weight_sync"])


def on_own_gpus(
    plan: Plan, engine_gpus: int, staleness: int, length_of: Callable[[int, int], int], fits: bool = True
) -> Scenario | None:
    """Engines have so many of the GPUs, the trainer the rest; None where that cannot be laid out, or does not fit.

    Weights go over the network, once. fits: refuse what has no room.
    """
    trainers, tp = plan.world - engine_gpus, plan.config.rollout.tp
    if engine_gpus % tp or trainers < 1:
        return None
    try:
        trainer = make_plan(plan.config, trainers)
    except BadInput:
        return None
    if fits and not trainer.fits:
        return None
    actor = plan.models["actor"]
    sync = trainer.time.phases["weight_sync"] + actor.spec.parameter_count() * actor.width / plan.hardware.network
    engine = replace(plan.memory.engine, taken=0.0)
    return _scenario(plan, trainer, engine, engine_gpus, _mode(plan.config.rollout, staleness, False), length_of, sync)


def splits(plan: Plan) -> Iterator[int]:
    """GPUs that engines may have for themselves."""
    tp, node = plan.config.rollout.tp, plan.hardware.gpus_per_node
    return (gpus for gpus in range(tp, plan.world, tp) if plan.world <= node or (plan.world - gpus) % node == 0)


def looks_like(scenario: Scenario, plan: Plan) -> float:
    """Seconds of a step as sums say them, to choose what to simulate: the longer of training, and of decoding with
    engines that are always full."""
    speed, lengths = scenario.speed, plan.lengths
    samples = plan.config.samples
    decoding = speed.decode_seconds(speed.at_once, lengths.prompt + lengths.mean / 2) / speed.at_once
    engines = samples * lengths.mean * decoding / scenario.engines
    return max(engines, scenario.trainer_seconds(round(samples * lengths.sample))) + scenario.sync_seconds


def lengths_of(plan: Plan) -> ResponseLengths:
    """As the config says."""
    return ResponseLengths(plan.lengths, plan.config.plan.simulation.response_spread)


def _mode(config: RolloutConfig, staleness: int, partial: bool) -> RolloutConfig:
    ahead = config.asynchronous.weight_sync if staleness else "auto"
    modes = {
        "asynchronous": AsynchronousConfig(max_staleness=staleness, weight_sync=ahead),
        "partial_responses": config.partial_responses.model_copy(update={"enabled": partial}),
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
