"""A plan for programs: `vapo-megatron plan --json`. Sizes are in bytes, times in seconds."""

from collections.abc import Mapping, Sequence
from typing import Any

from vapo_megatron.operations.plan.memory import Holding
from vapo_megatron.operations.plan.models import PlannedModel
from vapo_megatron.operations.plan.plan import Plan
from vapo_megatron.operations.plan.search import Proposal


def plan_as_json(
    plan: Plan,
    proposals: Sequence[Proposal],
    assumed: Sequence[str],
    warned: Sequence[str],
    simulated: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The figures that the tables show, and the proposals as overrides of a command line."""
    engine = plan.memory.engine
    return {
        "model": plan.config.model.path,
        "gpus": plan.world,
        "gpu_kind": plan.hardware.kind,
        "fits": plan.fits,
        "problems": list(plan.memory.problems),
        "models": {name: _model(plan, model) for name, model in plan.models.items()},
        **plan_figures(plan),
        "gpu_hours": plan.gpu_hours,
        "disk_bytes": plan.disk_bytes,
        "engines": {
            "count": plan.engines,
            "tp": engine.config.tp,
            "cache_tokens": max(0, engine.cache_tokens),
            "responses_at_once": engine.at_once(plan.lengths.running),
        },
        "assumptions": list(assumed),
        "warnings": list(warned),
        "proposals": [_proposal(proposal) for proposal in proposals],
        "simulation": [dict(mode) for mode in simulated],
    }


def plan_figures(plan: Plan) -> dict[str, Any]:
    """Memory and seconds."""
    return {
        "memory": {
            "usable_bytes_per_gpu": plan.hardware.usable_memory,
            "phases": [_holding(holding) for holding in plan.memory.phases],
            "node_bytes": plan.hardware.node_memory,
            "host": _holding(plan.memory.host),
        },
        "seconds": {
            "step": plan.time.step,
            "phases": plan.time.phases,
            "value_pretraining": plan.time.value_pretraining,
            "run": plan.seconds,
        },
    }


def _model(plan: Plan, model: PlannedModel) -> dict[str, Any]:
    return {
        "parameters": model.spec.parameter_count(model.head),
        "layout": model.layout.describe(plan.world),
        "max_tokens_per_microbatch": model.config.max_tokens_per_microbatch,
        "recompute": model.config.recompute.granularity,
    }


def _holding(holding: Holding) -> dict[str, Any]:
    return {"phase": holding.phase, "parts": holding.parts, "total": holding.total}


def _proposal(proposal: Proposal) -> dict[str, Any]:
    better = proposal.plan
    return {
        "changes": proposal.changes,
        "step_seconds": better.time.step,
        "worst_gpu_bytes": better.memory.worst.total,
        "gpu_hours": better.gpu_hours,
    }
