"""The table of conditions: means over steps and seeds, and the steps in which a share is
negative."""

import json
from pathlib import Path

from examples.regression import conditions, run
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.monitoring import names

SHARES = {1: [9.0, 0.1, 0.2, -0.1], 2: [9.0, 0.3, 0.2, 0.1]}


def write_run(folder: Path, shares: list[float]) -> Path:
    """Steps 4, which is not counted, to 7."""
    folder.mkdir()
    fixed = {names.ACCURACY: 0.75, names.ENTROPY: 0.5, names.EXPLAINED_VARIANCE: 0.25}
    rows = [{"step": 4 + place, **fixed, conditions.SURPRISE: x} for place, x in enumerate(shares)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines)
    return folder


def test_a_row_has_means_over_seeds_and_counts_negative_shares(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), shares) for seed, shares in SHARES.items()]
    *_, line = conditions.table({"as it is": runs})
    # 0.0667 and 0.2: t(1) 12.706 at 95 % times half of their difference.
    assert line == (
        "| as it is | 0.750 ± 0.000 | 0.500 ± 0.000 | 0.250 ± 0.000 | 0.133 ± 0.847 | 1 of 6 |"
    )


def test_every_condition_is_a_config_that_can_be_trained(tmp_path: Path) -> None:
    for overrides in conditions.ROWS.values():
        given = [
            "critic=null",
            f"preset={conditions.PRESET}",
            "model.path=m",
            "value_pretraining=null",
            "value_pretraining.enabled=false",
            f"run.root={tmp_path}",
            *run.ONE_RANK,
            *run.ROWS[conditions.PRESET],
            *overrides,
        ]
        config = load_config(TrainConfig, run.QUICKSTART / "vapo.yaml", given, PRESETS)
        assert config.critic.kind == "regression"
