"""The table of values by regression on every task: what it reads of runs, and how it compares."""

import json
from pathlib import Path

import pytest

from examples.regression import everywhere, run
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.monitoring import names


def write_run(
    run_dir: Path, accuracy: float, explained: list[float] | None = None, seconds: float = 2.0
) -> None:
    """A finished run of steps 5 to 8."""
    (run_dir / "hf" / "final").mkdir(parents=True)
    rows = []
    for place in range(4):
        row = {
            "step": 5 + place,
            names.ACCURACY: accuracy,
            run.ACCURACY: accuracy,
            "evaluation/unseen_avg@4": accuracy,
            names.STEP_TIME: seconds,
        }
        if explained is not None:
            row[names.EXPLAINED_VARIANCE] = explained[place]
            row[names.BASELINE_LOO] = 0.1
        rows.append(row)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (run_dir / "metrics.jsonl").write_text(lines)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    everywhere.main([*arguments, "--as-is"])
    return capsys.readouterr().out.splitlines()[2:]


def test_lines_pair_seeds_and_read_the_second_half_of_the_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "quickstart"
    for seed, gain in ((1, 0.1), (2, 0.3)):
        write_run(folder / f"reinforce_direct_{seed}", 0.5, seconds=4.0)
        write_run(folder / f"reinforce_regression_{seed}", 0.5 + gain, [9.0, 9.0, 0.2, 0.4])
    # A seed that only one of both has is not compared.
    write_run(folder / "reinforce_regression_3", 1.0, [9.0, 9.0, 0.9, 0.9])
    # t(1) is 12.706 at 95 %, times the standard error of 0.1.
    assert printed(capsys, "quickstart", "--seeds", "1", "2", "3", "--out", str(tmp_path)) == [
        "| quickstart | `reinforce_regression` | `reinforce_direct` | rollouts, steps 5 to 24 | 2 "
        "| 0.700 | +0.200 ± 1.271 | 0.30 | 0.10 | – | 0.50 |"
    ]


def test_an_agent_is_read_at_its_last_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        folder = tmp_path / "lookup" / f"seed{seed}"
        write_run(folder / "regression", 0.8, [0.1, 0.1, 0.2, 0.2])
        write_run(folder / "grpo", 0.9)
    lines = printed(capsys, "lookup", "--seeds", "1", "2", "--out", str(tmp_path))
    assert lines == [
        "| agent, lookup | `regression` | `grpo` | unseen problems, at the end | 2 | 0.800 "
        "| _-0.100 ± 0.000_ | 0.20 | 0.10 | – | 1.00 |"
    ]


def test_what_has_not_run_has_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, *everywhere.PARTS, "--out", str(tmp_path)) == []


def test_an_unknown_part_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        everywhere.main(["quickstrat"])
    assert ended.value.code == 2
    assert "quickstrat: expected some of: quickstart, adapters" in capsys.readouterr().err


@pytest.mark.parametrize("name", run.ROWS)
def test_every_row_is_a_config_that_can_be_trained(name: str, tmp_path: Path) -> None:
    preset = run.PRESET.get(name, name)
    given = [
        "critic=null",
        f"preset={preset}",
        "model.path=m",
        "value_pretraining=null",
        "value_pretraining.enabled=false",
        f"run.root={tmp_path}",
        *run.ONE_RANK,
        *run.ROWS[name],
    ]
    config = load_config(TrainConfig, run.QUICKSTART / "vapo.yaml", given, PRESETS)
    assert config.samples == 64
    if preset == "vapo_direct":
        assert config.critic.kind == name
    if preset.endswith("_regression"):
        bootstraps = config.algorithm.advantage.lambda_policy != 1.0
        assert bootstraps == name.endswith("_bootstrapped")


def test_the_tabular_stage_is_read_from_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one setting, whose intervals the stage has made."""
    single = {"area": [0.6, 0.1], "less_reinforce_direct": [0.05, 0.02], "explains": [0.3, 0.1]}
    groups = {"area": [0.7, 0.1], "less_without_critic": [-0.05, 0.06], "explains": [0.4, 0.1]}
    rows = {"reinforce_regression": single, "vapo_regression": groups}
    figures = {"seeds": [1, 2], "settings": {"forks": {"tables": {"tuned": rows}}}}
    file = tmp_path / "tabular" / "forks.json"
    file.parent.mkdir()
    file.write_text(json.dumps(figures))
    assert printed(capsys, "tabular", "--out", str(tmp_path)) == [
        "| tables, forks | `reinforce_regression` | `reinforce_direct` | area by responses | 2 "
        "| 0.600 | **+0.050 ± 0.020** | 0.30 | – | – | – |",
        "| tables, forks | `vapo_regression` | `without_critic` | area by responses | 2 "
        "| 0.700 | -0.050 ± 0.060 | 0.40 | – | – | – |",
    ]
