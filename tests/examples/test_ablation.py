"""Planning, resuming and the table of examples/ablation; nothing is trained here."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vapo_megatron.config.load import dump_config, load_config
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput

FOLDER = Path(__file__).parents[2] / "examples" / "ablation"
MODULES = (
    "ablation_config",
    "plan",
    "execute",
    "table",
    "page",
    "reward_decay",
    "task",
)


@pytest.fixture(scope="module")
def ablation() -> ModuleType:
    """The scripts, which find each other in the folder that they are run from, under one name."""
    import importlib

    sys.path.insert(0, str(FOLDER))
    try:
        found = ModuleType("ablation")
        for name in MODULES:
            setattr(found, name, importlib.import_module(name))
        return found
    finally:
        sys.path.remove(str(FOLDER))


def script(*lines: str) -> tuple[str, ...]:
    return (sys.executable, "-c", "\n".join(("import sys, pathlib", *lines)))


def small_job(ablation: ModuleType, folder: Path, name: str, needs: tuple[str, ...] = (), fails: bool = False):
    """A job that writes a file, or says something and fails."""
    result = folder / name.replace("/", "-")
    line = "sys.exit('no such luck')" if fails else f"pathlib.Path({str(result)!r}).write_text('x')"
    return ablation.plan.Job(name, script(line), folder / "none", needs, 1.0, result.is_file)


def metrics(ablation: ModuleType, run_dir: Path, accuracy: dict[int, float], length: float = 30.0) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    rows = [
        {"step": step, "response_length/mean": length, "critic/value_bias_0": -0.5, ablation.plan.EVALUATION: value}
        for step, value in accuracy.items()
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def two_rows(ablation: ModuleType, out: Path, ppo: dict[int, float], vapo: dict[int, float]):
    """The table of VAPO and PPO with these final accuracies by seed."""
    seeds = sorted(vapo)
    config = ablation.ablation_config.read_ablation(FOLDER / "ablation.yaml", [f"seeds={seeds}"], ["ppo"])
    for seed in seeds:
        metrics(ablation, out / f"seed{seed}" / "value_critic", {0: 0.5})
        metrics(ablation, out / f"seed{seed}" / "vapo", {10: 0.6, 20: vapo[seed]}, 40.0)
        metrics(ablation, out / f"seed{seed}" / "ppo", {10: 0.4, 20: ppo[seed]}, 3.0)
    finished = {f"seed{seed}/{name}" for seed in seeds for name in ("value_critic", "vapo", "ppo")}
    return ablation.table.make_table(config, out, finished)


def test_every_row_of_table_1_and_of_the_family_is_planned_at_every_seed(ablation: ModuleType, tmp_path: Path) -> None:
    config = ablation.ablation_config.read_ablation(FOLDER / "ablation.yaml", [], [])
    jobs = {job.name: job for job in ablation.plan.plan_jobs(config, tmp_path)}
    presets = {row.preset for row in config.rows}
    table_1 = {path.stem for path in (FOLDER.parents[1] / "vapo_megatron/config/presets").glob("vapo*.yaml")}
    assert table_1 | {"ppo", "vc_ppo", "grpo", "dapo", "rloo", "reinforce_pp"} <= presets
    assert len(config.seeds) >= 3
    for seed in config.seeds:
        for row in config.rows:
            assert f"preset={row.preset}" in jobs[f"seed{seed}/{row.name}"].argv
    assert len(jobs) == len(config.seeds) * (4 + len(config.rows))
    order = list(jobs)
    assert all(order.index(need) < order.index(job.name) for job in jobs.values() for need in job.needs)


def test_rows_share_all_but_what_they_are_about(ablation: ModuleType, tmp_path: Path) -> None:
    config = ablation.ablation_config.read_ablation(FOLDER / "ablation.yaml", ["seeds=[1]"], [])
    found = {}
    for job in ablation.plan.plan_jobs(config, tmp_path):
        if "train" in job.argv:
            arguments = job.argv[job.argv.index("train") + 1 :]
            found[job.name] = load_config(TrainConfig, Path(arguments[0]), list(arguments[1:]), ablation.plan.PRESETS)
    rows = {name.partition("/")[2]: settings for name, settings in found.items() if "value_critic" not in name}
    for settings in rows.values():
        assert settings.batch.prompts_per_step * settings.batch.samples_per_prompt == 256
        assert settings.actor == rows["vapo"].actor and settings.reward == rows["vapo"].reward
        assert not settings.value_pretraining.enabled and settings.run.steps == config.steps
    assert rows["vapo"].critic.init == rows["vc_ppo"].critic.init == "value_checkpoint"
    assert rows["ppo"].critic.init == rows["without_value_pretraining"].critic.init == "reward_model"
    assert rows["ppo"].critic.optimizer.lr < rows["ppo"].actor.optimizer.lr / 4
    pretraining = found["seed1/value_critic"]
    assert pretraining.value_pretraining.enabled and pretraining.critic.init == "policy"
    assert rows["vapo"].critic.init_path == f"{tmp_path}/seed1/value_critic/hf/value_pretrained/critic"


def test_rows_are_chosen_by_name_and_a_wrong_name_is_refused(ablation: ModuleType) -> None:
    read = ablation.ablation_config.read_ablation
    assert [row.name for row in read(FOLDER / "ablation.yaml", [], ["grpo"]).rows] == ["vapo", "grpo"]
    with pytest.raises(BadInput, match="no row grppo"):
        read(FOLDER / "ablation.yaml", [], ["grppo"])


def test_a_run_is_finished_by_its_last_step_and_its_config(ablation: ModuleType, tmp_path: Path) -> None:
    config = ablation.ablation_config.read_ablation(FOLDER / "ablation.yaml", ["seeds=[1]", "steps=2"], ["vapo"])
    job = next(job for job in ablation.plan.plan_jobs(config, tmp_path) if job.name == "seed1/vapo")
    arguments = job.argv[job.argv.index("train") + 1 :]

    def write(overrides: list[str], steps: int) -> None:
        settings = load_config(TrainConfig, Path(arguments[0]), [*arguments[1:], *overrides], ablation.plan.PRESETS)
        dump_config(settings, job.directory / "config.yaml")
        metrics(ablation, job.directory, {step: 0.5 for step in range(1, steps + 1)})

    assert not job.finished()
    write([], 1)
    assert not job.finished()
    write(["run.overwrite=true"], 2)
    assert not job.finished(), "the model is not there"
    (job.directory / "hf" / "final").mkdir(parents=True)
    assert job.finished()
    write(["actor.optimizer.lr=1.0e-4"], 2)
    assert not job.finished()
    (job.directory / "config.yaml").write_text("a_key_of_another_version: 1\n")
    assert not job.finished()


def test_jobs_run_in_order_once_and_a_failure_stops_only_what_needs_it(ablation: ModuleType, tmp_path: Path) -> None:
    jobs = [
        small_job(ablation, tmp_path, "seed1/a"),
        small_job(ablation, tmp_path, "seed1/b", fails=True),
        small_job(ablation, tmp_path, "seed1/needs_b", ("seed1/b",)),
        small_job(ablation, tmp_path, "seed1/needs_a", ("seed1/a",)),
    ]
    said: list[str] = []
    outcome = ablation.execute.execute(jobs, 2, tmp_path, said.append)
    assert sorted(outcome.done) == ["seed1/a", "seed1/needs_a"]
    assert "no such luck" in outcome.failed["seed1/b"] and outcome.failed["seed1/needs_b"] == "needs seed1/b"
    assert len(said) == 3 and any("FAILED seed1/b" in line for line in said)
    assert set(ablation.execute.seconds_taken(tmp_path)) == {"seed1/a", "seed1/needs_a"}
    again = ablation.execute.execute([jobs[0], jobs[3]], 2, tmp_path, said.append)
    assert again.skipped == ["seed1/a", "seed1/needs_a"] and not again.done and len(said) == 3


def test_what_stands_on_a_job_that_runs_again_runs_again(ablation: ModuleType, tmp_path: Path) -> None:
    jobs = [
        small_job(ablation, tmp_path, "seed1/cold_start"),
        small_job(ablation, tmp_path, "seed1/vapo", ("seed1/cold_start",)),
        small_job(ablation, tmp_path, "seed2/cold_start"),
    ]
    for job in jobs:
        (tmp_path / job.name.replace("/", "-")).write_text("x")
    assert ablation.execute.unfinished(jobs) == []
    (tmp_path / "seed1-cold_start").unlink()
    assert [job.name for job in ablation.execute.unfinished(jobs)] == ["seed1/cold_start", "seed1/vapo"]


def test_time_left_follows_what_jobs_really_take(ablation: ModuleType, tmp_path: Path) -> None:
    job = small_job(ablation, tmp_path, "seed2/vapo")
    expected = ablation.execute.pace({"seed1/vapo": 50.0}, [job])
    assert ablation.execute.time_left([job], [(job, 20.0)], 2, expected) == (50 + 30) / 2
    assert ablation.execute.time_left([job], [(job, 70.0)], 1, expected) == 50


def test_an_effect_is_shown_only_where_every_seed_says_so(ablation: ModuleType, tmp_path: Path) -> None:
    cases = {
        "shown": ({1: 0.3, 2: 0.4}, {1: 0.8, 2: 0.9}),
        "reversed": ({1: 0.8, 2: 0.9}, {1: 0.3, 2: 0.4}),
        "not resolved": ({1: 0.3, 2: 0.9}, {1: 0.8, 2: 0.8}),
        "one seed": ({1: 0.3}, {1: 0.8}),
    }
    for effect, (ppo, vapo) in cases.items():
        table = two_rows(ablation, tmp_path / effect, ppo, vapo)
        assert table.effect(table.of("ppo")) == effect
    close = two_rows(ablation, tmp_path / "close", {1: 0.80, 2: 0.80}, {1: 0.81, 2: 0.81})
    assert close.effect(close.of("ppo")) == "not resolved", "below the error of an evaluation"


def test_the_table_holds_the_measured_figures(ablation: ModuleType, tmp_path: Path) -> None:
    table = two_rows(ablation, tmp_path, {1: 0.25, 2: 0.35}, {1: 0.85, 2: 0.95})
    text = ablation.table.markdown(table)
    (line,) = (line for line in text.splitlines() if line.startswith("| vanilla PPO"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:5] == ["5", "0.400 ± 0.000", "0.300 ± 0.071", "0.250 to 0.350"]
    assert cells[5:] == ["+0.600 ± 0.000", "shown", "3.0 ± 0.0"]
    ablation.table.write_table(table, [], tmp_path)
    whole = json.loads((tmp_path / "table.json").read_text())
    assert whole["start"] == {"1": 0.5, "2": 0.5}
    assert whole["rows"][1]["seeds"]["2"]["accuracy"] == {"10": 0.4, "20": 0.35}


def test_the_page_is_refused_for_a_part_of_the_ablation(ablation: ModuleType, tmp_path: Path) -> None:
    table = two_rows(ablation, tmp_path, {1: 0.3}, {1: 0.8})
    config = ablation.ablation_config.read_ablation(FOLDER / "ablation.yaml", ["seeds=[1]"], ["ppo"])
    with pytest.raises(BadInput, match="--docs"):
        ablation.page.write_page(config, table, [], tmp_path, tmp_path / "docs")
    assert not (tmp_path / "docs").exists()


def test_a_late_reward_is_learnt_late_only_where_lambda_critic_is_below_one(ablation: ModuleType) -> None:
    ppo, _, vc_ppo, _ = ablation.reward_decay.SETTINGS
    late = {s.name: ablation.reward_decay.learn(s, 150, 2, 70, 20) for s in (ppo, vc_ppo)}
    soon = ablation.reward_decay.learn(ppo, 10, 2, 70, 20)
    slow, fast = late[ppo.name].learnt_after(), late[vc_ppo.name].learnt_after()
    assert all(count is not None and count < 50 for count in [*fast, *soon.learnt_after()])
    assert all(count is None or count > 50 for count in slow)
    assert late[ppo.name].value_error[0] > 0.4 > 0.2 > late[vc_ppo.name].value_error[0]


def test_a_solution_without_slips_is_the_answer(ablation: ModuleType) -> None:
    task = ablation.ablation_config.Task(slip_share=0.0, direct_share=0.0)
    problems = ablation.task.Problems(task, seed=5)
    assert not set(problems.training) & set(problems.evaluation)
    for pair in problems.evaluation:
        words = problems.solution(pair).split()
        assert len(words) == 2 * pair[1] + 2 and words[-3] == "c0"
        assert words[-1] == problems.row(pair)["answer"] == str(problems.answer(pair))
