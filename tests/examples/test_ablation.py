"""Task, planning, resuming, figures and page of examples/ablation; what is trained is a long
test."""

import json
import random
import shutil
from pathlib import Path

import psutil
import pytest
import yaml

from examples.ablation import execute as execution
from examples.ablation import forked, transformer_tables, tuned_tables
from examples.ablation.ablation_config import EVALUATED, Task, read_ablation
from examples.ablation.forked import SharedEngine, of_engine
from examples.ablation.page import MEASURED, ROOT, TABULAR, render, render_pages
from examples.ablation.plan import EVALUATION, POLICY, PRESETS, Job, plan_jobs
from examples.ablation.results import accuracy_at, collect, reached, read_figures
from examples.ablation.run import present
from examples.ablation.task import LOST, PROMPT_TOKENS, Problems, longest_sequence, make_task
from vapo_megatron.config.data import PromptTemplate
from vapo_megatron.config.load import dump_config, load_config
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import BadInput, RunFailed
from vapo_megatron.models.registry import read_spec
from vapo_megatron.rewards.math import grade_response
from vapo_megatron.weights.adapters import check_adapter

FOLDER = Path(__file__).parents[2] / "examples" / "ablation"
SHORT, LONG, TUNED, VALUES = (
    FOLDER / f"ablation{variant}.yaml" for variant in ("", "_long", "_tuned", "_values")
)


# The task.


def test_no_evaluation_problem_repeats_a_training_start() -> None:
    problems = Problems(Task(), seed=3)
    training = {problem[:2] for problem in problems.training}
    evaluation = {problem[:2] for problem in problems.evaluation}
    assert not training & evaluation and len(evaluation) == round(0.3 * 40 * 3)
    assert (
        {m for _, _, m in problems.evaluation} == {m for _, _, m in problems.training} == {0, 2, 7}
    )


def test_best_chain_is_graded_correct_at_every_length_and_fits(tmp_path: Path) -> None:
    task = Task(cold_start_rows=50)
    make_task(task, 5, tmp_path)
    problems = Problems(task, 5)
    tokenizer = TextTokenizer(tmp_path / "model", PromptTemplate())
    lengths = set()
    for problem in problems.evaluation:
        row = problems.row(problem)
        words = problems.chain(problem, best=True)
        ids = tokenizer.encode_response(" ".join(words))
        assert (
            len(ids) == len(words) and len(tokenizer.encode_prompt(row["problem"])) == PROMPT_TOKENS
        )
        assert PROMPT_TOKENS + len(ids) + 1 <= longest_sequence(task)
        assert grade_response(row["answer"], tokenizer.decode(ids), "hash").correct
        assert not grade_response(row["answer"], tokenizer.decode(ids[:-1]), "hash").correct
        lengths.add(len(ids))
    assert max(lengths) > 2 * min(lengths)


def test_wrong_operation_shows_at_its_end_and_leaves_luck_alone() -> None:
    task = Task(slip_share=0.0, hard_right=1e-9, direct_share=0.0, break_share=0.0)
    problems = Problems(task, seed=2)
    right = total = 0
    for problem in problems.training:
        state, _, m = problem
        words = problems.chain(problem)
        width = m + 4
        steps = [words[at : at + width] for at in range(0, len(words) - 2, width)]
        lost = False
        for step in steps:
            operation = step[0][0]
            here = int(step[0][1:])
            assert here == state and step[1:-2] == [f"k{left}" for left in range(m, -1, -1)]
            assert (operation == LOST) == lost, "the step before has told"
            lost = lost or operation != problems.right[here]
            assert step[-1].startswith("b") == lost
            state = int(step[-1].removeprefix("b"))
        if lost:
            total += 1
            right += words[-1] == problems.answer(problem)
        else:
            assert words[-1] == problems.answer(problem)
    assert total > 100 and right / total < 0.08


def test_solutions_end_at_any_token_as_often_as_stated() -> None:
    task = Task(direct_share=0.3, break_share=0.4)
    problems = Problems(task, seed=2)
    places = set()
    whole = 0
    bare = 0
    problem = next(p for p in problems.training if p[2] == 2 and p[1] == 8)
    for _ in range(3000):
        words = problems.solution(problem).split()
        assert words[-2] == "####" and words.count("####") == 1
        bare += len(words) == 2
        whole += len(words) == 8 * 6 + 2
        places.add(len(words) - 2)
    assert places == set(range(0, 8 * 6 + 1))
    assert bare / 3000 == pytest.approx(0.3, abs=0.03) and whole / 3000 == pytest.approx(
        0.3, abs=0.03
    )


def test_hard_states_are_wrong_by_majority_and_the_others_rarely() -> None:
    problems = Problems(Task(hard_right=0.3, slip_share=0.05), seed=2)
    problems.rng = random.Random(0)
    for state in range(40):
        share = sum(problems.operation(state) == problems.right[state] for _ in range(500)) / 500
        assert share == pytest.approx(0.3 if state in problems.hard else 0.95, abs=0.08)
    assert len(problems.hard) == 10


def test_seed_gives_the_same_bytes_and_another_seed_another_task(tmp_path: Path) -> None:
    task = Task(cold_start_rows=40)
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_task(task, seed, tmp_path / name)
    for name in ("train.jsonl", "eval.jsonl", "sft.jsonl", "model/model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    config = read_ablation(
        SHORT,
        ["seeds=[3]", "settings=[{name: steps, about: x, task: {cold_start_rows: 40}}]"],
        [],
        [],
    )
    job = plan_jobs(config, tmp_path)[0]
    make_task(task, 3, job.directory)
    assert job.name == "steps/seed3/task" and job.finished()
    assert (tmp_path / "a" / "sft.jsonl").read_bytes() != (
        tmp_path / "c" / "sft.jsonl"
    ).read_bytes()


# The plan.


@pytest.mark.parametrize("file", [SHORT, pytest.param(LONG, marks=pytest.mark.full)])
def test_every_row_is_planned_at_every_seed_after_what_it_needs(file: Path, tmp_path: Path) -> None:
    config = read_ablation(file, [], [], [])
    jobs = {job.name: job for job in plan_jobs(config, tmp_path)}
    table_1 = {path.stem for path in PRESETS.glob("vapo*.yaml")} - {
        "vapo_without_value_pretraining",
        "vapo_regression",  # of the method's own example
    }
    steps = next(setting for setting in config.settings if setting.name == "steps")
    assert table_1 | {"ppo", "vc_ppo", "grpo", "dapo"} <= {
        row.preset for row in config.rows_of(steps)
    }
    for setting in config.settings:
        for seed in config.seeds:
            for row in config.rows_of(setting):
                assert f"preset={row.preset}" in jobs[f"{setting.name}/seed{seed}/{row.name}"].argv
    order = list(jobs)
    assert all(
        order.index(need) < order.index(job.name) for job in jobs.values() for need in job.needs
    )
    assert len(config.seeds) >= 5


def test_rows_keep_papers_proportions_and_differ_in_one_thing(
    tmp_path: Path,
) -> None:
    rows = {}
    for job in plan_jobs(read_ablation(LONG, ["seeds=[1]"], [], ["steps"]), tmp_path):
        if "train" in job.argv:
            arguments = job.argv[job.argv.index("train") + 1 :]
            rows[job.name.split("/")[2]] = load_config(
                TrainConfig, Path(arguments[0]), list(arguments[1:]), PRESETS
            )
    pretraining = rows.pop("value_critic")
    for settings in rows.values():
        assert settings.batch.prompts_per_step * settings.batch.samples_per_prompt == 128
        assert settings.actor == rows["vapo"].actor and not settings.value_pretraining.enabled
        assert (settings.reward.correct, settings.reward.incorrect) == (1.0, -1.0)
        assert settings.critic.optimizer.lr == pytest.approx(2 * settings.actor.optimizer.lr)
        assert settings.algorithm.advantage.length_adaptive_alpha == 0.05
    assert pretraining.value_pretraining.enabled and pretraining.critic.init == "policy"
    updates = pretraining.value_pretraining.updates(128)
    assert pretraining.critic.optimizer.decay_steps == updates
    assert rows["vapo"].critic.init == rows["vc_ppo"].critic.init == "value_checkpoint"
    assert (
        rows["ppo"].critic.init == rows["without_value_pretraining"].critic.init == "reward_model"
    )
    advantage = {name: settings.algorithm.advantage for name, settings in rows.items()}
    assert (
        advantage["without_decoupled_gae"].lambda_critic == 0.0
        and advantage["vapo"].lambda_critic == 1.0
    )
    assert advantage["without_length_adaptive_gae"].lambda_policy == 0.0
    assert (
        advantage["lambda_policy_095"].lambda_policy
        == advantage["lambda_critic_095"].lambda_critic
        == 0.95
    )


def test_tuned_row_has_own_rate_multiple_and_fitting_adapters(
    tmp_path: Path,
) -> None:
    config = read_ablation(TUNED, ["seeds=[1]"], [], [])
    make_task(config.settings[0].task, 1, tmp_path)
    spec = read_spec(tmp_path / "model")
    jobs = {
        job.name.split("/")[2]: job for job in plan_jobs(config, tmp_path) if "train" in job.argv
    }
    for row in config.rows:
        arguments = jobs[row.name].argv[jobs[row.name].argv.index("train") + 1 :]
        settings = load_config(TrainConfig, Path(arguments[0]), list(arguments[1:]), PRESETS)
        expected = {"actor": 2e-4 * row.rate, "critic": 4e-4 * row.rate}
        for override in row.overrides:
            if (key := override.partition(".optimizer.lr=")[0]) in expected:
                expected[key] = float(override.partition("=")[2])
        assert settings.actor.optimizer.lr == pytest.approx(expected["actor"]), row.name
        assert settings.critic.optimizer.lr == pytest.approx(expected["critic"]), row.name
        check_adapter(spec, settings.model.adapter, settings.critic, row.name)
    assert all(
        "steps/seed1/cold_start" in job.needs
        for name, job in jobs.items()
        if name != "value_critic"
    )


def test_rows_with_values_by_regression_have_no_model_as_critic(tmp_path: Path) -> None:
    config = read_ablation(VALUES, ["seeds=[1]"], [], [])
    jobs = {job.name.split("/")[2]: job for job in plan_jobs(config, tmp_path)}
    regressions = [row for row in config.rows if row.critic == "regression"]
    assert [row.name for row in regressions] == ["reinforce_regression", "vapo_regression"]
    for row in regressions:
        argv = jobs[row.name].argv
        place = argv.index("train")
        overrides = list(argv[place + 2 :])
        settings = load_config(TrainConfig, Path(argv[place + 1]), overrides, PRESETS)
        assert settings.critic.kind == "regression"
        assert settings.actor.optimizer.lr == pytest.approx(2e-4 * row.rate)
        assert settings.samples == 128


def test_names_choose_rows_and_settings_and_wrong_ones_refused() -> None:
    config = read_ablation(LONG, [], ["grpo"], ["clip", "insight"])
    assert [[row.name for row in config.rows_of(setting)] for setting in config.settings] == [
        ["vapo", "grpo"]
    ] * 2
    only = read_ablation(LONG, [], ["ppo"], ["clip"])
    assert [row.name for row in only.rows_of(only.settings[0])] == ["vapo"], "clip has no row ppo"
    for arguments in ((["grppo"], []), ([], ["stepps"])):
        with pytest.raises(BadInput, match="expected some of"):
            read_ablation(SHORT, [], *arguments)


def test_every_run_ends_with_an_evaluation() -> None:
    assert yaml.safe_load((FOLDER / "train.yaml").read_text())["evaluation"]["every"] == EVALUATED
    with pytest.raises(BadInput, match="steps is 13; expected a multiple of 4"):
        read_ablation(SHORT, ["steps=13"], [], [])


def test_a_run_is_finished_by_its_last_step_and_its_config(tmp_path: Path) -> None:
    config = read_ablation(SHORT, ["seeds=[1]", "steps=4"], ["vapo"], [])
    job = next(job for job in plan_jobs(config, tmp_path) if job.name == "steps/seed1/vapo")
    arguments = job.argv[job.argv.index("train") + 1 :]

    def write(overrides: list[str], steps: int) -> None:
        settings = load_config(
            TrainConfig, Path(arguments[0]), [*arguments[1:], *overrides], PRESETS
        )
        dump_config(settings, job.directory / "config.yaml")
        (job.directory / "metrics.jsonl").write_text(
            "".join(f'{{"step": {n + 1}}}\n' for n in range(steps))
        )

    job.directory.mkdir(parents=True)
    assert not job.finished()
    write([], 3)
    assert not job.finished()
    write(["run.overwrite=true"], 4)
    assert not job.finished(), "the model is not there"
    (job.directory / "hf" / "final").mkdir(parents=True)
    assert job.finished()
    write([*of_engine("http://127.0.0.1:9")], 4)
    assert job.finished(), "a shared engine's address and key are no part of the request"
    write(["actor.optimizer.lr=1.0e-5"], 4)
    assert not job.finished()


# Running.


def small_job(
    folder: Path, name: str, needs: tuple[str, ...] = (), fails: bool = False, refusal: str = ""
) -> Job:
    """A job that writes a file, or says something and fails."""
    result = folder / name.replace("/", "-")
    line = "sys.exit('no such luck')" if fails else f"pathlib.Path({str(result)!r}).write_text('x')"
    argv = ("ablation_job", f"import sys, pathlib\n{line}")
    return Job(name, argv, folder / "none", needs, 1.0, result.is_file, refusal=lambda: refusal)


def test_jobs_run_once_and_failures_stop_dependents_only(tmp_path: Path) -> None:
    jobs = [
        small_job(tmp_path, "steps/seed1/a"),
        small_job(tmp_path, "steps/seed1/b", fails=True),
        small_job(tmp_path, "steps/seed1/needs_b", ("steps/seed1/b",)),
        small_job(tmp_path, "steps/seed1/needs_a", ("steps/seed1/a",)),
        small_job(
            tmp_path, "steps/seed1/blind", ("steps/seed1/a",), refusal="its critic explains 0.1"
        ),
    ]
    said: list[str] = []
    outcome = execution.execute(jobs, 2, tmp_path, said.append)
    assert sorted(outcome.done) == ["steps/seed1/a", "steps/seed1/needs_a"]
    assert "no such luck" in outcome.failed["steps/seed1/b"]
    assert outcome.failed["steps/seed1/needs_b"] == "needs steps/seed1/b"
    assert outcome.refused == {"steps/seed1/blind": "its critic explains 0.1"}
    assert any(line.startswith("NOT RUN steps/seed1/blind") for line in said)
    stands = execution.as_it_stands(jobs)
    assert (
        stands.skipped == ["steps/seed1/a", "steps/seed1/needs_a"]
        and stands.refused == outcome.refused
    )
    again = execution.execute([jobs[0], jobs[3]], 2, tmp_path, said.append)
    assert again.skipped == ["steps/seed1/a", "steps/seed1/needs_a"] and not again.done


@pytest.mark.full
def test_a_run_on_a_shared_engine_counts_as_finished(tmp_path: Path) -> None:
    """A row of the ablation, on its engine, from a random model."""
    task = Task(fewest_steps=2, most_steps=3, cold_start_rows=64)
    sizes = ["batch.prompts_per_step=2", "batch.samples_per_prompt=2"]
    setting = {
        "name": "steps",
        "about": "small",
        "task": task.model_dump(mode="json"),
        "overrides": [*sizes, "algorithm.update.minibatch_size=2"],
    }
    overrides = ["seeds=[1]", "steps=4", f"settings=[{json.dumps(setting)}]"]
    jobs = plan_jobs(read_ablation(SHORT, overrides, ["grpo"], []), tmp_path)
    folder = tmp_path / "steps" / "seed1"
    make_task(task, 1, folder / "task")
    shutil.copytree(folder / "task" / "model", folder / POLICY)
    grpo = [job for job in jobs if job.name == "steps/seed1/grpo"]
    forked.import_program()
    outcome = execution.execute(grpo, 1, tmp_path, print)
    assert outcome.done == ["steps/seed1/grpo"] and not outcome.failed
    assert execution.execute(grpo, 1, tmp_path, print).skipped == ["steps/seed1/grpo"]


def test_what_stands_on_a_job_that_runs_again_runs_again(tmp_path: Path) -> None:
    jobs = [
        small_job(tmp_path, "steps/seed1/cold_start"),
        small_job(tmp_path, "steps/seed1/vapo", ("steps/seed1/cold_start",)),
        small_job(tmp_path, "steps/seed2/cold_start"),
    ]
    for job in jobs:
        (tmp_path / job.name.replace("/", "-")).write_text("x")
    assert execution.unfinished(jobs) == []
    (tmp_path / "steps-seed1-cold_start").unlink()
    assert [job.name for job in execution.unfinished(jobs)] == [
        "steps/seed1/cold_start",
        "steps/seed1/vapo",
    ]


def test_jobs_of_one_kind_share_an_engine_until_another_kind(tmp_path: Path) -> None:
    code = "import os, time; sum(range(10**7))\n"
    code += "print(f'engine at http://127.0.0.1:{os.getpid()}, log x', flush=True); time.sleep(60)"
    engine = SharedEngine(tmp_path / "engine.log")
    try:
        first = engine.serving(("ablation_job", code))
        assert engine.serving(("ablation_job", code)) == first and engine.cpu_seconds() > 0
        second = engine.serving(("ablation_job", code, "of another setting"))
        assert second != first
    finally:
        engine.close()
    for url in (first, second):
        assert not psutil.pid_exists(int(url.rpartition(":")[2]))
    with pytest.raises(RunFailed, match="did not start"):
        engine.serving(("ablation_job", "raise SystemExit(3)"))


def test_time_left_follows_what_jobs_really_take(tmp_path: Path) -> None:
    job = small_job(tmp_path, "steps/seed2/vapo")
    expected = execution.pace({"steps/seed1/vapo": 50.0, "clip/seed1/vapo": 500.0}, [job])
    assert execution.time_left([job], [(job, 20.0)], 2, expected) == (50 + 30) / 2


# Figures and page.


CPU = {"value_critic": 30.0, "vapo": 8.0, "grpo": 12.0, "without_clip_higher": 8.0}


def finished_runs(out: Path, explained: float = 0.3) -> tuple:
    """Two seeds of VAPO and GRPO as run directories, and their config."""
    config = read_ablation(SHORT, ["seeds=[1, 2]", "steps=4"], ["grpo", "without_clip_higher"], [])
    accuracy = {"vapo": (0.80, 0.92), "grpo": (0.70, 0.84), "without_clip_higher": (0.80, 0.925)}
    for job in plan_jobs(config, out):
        _, seed, name = job.name.split("/")
        if "train" not in job.argv:
            continue
        arguments = job.argv[job.argv.index("train") + 1 :]
        job.directory.mkdir(parents=True)
        settings = load_config(TrainConfig, Path(arguments[0]), list(arguments[1:]), PRESETS)
        dump_config(settings, job.directory / "config.yaml")
        if name == "value_critic":
            rows: list[dict] = [{"step": 0, EVALUATION: 0.4}]
            last = {f"value_pretraining/value_bias_{p}": -0.05 for p in (0, 25, 50, 75, 95)}
            names = ("explained_variance", "baseline_loo_ev", "baseline_position_ev")
            last |= {f"value_pretraining/{key}": explained for key in names}
            rows.append({"step": 0, "value_pretraining/iteration": 224.0} | last)
        else:
            shared = {"response_length/mean": 60.0, "time/step": 2.0}
            shared |= {
                "actor/approx_kl": 1e-3,
                "actor/clip_fraction_low": 0.0,
                "actor/clip_fraction_high": 0.01,
            }
            shared |= {
                "accuracy/mean": 0.7,
                "response_length/min": 3.0,
                "response_length/max": 70.0,
            }
            shared |= {"dynamic_sampling/prompts": 16.0} if name == "grpo" else {}  # as DAPO has it
            rows = [shared | {"step": step} for step in range(1, 5)]
            for step, value in zip((2, 4), accuracy[name], strict=True):
                rows[step - 1][EVALUATION] = value + 0.01 * (seed == "seed2" and name == "vapo")
        (job.directory / "metrics.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    used = {
        f"steps/seed{seed}/{name}": {"seconds": 99.0, "cpu_seconds": s}
        for seed in (1, 2)
        for name, s in CPU.items()
    }
    (out / execution.COSTS_FILE).write_text(json.dumps(used))
    return config, {job.name for job in plan_jobs(config, out)}


def test_figures_count_the_responses_of_value_pretraining(tmp_path: Path) -> None:
    config, names = finished_runs(tmp_path)
    setting = collect(config, tmp_path, names, {})["settings"]["steps"]
    vapo, grpo = (setting["rows"][name]["seeds"]["1"] for name in ("vapo", "grpo"))
    before = 16 * 128
    assert vapo["responses"] == [before + 128 * n for n in (1, 2, 3, 4)]
    assert grpo["responses"] == [128, 256, 384, 512]
    assert vapo["cpu_seconds"] == [32, 34, 36, 38] and grpo["cpu_seconds"] == [3, 6, 9, 12]
    assert reached(vapo, 0.4, 0.85, "responses") == before + 512
    assert reached(grpo, 0.4, 0.85, "responses") is None
    assert accuracy_at(grpo, (0, 0.4), "responses", 128) == pytest.approx(0.55), (
        "half way from 0.4 to 0.7"
    )
    assert accuracy_at(vapo, (before, 0.4), "responses", 1000) == 0.4, (
        "value pretraining moves no policy"
    )
    assert accuracy_at(grpo, (0, 0.4), "responses", 513) is None
    table = transformer_tables.accuracy_table(setting, 4)
    (line,) = (line for line in table.splitlines() if line.startswith("| GRPO"))
    assert "+0.085 ± 0.064" in line, "(0.08 + 0.09) / 2, t(1) * 0.005"
    assert "| 0.770 ± 0.000 | – |" in line and "correct" not in grpo, (
        "groups were dropped: the rest says nothing"
    )
    assert "| GRPO | 256 | 256 | 256 | not reached | 128 | 3.00 |" in transformer_tables.cost_table(
        setting
    )


def test_a_lead_is_over_what_both_rows_have_spent(tmp_path: Path) -> None:
    config, names = finished_runs(tmp_path)
    setting = collect(config, tmp_path, names, {})["settings"]["steps"]
    setting["rows"]["grpo"]["more_steps"] = 16
    assert tuned_tables.least_spent(setting, "responses") == 512, "GRPO's four steps"
    assert not tuned_tables.area(
        setting, setting["rows"]["without_clip_higher"] | {"critic": "none"}, "responses"
    )
    area = tuned_tables.area(setting, setting["rows"]["grpo"], "responses")
    assert area[1] == pytest.approx((0.55 + 0.77) / 2, abs=1e-3), "0.4 to 0.7 to 0.84"
    still = tuned_tables.area(setting, setting["rows"]["vapo"], "responses")
    assert still == {1: 0.4, 2: 0.4}, (
        "VAPO's value pretraining draws more than that, and moves no policy"
    )
    lead = tuned_tables.lead(setting, "grpo", "vapo")
    assert (
        lead is not None
        and lead.mean == pytest.approx(0.26, abs=1e-3)
        and lead.half == pytest.approx(0, abs=1e-9)
    )


@pytest.mark.parametrize("tuned", [False, True])
def test_the_command_ends_with_the_tables_of_the_page(
    tuned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, names = finished_runs(tmp_path)
    present(config, tmp_path, execution.Outcome(skipped=sorted(names)), "as run", None, 0.0, tuned)
    told = capsys.readouterr().out
    assert (
        "| GRPO |" in told
        and ("area by responses" in told) == tuned
        and ("seconds of the processor" in told) != tuned
    )
    measured = read_figures(MEASURED / "tuned.json")
    report = tuned_tables.tuned_report(
        measured["settings"]["steps"], measured["steps"]
    ).splitlines()
    page = (ROOT / "results" / "ablation.md").read_text().splitlines()
    assert [line for line in report if line not in page] == [], (
        "the printed figures are on the page"
    )
    assert (
        sum(line.startswith("- ") for line in report) == 5
        and sum(line.startswith("|---") for line in report) >= 1
    )


def test_the_page_says_what_was_not_run_and_what_is_missing(tmp_path: Path) -> None:
    config, names = finished_runs(tmp_path, explained=0.1)
    refused = {"steps/seed2/vapo": "its critic explains 0.100 held out, below 0.2"}
    figures = collect(config, tmp_path, names - {"steps/seed2/vapo", "steps/seed2/grpo"}, refused)
    tables = [read_figures(MEASURED / f"{name}.json") for name in TABULAR]
    page = render("results.md.j2", *tables, figures | {"command": "as run"}, None)
    assert "- GRPO: after equally many steps VAPO is ahead in none, behind in none" in page, (
        "one seed has no interval"
    )
    assert "not run: VAPO, seed 2: its critic explains 0.100" in page
    assert "steps, GRPO: seeds 2" in page and "`as run`" in page
    assert (
        "without clip-higher: fewer than 3 seeds, which tell nothing; clipped high 1.000 % of "
        "tokens, VAPO's 1.000 %" in page
    )
    jobs = {job.name: job for job in plan_jobs(config, tmp_path)}
    assert (
        "below 0.2" in jobs["steps/seed1/vapo"].refusal() and not jobs["steps/seed1/grpo"].refusal()
    )


def test_the_pages_are_rendered_from_the_figures() -> None:
    for page, text in render_pages().items():
        assert (ROOT / page).read_text() == text, "python -m examples.ablation.page writes it"


def test_the_short_page_says_when_a_stage_was_not_run(tmp_path: Path) -> None:
    for name in TABULAR:
        shutil.copy(MEASURED / f"{name}.json", tmp_path)
    pages = render_pages(tmp_path)
    assert "With transformers**, every row" not in pages["docs/ablation.md"]
    assert "Not measured with these settings yet" in pages["results/ablation.md"]
