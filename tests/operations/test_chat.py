"""`vapo-megatron chat`: what an engine is asked, and what is shown of its answers."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from called import exit_code_of
from rich.console import Console
from tiny_runs import evaluate_config, make_model, train_config, write_config
from transformers import AutoConfig, AutoModelForTokenClassification

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.critic_probes import ProbedRunConfig
from vapo_megatron.config.load import load_config
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.operations.chat import command
from vapo_megatron.operations.chat.values import ValueReader, coloured, key_of_colours, scale_of
from vapo_megatron.operations.critic_lab.command import values_on_ranks
from vapo_megatron.rollout.request import GenerationRequest, GroupRequest, empty_response

ANSWER = "#### 7 plus"


class Engine:
    """Answers ANSWER and the end token, two tokens a piece."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._answer = [*tokenizer.encode_response(ANSWER), tokenizer.eos_id]
        self.asked: list[GenerationRequest] = []

    @property
    def prompts(self) -> list[str]:
        """As the model reads them."""
        requests = (request.prompts[0].token_ids for request in self.asked)
        return [self._tokenizer.decode_all(ids) for ids in requests]

    def collect(self, request: GenerationRequest, generate: Callable[..., Any]) -> list[Sample]:
        self.asked.append(request)
        (group,) = request.groups()
        return list(asyncio.run(generate(group)))

    async def generate(self, group: GroupRequest) -> list[Sample]:
        sample = group.begun[0] if group.begun else empty_response(group, 0)
        answer = self._answer[: group.max_new_tokens]
        ids = answer[: len(sample.response_ids) + 2]
        reason: Any = "abort" if len(ids) < len(answer) else "stop"
        if len(answer) < len(self._answer) and reason == "stop":
            reason = "length"
        return [replace(sample, response_ids=np.array(ids, np.int32), finish_reason=reason)]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the exports step_000002 and final, and a critic in the latter."""
    folder = tmp_path_factory.mktemp("chat")
    run_dir = folder / "runs" / "tiny"
    make_model(run_dir / "hf/step_000002/actor", seed=1)
    policy = make_model(run_dir / "hf/final/actor")
    torch.manual_seed(0)
    critic = AutoConfig.from_pretrained(policy, num_labels=1)
    AutoModelForTokenClassification.from_config(critic, dtype=torch.float32).save_pretrained(
        run_dir / "hf/final/critic"
    )
    config = train_config(folder, policy)
    config["cluster"]["ranks"] = 1
    config["actor"] = config["critic"] = {}
    config["data"]["prompt"] = {"user_template": "1 {problem}", "system_prompt": "9"}
    config["evaluation"] = {"temperature": 0.5, "max_new_tokens": 6}
    write_config(run_dir / "config.yaml", config)
    return run_dir


@pytest.fixture
def engine(run_dir: Path, use_engines: Callable[[Any], None]) -> Engine:
    template = load_config(ProbedRunConfig, run_dir / "config.yaml", [], PRESETS).data.prompt
    stand_in = Engine(TextTokenizer(run_dir / "hf/final/actor", template))

    @contextmanager
    def engines_of(model: Any, rollout: Any, devices: Any, *_: Any) -> Iterator[Engine]:
        assert devices == [None]
        yield stand_in

    use_engines(engines_of)
    return stand_in


def _say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    said = iter(lines)

    def read(_: str) -> str:
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)


def test_messages_reach_the_engine_as_in_an_evaluation(
    run_dir: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    _say(monkeypatch, "3 plus 4", "8 plus 1", "", "/what", "/new", "5 plus 1")
    assert exit_code_of("chat", run_dir, "evaluation.top_p=0.9") == 0
    sampling = engine.asked[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.5, 0.9, 6)
    first, second, afresh = engine.prompts
    # The template of problems is around the first message of a conversation alone
    assert first.count("1 3 plus") == 1
    assert second.startswith(first) and "#### 7" in second[len(first) :]
    assert "1 8" not in second and "8 plus" in second[len(first) :]
    assert "3 plus" not in afresh and "1 5 plus" in afresh
    said = capfd.readouterr()
    assert said.out == f"{ANSWER}\n" * 3
    assert "temperature 0.5, top_p 0.9" in said.err and "hf/final/actor" in said.err


def test_once_prints_the_answer_alone_or_its_tokens(
    run_dir: Path, engine: Engine, capfd: Any
) -> None:
    assert exit_code_of("chat", run_dir, "--once", "3 plus 4") == 0
    assert capfd.readouterr().out == f"{ANSWER}\n"
    assert exit_code_of("chat", run_dir, "--once", "3 plus 4", "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert "".join(found["tokens"]).strip() == found["text"] == ANSWER
    assert found["finish_reason"] == "stop" and len(found["values"]) == len(found["tokens"])
    short = ("--plain", "--json", "evaluation.max_new_tokens=1")
    assert exit_code_of("chat", run_dir, "--once", "3", *short) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["values"] is None and found["finish_reason"] == "length"


def test_values_are_those_of_the_trainers_critic(run_dir: Path) -> None:
    config = load_config(ProbedRunConfig, run_dir / "config.yaml", [], PRESETS)
    critic = config.critic.model_copy(
        update={"init": "value_checkpoint", "init_path": str(run_dir / "hf/final/critic")}
    )
    model = config.model.model_copy(update={"path": str(run_dir / "hf/final/actor")})
    config = config.model_copy(update={"critic": critic, "model": model})
    prompt, response = (5, 3, 8, 4), [7, 6, 9, 3, 2]
    sample = Sample(Prompt("a", "", "", prompt), 0, 0, 0, np.array(response, np.int32),
                    np.zeros(5, np.float32), "stop", 0, 0)  # fmt: skip
    sample.reward = 1.0
    drawn = cast(Any, SimpleNamespace(batch=from_samples([sample])))
    expected = values_on_ranks(config, drawn, 1).tolist()
    folder = run_dir / "hf/final/critic"
    for loss in (ValueLossConfig(), ValueLossConfig(squash="tanh")):
        reader = ValueReader(folder, loss, "float32", current_platform(), 1)
        found = reader.values(prompt, response)
        if loss.squash == "none":
            assert found == pytest.approx(expected, abs=1e-4)
        else:
            assert found == pytest.approx(np.tanh(expected).tolist(), abs=1e-4)


def test_tokens_are_coloured_from_low_to_high() -> None:
    line = coloured(["a", "b", "c", "d"], [-2.0, 0.0, 1.0, 9.0], (0.0, 1.0))
    shades = [str(span.style) for span in line.spans]
    assert line.plain == "abcd"
    assert shades[0] == shades[1] != shades[2] == shades[3]
    key = key_of_colours((0.0, 1.0))
    assert {shades[0], shades[2]} <= {str(span.style) for span in key.spans}
    assert "0.5" in key.plain
    assert scale_of([0.2, 0.4], (0.0, 1.0)) == (0.0, 1.0)
    assert scale_of([0.2, 0.4], None) == (0.2, 0.4) and scale_of([3.0], None) == (3.0, 4.0)


def test_a_model_does_not_steer_the_terminal(run_dir: Path, engine: Engine, capfd: Any) -> None:
    screen = command.Screen(cast(Any, SimpleNamespace()), cast(Any, None), None)
    screen.show_piece("a\x1b[2J\tb\n")
    assert capfd.readouterr().out == "a\x1b[2J\tb\n"  # a file gets what was written
    screen._console = Console(force_terminal=True)
    screen.show_piece("a\x1b[2J\tb\n")
    assert capfd.readouterr().out == "a\N{REPLACEMENT CHARACTER}[2J\tb\n"


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("critic.privileged_field=solution", "reads the field solution of a row"),
        ("preset=vapo_without_critic", "estimator=grpo has no critic"),
        ("preset=vapo_regression", "critic.kind=regression"),
    ],
)
def test_without_values_the_reason_is_said(
    run_dir: Path, engine: Engine, override: str, reason: str, capfd: Any
) -> None:
    more = ["batch.samples_per_prompt=4"]
    if "preset" in override:
        more += ["algorithm=null", "critic=null", "value_pretraining=null"]
    assert exit_code_of("chat", run_dir, "--once", "3", "--json", override, *more) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["values"] is None and reason in said.err


def test_models_and_evaluations_are_talked_to_as_well(
    tmp_path: Path, run_dir: Path, engine: Engine, capfd: Any
) -> None:
    model = run_dir / "hf/step_000002/actor"
    plain = "data.prompt.user_template=2 {problem}"
    assert exit_code_of("chat", model, "--once", "3 plus 1", plain, "sampling.temperature=0") == 0
    assert "2 3 plus" in engine.prompts[0] and engine.asked[0].sampling.temperature == 0
    config = evaluate_config(tmp_path, model)
    config["data"]["prompt"] = {"user_template": "4 {problem}"}
    write_config(tmp_path / "config.yaml", config)
    assert exit_code_of("chat", tmp_path, "--once", "3 plus 1") == 0
    assert "4 3 plus" in engine.prompts[1] and engine.asked[1].sampling.max_new_tokens == 8


def _refused(capfd: Any, *arguments: object) -> str:
    assert exit_code_of("chat", *arguments) == 2
    said = capfd.readouterr()
    assert not said.out and len(said.err.splitlines()) == 1, said.err
    return str(said.err)


def test_whom_nobody_can_talk_to_is_named(
    tmp_path: Path, run_dir: Path, use_engines: Callable[[Any], None], capfd: Any
) -> None:
    use_engines(None)  # before any engine starts
    assert "holds final, step_000002" in _refused(capfd, run_dir, "--checkpoint", "step_3")
    assert "no such directory" in _refused(capfd, tmp_path / "absent")
    assert "hub:org/model" in _refused(capfd, "org/model")
    assert "give --once" in _refused(capfd, run_dir, "--json")
    model = run_dir / "hf/final/actor"
    assert "is a model, not a run" in _refused(capfd, model, "--checkpoint", "final")
    (tmp_path / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    assert "convert-megatron-to-hf" in _refused(capfd, tmp_path)


def test_a_conversation_that_fills_the_context_says_so(
    run_dir: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    _say(monkeypatch, *["3 plus 4"] * 9, "/new", "5 plus 1")
    assert exit_code_of("chat", run_dir, "--plain", "rollout.context_length=64") == 0
    said = capfd.readouterr()
    assert "no answer fits, begin again with /new" in said.err
    assert "1 5 plus" in engine.prompts[-1] and len(engine.prompts) < 10
    lengths: Sequence[int] = [len(request.prompts[0].token_ids) for request in engine.asked]
    assert max(lengths) + 5 + 2 <= 64


@pytest.mark.full
def test_a_real_engine_answers(run_dir: Path, capfd: Any) -> None:
    small = ("rollout.max_total_tokens=4096", "evaluation.max_new_tokens=40")
    assert exit_code_of("chat", run_dir, "--once", "3 plus 4", "--json", *small) == 0
    said = capfd.readouterr()
    found = json.loads(said.out)
    assert found["text"].split() == "".join(found["tokens"]).split() and found["text"]
    assert len(found["values"]) == len(found["tokens"]) <= 40
