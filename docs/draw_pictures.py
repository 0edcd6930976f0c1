"""Draws docs/images/healthy_and_unhealthy.png from published curves of others: python
docs/draw_pictures.py FOLDER
 FOLDER holds the three files named below, as CSV with a column `step`. They are not part of this
repository; their licence is Apache-2.0, and docs/curves.md names where they come from.
"""

import csv
import sys
from pathlib import Path

from matplotlib.figure import Figure

OUT = Path(__file__).parent / "images" / "healthy_and_unhealthy.png"
# File, what it shows, and for every panel its title and columns.
RUNS: tuple[tuple[str, tuple[tuple[str, dict[str, str]], ...]], ...] = (
    (
        "verl_grpo_gsm8k_console_log6.csv",
        (
            (
                "Healthy: evaluation follows training",
                {
                    "critic/score/mean": "reward",
                    "val-core/openai/gsm8k/acc/mean@1": "GSM8K, unseen",
                },
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
            (
                "Unhealthy: responses run to the limit",
                {"avg_response_len": "response length (tokens)"},
            ),
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
    """Draw the picture: a row for each run, a panel for each of its columns."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    figure = Figure(figsize=(15, 9.8), layout="constrained")
    axes = figure.subplots(len(RUNS), 3)
    for row, (file, panels) in zip(axes, RUNS, strict=True):
        with (Path(sys.argv[1]) / file).open(encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
        for place, (title, columns) in zip(row, panels, strict=True):
            for name, label in columns.items():
                points = [
                    (float(entry["step"]), float(entry[name])) for entry in rows if entry.get(name)
                ]
                place.plot(*zip(*points, strict=True), label=label)
            place.set(title=title, xlabel="step", ylim=(0, None))
            place.legend(frameon=False)
    figure.savefig(OUT, dpi=80)


if __name__ == "__main__":
    main()
