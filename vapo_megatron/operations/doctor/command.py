"""`vapo-megatron doctor CONFIG`, on one node or on all of a job."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from vapo_megatron.checks.config import look_first
from vapo_megatron.checks.preflight import check_train
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.files import atomic_write
from vapo_megatron.operations.doctor.checks import (
    Check,
    Examination,
    allreduce_over_nodes,
    checks,
    perform,
)
from vapo_megatron.operations.doctor.nodes import (
    Line,
    Meeting,
    NodeReport,
    broken_nodes,
    from_json,
    show,
)
from vapo_megatron.operations.plan.without_gpu import memory_shortage
from vapo_megatron.run.launch_env import node_name, place_from_environment
from vapo_megatron.run.start import foresee_start

# Stands in the table for faults that no single node can be blamed for.
BETWEEN = "(between nodes)"
# Once all nodes have connected, their imports are done: they wait for each other no longer than
# this.
_AMONG_THOSE_PRESENT = 120.0


def doctor(
    config: PlanConfig,
    quick: bool,
    wait: float,
    broken_file: Path | None = None,
    node_names: Sequence[str] = (),
    as_json: bool = False,
) -> int:
    """Check this node, and together with the other nodes of the job what needs several; rank 0
    prints the result.

    Args:
        wait: seconds to wait for other nodes to come.
        broken_file: gets the names of nodes with a fault, one per line.
        node_names: of all nodes in the order of their ranks, equally many on each, so that those
            that do not come have a name; empty where it is not known.
        as_json: print one JSON object instead of a table.

    Returns the exit code: on rank 0 1 where any node has a fault; 0 elsewhere. Raises RunFailed
    where this process does not reach the others.
    """
    place = place_from_environment()
    meeting = Meeting(place, node_name(), wait)
    if not meeting.leads:
        return 0
    among = min(wait, _AMONG_THOSE_PRESENT)
    examination = Examination(config, meeting, quick, among)
    table = checks(config, among)
    lines = tuple(line for check in table for line in perform(check, examination))
    report = NodeReport(meeting.node, meeting.rank, lines)
    allreduce = Check(
        "all-reduce over nodes", allreduce_over_nodes, among + 900, between=True, slow=True
    )
    if quick or len(meeting.nodes) == 1:
        between = []
    else:
        between = perform(allreduce, examination)
    meeting.put(f"report/{meeting.index}", asdict(report))
    if meeting.index:
        return 0
    reports = [
        report,
        *_reports_of_others(meeting, among + max(check.deadline for check in table)),
    ]
    for rank in meeting.missing:
        line = Line(
            "fault",
            f"rank {rank} did not arrive within {wait:g} s",
            "check its log and its node",
            "ranks",
        )
        if place is not None and node_names:
            reports.append(
                NodeReport(node_names[rank * len(node_names) // place.world_size], rank, (line,))
            )
        else:
            between.append(line)
    if between:
        reports.append(NodeReport(BETWEEN, 0, tuple(between)))
    if as_json:
        nodes = [{**asdict(report), "status": report.status} for report in reports]
        print(json.dumps({"broken": broken_nodes(reports), "nodes": nodes}, indent=2), flush=True)
    else:
        show(reports)
    if broken_file is not None:
        with atomic_write(broken_file) as file:
            file.write("".join(f"{node}\n" for node in broken_nodes(reports) if node != BETWEEN))
    if broken_nodes(reports):
        return 1
    return 0


def _reports_of_others(meeting: Meeting, wait: float) -> list[NodeReport]:
    """What the other nodes found, of those that came; one that gives no report has a fault."""
    if not meeting.nodes[1:]:
        return []
    silent = Line(
        "fault", "the node gave no report in time", "leave it out, and check its log", "report"
    )
    answers = meeting.get_all("report", wait)
    others = list(zip(meeting.nodes, meeting.ranks, answers, strict=False))[1:]
    return [
        NodeReport(name, rank, (silent,)) if answer is None else from_json(answer)
        for name, rank, answer in others
    ]


def check_run(settings: TrainConfig, planned: PlanConfig) -> int:
    """`vapo-megatron train --check`: whatever can be known of a run before its ranks start, on this
    machine alone.

    planned: the same config, for doctor. Nothing is written. Returns the exit code: 2 where the
        machine has a fault, and 1 in a Slurm job, which has other machines. The last line is
        "ready", or says what fails.
    Raises BadInput where something in the config, its files or the saved state cannot work.
    """
    look_first(settings)
    facts: list[str] = []
    start = foresee_start(settings, partial(check_train, settings, settings.cluster.ranks, facts))
    if start.checkpoint is not None:
        begin = f"resumes from {start.checkpoint}"
    else:
        begin = "begins at step 1"
    if start.finished:
        begin = "nothing to do, it is finished"
    print("\n".join([*facts, f"{settings.run.directory}: {begin}"]), flush=True)
    examination = Examination(planned, Meeting(None, node_name(), 0), quick=True, wait=0)
    table = [check for check in checks(planned, 0) if check.name != "config"]
    lines = [line for check in table for line in perform(check, examination)]
    if shortage := memory_shortage(planned):
        lines.append(Line("warning", *shortage, check="memory"))
    report = NodeReport(
        node_name(), 0, tuple(line for line in lines if line.status in ("ok", "warning", "fault"))
    )
    show([report])
    faults = [line.found for line in report.lines if line.status == "fault"]
    print(f"not ready: {'; '.join(faults)}" if faults else "ready", flush=True)
    if not faults:
        return 0
    # A job then calls doctor, which leaves out the nodes that have a fault (slurm/lib.sh).
    return 1 if "SLURM_JOB_ID" in os.environ else BadInput.exit_code
