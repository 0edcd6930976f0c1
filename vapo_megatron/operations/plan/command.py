"""`vapo-megatron plan CONFIG`."""

import json

from rich.console import Console

from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.data.rows import eval_problems
from vapo_megatron.errors import BadInput
from vapo_megatron.operations.plan.plan import Plan, default_world, make_plan
from vapo_megatron.operations.plan.search import Proposal, largest_budget, propose
from vapo_megatron.operations.plan.tables import as_json, show
from vapo_megatron.operations.twin import modes as twin

# A proposal is worth telling where it saves at least this share of the run's time.
_WORTH_TELLING = 0.1


def plan_run(config: PlanConfig, gpus: int | None, nodes: int | None, as_text: bool, simulated: bool = False) -> None:
    """Print what a run needs and takes on `gpus` GPUs, or on `nodes` nodes; neither: what the config says.

    as_text: JSON on standard output in place of tables. simulated: and what each mode of collecting is like, where the
    plan fits.

    Raises:
        BadInput: the layouts cannot be made, or something has no room; then the line ends with what to change.
    """
    if gpus is not None and nodes is not None:
        raise BadInput(f"--gpus {gpus} and --nodes {nodes} both say how many GPUs: give one of them")
    world = nodes * config.hardware.gpus_per_node if nodes is not None else gpus or default_world(config)
    plan = make_plan(config, world, evaluation_samples(config))
    budgets: dict[str, int | None] = {
        name: largest_budget(plan, name) for name in ("actor", "critic") if name in plan.models
    }
    proposal = worth_telling(plan, propose(plan))
    found: list[twin.Mode] = twin.modes(plan) if simulated and plan.fits else []
    console = Console(width=None if Console().is_terminal else 160)
    if as_text:
        told = as_json(plan, budgets, proposal)
        if found:
            told["simulation"] = {"modes": [mode.as_json() for mode in found], "assumptions": twin.assumptions(plan)}
        print(json.dumps(told, indent=2))
    else:
        show(plan, budgets, proposal, console)
        if found:
            twin.show(plan, found, console)
    if not plan.fits:
        raise BadInput(_refusal(plan, proposal))


def worth_telling(plan: Plan, proposal: Proposal | None) -> Proposal | None:
    """The proposal where it changes something for the better by enough."""
    if proposal is None or not plan.fits:
        return proposal
    now, then = sum(plan.seconds.values()), sum(proposal.plan.seconds.values())
    return proposal if then < (1 - _WORTH_TELLING) * now else None


def evaluation_samples(config: PlanConfig) -> int:
    """Responses of one evaluation over all sets of data.eval; 0 where one of their files is not here."""
    total = 0
    for entry in config.data.eval:
        try:
            total += entry.samples * len(eval_problems(entry, config.data.fields))
        except BadInput:
            return 0
    return total


def _refusal(plan: Plan, proposal: Proposal | None) -> str:
    problems = "; ".join(problem.line for problem in plan.memory.problems)
    remedy = (
        f"try {proposal.overrides}"
        if proposal is not None
        else f"no layout of {plan.world} GPUs was found to fit: take more GPUs, or shorten sampling.max_new_tokens"
    )
    return f"does not fit {plan.world} x {plan.hardware.kind}: {problems}: {remedy}"
