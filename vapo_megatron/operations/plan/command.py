"""`vapo-megatron plan CONFIG`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.proportions import proportions_left
from vapo_megatron.errors import BadInput
from vapo_megatron.monitoring.pictures import show_picture
from vapo_megatron.operations.plan.as_json import plan_as_json, plan_figures
from vapo_megatron.operations.plan.inputs import GIB, model_directory
from vapo_megatron.operations.plan.models import EXPERT_IMBALANCE
from vapo_megatron.operations.plan.pictures import pictures_of
from vapo_megatron.operations.plan.plan import Plan, default_world, make_plan
from vapo_megatron.operations.plan.rollout import drawn_prompts, imbalance
from vapo_megatron.operations.plan.search import Proposal, propose, propose_adapters
from vapo_megatron.operations.plan.without_gpu import memory_shortage

# A proposal is shown if it saves at least this share of the run's time.
_WORTH_TELLING = 0.1


def plan_run(
    config: PlanConfig,
    gpus: int | None,
    nodes: int | None,
    simulated: bool = False,
    as_json: bool = False,
) -> None:
    """Print memory and time of a run on `gpus` GPUs, or on `nodes` nodes; neither: as the config
    says.

    simulated: also what each mode of collecting is like, if the plan fits. as_json: one JSON object
        instead of tables.

    Raises:
        BadInput: the layouts cannot be made, or something has no room; then the line ends with what
            to change.
    """
    plan = make_plan(config, _world(config, gpus, nodes))
    proposals = propose(plan)
    if plan.fits:
        limit = (1 - _WORTH_TELLING) * plan.seconds
        proposals = [proposal for proposal in proposals if proposal.plan.seconds < limit]
    if plan.fits or proposals:
        adapted = []
    else:
        adapted = propose_adapters(plan)
    modes_of_collecting: Sequence[Mapping[str, Any]] = ()
    if simulated and plan.fits:
        from vapo_megatron.operations.plan.rollout_modes import modes

        modes_of_collecting = modes(plan)
    shown = proposals or adapted
    if as_json:
        content = plan_as_json(plan, shown, assumptions(plan), warnings(plan), modes_of_collecting)
        print(json.dumps(content, indent=2))
    else:
        console = Console(width=None if Console().is_terminal else 160)
        show(plan, shown, console)
        if modes_of_collecting:
            console.print(_simulation_table(plan, modes_of_collecting))
    if not plan.fits:
        raise BadInput(_refusal(plan, proposals, adapted))


def _world(config: PlanConfig, gpus: int | None, nodes: int | None) -> int:
    if gpus is not None and nodes is not None:
        raise BadInput(
            f"--gpus {gpus} and --nodes {nodes} both say how many GPUs: give one of them"
        )
    if nodes is not None:
        return nodes * config.hardware.gpus_per_node
    return gpus or default_world(config)


def _refusal(plan: Plan, proposals: Sequence[Proposal], adapted: Sequence[Proposal]) -> str:
    if proposals:
        remedy = f"try {proposals[0].overrides}"
    else:
        remedy = f"no layout of {plan.world} GPUs was found to fit"
        if adapted:
            remedy += f" but with adapters: try {adapted[0].overrides}"
        else:
            remedy += ": take more GPUs, or shorten sampling.max_new_tokens"
    problems = "; ".join(plan.memory.problems)
    return f"does not fit {plan.world} x {plan.hardware.kind}: {problems}: {remedy}"


def assumptions(plan: Plan) -> list[str]:
    """The plan's assumptions, one line each; docs/configuration.md explains the keys."""
    hardware = plan.hardware
    lengths = plan.lengths
    config = plan.config
    uneven = imbalance(plan.engines, config.batch.prompts_per_step, config.samples, lengths)
    reached = ", ".join(
        f"{name} {value:g}" for name, value in hardware.efficiency.model_dump().items()
    )
    kept = config.hardware.model_dump(
        include={"trainer_overhead_gib", "engine_overhead_gib", "fragmentation"}
    )
    asked = config.plan.model_dump(exclude={"gpus", "mean_prompt_tokens", "mean_response_tokens"})
    lines = [
        f"{hardware.kind}: {hardware.device_memory / GIB:.1f} GiB, {hardware.bf16 / 1e12:.0f} "
        f"TFLOP/s dense bf16, "
        f"memory {hardware.memory_rate / 1e9:.0f} GB/s, NVLink {hardware.nvlink / 1e9:.0f}, "
        f"network "
        f"{hardware.network / 1e9:.0f}, PCIe {hardware.pcie / 1e9:.0f} GB/s a GPU in one direction "
        f"(hardware.*)",
        f"of these rates are reached (hardware.efficiency.*): {reached}; communication does not "
        f"overlap",
        f"prompts have {lengths.prompt:.0f} tokens, responses {lengths.mean:.0f} on average with a "
        f"tail up to "
        f"{lengths.longest} (plan.mean_prompt_tokens, plan.mean_response_tokens); the engine with "
        f"most tokens has "
        f"{uneven:.2f} times the mean, the rank whose experts get most {EXPERT_IMBALANCE:g} times",
        ", ".join([f"hardware.{key}={value:g}" for key, value in kept.items()]),
        ", ".join(
            [f"plan.{key}={value:g}" for key, value in asked.items()] + [f"{plan.engines} engines"]
        ),
        "starting, evaluations and checkpoints are not counted",
    ]
    if config.algorithm.dynamic_sampling.enabled:
        drawn = drawn_prompts(
            config.batch.prompts_per_step,
            config.algorithm.dynamic_sampling,
            config.plan.informative_share,
        )
        lines.append(
            f"dynamic sampling draws {drawn:.0f} prompts for {config.batch.prompts_per_step}"
        )
    if config.rollout.external_urls:
        lines.append(
            "`rollout` is what the trainer waits for engines elsewhere, where they work ahead"
        )
    if config.rollout.agent and config.plan.turns == 1:
        lines.append(
            "an agent's episode is one response: plan.turns and plan.tool_seconds say otherwise"
        )
    if config.rollout.is_deterministic(config.model.dtype, True):
        lines.append(
            "deterministic kernels of engines are as fast as others; SGLang measured 34 % less"
        )
    if config.rollout.attention_parts > 1:
        lines.append(
            "attention of the engines is cut over all their GPUs: rollout.server_args.attn_dp_size "
            "is not counted"
        )
    if model_directory(config.model.path) != Path(config.model.path):
        lines.append(
            f"{config.model.path} is not here: its sizes are those that the package has of that "
            f"name"
        )
    return lines


def warnings(plan: Plan) -> list[str]:
    """Settings that do not suit a run of this plan, one line each."""
    lines = proportions_left(plan.config, plan.lengths.mean)
    rollout = plan.config.rollout
    if plan.time.phases["rollout"] > rollout.collect_timeout_s:
        lines.append(
            f"a rollout takes {plan.time.phases['rollout']:.0f} s, and is given up if nothing "
            f"arrives for rollout.collect_timeout_s={rollout.collect_timeout_s:g}: raise it, or "
            "take more GPUs"
        )
    engine = plan.memory.engine
    most = min(rollout.max_running_requests, plan.config.samples // plan.engines)
    if most > (room := engine.at_once(plan.lengths.running)):
        lines.append(
            f"rollout.max_running_requests={rollout.max_running_requests}, and an engine has room "
            f"for {room:.0f} "
            f"responses at their mean context of {plan.lengths.running:.0f} tokens: others begin "
            f"and are read again "
            "later, raise rollout.mem_fraction_static or rollout.tp, or lower it"
        )
    if shortage := memory_shortage(plan.config):
        lines.append(": ".join(shortage))
    return lines


def show(plan: Plan, proposals: Sequence[Proposal], console: Console) -> None:
    """Print the tables."""
    console.print(f"[bold]{plan.config.model.path}[/]: {plan.world} x {plan.hardware.kind}")
    for name, model in plan.models.items():
        console.print(
            f"  {name}: {model.spec.parameter_count(model.head):,} parameters, "
            f"{model.layout.describe(plan.world)}, "
            f"{model.config.max_tokens_per_microbatch} tokens a micro-batch, recompute "
            f"{model.config.recompute.granularity}",
            soft_wrap=True,
        )
    console.print(_memory_table(plan))
    host = plan.memory.host
    node = plan.hardware.node_memory / GIB
    parts = ", ".join(f"{part} {size / GIB:.1f}" for part, size in host.parts.items())
    console.print(
        f"memory of the worst node: {host.total / GIB:.1f} of {node:.0f} GiB ({parts})\n",
        soft_wrap=True,
    )
    memory, time = pictures_of(plan_figures(plan))
    show_picture(memory, console)
    console.print(_time_table(plan))
    show_picture(time, console)
    engine = plan.memory.engine
    console.print(
        f"engines: {plan.engines} x TP{engine.config.tp}, a KV cache of "
        f"{max(0, engine.cache_tokens):,} tokens, "
        f"{engine.at_once(plan.lengths.running):.0f} responses at once"
    )
    console.print(
        f"disk: at least {plan.disk_bytes / GIB:,.0f} GiB, of checkpoints (the last "
        f"{plan.config.checkpoint.keep.last} are kept) and the last export",
        soft_wrap=True,
    )
    console.print(
        f"the run: {plan.seconds / 3600:,.1f} h, {plan.gpu_hours:,.0f} "
        f"GPU-hours\n\n[bold]Assumed[/]"
    )
    for line in assumptions(plan):
        console.print(f"  - {line}", soft_wrap=True)
    for line in warnings(plan):
        console.print(f"[bold yellow]warning[/]: {line}", soft_wrap=True, highlight=False)
    for problem in plan.memory.problems:
        console.print(f"[bold red]does not fit[/]: {problem}", soft_wrap=True)
    for proposal in proposals:
        better = proposal.plan
        console.print(
            f"\n[bold]{'Faster' if plan.fits else 'Fits'}[/]: {better.time.step:.0f} s a step, at "
            f"most "
            f"{better.memory.worst.total / GIB:.1f} GiB on a GPU, {better.gpu_hours:,.0f} "
            f"GPU-hours with\n"
            f"  {proposal.overrides}",
            soft_wrap=True,
            highlight=False,
        )


def _table_of(title: str, columns: Sequence[str]) -> Table:
    """An empty table: names to the left, figures to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _memory_table(plan: Plan) -> Table:
    phases = plan.memory.phases
    usable = plan.hardware.usable_memory
    title = (
        f"GiB on the worst GPU ({usable / GIB:.1f} usable); parts not listed are offloaded, "
        f"gradients dropped"
    )
    table = _table_of(title, ["", *(held.phase for held in phases)])
    for part in dict.fromkeys(part for held in phases for part in held.parts):
        table.add_row(
            part,
            *(f"{held.parts[part] / GIB:.2f}" if part in held.parts else "" for held in phases),
        )
    table.add_row(
        "total",
        *(f"{'[red]' * (held.total > usable)}{held.total / GIB:.2f}" for held in phases),
        style="bold",
    )
    return table


def _time_table(plan: Plan) -> Table:
    table = _table_of("Seconds", ["", "s", "share of a step"])
    for phase, seconds in plan.time.phases.items():
        table.add_row(phase, f"{seconds:.1f}", f"{seconds / plan.time.step:.0%}")
    table.add_row("step", f"{plan.time.step:.1f}", style="bold")
    for part, seconds in plan.time.value_pretraining.items():
        table.add_row(f"value pretraining: {part}", f"{seconds:.1f}")
    return table


def _simulation_table(plan: Plan, modes: Sequence[Mapping[str, Any]]) -> Table:
    world = plan.world + len(plan.config.rollout.external_urls) * plan.config.rollout.tp
    columns = "GPUs", "s a step", "engines unused", "trainer idle", "mean age of tokens"
    table = _table_of(
        "Simulated, in steady state (no row: no split of the GPUs fits)", ["", *columns]
    )
    for mode in modes:
        engines = mode["engine_gpus"]
        if engines is None:
            gpus = f"{world} shared"
        else:
            gpus = f"{world - engines} + {engines} engines'"
        shares = f"{mode['engines_unused']:.0%}", f"{mode['trainer_idle']:.0%}"
        table.add_row(mode["mode"], gpus, f"{mode['step']:.1f}", *shares, f"{mode['age']:.2f}")
    return table
