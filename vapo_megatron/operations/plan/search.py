"""Looking for layouts that fit and are faster, and for the largest token budget."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from vapo_megatron.checkpoint.resume import differences
from vapo_megatron.config.model import LayoutConfig, RecomputeConfig, TrainableConfig
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.megatron.offload import PARTS
from vapo_megatron.operations.hardware import GIB
from vapo_megatron.operations.plan.memory import plan_memory
from vapo_megatron.operations.plan.models import PlannedModel, PlannedRun, can_be_cut, planned_models
from vapo_megatron.operations.plan.plan import Plan, make_plan, score_seconds, update_seconds

_BUDGET_STEP = 1024
_LARGEST_BUDGET = 1 << 20
_RECOMPUTE = (
    RecomputeConfig(granularity="none"),
    RecomputeConfig(granularity="selective"),
    RecomputeConfig(granularity="full"),
)
_FRACTIONS = (0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5, 0.4, 0.3)
# What a proposal leaves free on every GPU: the model of memory errs by about so much where pipelines are deep.
_HEADROOM = 5 * GIB
# Pairs of an actor's and a critic's candidate that are planned in full.
_PAIRS = 64


@dataclass(frozen=True)
class Proposal:
    """A config that fits, and what it changes: dotted keys with values as the command line takes them."""

    plan: Plan
    changes: dict[str, str]

    @property
    def overrides(self) -> str:
        """The changes, to be put behind `train CONFIG`."""
        return " ".join(f"{key}={value}" for key, value in self.changes.items())


@dataclass(frozen=True)
class _Candidate:
    """A model's section with the seconds of its phases and the bytes of its fullest rank."""

    section: TrainableConfig
    seconds: float
    peak: float
    resident: float


def propose(plan: Plan) -> Proposal | None:
    """The fastest config found that fits with 5 GiB to spare, the given one among those that are compared; None where
    none does.

    Searched are layout, recomputation and token budget of actor and critic, rollout.tp and mem_fraction_static. The
    algorithm stays as it is. A given config that does not fit first gets token budgets that do, if that is enough.
    """
    found: list[Plan] = [plan] if plan.fits else []
    if not plan.fits and (smaller := _with_own_budgets(plan)) is not None:
        return Proposal(smaller, _changes(plan.config, smaller.config))
    names = [name for name in ("actor", "critic") if name in plan.models]
    candidates: dict[str, list[_Candidate]] = {name: _candidates(plan, name) for name in names}
    if all(candidates.values()):
        for sections in _pairs(candidates):
            better = _with_engines(plan, plan.config.model_copy(update=sections))
            if better is not None:
                found.append(better)
                break
    if not found:
        return None
    best = min(found, key=lambda found: sum(found.seconds.values()))
    return Proposal(best, _changes(plan.config, best.config))


def _with_own_budgets(plan: Plan) -> Plan | None:
    """The plan with a smaller token budget for each model that has no room, all else as it is; None where that is not
    enough."""
    sections: dict[str, TrainableConfig] = {}
    for name in ("actor", "critic"):
        if name in plan.models:
            section, most = getattr(plan.config, name), largest_budget(plan, name, _HEADROOM)
            if most is not None and most < section.max_tokens_per_microbatch:
                sections[name] = section.model_copy(update={"max_tokens_per_microbatch": most})
    if not sections:
        return None
    changed = make_plan(plan.config.model_copy(update=sections), plan.world, plan.evaluation_samples)
    return changed if _fits_well(changed) else None


def _fits_well(plan: Plan) -> bool:
    return plan.fits and plan.memory.worst.total + _HEADROOM <= plan.hardware.usable_memory


def largest_budget(plan: Plan, name: str, headroom: float = 0.0) -> int | None:
    """The largest max_tokens_per_microbatch of a model, in steps of 1024, with which every phase of it fits on a GPU,
    with `headroom` bytes to spare.

    None where none does that also holds the longest sample. All else stays as it is.
    """
    phases = {
        "actor": ("score_policy", "update_policy", "score_reference"),
        "critic": ("score_values", "update_critic"),
    }

    def problems(steps: int) -> set[str]:
        section = getattr(plan.config, name).model_copy(update={"max_tokens_per_microbatch": steps * _BUDGET_STEP})
        config = plan.config.model_copy(update={name: section})
        models = planned_models(config, plan.world)
        memory = plan_memory(PlannedRun(config, models, plan.hardware, plan.lengths))
        kinds = {problem.kind for problem in memory.problems if problem.line.startswith(name)}
        worst = max(phase.total for phase in memory.phases if phase.phase in phases[name])
        return kinds | ({"device"} if worst + headroom > plan.hardware.usable_memory else set())

    low, high = 0, _LARGEST_BUDGET // _BUDGET_STEP
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if "device" in problems(middle) else (middle, high)
    return low * _BUDGET_STEP if low and not problems(low) else None


def _layouts(model: PlannedModel, gpus_per_node: int) -> Iterator[LayoutConfig]:
    spec, world = model.spec, model.world
    experts = _powers(min(world, spec.num_experts)) if spec.num_experts else [1]
    for tp in _powers(min(world, gpus_per_node)):
        for pp in (pp for pp in range(1, min(world, spec.num_layers) + 1) if spec.num_layers % pp == 0):
            for cp in _powers(world // tp // pp if tp * pp <= world else 0):
                for ep in experts:
                    if ep % tp and tp % ep:
                        continue
                    layout = LayoutConfig(tp=tp, pp=pp, cp=cp, ep=ep, sequence_parallel=tp > 1)
                    if can_be_cut(spec, layout, world):
                        yield layout


def _powers(limit: int) -> list[int]:
    return [1 << n for n in range(limit.bit_length())] if limit else []


def _candidates(plan: Plan, name: str) -> list[_Candidate]:
    """Sections of a model that fit by themselves; those remain that are not both slower and larger than another."""
    model, lengths, samples = plan.models[name], plan.lengths, float(plan.config.samples)
    room = plan.hardware.usable_memory - plan.hardware.trainer_overhead - plan.hardware.engine_overhead - _HEADROOM
    sections: list[_Candidate] = []
    for layout in _layouts(model, plan.hardware.gpus_per_node):
        smallest = TrainableConfig(layout=layout, precision=model.config.precision)
        least = -(-(lengths.longest_sample + smallest.total_alignment) // layout.cp)
        least = -(-least // _BUDGET_STEP) * _BUDGET_STEP
        for recompute in _RECOMPUTE:
            for budget in (least, 2 * least, 4 * least):
                values = {"layout": layout, "recompute": recompute, "max_tokens_per_microbatch": budget}
                section = model.config.model_copy(update=values)
                changed = replace(model, config=section)
                peak = max(_peak(changed, stage, lengths.longest_sample) for stage in range(layout.pp))
                if peak > room:
                    break  # a larger budget needs more
                seconds = score_seconds(plan, changed, samples) + update_seconds(plan, changed, samples)
                resident = max(changed.bytes_of("weights", stage) for stage in range(layout.pp))
                sections.append(_Candidate(section, seconds, peak, resident))
    sections.sort(key=lambda candidate: (candidate.seconds, candidate.peak))
    front: list[_Candidate] = []
    for candidate in sections:
        if all(candidate.peak < kept.peak or candidate.resident < kept.resident for kept in front):
            front.append(candidate)
    return front


def _peak(model: PlannedModel, stage: int, longest: int) -> float:
    """Bytes of an update on a rank of a stage, with as many micro-batches as the pipeline takes."""
    tokens, activations = float(model.config.max_tokens_per_microbatch), model.activations
    state = sum(model.bytes_of(part, stage) for part in PARTS)
    return (
        state
        + activations.kept(tokens, stage, tokens * 2 * model.layout.pp)
        + activations.passing(tokens, True)
        + activations.logits(tokens, stage, True)
    )


def _pairs(candidates: dict[str, list[_Candidate]]) -> Iterator[dict[str, TrainableConfig]]:
    """Sections of all models together, the fastest first."""
    together = sorted(product(*candidates.values()), key=lambda pair: sum(candidate.seconds for candidate in pair))
    for pair in together[:_PAIRS]:
        yield {name: candidate.section for name, candidate in zip(candidates, pair, strict=True)}


def _with_engines(start: Plan, config: PlanConfig) -> Plan | None:
    """The fastest plan of a config over the engines' sizes; None where none fits."""
    rollout, heads = config.rollout, start.models["actor"].spec.num_heads
    fractions = dict.fromkeys((rollout.mem_fraction_static, *_FRACTIONS))
    best: Plan | None = None
    for tp in dict.fromkeys((rollout.tp, *_powers(min(start.world, start.hardware.gpus_per_node)))):
        if start.world % tp or heads % tp:
            continue
        for fraction in fractions:
            sized = rollout.model_copy(update={"tp": tp, "mem_fraction_static": fraction})
            plan = make_plan(config.model_copy(update={"rollout": sized}), start.world, start.evaluation_samples)
            if _fits_well(plan) and (best is None or plan.time.step < 0.98 * best.time.step):
                best = plan
    return best


def _changes(old: PlanConfig, new: PlanConfig) -> dict[str, str]:
    """Dotted keys whose values differ."""
    changed = differences(old.model_dump(mode="json"), new.model_dump(mode="json"))
    return {key: _text(value) for key, _, value in changed}


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, list) else str(value)
