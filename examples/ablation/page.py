"""docs/ablation.md: the page of a whole ablation, filled in with what was measured."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ablation_config import AblationConfig, RewardModelConfig
from execute import seconds_taken
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plan import HERE
from reward_decay import LEARNT, Course, summary
from table import MARGIN, Table, markdown, spread

from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.config.load import load_config
from vapo_megatron.errors import BadInput
from vapo_megatron.monitoring.metrics import read_metrics

COMMAND = ".venv/bin/python examples/ablation/run.py --docs"
STARTS = {
    "pretrained": "value pretraining",
    "reward_model": "reward model",
    "fresh": "policy, head of zeros",
    "none": "no critic",
}
COLLAPSE = (
    "ppo",
    "ppo_fast_critic",
    "ppo_fresh_critic",
    "ppo_value_pretraining",
    "vc_ppo",
    "without_value_pretraining",
    "vapo",
)


def write_page(config: AblationConfig, table: Table, decay: Sequence[Course], out: Path, docs: Path) -> Path:
    """Write docs/ablation.md and its two images; return the page's path.

    Raises:
        BadInput: a row or a seed of ablation.yaml is missing: the page shows a whole ablation or none.
    """
    whole = load_config(AblationConfig, HERE / "ablation.yaml", [], HERE).model_copy(update={"workers": config.workers})
    if config != whole or any(len(result.seeds) < len(config.seeds) for result in table.rows):
        raise BadInput("--docs: the page shows all of ablation.yaml: leave out --only and the overrides, and run again")
    text = render(config, table, decay, out)
    for name in ("ablation.png", "reward_decay.png"):
        with atomic_write(docs / "images" / name, "wb") as file, (out / name).open("rb") as image:
            shutil.copyfileobj(image, file)
    with atomic_write(docs / "ablation.md") as file:
        file.write(text)
    return docs / "ablation.md"


def render(config: AblationConfig, table: Table, decay: Sequence[Course], out: Path) -> str:
    """The page as Markdown."""
    environment = Environment(
        loader=FileSystemLoader(HERE), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    return environment.get_template("ablation.md.j2").render(_facts(config, table, decay, out))


def _facts(config: AblationConfig, table: Table, decay: Sequence[Course], out: Path) -> dict[str, Any]:
    compared = [r for r in table.rows if r.row.part == "ablation" and r.row.name != "vapo"]
    by_effect = {
        effect: [(r.row.title, r.row.reason) for r in compared if table.effect(r) == effect]
        for effect in ("shown", "reversed", "not resolved")
    }
    taken, reward_models = seconds_taken(out), [_last_row(out, seed, "reward_model") for seed in config.seeds]
    return {
        "command": COMMAND,
        "facts": table.facts,
        "seeds": ", ".join(map(str, config.seeds)),
        "seed_count": len(config.seeds),
        "chance": 0.5 ** len(config.seeds),
        "runs": len(taken),
        "core_minutes": round(sum(taken.values()) / 60),
        "wall_minutes": round(sum(taken.values()) / 60 / config.workers),
        "workers": config.workers,
        "table": markdown(table),
        "problems": config.task.evaluation_problems,
        "steps": config.steps,
        "margin": MARGIN,
        "shown": [title for title, _ in by_effect["shown"]],
        "missing": by_effect["not resolved"],
        "reversed": by_effect["reversed"],
        "task": config.task,
        "start": spread(list(table.start.values())),
        "rows": config.rows,
        "starts": STARTS,
        "reward_model_steps": load_config(RewardModelConfig, HERE / "reward_model.yaml", [], HERE).steps,
        "prefix": spread([row["reward_model/prefix_mean"] for row in reward_models], ".2f"),
        "end_accuracy": spread([row["reward_model/end_accuracy"] for row in reward_models], ".2f"),
        "collapse": [_collapse_line(table, name) for name in COLLAPSE if table.of(name)],
        "settings": list(dict.fromkeys(course.setting for course in decay)),
        "decay": _decay_lines(decay),
        "decay_seeds": len(decay[0].chance),
        "learnt": LEARNT,
        "vapo_tokens": spread(table.rows[0].last_lengths, ".0f"),
    }


def _last_row(out: Path, seed: int, name: str) -> dict[str, Any]:
    return read_metrics(out / f"seed{seed}" / name)[-1]


def _collapse_line(table: Table, name: str) -> dict[str, str]:
    result = table.of(name)
    assert result is not None
    return {
        "title": result.row.title,
        "length": spread(result.last_lengths, ".1f"),
        "accuracy": spread(result.finals),
        "start": STARTS[result.row.critic],
    }


def _decay_lines(decay: Sequence[Course]) -> list[dict[str, Any]]:
    rows = summary(decay)
    lines = []
    for tokens in sorted({row["tokens"] for row in rows}):
        cells = []
        for row in (row for row in rows if row["tokens"] == tokens):
            learnt = f"{row['median']} ({row['least']} to {row['most']})"
            cells.append(f"never at {row['never']} seeds" if row["never"] else learnt)
        lines.append({"tokens": tokens, "cells": cells})
    return lines
