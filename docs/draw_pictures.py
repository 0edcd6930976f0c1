"""Draws docs/images/healthy_and_unhealthy.png from published curves of others: python docs/draw_pictures.py FOLDER

FOLDER holds the three files named below, as CSV with a column `step`. They are not part of this repository; their
licence is Apache-2.0, and docs/curves.md names where they come from.
"""

import csv
import sys
from pathlib import Path
from typing import Any

from vapo_megatron.operations.report.panels import Curve, Panel
from vapo_megatron.operations.report.report import draw_panels

OUT = Path(__file__).parent / "images" / "healthy_and_unhealthy.png"
# File, what it shows, and for every panel its title and columns.
RUNS: tuple[tuple[str, tuple[tuple[str, dict[str, str]], ...]], ...] = (
    (
        "verl_grpo_gsm8k_console_log6.csv",
        (
            (
                "Healthy: evaluation follows training",
                {"critic/score/mean": "reward", "val-core/openai/gsm8k/acc/mean@1": "GSM8K, unseen"},
            ),
            ("Healthy: entropy falls and levels off", {"actor/entropy": "entropy (nats)"}),
            ("Healthy: length settles", {"response_length/mean": "response length (tokens)"}),
        ),
    ),
    (
        "rasbt_7_3_plus_tracking_metrics.csv",
        (
            ("Unhealthy: reward collapses after 200 steps", {"reward_avg": "reward"}),
            ("Unhealthy: entropy explodes", {"entropy_avg": "entropy (nats)"}),
            ("Unhealthy: responses run to the limit", {"avg_response_len": "response length (tokens)"}),
        ),
    ),
    (
        "nemo_grpo_qwen2.5-7b.csv",
        (
            ("Broken at once: reward", {"train/reward": "reward"}),
            ("Broken at once: entropy", {"train/approx_entropy": "entropy (nats)"}),
            ("Broken at once: trainer against engine", {"train/gen_kl_error": "KL (nats)"}),
        ),
    ),
)


def main() -> None:
    """Draw the picture."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    drawn = []
    for file, panels in RUNS:
        with (Path(sys.argv[1]) / file).open(encoding="utf-8") as lines:
            rows: list[dict[str, Any]] = [
                {name: float(value) for name, value in row.items() if value} | {"step": int(float(row["step"]))}
                for row in csv.DictReader(lines)
            ]
        for title, columns in panels:
            curves = tuple(Curve(name, label, smooth=file.startswith("rasbt")) for name, label in columns.items())
            drawn.append((Panel(title, curves, bottom=0), rows))
    draw_panels(drawn).savefig(OUT, dpi=80)


if __name__ == "__main__":
    main()
