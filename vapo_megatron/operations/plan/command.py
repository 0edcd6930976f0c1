"""`vapo-megatron plan CONFIG`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.proportions import proportions_left
from vapo_megatron.data.rows import eval_problems
from vapo_megatron.errors import BadInput
from vapo_megatron.operations.hardware import GIB
from vapo_megatron.operations.plan.activations import EXPERT_IMBALANCE
from vapo_megatron.operations.plan.inputs import model_directory
from vapo_megatron.operations.plan.plan import Plan, default_world, make_plan
from vapo_megatron.operations.plan.rollout import drawn_prompts, imbalance
from vapo_megatron.operations.plan.search import Proposal, largest_budget, propose

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
    console = Console(width=None if Console().is_terminal else 160)
    answer = as_json(plan, budgets, proposal)
    if not as_text:
        show(plan, budgets, proposal, console)
    if simulated and plan.fits:
        from vapo_megatron.operations.twin import modes as twin  # its tables are made here

        modes = twin.modes(plan)
        answer["simulation"] = {"modes": [mode.as_json() for mode in modes], "assumptions": twin.assumptions(plan)}
        if not as_text:
            twin.show(plan, modes, console)
    if as_text:
        print(json.dumps(answer, indent=2))
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


def assumptions(plan: Plan) -> list[str]:
    """One line each."""
    hardware, lengths, config, batch = plan.hardware, plan.lengths, plan.config, plan.config.batch
    prompts, reached = batch.prompts_per_step, hardware.efficiency
    uneven = imbalance(plan.engines, prompts, prompts * batch.samples_per_prompt, lengths)
    lines = [
        f"{hardware.kind}: {hardware.device_memory / GIB:.1f} GiB, {hardware.bf16 / 1e12:.0f} TFLOP/s dense bf16, "
        f"memory {hardware.memory_rate / 1e9:.0f} GB/s, NVLink {hardware.nvlink / 1e9:.0f} GB/s, network "
        f"{hardware.network / 1e9:.0f} GB/s a GPU, PCIe {hardware.pcie / 1e9:.0f} GB/s, each in one direction, as the "
        f"maker states them (hardware.*)",
        f"of these rates are reached: linear layers {reached.linear:g} ({reached.fp8_gain:g} times that in FP8), "
        f"attention {reached.attention:g}, memory {reached.memory:g}, NVLink {reached.nvlink:g}, network "
        f"{reached.network:g}, PCIe {reached.pcie:g}; a decoding step waits {reached.decode_overhead * 1000:g} ms "
        "besides (hardware.efficiency.*; not measured on your machines)",
        f"prompts have {lengths.prompt:.0f} tokens, responses {lengths.mean:.0f} on average with a tail up to "
        f"{lengths.longest} (plan.mean_prompt_tokens, plan.mean_response_tokens); half of the variance of lengths is "
        f"between prompts, and the engine with most tokens has {uneven:.2f} times the mean",
        f"{hardware.trainer_overhead / GIB:g} GiB of a GPU go to the trainer's context and NCCL, "
        f"{hardware.engine_overhead / GIB:g} GiB to an offloaded engine's, {hardware.fragmentation:.0%} are lost to "
        "fragmentation (hardware.trainer_overhead_gib, .engine_overhead_gib, .fragmentation)",
        "communication does not overlap with computation, grading overlaps with generation "
        f"({config.plan.grade_seconds:g} s a response on each of {config.reward.workers} reward.workers, "
        "plan.grade_seconds); starting and checkpoints are not counted in steps",
        f"checkpoints: the file system takes {hardware.storage / 1e9:g} GB/s in all, a rank puts "
        f"{hardware.rank_save / 1e9:g} GB/s of tensors into files (hardware.storage_gbs, .rank_save_gbs)",
        "layers are Transformer Engine's (model.attention=sdpa: PyTorch's, which keep more); in FP8 matrices are "
        f"kept twice; the rank whose experts get most tokens gets {EXPERT_IMBALANCE:g} times the mean",
    ]
    if config.algorithm.dynamic_sampling.enabled:
        drawn = drawn_prompts(prompts, config.algorithm.dynamic_sampling, config.plan.informative_share)
        lines.append(
            f"dynamic sampling draws {drawn:.0f} prompts for {prompts}, as {config.plan.informative_share:.0%} of the "
            "groups are informative (plan.informative_share)"
        )
    if config.rollout.external_urls:
        lines.append(
            f"{plan.engines} engines elsewhere (rollout.external_urls) have {config.rollout.tp} GPUs of the same kind "
            "each; `rollout` is what the trainer waits for them, where they work ahead"
        )
    if plan.memory.engine.deterministic:
        lines.append(f"deterministic engines have {reached.deterministic:g} of the speed of others")
    if model_directory(config.model.path) != Path(config.model.path):
        lines.append(f"{config.model.path} is not here: its sizes are those that the package has of that name")
    if plan.evaluations and not plan.evaluation_samples:
        lines.append("evaluations are not counted: the files of data.eval cannot be read here")
    return lines


_FORMAT = 1


def as_json(plan: Plan, budgets: Mapping[str, int | None], proposal: Proposal | None) -> dict[str, Any]:
    """Everything, in bytes and seconds. Totals are sums of the parts."""
    memory, time, engine = plan.memory, plan.time, plan.memory.engine
    return {
        "format": _FORMAT,
        "gpus": plan.world,
        "kind": plan.hardware.kind,
        "models": {
            name: {
                "family": model.spec.family,
                "parameters": model.spec.parameter_count(model.head),
                "active_parameters": model.spec.active_parameter_count(model.head),
                "layout": model.layout.describe(plan.world),
            }
            for name, model in plan.models.items()
        },
        "fits": plan.fits,
        "problems": [problem.line for problem in memory.problems],
        "memory": {
            "usable": plan.hardware.usable_memory,
            "phases": [{"phase": h.phase, "parts": h.parts, "total": h.total} for h in memory.phases],
            "node": {"usable": plan.hardware.node_memory, "parts": memory.host.parts, "total": memory.host.total},
        },
        "engine": {
            "count": plan.engines,
            "cache_tokens": max(0, engine.cache_tokens),
            "responses_at_once": engine.at_once(plan.lengths.running),
        },
        "time": {
            "phases": time.phases,
            "step": time.step,
            "value_pretraining": time.value_pretraining,
            "evaluation": time.evaluation,
        },
        "checkpoint": asdict(plan.saving),
        "run": {"seconds": plan.seconds, "gpu_hours": plan.gpu_hours},
        "largest_max_tokens_per_microbatch": dict(budgets),
        "proposal": None
        if proposal is None
        else {
            "overrides": proposal.changes,
            "step": proposal.plan.time.step,
            "gpu_hours": proposal.plan.gpu_hours,
            "worst": {"phase": proposal.plan.memory.worst.phase, "total": proposal.plan.memory.worst.total},
        },
        "proportions_left": proportions_left(plan.config, plan.lengths.mean),
        "assumptions": assumptions(plan),
    }


def show(plan: Plan, budgets: Mapping[str, int | None], proposal: Proposal | None, console: Console) -> None:
    """Print the tables."""
    actor = plan.models["actor"]
    active = actor.spec.active_parameter_count()
    of_them = f", {active:,} of them active" if active != actor.spec.parameter_count() else ""
    console.print(
        f"[bold]{plan.config.model.path}[/]: {actor.spec.family}, {actor.spec.parameter_count():,} parameters"
        f"{of_them}; {plan.world} x {plan.hardware.kind}"
    )
    for name, model in plan.models.items():
        recompute = model.config.recompute.granularity
        console.print(
            f"  {name}: {model.layout.describe(plan.world)}, {model.config.max_tokens_per_microbatch} tokens a "
            f"micro-batch, recompute {recompute}"
        )
    console.print(_memory_table(plan))
    console.print(_node_table(plan))
    console.print(_time_table(plan))
    engine = plan.memory.engine
    at_once = engine.at_once(plan.lengths.running)
    parts = engine.config.attention_parts
    caches = "KV cache" if parts == 1 else f"{parts} KV caches"
    console.print(
        f"engines: {plan.engines} x TP{engine.config.tp}, {caches} of "
        f"{max(0, engine.cache_tokens):,} tokens, {at_once:.0f} responses at once"
    )
    console.print(f"a checkpoint: {plan.saving.bytes / 1e9:,.0f} GB, on the disk within {plan.saving.writes:.0f} s")
    for name, budget in budgets.items():
        budget_text = "none fits" if budget is None else f"{budget:,}"
        console.print(f"largest {name}.max_tokens_per_microbatch that fits, all else as it is: {budget_text}")
    console.print(f"the run: {_duration(sum(plan.seconds.values()))}, {plan.gpu_hours:,.0f} GPU-hours")
    console.print("\n[bold]Assumed[/]")
    for line in assumptions(plan):
        console.print(f"  - {line}", soft_wrap=True)
    for line in proportions_left(plan.config, plan.lengths.mean):
        console.print(f"[bold yellow]out of proportion[/]: {line}", soft_wrap=True, highlight=False)
    for problem in plan.memory.problems:
        console.print(f"[bold red]does not fit[/]: {problem.line}")
    if proposal is not None and proposal.changes:
        better = proposal.plan
        console.print(
            f"\n[bold]{'Faster' if plan.fits else 'Fits'}[/]: {better.time.step:.0f} s a step, at most "
            f"{better.memory.worst.total / GIB:.1f} GiB on a GPU, {better.gpu_hours:,.0f} GPU-hours with"
        )
        console.print(f"  {proposal.overrides}", soft_wrap=True, highlight=False)


def table_of(title: str, columns: Sequence[str]) -> Table:
    """One without rows yet: names to the left, figures to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _memory_table(plan: Plan) -> Table:
    phases = plan.memory.phases
    usable = plan.hardware.usable_memory
    title = f"GiB on the worst GPU ({usable / GIB:.1f} usable); parts not listed are offloaded, gradients dropped"
    table = table_of(title, ["", *(h.phase for h in phases)])
    for part in dict.fromkeys(part for holding in phases for part in holding.parts):
        table.add_row(part, *(f"{h.parts[part] / GIB:.2f}" if part in h.parts else "" for h in phases))
    totals = [f"{h.total / GIB:.2f}" if h.total <= usable else f"[red]{h.total / GIB:.2f}[/]" for h in phases]
    table.add_row("[bold]total[/]", *totals)
    return table


def _node_table(plan: Plan) -> Table:
    table = table_of(f"GiB of the worst node's own memory ({plan.hardware.node_memory / GIB:.0f} there)", ["", "GiB"])
    for part, size in plan.memory.host.parts.items():
        table.add_row(part, f"{size / GIB:.1f}")
    table.add_row("[bold]total[/]", f"{plan.memory.host.total / GIB:.1f}")
    return table


def _time_table(plan: Plan) -> Table:
    table = table_of("Seconds", ["", "s", "share of a step"])
    for phase, seconds in plan.time.phases.items():
        table.add_row(phase, f"{seconds:.1f}", f"{seconds / plan.time.step:.0%}")
    table.add_row("[bold]step[/]", f"{plan.time.step:.1f}")
    for part, seconds in plan.time.value_pretraining.items():
        table.add_row(f"value pretraining: {part}", f"{seconds:.1f}")
    if plan.time.evaluation:
        table.add_row(f"evaluation ({plan.evaluations} of them)", f"{plan.time.evaluation:.1f}")
    return table


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
