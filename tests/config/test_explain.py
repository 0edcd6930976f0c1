"""The line that a wrong config ends with, word for word: where it comes from, key, value,
expectation, remedy."""

from pathlib import Path

import pytest

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.base import Section
from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.explain import named_here
from vapo_megatron.config.load import load_config
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput

REQUIRED = ("model.path=m", "data.train=t", "sampling.max_new_tokens=16")
PLAN = (
    "it belongs to `vapo-megatron plan`, `doctor` or `critic`: give it there, or in a YAML that "
    "extends this"
)
LORA = (
    "here adapters are model.adapter, trained with actor.kind=adapter or critic.kind=adapter: "
    "docs/lora.md"
)
TOP = (
    "preset, run, cluster, model, actor, critic, reference, data, batch, sampling, rollout, "
    "reward, algorithm, value_pretraining, evaluation, export, checkpoint, monitoring, robustness"
)
QUOTED = "(quote it: key='\"...\"' on a command line)"
SCALAR = f"expected a valid boolean or a valid integer or a valid number or a text {QUOTED}"
EVAL = "data.eval=[{name: a, path: p}]"
METRICS = (
    "evaluation/a_avg@8, evaluation/a_pass@8, evaluation/a_maj@8, evaluation/a_response_length, "
    "evaluation/a_truncated"
)
BEST = "checkpoint.keep.best"
LONG = "x" * 99


def line(*overrides: str, model: type[Section] = TrainConfig, path: Path | None = None) -> str:
    with pytest.raises(BadInput) as refused:
        load_config(model, path, overrides, PRESETS)
    return str(refused.value)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("run.lora_rank=3", f"unknown key run.lora_rank; {LORA}"),
        ("actor.lora.rank=3", f"unknown key actor.lora.rank; {LORA}"),
        (
            "trainer.val_only=true",
            "unknown key trainer.val_only; evaluation alone is a command: vapo-megatron evaluate "
            "CONFIG --checkpoint final",
        ),
        (
            "trainer.foo=1",
            "unknown key trainer.foo; it looks like one of verl's: docs/configuration.md has the "
            "names here",
        ),
        (
            "actor_rollout_ref.x.y=1",
            "unknown key actor_rollout_ref.x.y; it looks like one of verl's: "
            "docs/configuration.md has the names here",
        ),
        ("hardware.kind=x", f"unknown key hardware.kind; {PLAN}"),
        ("critic_probes.prompts=3", f"unknown key critic_probes.prompts; {PLAN}"),
        ("plan.gpus=1", f"unknown key plan.gpus; {PLAN}"),
        ("run.stesp=1", "unknown key run.stesp; did you mean run.steps?"),
        ("zzzzz=1", f"unknown key zzzzz; known keys at the top: {TOP}"),
        ("zzz.yyy=1", f"unknown key zzz.yyy; known keys at the top: {TOP}"),
        (
            "sampling.zzzzz.y.x=2",
            "unknown key sampling.zzzzz.y.x; known keys of sampling: temperature, top_p, top_k, "
            "stop, max_new_tokens",
        ),
        (
            "critic.probe.zzzzz=2",
            "unknown key critic.probe.zzzzz; known keys of critic.probe: layer, width",
        ),
        ("run=3", "run is 3; expected a section of keys"),
        ("run.profile=[1]", "run.profile is [1]; expected a section of keys"),
        ("run.root=3", f"run.root is 3; expected a text {QUOTED}"),
        ("sampling.stop=[a, 1]", f"sampling.stop.1 is 1; expected a text {QUOTED}"),
        ("data.train=3", f"data.train is 3; expected a valid dictionary or a path {QUOTED}"),
        (
            "data.train=[a, 3]",
            f"data.train is ['a', 3]; expected a valid dictionary or a path {QUOTED}",
        ),
        (
            "data.train={a: 1, 2024: 4}",
            "data.train: 2024 is no text; expected the path of a file: quote it",
        ),
        ("data.eval=[3]", "data.eval.0 is 3; expected a section of keys"),
        ("rollout.server_args={x: [1]}", f"rollout.server_args.x is [1]; {SCALAR}"),
        ("run.profile.steps=3", "run.profile.steps is 3; expected a list"),
        ("model.adapter.layers=[]", "model.adapter.layers is []; expected a list of at least 1"),
        (
            "rollout.agent=nocolon",
            "rollout.agent is 'nocolon'; expected package.module:name, with a colon",
        ),
        (
            "data.eval=[{name: a b, path: p}]",
            "data.eval.0.name is 'a b'; expected a text that matches ^[A-Za-z0-9_.-]+$",
        ),
        ("run.steps=1e9999", "run.steps is inf; expected a finite number"),
        (f"run.steps='{'9' * 5000}'", f"run.steps is '{'9' * 59}...; expected a smaller integer"),
        ("run.steps=many", "run.steps is 'many'; expected a valid integer"),
        (f"run.steps={LONG}", f"run.steps is '{'x' * 59}...; expected a valid integer"),
        (f"run.steps={'x' * 58}", f"run.steps is '{'x' * 58}'; expected a valid integer"),
        ("run.seed=-1", "run.seed is -1; expected greater than or equal to 0"),
        ("model.dtype=half", "model.dtype is 'half'; expected 'float32' or 'bfloat16'"),
        (
            "rollout.deterministic=3",
            "rollout.deterministic is 3; expected a valid boolean or 'auto'",
        ),
        ("actor.optimizer.lr=true", "actor.optimizer.lr is 'true'; expected a valid number"),
        ("data.eval=[{name: a}]", "missing key data.eval.0.path: give it a value"),
        (
            "data.train={a: {weight: -1}, b: 1}",
            "data.train.a.weight is -1; expected greater than 0",
        ),
        (
            "data.train={a: {wieght: 1}}",
            "data.train: a: unknown key wieght; known keys: weight, fields, reward",
        ),
        (
            "data.train={a: {fields: {problm: x}}}",
            "data.train: a: fields: unknown key problm; did you mean problem?",
        ),
        (
            "data.train={a: {reward: {correct: x, workers: 0}}}",
            "data.train: a: reward: correct is 'x'; expected a valid number (and 1 more)",
        ),
        ("data.train=[a, ./a]", "data.train: a and ./a are one file: name it once"),
        (
            f"{BEST}=evaluation/a_avg@9",
            f"{BEST}=evaluation/a_avg@9 is not a metric of data.eval: did you mean "
            "evaluation/a_avg@8?",
        ),
        (
            f"{BEST}=a_avg@8",
            f"{BEST}=a_avg@8 is not a metric of data.eval: did you mean evaluation/a_avg@8?",
        ),
        (
            f"{BEST}=zzz",
            f"{BEST}=zzz is not a metric of data.eval: expected one of: {METRICS}",
        ),
        (
            f"{BEST}=time/step",
            f"{BEST}=time/step is not a metric of a step: give one such as reward/mean",
        ),
    ],
)
def test_a_wrong_override_is_told_in_these_words(override: str, told: str) -> None:
    assert line(*REQUIRED, EVAL, override) == f"override: {told}"


def test_the_best_checkpoint_of_no_evaluation_is_refused() -> None:
    told = "is not a metric of data.eval: that is empty, name a set or leave keep.best out"
    assert line(*REQUIRED, f"{BEST}=evaluation/a") == f"override: {BEST}=evaluation/a {told}"
    for metric in ("reward/mean", "accuracy/mean", "response_length/mean", "actor/x", "critic/x"):
        load_config(TrainConfig, None, [*REQUIRED, f"{BEST}={metric}"], PRESETS)
    load_config(TrainConfig, None, [*REQUIRED, EVAL, f"{BEST}=evaluation/a_maj@8"], PRESETS)


@pytest.mark.parametrize(
    ("model", "text", "told"),
    [
        (
            TrainConfig,
            "run.steps: 3",
            "unknown key run.steps: in a file write it nested, run: {steps: ...}",
        ),
        (
            TrainConfig,
            "actor.optimizer.lr: 3",
            "unknown key actor.optimizer.lr: in a file write it nested, actor: {optimizer: {lr: "
            "...}}",
        ),
        (
            TrainConfig,
            "actor: {optimizer: {lrr: 3}}",
            "unknown key actor.optimizer.lrr; did you mean actor.optimizer.lr?",
        ),
        (
            TrainConfig,
            "atcor: {optimizer: {lr: 3}}",
            "unknown key atcor.optimizer.lr; did you mean actor.optimizer.lr?",
        ),
        (
            TrainConfig,
            "atcor: {kind: model, offload: auto}",
            "unknown key atcor; did you mean actor?",
        ),
        (TrainConfig, "1: 2", f"unknown key 1; known keys at the top: {TOP}"),
        (
            TrainConfig,
            "run: {steps: 0}\nsampling: {max_new_tokens: 0}",
            "run.steps is 0; expected greater than or equal to 1 (and 1 more)",
        ),
        (TrainConfig, "a: 1\nb: 2\nc: 3", "unknown key a; did you mean data? (and 2 more)"),
        (
            TrainConfig,
            "a: 1\nb: 2\nc: 3\nd: 4",
            "unknown key a; did you mean data? (and 3 more: is it the config of another command?)",
        ),
        (
            TrainConfig,
            "run: {steps: 0}\na: 1\nb: 2\nc: 3\nd: 4",
            "run.steps is 0; expected greater than or equal to 1 (and 4 more: is it the config of "
            "another command?)",
        ),
        (
            TrainConfig,
            "sampling: {temperature: 0, max_new_tokens: 8}",
            "sampling.temperature=0: it is greedy, but policy gradients need sampling: 1.0 is "
            "usual (evaluation.temperature may be 0)",
        ),
    ],
)
def test_a_wrong_file_is_told_in_these_words(
    tmp_path: Path, model: type[Section], text: str, told: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"extends: base.yaml\n{text}\n")
    (tmp_path / "base.yaml").write_text(
        "model: {path: m}\ndata: {train: t}\nsampling: {max_new_tokens: 16}\n"
    )
    assert line(model=model, path=path) == f"{path}: {told}"


def test_the_config_of_another_command_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: {name: x}\nbatch: {}\nactor: {}\ncritic: {}\nalgorithm: {}\n")
    asked = "is it the config of another command?"
    assert line(model=SftConfig, path=path) == (
        f"{path}: missing key model: give it a value (and 4 more: {asked})"
    )
    assert line(model=EvaluateConfig, path=path) == (
        f"{path}: missing key data: give it a value (and 5 more: {asked} A training run's needs "
        "--checkpoint final)"
    )


def test_mistakes_on_a_command_line_are_not_another_command() -> None:
    wrong = ("a.x=1", "b.x=2", "c.x=3", "d.x=4")
    told = line(*REQUIRED, *wrong)
    assert told.startswith("override: unknown key a.x; ") and told.endswith(" (and 3 more)")


@pytest.mark.parametrize(
    ("override", "is_told"),
    [
        ("run.steps=0", True),
        ("run={steps: 0}", True),
        ("run.name=a", False),
        ("batch.samples_per_prompt=4", False),
    ],
)
def test_an_override_is_told_from_the_file_it_changes(
    tmp_path: Path, override: str, is_told: bool
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: {name: b, steps: 0}\n")
    origin = "override" if is_told else path
    assert line(*REQUIRED, override, path=path).startswith(f"{origin}: run.steps is 0; ")


@pytest.mark.parametrize(
    ("override", "is_told"),
    [("sampling.temperature=0", True), ("run.steps=3", False), ("reward.correct=1", False)],
)
def test_a_contradiction_is_the_overrides_if_it_names_one(
    tmp_path: Path, override: str, is_told: bool
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("sampling: {temperature: 0}\n")
    origin = "override" if is_told else path
    told = line(*REQUIRED, override, path=path)
    assert told.startswith(f"{origin}: sampling.temperature=0: it is greedy")


@pytest.mark.parametrize("override", ["reward={correct: 2}", "run.steps=3"])
def test_a_contradiction_in_a_file_of_data_is_the_files(tmp_path: Path, override: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {train: {a: {reward: {correct: x}}}}\n")
    required = [given for given in REQUIRED if "data" not in given]
    assert line(*required, override, path=path) == (
        f"{path}: data.train: a: reward: correct is 'x'; expected a valid number"
    )


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ("lora_alpha", LORA),
        ("model.lora.r", LORA),
        ("loratory", None),
        (
            "trainer.total_epochs.val_only",
            "evaluation alone is a command: vapo-megatron evaluate CONFIG --checkpoint final",
        ),
        ("a.b.rollout.n", "here it is batch.samples_per_prompt"),
        ("a.val_kwargs.n", "here it is data.eval.samples"),
        ("trainer", "it looks like one of verl's: docs/configuration.md has the names here"),
        ("my.trainer", None),
    ],
)
def test_a_key_of_another_trainer_is_known_by_its_last_names(theirs: str, told: str | None) -> None:
    assert named_here(theirs) == told


def test_a_secret_of_a_config_is_told_of_in_these_words() -> None:
    override = "data.prompt.system_prompt='see https://me:pass@host/x'"
    assert line(*REQUIRED, override) == (
        "config: data.prompt.system_prompt=see https://***@host/x holds a password or key, which "
        "would be written to files: take it out, and give it by an environment variable "
        "(api_key_variable; JUDGE_API_KEY; HF_TOKEN; for MLflow MLFLOW_TRACKING_USERNAME, "
        "MLFLOW_TRACKING_PASSWORD or MLFLOW_TRACKING_TOKEN)"
    )
