"""`vapo-megatron evaluate --checkpoint`: the engines are asked what the run's own evaluation asks
of its engines."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from commands import Command, assert_refused
from tiny_runs import evaluate_config, make_model, train_config

from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.load import load_config
from vapo_megatron.config.model import ModelConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.prompts import eval_prompts
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.evaluation.check import Evaluation, at_its_place
from vapo_megatron.evaluation.command import _write
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.training.outputs import evaluate_sets
from vapo_megatron.training.rollouts import Rollouts


class Enough(BaseException):
    """Ends a command once it has asked the engines."""


class Engines:
    """Answer nothing."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    def collect(self, request: GenerationRequest, *_: Callable[..., None] | None) -> list[Any]:
        self.requests.append(request)
        raise Enough


def test_an_export_is_evaluated_as_the_run_does_it(
    tmp_path: Path, use_engines: Callable[[Any], None]
) -> None:
    actor = make_model(tmp_path / "runs/tiny/hf/step_000002/actor")
    config = train_config(tmp_path, tmp_path / "absent")
    config["run"]["seed"] = 5
    config["data"]["prompt"] = {"user_template": "1 {problem}"}
    config["evaluation"] = {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 7}
    config["rollout"] = {"load_format": "dummy", "max_total_tokens": 4096}
    engines = Engines()
    started = []

    @contextmanager
    def engines_of(model: ModelConfig, rollout: RolloutConfig, *_: object) -> Iterator[Engines]:
        started.append((model.path, rollout.load_format, rollout.max_total_tokens))
        yield engines

    use_engines(engines_of)
    with pytest.raises(Enough):
        Command(tmp_path, actor).exit_code(
            "evaluate", "--checkpoint", "step_000002", "evaluation.max_new_tokens=6", config=config
        )
    assert started == [(str(actor), "auto", 4096)]
    kept = tmp_path / "runs/tiny_step_000002/config.yaml"
    assert load_config(EvaluateConfig, kept, [], tmp_path).data.eval[0].name == "sums"

    config["evaluation"]["max_new_tokens"] = 6
    settings = TrainConfig.model_validate(config)
    _evaluate_in_the_run(settings, TextTokenizer(actor, settings.data.prompt), engines, tmp_path)
    alone, in_run = engines.requests
    assert alone == in_run
    assert (alone.sampling.temperature, alone.sampling.top_p, alone.sampling.max_new_tokens) == (
        0.5,
        0.9,
        6,
    )


def _evaluate_in_the_run(
    settings: TrainConfig, tokenizer: TextTokenizer, engines: Engines, folder: Path
) -> None:
    data = settings.data
    rollouts = SimpleNamespace(
        verifier="there is one",
        dispatcher=engines,
        engine_weights=SimpleNamespace(version=0),
        sampling=settings.sampling,
        seed=settings.run.seed,
        tokenizer=tokenizer,
        evaluation_prompts=[eval_prompts(entry, data, tokenizer) for entry in data.eval],
        reward=settings.reward,
        agents=None,
        _open_agents=lambda: None,
    )
    rollouts.generator = partial(Rollouts.generator, rollouts)
    with pytest.raises(Enough):
        evaluate_sets(cast(Rollouts, rollouts), data.eval, settings.evaluation, folder, 2)


@pytest.mark.parametrize(
    ("made", "override", "named"),
    [
        (
            [],
            "run.steps=1",
            ["hf/final/actor holds no model", "give run.root and run.name of a run with exports"],
        ),
        (
            ["hf/step_000002/actor", "hf/best/actor"],
            "run.steps=1",
            ["expected one of best, step_000002"],
        ),
        (
            ["checkpoints/final/actor", "hf/best/actor"],
            "run.steps=1",
            [
                "vapo-megatron convert-megatron-to-hf --checkpoint ",
                "/tiny/checkpoints/final --out ",
                "/hf/final/actor",
            ],
        ),
        ([], "data.eval=[]", ["data.eval is empty"]),
        (
            ["hf/final/actor"],
            f"run.seed={2**62 - 1}",
            ["--checkpoint final", "run.seed of its evaluation"],
        ),
    ],
)
def test_what_a_run_has_not_exported_is_refused_with_what_to_do(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    made: Sequence[str],
    override: str,
    named: Sequence[str],
) -> None:
    for folder in made:
        (tmp_path / "elsewhere/tiny" / folder).mkdir(parents=True)
        (tmp_path / "elsewhere/tiny" / folder / "config.json").touch()
    command = Command(tmp_path, tmp_path / "absent")
    overrides = ("--checkpoint", "final", f"run.root={tmp_path / 'elsewhere'}", override)
    code = command.exit_code(
        "evaluate", *overrides, config=train_config(tmp_path, tmp_path / "absent")
    )
    assert_refused(command, code, capfd.readouterr().err, *named)


def test_a_copied_run_is_evaluated_where_it_lies(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = TrainConfig.model_validate(train_config(tmp_path, tmp_path / "absent"))
    copy = tmp_path / "copies" / "second"
    (copy / "hf").mkdir(parents=True)
    path = copy / "config.yaml"
    assert at_its_place(config, path, ()).run.directory == str(copy)
    assert str(copy) in capfd.readouterr().err
    for given, overrides in ((path, ["run.name=tiny"]), (copy / "train.yaml", [])):
        assert at_its_place(config, given, overrides) is config
    (Path(config.run.directory) / "hf").mkdir(parents=True)
    assert at_its_place(config, Path(config.run.directory) / "config.yaml", ()) is config


def test_the_step_of_an_evaluated_export_is_written(tmp_path: Path) -> None:
    """hf/final is of another step once the run has gone further."""
    final = tmp_path / "trained/hf/final"
    final.mkdir(parents=True)
    (final / "step.json").write_text('{"step": 40}')
    for folder, step in ((final, 40), (final.with_name("step_000020"), 20), (tmp_path, None)):
        settings = EvaluateConfig.model_validate(evaluate_config(tmp_path, folder / "actor"))
        _write(Evaluation(settings, {}), [], tmp_path)
        assert json.loads((tmp_path / "evaluation.json").read_text()).get("model_step") == step
