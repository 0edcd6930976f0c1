"""What makes the effects of the tabular stage larger or smaller: one thing of a setting changed at
a time.

    python -m examples.ablation.tabular.sweep

Runs on the seeds that settings were chosen on, 1000 to 1009: it says where an effect comes from,
and is no evidence for its size. What is finished is not run again.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from vapo_megatron.errors import told_in_one_line
from vapo_megatron.files import atomic_write
from vapo_megatron.monitoring.facts import environment_facts

from ..intervals import interval
from .run import change, console, parse_seeds
from .settings import ROWS, SETTINGS, VAPO, Row, Setting
from .training import Training

ALL_LENGTHS = SETTINGS["steps"].step_tokens
EXTRA_ROWS = {
    "policy_08": replace(VAPO, title="lambda_policy 0.8", lambda_policy=0.8),
    "policy_1": replace(VAPO, title="lambda_policy 1", lambda_policy=1.0),
    "dapo_without_clip_higher": replace(
        ROWS["dapo"], title="DAPO without clip-higher", clip_higher=False
    ),
    "policy_095_without_clip_higher": replace(
        ROWS["no_length_adaptive_95"],
        title="lambda_policy 0.95 without clip-higher",
        clip_higher=False,
    ),
}
LAMBDAS = ("vapo", "no_length_adaptive", "policy_08", "no_length_adaptive_95", "policy_1")
CRITICS = ("vapo", "no_decoupled", "no_value_pretraining")
CLIPS = ("vapo", "no_clip_higher")


@dataclass(frozen=True)
class Probe:
    """A change of a setting, and the rows that are compared with the first of them."""

    question: str
    setting: str
    changes: tuple[str, ...]
    rows: tuple[str, ...]

    @property
    def name(self) -> str:
        """As it is told and stored."""
        return f"{self.question}: {', '.join(self.changes) or 'as it is'}, {self.rows[0]}"


def probes() -> Iterator[Probe]:
    """All of them."""
    for lengths in ([1], [5], [20], list(ALL_LENGTHS)):
        shorter = ("rollouts=25", "pretraining=10")
        yield Probe("lengths", "steps", (f"step_tokens={json.dumps(lengths)}", *shorter), LAMBDAS)
    for text in ("", "hard_share=0.0", "minibatches=4", "critic_ratio=0.5", "critic_ratio=8.0"):
        yield Probe(
            "critic",
            "insight",
            (*([text] if text else []), "rollouts=20", "pretraining=10"),
            CRITICS,
        )
    for changes in ((), ("nll=0.0",), ("minibatches=8",), ("rare=0.1",)):
        yield Probe("clip", "clip", changes, CLIPS)
    yield Probe("clip", "clip", ("own=true", "features=16", "coupling=0.5", "lr=0.02"), CLIPS)
    yield Probe("clip", "clip", (), ("dapo", "dapo_without_clip_higher"))
    yield Probe("clip", "clip", (), ("no_length_adaptive_95", "policy_095_without_clip_higher"))
    for prompts, samples in ((128, 1), (32, 4), (16, 8), (8, 16)):
        rows = ("vapo", "grpo") if samples > 1 else ("vapo",)
        sizes = (
            f"prompts_per_step={prompts}",
            f"samples_per_prompt={samples}",
            "rollouts=20",
            "pretraining=10",
        )
        yield Probe("groups", "steps", sizes, rows)


def run_probe(probe: Probe, seeds: list[int]) -> dict[str, Any]:
    """Final accuracy of the first row, and by how much it is ahead of each other, in the end and
    over the course."""
    setting: Setting = change(SETTINGS[probe.setting], probe.changes)
    rows: dict[str, Row] = {name: (ROWS | EXTRA_ROWS)[name] for name in probe.rows}
    courses = {name: Training(setting, row, seeds).run() for name, row in rows.items()}
    last = setting.rollouts
    found: dict[str, Any] = {
        "question": probe.question,
        "setting": probe.setting,
        "changes": probe.changes,
        "rows": {},
    }
    first = courses[probe.rows[0]]
    for name, course in courses.items():
        lead = [a.accuracy[last] - b.accuracy[last] for a, b in zip(first, course, strict=True)]
        over = [
            sum(a.accuracy[1 : last + 1]) / last - sum(b.accuracy[1 : last + 1]) / last
            for a, b in zip(first, course, strict=True)
        ]
        found["rows"][name] = {
            "title": rows[name].title,
            "final": interval([each.accuracy[last] for each in course]),
            "less": None if name == probe.rows[0] else interval(lead),
            "less_area": None if name == probe.rows[0] else interval(over),
            "clip_high": sum(sum(each.metrics["clip_high"][:last]) / last for each in course)
            / len(course),
        }
    return found


def main(
    seeds: Annotated[str, typer.Option(help="such as 3 or 0-19")] = "1000-1009",
    out: Annotated[Path, typer.Option(help="the JSON to write, and to go on from")] = Path(
        "runs/ablation_sweep.json"
    ),
) -> None:
    """Run the probes that are missing."""
    with told_in_one_line("ablation"):
        torch.set_num_threads(1)
        wanted = parse_seeds(seeds)
        figures = json.loads(out.read_text()) if out.is_file() else {}
        if figures.get("seeds") != wanted:
            figures = {"seeds": wanted, "facts": environment_facts(), "probes": {}}
        for probe in probes():
            if probe.name not in figures["probes"]:
                figures["probes"][probe.name] = run_probe(probe, wanted)
                out.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(out) as file:
                    json.dump(figures, file, indent=1)
                console.print(probe.name)


if __name__ == "__main__":
    typer.run(main)
