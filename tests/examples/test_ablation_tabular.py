"""The tabular stage: seeds are independent, finished runs are not repeated, and its
optimum is reachable."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from examples.ablation.intervals import interval, paired, shown
from examples.ablation.page import MEASURED, ROOT
from examples.ablation.results import read_figures
from examples.ablation.tabular import sweep, tables
from examples.ablation.tabular.price import accuracy_at, area, choose_rate
from examples.ablation.tabular.price import main as price_command
from examples.ablation.tabular.run import change, main, parse_seeds, run_row
from examples.ablation.tabular.settings import (
    ALL_PRICE_ROWS,
    INSIGHT,
    PAPER_ROWS,
    ROWS,
    SETTINGS,
    STEPS,
)
from examples.ablation.tabular.summary import summarise
from examples.ablation.tabular.task import Rollout, exact_accuracy, make_tasks, sample
from examples.ablation.tabular.training import Course, Training
from vapo_megatron.algorithms.baselines import tracked_values, with_responses
from vapo_megatron.algorithms.gae import length_adaptive_lambda
from vapo_megatron.algorithms.segments import place_terminal
from vapo_megatron.config.algorithm import AdvantageConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.training.past_returns import calibrated_advantages
from vapo_megatron.training.return_history import ReturnHistory

SMALL = change(
    STEPS,
    ["steps=6", "prompts=20", "prompts_per_step=4", "rollouts=2", "pretraining=1", "minibatches=4"],
)


def test_a_seeds_results_do_not_depend_on_the_seeds_beside_it() -> None:
    together = Training(SMALL, ROWS["vapo"], [3, 4, 5]).run()
    alone = Training(SMALL, ROWS["vapo"], [4]).run()
    assert together[1].accuracy == pytest.approx(alone[0].accuracy, abs=1e-6)
    assert together[0].accuracy != together[1].accuracy


def test_finished_seeds_are_not_run_again_and_another_setting_is(
    tmp_path: Path, monkeypatch
) -> None:
    first = run_row(SMALL, "vapo", [0, 1], tmp_path)
    ran: list[list[int]] = []
    start = Training.__init__

    def recorded(self, setting, row, seeds):
        ran.append(list(seeds))
        start(self, setting, row, seeds)

    monkeypatch.setattr(Training, "__init__", recorded)
    again = run_row(SMALL, "vapo", [0, 1, 2], tmp_path)
    assert ran == [[2]] and again[0] == first[0]
    run_row(change(SMALL, ["alpha=0.1"]), "vapo", [0], tmp_path)
    assert ran == [[2], [0]]


def test_accuracy_of_samples_is_the_exact_accuracy() -> None:
    setting = change(SMALL, ["prompts_per_step=400", "samples_per_prompt=8"])
    tasks = make_tasks(setting, [7])
    exact, by_length = exact_accuracy(setting, tasks, tasks.logits)
    rollout = sample(setting, tasks, tasks.logits, [torch.Generator().manual_seed(0)], groups=True)
    assert rollout.correct.float().mean() == pytest.approx(float(exact), abs=0.04)
    assert by_length.mean() == pytest.approx(float(exact), abs=1e-6)


def test_the_optimum_is_reachable() -> None:
    for setting in (SMALL, change(INSIGHT, ["steps=6", "prompts=20"])):
        tasks = make_tasks(setting, [7])
        best = torch.full_like(tasks.logits, -50.0).scatter(2, tasks.right[..., None], 50.0)
        assert float(exact_accuracy(setting, tasks, best)[0]) == pytest.approx(1.0)


def test_row_better_at_every_seed_is_ahead_by_the_right_amount() -> None:
    better = Training(SMALL, ROWS["vapo"], [0, 1, 2]).run()
    worse = Training(SMALL, ROWS["vapo"], [0, 1, 2]).run()
    for shift, course in enumerate(worse):
        course.accuracy = [value - 0.1 - 0.01 * shift for value in course.accuracy]
    rows = summarise(
        {"vapo": dict(enumerate(better)), "grpo": dict(enumerate(worse))}, SMALL.rollouts
    )
    assert rows["grpo"]["final_less"].mean == pytest.approx(0.11)
    assert rows["grpo"]["final_less"].half == pytest.approx(4.3027 * 0.01 / 3**0.5, rel=1e-3)


def test_intervals_are_those_of_students_t() -> None:
    assert interval([1.0, 3.0]).half == pytest.approx(12.7062, rel=1e-4)
    less = paired({1: 0.5, 2: 0.7, 3: 0.9}, {2: 0.6, 3: 0.7, 9: 0.0})
    assert less is not None and less.mean == pytest.approx(0.15)
    assert paired({1: 0.5}, {2: 0.5}) is None and shown(None) == "–"
    assert shown(interval([0.1, 0.1, 0.1001])).startswith("**+") and "one seed" in shown(
        interval([0.1])
    )
    assert shown(interval([-0.1, -0.1, -0.1001])).startswith("_-")


def test_settings_have_the_papers_proportions() -> None:
    for setting in SETTINGS.values():
        assert setting.alpha == 0.05 and setting.critic_ratio == 2.0
        assert (setting.clip_low, setting.clip_high, setting.nll) == (0.2, 0.28, 0.1)
        assert setting.samples % setting.minibatches == 0
    assert PAPER_ROWS[0] == "vapo" and len(PAPER_ROWS) == 12


def test_wrong_input_is_named(tmp_path: Path) -> None:
    assert parse_seeds("1,5,7-9") == [1, 5, 7, 8, 9]
    for text in ("a", "3-1", "1,1"):
        with pytest.raises(BadInput, match="--seeds"):
            parse_seeds(text)
    with pytest.raises(BadInput, match="no key alfa"):
        change(STEPS, ["alfa=1"])


def test_every_probe_of_the_sweep_is_among_the_measured_ones() -> None:
    measured = json.loads((Path(sweep.__file__).parents[1] / "measured" / "sweep.json").read_text())
    assert [probe.name for probe in sweep.probes()] == list(measured["probes"])


def test_a_probe_compares_with_its_first_row() -> None:
    sizes = (
        "steps=4",
        "prompts=10",
        "prompts_per_step=4",
        "rollouts=1",
        "pretraining=1",
        "minibatches=4",
    )
    found = sweep.run_probe(sweep.Probe("x", "steps", sizes, ("vapo", "policy_1")), [0, 1])
    first = found["rows"]["vapo"]
    other = found["rows"]["policy_1"]
    assert first["less"] is None and other["less"].mean == pytest.approx(
        first["final"].mean - other["final"].mean
    )


def test_the_command_writes_a_summary_and_ends_with_its_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [
        "steps=4",
        "prompts=10",
        "prompts_per_step=4",
        "rollouts=1",
        "pretraining=1",
        "minibatches=4",
    ]
    main(small, ["steps"], ["grpo"], "0-1", tmp_path)
    found = json.loads((tmp_path / "summary.json").read_text())
    assert set(found["settings"]["steps"]["rows"]) == {"vapo", "grpo"} and found["seeds"] == [0, 1]
    said = capsys.readouterr().out
    steps = found["settings"]["steps"]
    lead = shown(tables.as_interval(steps["rows"]["grpo"]["final_less"]))
    assert (
        "±" in lead
        and f"| GRPO | {steps['rows']['grpo']['final'][0]:.3f} |" in said
        and f"| {lead} |" in said
    )
    assert "At equal numbers of responses" in said and said.count("\n| VAPO |") == 1


@pytest.mark.parametrize("row", ["direct", "tether"])
def test_calibrated_advantages_are_those_of_the_trainer(row: str) -> None:
    """The tabular stage's advantages beside training/past_returns.py, on two steps of a rollout."""
    training = Training(SMALL, ALL_PRICE_ROWS[row], [3, 4])
    history = [ReturnHistory(), ReturnHistory()]
    for _ in range(2):
        rollout = sample(
            SMALL, training.tasks, training.tasks.logits, training.generators, row == "tether"
        )
        values = torch.randn(len(rollout.state), generator=torch.Generator().manual_seed(5))
        lam = length_adaptive_lambda(rollout.tokens.flatten(), 0.05, floor=0.95)
        rewards = place_terminal(rollout.rewards, rollout.bounds, len(rollout.state))
        for seed in range(2):
            found, trust = training.calibrated(seed, rollout, values, rewards, lam)
            kind = ALL_PRICE_ROWS[row].calibration
            expected = from_trainer(seed, rollout, values, rewards, lam, history[seed], kind)
            assert torch.allclose(found, expected, atol=1e-6) and 0 <= trust <= 1


def from_trainer(
    seed: int,
    rollout: Rollout,
    values: Tensor,
    rewards: Tensor,
    lam: Tensor,
    history: ReturnHistory,
    kind: str,
) -> Tensor:
    """What training/past_returns.py makes of a seed's responses, held by one rank."""
    samples = rollout.group.shape[1]
    bounds = rollout.bounds[seed * samples : (seed + 1) * samples + 1]
    tokens = slice(int(bounds[0]), int(bounds[-1]))
    responses = slice(seed * samples, (seed + 1) * samples)
    table = SimpleNamespace(
        shaped_rewards=rollout.rewards[responses],
        group_ids=rollout.group[seed],
        response_lengths=rollout.tokens[seed],
    )
    batch = SimpleNamespace(
        local=SimpleNamespace(
            values=values[tokens],
            response_cu_seqlens=bounds - bounds[0],
            response_tokens=int(bounds[-1] - bounds[0]),
            turn_rewards=None,
        ),
        table=table,
        samples=samples,
        local_slice=torch.arange(samples),
        gather_samples=lambda per_response: per_response,
    )
    known = torch.ones(samples, dtype=torch.bool)
    settings = AdvantageConfig.model_validate({"calibration": kind})
    advantages, _ = calibrated_advantages(
        batch, rewards[tokens], lam[responses], known, history, settings
    )  # type: ignore[arg-type]
    return advantages


def test_the_learning_rate_grid_grows_until_the_best_is_inside() -> None:
    assert max(choose_rate(lambda rate: -abs(rate - 2))) == 8 and 0.5 not in choose_rate(
        lambda rate: -abs(rate - 2)
    )
    assert sorted(choose_rate(lambda rate: -abs(rate - 30))) == [1, 2, 4, 8, 16, 32, 64]
    assert sorted(choose_rate(lambda rate: -abs(rate - 0.4)))[:2] == [0.25, 0.5]


def test_area_counts_responses_and_not_rollouts() -> None:
    course = Course(accuracy=[0.2, 0.4, 0.6], responses=[100, 200, 300])
    assert accuracy_at(course, 50) == 0.2 and accuracy_at(course, 250) == pytest.approx(0.5)
    assert accuracy_at(course, 900) == 0.6 and area(course, 300) == pytest.approx(
        (0.2 + 0.3 + 0.5) / 3, abs=0.005
    )


def test_a_tracked_value_is_of_the_past_alone_and_fades() -> None:
    sums, weights = torch.zeros(2, 3, dtype=torch.float64)
    assert tracked_values(sums, weights, 0.3).tolist() == [0.3] * 3, "nobody has answered yet"
    sums, weights = with_responses(
        sums, weights, torch.tensor([2.0, -1.0, 0.0]), torch.tensor([2.0, 1.0, 0.0])
    )
    assert tracked_values(sums, weights, 0.0).tolist() == pytest.approx([2 / 3, -0.5, 0.0])
    sums, weights = with_responses(
        sums, weights, torch.tensor([-1.0, 0, 0]), torch.tensor([1.0, 0, 0])
    )
    assert float(tracked_values(sums, weights, 0.0)[0]) == pytest.approx(
        (0.875 * 2 - 1) / (0.875 * 2 + 2)
    )


def test_the_price_of_a_small_task_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [
        "steps=4",
        "prompts=10",
        "prompts_per_step=4",
        "rollouts=2",
        "pretraining=1",
        "minibatches=4",
    ]
    rows = ["direct", "direct_tracker", "tracker", "reinforce_direct", "without_critic"]
    price_command(small, ["steps"], rows, "0-1", tmp_path / "price.json")
    figures = json.loads((tmp_path / "price.json").read_text())["settings"]["steps"]
    assert set(figures["rates"]) == set(figures["tables"]["tuned"]) == set(rows)
    assert "less_reinforce_direct" in figures["tables"]["common"]["direct"]
    said = capsys.readouterr().out
    for kind in ("tuned", "common"):
        less = shown(tables.as_interval(figures["tables"][kind]["direct"]["less_reinforce_direct"]))
        assert "±" in less and f"| {less} |" in said, "the tables of the page, with intervals"
    assert said.count("| vapo_direct |") == 2 and "| VAPO |" not in said, (
        "rows that were not run are left out"
    )


@pytest.mark.parametrize("name", ["price", "forks"])
def test_command_prints_the_measured_figures_of_the_page(name: str) -> None:
    page = " ".join((ROOT / "results" / "ablation.md").read_text().split())
    lines = [
        line
        for line in tables.price_report(read_figures(MEASURED / f"{name}.json")).splitlines()
        if line
    ]
    assert [line for line in lines if " ".join(line.split()) not in page] in (
        [],
        ["forks, each row at its own learning rate:"],
    )
    assert sum(line.startswith("| ") for line in lines) > 6
    assert name == "forks" or sum(line.startswith("- ") for line in lines) == 7
