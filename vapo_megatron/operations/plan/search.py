"""Layouts that fit, ranked by the seconds of the run."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, product

from pydantic import ValidationError

from vapo_megatron.config.base import differences
from vapo_megatron.config.model import LayoutConfig, RecomputeConfig, TrainableConfig
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.offload import PARTS
from vapo_megatron.operations.plan.memory import HEADROOM
from vapo_megatron.operations.plan.models import PlannedModel, can_be_cut
from vapo_megatron.operations.plan.plan import Plan, make_plan, pass_seconds

_BUDGET_STEP = 1024
_RECOMPUTE = [RecomputeConfig(granularity=kind) for kind in ("none", "selective", "full")]
_FRACTIONS = (0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5, 0.4, 0.3)
# The fastest layouts of each model that are planned together, and sizes of engines with each pair;
# proposals at most.
_EACH = 12
_ENGINES = 3
_BEST = 3


@dataclass(frozen=True)
class Proposal:
    """A config that fits, and its changes: dotted keys with values as the command line takes
    them."""

    plan: Plan
    changes: dict[str, str]

    @property
    def overrides(self) -> str:
        """The changes, to be put behind `train CONFIG`."""
        return " ".join(f"{key}={value}" for key, value in self.changes.items())


def propose(plan: Plan) -> list[Proposal]:
    """The three fastest configs found that fit with 5 GiB to spare, the fastest first.

    Searched are layout, recomputation and token budget of actor and critic, rollout.tp, nodes
    and mem_fraction_static. The algorithm stays as it is.
    """
    names = [name for name in ("actor", "critic") if name in plan.models]
    pairs = sorted(
        product(*(_sections(plan, name) for name in names)),
        key=lambda pair: sum(s for s, _ in pair),
    )
    engines = _engines(plan)

    def fitting() -> Iterator[Plan]:
        for pair in pairs:
            sections = {name: section for name, (_, section) in zip(names, pair, strict=True)}
            for rollout in engines:
                config = plan.config.model_copy(update=sections | {"rollout": rollout})
                changed = make_plan(config, plan.world)
                if (
                    changed.fits
                    and changed.memory.worst.total + HEADROOM <= plan.hardware.usable_memory
                ):
                    yield changed
                    break

    best = sorted(islice(fitting(), _BEST), key=lambda changed: changed.seconds)
    return [Proposal(changed, _changes(plan.config, changed.config)) for changed in best]


def propose_adapters(plan: Plan) -> list[Proposal]:
    """The fastest config that fits with adapters for the critic alone, and the fastest with the
    actor's too; those that there are. Beside kinds, what `propose` searches changes."""
    names: tuple[str, ...] = ("critic", "actor")
    whole = [name for name in names if name in plan.models and plan.models[name].adapter is None]
    proposals = []
    for count in range(1, len(whole) + 1):
        kinds = {
            name: getattr(plan.config, name).model_copy(update={"kind": "adapter"})
            for name in whole[:count]
        }
        # What adapters rule out, a rank that is too high for example
        with suppress(BadInput, ValidationError):
            config = PlanConfig.model_validate(plan.config.model_copy(update=kinds).model_dump())
            for best in propose(make_plan(config, plan.world))[:1]:
                proposals.append(Proposal(best.plan, _changes(plan.config, best.plan.config)))
    return proposals


def _sections(plan: Plan, name: str) -> list[tuple[float, TrainableConfig]]:
    """Seconds of a step and section of the model's fastest layouts that fit by themselves."""
    model = plan.models[name]
    lengths = plan.lengths
    samples = float(plan.config.samples)
    room = (
        plan.hardware.usable_memory
        - plan.hardware.trainer_overhead
        - plan.hardware.engine_overhead
        - HEADROOM
    )
    best = []
    for layout in _layouts(model, plan.hardware.gpus_per_node):
        section = model.config.model_copy(update={"layout": layout})
        least = (
            -(-(lengths.longest_sample + section.total_alignment) // layout.cp // _BUDGET_STEP)
            * _BUDGET_STEP
        )
        fitting = []
        for recompute, budget in product(_RECOMPUTE, (least, 2 * least, 4 * least)):
            section = section.model_copy(
                update={"recompute": recompute, "max_tokens_per_microbatch": budget}
            )
            changed = replace(model, config=section)
            if all(_peak(changed, stage) <= room for stage in range(layout.pp)):
                seconds = sum(
                    pass_seconds(plan, changed, samples, training) for training in (False, True)
                )
                fitting.append((seconds, section))
        best += [min(fitting, key=lambda pair: pair[0])] if fitting else []
    return sorted(best, key=lambda pair: pair[0])[:_EACH]


def _layouts(model: PlannedModel, gpus_per_node: int) -> Iterator[LayoutConfig]:
    spec = model.spec
    world = model.world
    stages = [pp for pp in range(1, min(world, spec.num_layers) + 1) if world % pp == 0]
    experts = _powers(min(world, spec.num_experts or 1))
    for tp, pp, cp, ep in product(
        _powers(min(world, gpus_per_node)), stages, _powers(world), experts
    ):
        layout = LayoutConfig(tp=tp, pp=pp, cp=cp, ep=ep, sequence_parallel=tp > 1)
        if not (ep % tp and tp % ep) and can_be_cut(spec, layout, world):
            yield layout


def _powers(limit: int) -> list[int]:
    return [1 << n for n in range(limit.bit_length())]


def _peak(model: PlannedModel, stage: int) -> float:
    """Bytes of an update on a rank of a stage, with as many micro-batches as the pipeline takes."""
    tokens = float(model.config.max_tokens_per_microbatch)
    state = sum(model.bytes_of(part, stage) for part in PARTS)
    kept = model.activations_kept(tokens, stage, tokens * 2 * model.layout.pp)
    return (
        state + kept + model.activations_passing(tokens, True) + model.logits(tokens, stage, True)
    )


def _engines(plan: Plan) -> list[RolloutConfig]:
    """Sizes of engines that fit beside offloaded models, the fastest first; on several nodes where
    none fits one. Those elsewhere stay as they are."""
    rollout = plan.config.rollout
    if rollout.external_urls:
        return [rollout]
    node = min(plan.world, plan.hardware.gpus_per_node)
    within = _fitting_engines(plan, [(tp, 1) for tp in _powers(node)])
    several = [(node * nodes, nodes) for nodes in _powers(plan.world // node)[1:]]
    return within or _fitting_engines(plan, several)


def _fitting_engines(plan: Plan, sizes: list[tuple[int, int]]) -> list[RolloutConfig]:
    """Those of some sizes (tp, nodes)."""
    rollout = plan.config.rollout
    spec = plan.models["actor"].spec
    fitting = []
    for (tp, nodes), fraction in product(sizes, _FRACTIONS):
        if plan.world % tp == 0 and spec.attention.num_heads % tp == 0:
            sized = rollout.model_copy(
                update={"tp": tp, "nodes": nodes, "mem_fraction_static": fraction}
            )
            changed = make_plan(plan.config.model_copy(update={"rollout": sized}), plan.world)
            has_room = changed.memory.phases[0].total + HEADROOM <= plan.hardware.usable_memory
            if has_room and changed.memory.engine.cache_tokens >= plan.lengths.longest_sample:
                seconds = changed.time.phases["rollout"] + changed.time.phases["weight_sync"]
                fitting.append((seconds, fraction, tp, sized))
    return [sized for *_, sized in sorted(fitting, key=lambda entry: entry[:3])[:_ENGINES]]


def _changes(old: PlanConfig, new: PlanConfig) -> dict[str, str]:
    """Dotted keys whose values differ."""
    changed = differences(old.model_dump(mode="json"), new.model_dump(mode="json"))
    return {
        key: value if isinstance(value, str) else json.dumps(value) for key, _, value in changed
    }
