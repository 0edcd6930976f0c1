"""Bad input: one line on standard error that names it, exit code 2, no stack trace, nothing
written.

In this process, since imports take longer than all cases together; no case gets as far as starting
a rank.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from commands import CONFIGS, Command, Ranks, assert_refused
from tiny_runs import (
    CONTEXT,
    WORDS,
    problems,
    train_config,
    write_config,
    write_rows,
)

from vapo_megatron.checkpoint.lease import Lease
from vapo_megatron.checks import preflight
from vapo_megatron.config.run import RunConfig
from vapo_megatron.config.run_directory import MARKER, make_run_dir
from vapo_megatron.errors import BadInput
from vapo_megatron.operations.doctor import command as doctor_command
from vapo_megatron.operations.doctor.nodes import Line
from vapo_megatron.signals import STOP_SIGNALS, stop_requested
from vapo_megatron.weights.tiny import CHATML_TEMPLATE, word_tokenizer

USAGE = namedtuple("USAGE", "total used free")


def test_the_configs_that_the_cases_spoil_are_good(
    command: Command, ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks.may_start()
    for name, count in (("train", 2), ("sft", 1)):
        assert command.exit_code(name) == 0, capfd.readouterr().err
        assert ranks.starts.pop() == count
        assert [entry.name for entry in command.run_dir.iterdir()] == [MARKER, "config.yaml"]
        shutil.rmtree(command.run_dir)
    assert ranks.reports == [[command.run_dir]], (
        "train, and train alone, draws a report after the run"
    )
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_stop_request_after_the_last_save_is_ignored(
    command: Command, ranks: Ranks, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """Python gives signals back to the system while it ends: one that is noted in the report may
    end it then."""

    def slow_report() -> str:
        os.kill(os.getpid(), number)
        return f"noted {stop_requested()}, then {signal.getsignal(number).name}"

    ranks.may_start(report=slow_report)
    assert command.exit_code("train") == 0
    assert "report  noted None, then SIG_IGN" in capfd.readouterr().out


def test_a_check_says_what_a_run_would_meet_and_writes_nothing(
    command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted(command.folder.iterdir())
    assert command.exit_code("train", "--check") == 0, capfd.readouterr().err
    said = capfd.readouterr().out
    for line in (
        "actor: qwen3, 62,976 parameters",
        "data.train: 8 problems",
        "sums: 4 problems",
        "begins at step 1",
    ):
        assert line in said
    assert "versions" in said, "what doctor sees"
    assert {path.name for path in command.folder.iterdir()} - {path.name for path in before} == {
        "train.yaml",
        "train.jsonl",
        "eval.jsonl",
    }
    # Cases that need more than a glance at the files: a prompt that is too long has its own
    # message.
    assert_refused(
        command,
        command.exit_code(
            "train", "--check", "data.max_prompt_tokens=2", "data.fields.answer=answer"
        ),
        capfd.readouterr().err,
        "data.max_prompt_tokens=2",
    )
    needs_gpu = "actor.precision.fp8=tensorwise"
    assert command.exit_code("train", "--check", needs_gpu) == 0, (
        "the run may be meant for another machine"
    )
    said = capfd.readouterr().out
    assert "actor: not on this machine, which has no GPU: " in said
    assert said.rstrip().endswith("\nready")
    # What no machine could run is no matter of this one
    adapters = ("actor.kind=adapter", "critic.kind=adapter", "model.adapter.rank=4096")
    assert_refused(
        command,
        command.exit_code("train", "--check", *adapters),
        capfd.readouterr().err,
        "model.adapter.rank=4096 is above",
    )


def test_a_machines_fault_is_2_by_hand_and_1_in_a_job(
    command: Command, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job goes on to doctor, which leaves the node out: 2 would end it (slurm/lib.sh)."""
    fault = Line("fault", "no room in /tmp", "make room", "files")
    monkeypatch.setattr(doctor_command, "perform", lambda *_: [fault])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert command.exit_code("train", "--check") == 2
    assert capfd.readouterr().out.rstrip().splitlines()[-1].startswith("not ready: no room in /tmp")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert command.exit_code("train", "--check") == 1


def test_what_the_critic_alone_reads_has_to_be_there_and_to_fit(
    command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command.exit_code("train", "--check", "critic.privileged_field=answer") == 0, (
        capfd.readouterr().err
    )
    config = train_config(command.folder, command.model)
    rows = [row | {"solution": "1 " * (2 + row["answer"])} for row in problems(8)]
    write_rows(
        command.folder / "train.jsonl", [*rows[:5], rows[5] | {"solution": "1 " * 105}, *rows[6:]]
    )
    for check in ([], ["--check"]):
        code = command.exit_code("train", *check, "critic.privileged_field=solution", config=config)
        assert_refused(
            command,
            code,
            capfd.readouterr().err,
            "critic.privileged_field=solution: row p5 has 105 tokens there",
            "data.max_prompt_tokens + sampling.max_new_tokens = 24",
            "room for 104",
            "(128)",
        )
    keys = ("critic.privileged_field=solution", "critic.max_tokens_per_microbatch=64")
    code = command.exit_code("train", *keys, config=config)
    assert_refused(
        command,
        code,
        capfd.readouterr().err,
        "row p5",
        "room for 40",
        "max_tokens_per_microbatch=64",
    )
    write_rows(command.folder / "train.jsonl", [*rows[:5], problems(8)[5], *rows[6:]])
    code = command.exit_code("train", "critic.privileged_field=solution", config=config)
    assert_refused(
        command,
        code,
        capfd.readouterr().err,
        "train.jsonl:6",
        "'solution'",
        "critic.privileged_field",
    )


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            ["actor.optimizer.warmup_steps=101"],
            "actor.optimizer.warmup_steps=101 (101 updates) is longer than the run",
        ),
        (
            ["run.steps=2", "actor.optimizer.warmup_steps=1", "critic.optimizer.warmup_steps=53"],
            "critic.optimizer.warmup",
        ),
        (
            ['data.eval=[{name: same, path: "${data.train}"}]'],
            "8 of the 8 problems of same are in data.train",
        ),
    ],
)
def test_what_is_most_often_a_mistake_is_told_of_and_runs(
    command: Command,
    ranks: Ranks,
    capfd: pytest.CaptureFixture[str],
    overrides: list[str],
    named: str,
) -> None:
    ranks.may_start()
    assert command.exit_code("train", *overrides) == 0 and ranks.starts == [2]
    error = capfd.readouterr().err
    assert (
        error.count("\n") == 1 and error.startswith("vapo-megatron: caution: ") and named in error
    )


@pytest.mark.parametrize(("steps", "cautions"), [(4, 1), (5, 0)])
def test_a_fine_tuning_shorter_than_its_warm_up_is_told_of(
    command: Command, ranks: Ranks, capfd: pytest.CaptureFixture[str], steps: int, cautions: int
) -> None:
    ranks.may_start()
    warmup = ("actor.optimizer.warmup_steps=5", f"data.steps={steps}")
    assert command.exit_code("sft", *warmup) == 0 and ranks.starts
    told = (
        "vapo-megatron: caution: actor.optimizer.warmup_steps=5 (5 updates) is longer than the "
        "run (4)"
    )
    assert capfd.readouterr().err.count(told) == cautions


def test_ranks_that_the_run_does_not_have_cannot_be_traced(
    command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    code = command.exit_code("train", "run.profile.steps=[1]", "run.profile.ranks=[0,2]")
    assert_refused(command, code, capfd.readouterr().err, "run.profile.ranks: 2 with 2 ranks")


@pytest.mark.parametrize(
    ("name", "override", "named"),
    [
        (
            "train",
            "actor.optimizer.learning_rate=1e-6",
            ["actor.optimizer.learning_rate", "actor.optimizer.lr"],
        ),
        (
            "train",
            "algorithm.advantage.lambda_polcy=1",
            ["lambda_polcy", "algorithm.advantage.lambda_policy"],
        ),
        (
            "train",
            "value_pretrainin.iterations=3",
            ["value_pretrainin", "value_pretraining.iterations"],
        ),
        ("sft", "data.batchsize=3", ["data.batchsize", "data.batch_size"]),
        ("evaluate", "data.evals=[]", ["data.evals", "data.eval"]),
        ("train", "run.steps", ["run.steps", "section.key=value"]),
        ("train", "run.root=", ["run.root is ''", "at least 1 character"]),
        ("train", f"run.name={'n' * 300}", ["run.name", "at most 200 characters"]),
        ("train", f"model.path=/{'n' * 300}", ["nnn", "name too long"]),
        ("train", f"data.train={'n' * 300}.jsonl", ["nnn", "name too long"]),
        ("train", f"run.root={'n' * 300}", ["nnn", "name too long"]),
        ("train", f"run.seed={2**64}", ["run.seed", str(2**64)]),
        (
            "train",
            "checkpoint.keep.best=typo",
            ["checkpoint.keep.best=typo", "evaluation/sums_avg@2"],
        ),
        (
            "train",
            "checkpoint.keep.best=evaluation/sums_avg@4",
            ["did you mean evaluation/sums_avg@2?"],
        ),
        ("train", "run.steps=many", ["run.steps", "'many'", "integer"]),
        ("train", "actor.optimizer.lr=true", ["actor.optimizer.lr is 'true'", "a valid number"]),
        (
            "train",
            "batch.samples_per_prompt=yes",
            ["batch.samples_per_prompt is 'true'", "integer"],
        ),
        (
            "train",
            "reward.correct_above=false",
            ["reward.correct_above is 'false'", "a valid number"],
        ),
        ("train", "data.eval.-1.limit=2", ["data.eval.-1.limit", "counted from 0"]),
        ("train", "run.steps=0", ["run.steps is 0", "greater than or equal to 1"]),
        (
            "train",
            "algorithm.policy_loss.kind=ppo",
            ["algorithm.policy_loss.kind", "'ppo'", "ppo_clip"],
        ),
        ("train", "preset=vap", ["preset vap", "vapo"]),
        ("train", "preset=GRPO", ["preset GRPO", "did you mean grpo?"]),
        (
            "train",
            "data.train_batch_size=8",
            ["unknown key data.train_batch_size", "here it is batch.prompts_per_step"],
        ),
        (
            "train",
            "actor_rollout_ref.rollout.n=8",
            ["actor_rollout_ref.rollout.n", "batch.samples_per_prompt"],
        ),
        (
            "train",
            "actor_rollout_ref.rollout.name=vllm",
            ["actor_rollout_ref.rollout.name", "docs/configuration.md"],
        ),
        ("train", "trainer.val_only=true", ["trainer.val_only", "vapo-megatron evaluate"]),
        ("train", "actor.lora_rank=8", ["actor.lora_rank", "docs/lora.md"]),
        ("train", "sampling=[", ["sampling"]),
        ("train", "algorithm.policy_loss.kind=gspo", ["algorithm.policy_loss", "sequence_mean"]),
        (
            "train",
            "actor.layout.sequence_parallel=true actor.layout.tp=1",
            ["actor.layout", "sequence_parallel"],
        ),
        ("evaluate", "rollout.load_format=dummy", ["rollout.load_format=dummy", "auto"]),
        (
            "evaluate",
            "rollout.external_urls=[http://127.0.0.1:9]",
            ["rollout.external_urls", "section server"],
        ),
        ("evaluate", "data.eval=[]", ["data.eval", "at least 1"]),
    ],
)
def test_keys_and_values(
    command: Command, capfd: pytest.CaptureFixture[str], name: str, override: str, named: list[str]
) -> None:
    code = command.exit_code(name, *override.split())
    assert_refused(command, code, capfd.readouterr().err, *named)


def test_one_problem_many_times_is_told_of(
    command: Command, ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks.may_start()
    rows = [{"problem": "1 plus 1", "answer": 2}] * 50
    path = write_rows(command.folder / "same.jsonl", rows)
    assert command.exit_code("train", config=_with_data(command, "train", "train", path)) == 0
    assert "holds 50 rows and 1 different problem: the others repeat" in capfd.readouterr().err


def test_an_unknown_key_in_the_file_names_file_and_nearest(
    command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    config = train_config(command.folder, command.model)
    config["batch"]["prompt_per_step"] = config["batch"].pop("prompts_per_step")
    code = command.exit_code("train", config=config)
    named = ["train.yaml", "batch.prompt_per_step", "did you mean batch.prompts_per_step"]
    assert_refused(command, code, capfd.readouterr().err, *named)


def test_the_config_of_another_command_is_doubted(
    command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    config = train_config(command.folder, command.model)
    code = command.exit_code("evaluate", config=config)
    assert_refused(
        command, code, capfd.readouterr().err, "unknown key", "is it the config of another command?"
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_is_not_there(
    command: Command, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    code = command.exit_code(name, config=command.folder / "absent.yaml")
    assert_refused(command, code, capfd.readouterr().err, "absent.yaml", "no such file")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["cluster.ranks=3", "actor.layout.tp=3"], ["actor.layout.tp=3", "4 attention heads"]),
        (["cluster.ranks=4", "critic.layout.tp=4"], ["critic.layout.tp=4", "2 key-value heads"]),
        (["cluster.ranks=3"], ["actor.layout", "3 ranks", "cluster.ranks"]),
        (["cluster.ranks=6", "critic.layout.pp=3"], ["critic.layout", "2 layers"]),
        (["actor.max_tokens_per_microbatch=20"], ["actor.max_tokens_per_microbatch", "20", "24"]),
        (["data.max_prompt_tokens=120"], ["data.max_prompt_tokens=120", "130", "context is 128"]),
        (["actor.layout.ep=2"], ["actor.layout.ep=2", "qwen3", "no experts"]),
        (["cluster.ranks=2", "critic.layout.ep=4"], ["critic.layout.ep=4", "2 ranks"]),
        (["rollout.router_replay=true"], ["rollout.router_replay", "qwen3"]),
        (
            ["rollout.quantization=fp8", "rollout.load_format=dummy"],
            ["rollout.quantization=fp8", "multiple of 128"],
        ),
        (
            ["rollout.external_urls=[http://127.0.0.1:9]", "rollout.api_key_variable=VAPO_NO_KEY"],
            ["rollout.api_key_variable=VAPO_NO_KEY", "no such variable"],
        ),
        (["evaluation.max_new_tokens=112"], ["evaluation.max_new_tokens=112", "context is 128"]),
        (["rollout.context_length=20"], ["rollout.context_length is 20", "26"]),
        (["rollout.context_length=200"], ["rollout.context_length=200", "128"]),
        (
            ["reward.verifier=function", "reward.function=absent_module:score"],
            ["absent_module:score"],
        ),
    ],
)
def test_sizes_that_do_not_fit(
    command: Command, capfd: pytest.CaptureFixture[str], overrides: list[str], named: list[str]
) -> None:
    code = command.exit_code("train", *overrides)
    assert_refused(command, code, capfd.readouterr().err, *named)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_is_not_there(
    command: Command, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    code = command.exit_code(name, f"model.path={command.folder / 'absent'}")
    assert_refused(
        command, code, capfd.readouterr().err, str(command.folder / "absent"), "no such directory"
    )


def _without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def _truncated(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def _without_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def _other_family(directory: Path) -> None:
    _edit(directory / "config.json", model_type="qwen33")


def _larger_tokenizer(directory: Path) -> None:
    tokenizer = word_tokenizer([*WORDS, "another"], CONTEXT, CHATML_TEMPLATE)
    tokenizer.save_pretrained(directory)


def _without_eos(directory: Path) -> None:
    _edit(directory / "tokenizer_config.json", eos_token=None)


def _without_tokenizer(directory: Path) -> None:
    for path in directory.glob("tokenizer*"):
        path.unlink()


def _without_chat_template(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()


def _deaf_chat_template(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(
        "<|im_start|>user{{ messages[0].text }}<|im_start|>assistant"
    )


def _strange_eos(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": 18}')


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_without_weights, ["model.safetensors"]),
        (_truncated, ["model.safetensors", "truncated"]),
        (_without_config, ["config.json", "no such file"]),
        (_other_family, ["config.json", "'qwen33'", "qwen3"]),
        (_without_tokenizer, ["tokenizer"]),
        (_larger_tokenizer, ["19 tokens", "vocabulary of 18"]),
        (_without_eos, ["end token", "eos_token"]),
        (_deaf_chat_template, ["chat template leaves the problem out"]),
        (_strange_eos, ["generation_config.json: eos_token_id 18", "vocabulary of 18"]),
        (_without_chat_template, ["chat template", "data.prompt.chat_template=false"]),
    ],
)
def test_a_model_directory_that_lacks_something(
    command: Command,
    capfd: pytest.CaptureFixture[str],
    name: str,
    spoil: Callable[[Path], None],
    named: list[str],
) -> None:
    directory = shutil.copytree(command.model, command.folder / "spoilt")
    spoil(directory)
    code = command.exit_code(name, f"model.path={directory}")
    assert_refused(command, code, capfd.readouterr().err, str(directory), *named)


async def plays(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    """An agent that would be good."""
    return 1.0


def is_not_async(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    return 1.0


class HasNoStep:
    async def reset(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return list(task["messages"])


class HasTools(HasNoStep):
    tools = ({"type": "function", "function": {"name": "add", "parameters": {}}},)

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        return [], 1.0, True


AGENTS: dict[str, list[str]] = {
    "absent_module:run": ["absent_module:run", "cannot be imported"],
    f"{__name__}:is_not_async": ["not an async function"],
    f"{__name__}:HasNoStep": ["without the async methods reset and step"],
    f"{__name__}:HasTools": ["sends tools", "ignores tools"],
    f"{__name__}:plays rollout.episode.tool_parser=qwen25": ["tool_parser=qwen25", "ignores tools"],
    f"{__name__}:plays algorithm.advantage.credit=turn rollout.episode.max_turns=1": [
        "credit=turn",
        "max_turns=1",
    ],
}


@pytest.mark.parametrize("agent", AGENTS)
def test_untrainable_agent_is_refused_before_ranks_start(
    command: Command, capfd: pytest.CaptureFixture[str], ranks: Ranks, agent: str
) -> None:
    fits = ["rollout.episode.max_tokens=64", "value_pretraining.enabled=false"]
    code = command.exit_code("train", *f"rollout.agent={agent}".split(), *fits)
    assert_refused(command, code, capfd.readouterr().err, *AGENTS[agent])
    ranks.may_start()
    assert command.exit_code(
        "train", f"rollout.agent={__name__}:plays", *fits
    ) == 0 and ranks.starts == [2]
    if "credit" not in agent:
        config = CONFIGS["evaluate"](command.folder, command.model)
        overrides = [*f"rollout.agent={agent}".split(), fits[0]]
        capfd.readouterr()
        shutil.rmtree(command.run_dir)
        code = command.exit_code("evaluate", *overrides, config=config)
        assert_refused(command, code, capfd.readouterr().err, *AGENTS[agent])


LONG = {"id": "long", "problem": " plus ".join("12345678901234567890"), "answer": 1}
ROWS = {
    "empty": ([], ["holds no rows"]),
    "blank": (["", ""], ["holds no rows"]),
    "unanswered": ([*problems(2), {"id": "x", "problem": "1 plus 1"}], [":3:", "'answer'"]),
    "null": ([*problems(2), {"id": "x", "problem": "1 plus 1", "answer": None}], [":3:", "answer"]),
    "hollow": (
        [*problems(2), {"id": "x", "problem": "1 plus 1", "answer": " "}],
        [":3:", "answer is empty"],
    ),
    "textless": ([{"answer": 1}], [":1:", "'problem'"]),
    "broken": ([*problems(1), '{"id": '], [":2:", "not JSON"]),
    "double": (
        [*problems(1), '{"problem": "1", "answer": 1, "answer": 2}'],
        [":2:", "field answer comes twice"],
    ),
    "long": ([*problems(2), LONG], [":3:", "row long", "data.max_prompt_tokens=16"]),
}


@pytest.mark.parametrize(
    ("name", "key"), [("train", "train"), ("train", "eval.0.path"), ("evaluate", "eval.0.path")]
)
@pytest.mark.parametrize("case", ROWS)
def test_data_that_cannot_be_used(
    command: Command, capfd: pytest.CaptureFixture[str], name: str, key: str, case: str
) -> None:
    rows, named = ROWS[case]
    path = write_rows(command.folder / f"{case}.jsonl", rows)
    code = command.exit_code(name, config=_with_data(command, name, key, path))
    assert_refused(command, code, capfd.readouterr().err, f"{case}.jsonl", *named)


def _with_data(command: Command, name: str, key: str, path: Path) -> dict[str, Any]:
    config = CONFIGS[name](command.folder, command.model)
    if key == "train":
        config["data"]["train"] = str(path)
    else:
        config["data"]["eval"][0]["path"] = str(path)
    return config


@pytest.mark.parametrize(
    ("name", "key"),
    [("train", "train"), ("train", "eval.0.path"), ("evaluate", "eval.0.path"), ("sft", "path")],
)
def test_a_data_file_that_is_not_there(
    command: Command, capfd: pytest.CaptureFixture[str], name: str, key: str
) -> None:
    path = command.folder / "absent.jsonl"
    if name == "sft":
        code = command.exit_code(name, f"data.path={path}")
    else:
        code = command.exit_code(name, config=_with_data(command, name, key, path))
    assert_refused(command, code, capfd.readouterr().err, str(path), "file")


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([], ["holds no"]),
        ([{"problem": "1 plus 1"}], [":1", "response"]),
        ([{"problem": "1 plus 1", "response": "2 " * 100}], [":1", "data.max_tokens=64"]),
    ],
)
def test_demonstrations_that_cannot_be_used(
    command: Command,
    capfd: pytest.CaptureFixture[str],
    rows: list[dict[str, str]],
    named: list[str],
) -> None:
    path = write_rows(command.folder / "bad.jsonl", rows)
    code = command.exit_code("sft", f"data.path={path}", "data.max_tokens=64")
    assert_refused(command, code, capfd.readouterr().err, "bad.jsonl", *named)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_full_disk_is_seen_beforehand(
    command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: USAGE(2**40, 2**40 - 2**20, 2**20))
    code = command.exit_code(name)
    assert_refused(command, code, capfd.readouterr().err, "run.root", "0.00 GiB free", "make room")


@contextmanager
def refusing_file_system() -> Iterator[None]:
    """Every file system refuses to take another byte, as a full one does; only for as long as the
    command runs, since pytest's own output may go to a file. The limit that plays it is not
    checked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with mock.patch.object(preflight, "check_file_size"):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# capsys: standard error must not be a file here, or it would be refused as well.
@pytest.mark.parametrize("name", CONFIGS)
def test_a_write_that_the_file_system_refuses(
    command: Command, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    config = write_config(
        command.folder / "config.yaml", CONFIGS[name](command.folder, command.model)
    )
    with refusing_file_system():
        code = command.exit_code(name, config=config)
    error = capsys.readouterr().err
    assert_refused(command, code, error, str(command.run_dir), "cannot be made", "make room")


def test_a_run_is_replaced_only_once_its_successor_is_written(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(
        command.folder / "config.yaml", train_config(command.folder, command.model)
    )
    earlier = command.run_dir / "hf" / "weights"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("worth keeping")
    (command.run_dir / "config.yaml").write_text("run: {}\n")
    (command.run_dir / MARKER).touch()
    with refusing_file_system():
        code = command.exit_code("train", "run.overwrite=true", config=config)
    assert code == 2
    assert str(command.run_dir) in capsys.readouterr().err
    assert earlier.read_text() == "worth keeping"
    assert [entry.name for entry in command.run_dir.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("overwrite", "named"),
    [
        ("false", ["run.name=tiny", "exists", "run.overwrite=true"]),
        ("true", ["not a run directory", "remove it yourself"]),
    ],
)
def test_what_is_there_already_stays(
    command: Command, capfd: pytest.CaptureFixture[str], name: str, overwrite: str, named: list[str]
) -> None:
    thesis = command.run_dir / "thesis.txt"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("mine")
    code = command.exit_code(name, f"run.overwrite={overwrite}")
    error = capfd.readouterr().err
    assert code == 2 and error.count("\n") == 1, error
    for text in [str(command.run_dir), *named]:
        assert text in error
    assert [entry.name for entry in command.run_dir.iterdir()] == [
        "thesis.txt"
    ] and thesis.read_text() == "mine"


def _tree(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("run", [".", "..", "../runs", "-x", ".hidden", "a/b"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_name_that_leads_out_of_the_root_touches_nothing(
    command: Command, capfd: pytest.CaptureFixture[str], name: str, run: str
) -> None:
    for decoy in ("other/metrics.jsonl", "other/.vapo_run", "config.yaml", ".vapo_run"):
        path = command.run_dir.parent / decoy
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    (command.folder / "thesis.txt").write_text("mine")
    before = _tree(command.folder)
    code = command.exit_code(name, "run.overwrite=true", f"run.name={run}")
    error = capfd.readouterr().err
    assert code == 2 and error.count("\n") == 1 and "run.name" in error, error
    assert {path: text for path, text in _tree(command.folder).items() if path in before} == before


def test_replacing_a_run_takes_only_what_a_run_makes(tmp_path: Path) -> None:
    run = RunConfig(name="tiny", root=str(tmp_path), overwrite=True)
    run_dir = tmp_path / "tiny"
    outside = tmp_path / "outside"
    make_run_dir(run, run)
    outside.mkdir()
    for path in (run_dir / "notes.md", run_dir / "hf" / "weights", outside / "kept"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (run_dir / "logs").symlink_to(outside)
    make_run_dir(run, run)
    assert sorted(entry.name for entry in run_dir.iterdir()) == [MARKER, "config.yaml", "notes.md"]
    assert (outside / "kept").read_text() == "mine", "a link goes, not what it leads to"
    (run_dir / MARKER).unlink()
    with pytest.raises(BadInput, match="is not a run directory"):
        make_run_dir(run, run)
    (tmp_path / "link").symlink_to(run_dir)
    with pytest.raises(BadInput, match="is a link"):
        make_run_dir(run, run.model_copy(update={"name": "link"}))
    assert (run_dir / "notes.md").exists()


@pytest.mark.parametrize("setting", ["run.overwrite=true", "run.resume=auto"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_directory_in_which_a_live_run_works(
    command: Command, capfd: pytest.CaptureFixture[str], name: str, setting: str
) -> None:
    (command.run_dir / "hf").mkdir(parents=True)
    (command.run_dir / "config.yaml").write_text("run: {}\n")
    (command.run_dir / MARKER).touch()
    with Lease(command.run_dir) as lease:
        lease.take()
        code = command.exit_code(name, setting)
    error = capfd.readouterr().err
    assert code == 2 and error.count("\n") == 1, error
    assert (
        str(command.run_dir) in error
        and f"process {os.getpid()} on" in error
        and "works in it" in error
    )
    assert (command.run_dir / "config.yaml").read_text() == "run: {}\n"
    assert [entry.name for entry in command.run_dir.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize("name", CONFIGS)
def test_empty_run_directory_that_another_process_will_use(
    command: Command, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    command.run_dir.mkdir(parents=True)
    with Lease(command.run_dir) as lease:
        lease.take()
        code = command.exit_code(name)
    assert code == 2 and "works in it" in capfd.readouterr().err
    assert not list(command.run_dir.iterdir())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_root_that_is_a_file(
    command: Command, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    (command.folder / "runs").write_text("a file")
    code = command.exit_code(name)
    assert_refused(
        command,
        code,
        capfd.readouterr().err,
        "run.root",
        str(command.folder / "runs"),
        "is not a folder",
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_root_that_this_user_may_not_write(
    command: Command, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    root = command.folder / "runs"
    root.mkdir(mode=0o500)
    code = command.exit_code(name)
    assert_refused(
        command, code, capfd.readouterr().err, "run.root", str(root), "cannot be written"
    )


def test_the_program_itself_ends_so(command: Command) -> None:
    config = write_config(
        command.folder / "config.yaml", train_config(command.folder, command.model)
    )
    program = [sys.executable, "-m", "vapo_megatron.cli", "train", str(config), "actor.layuot.tp=2"]
    ended = subprocess.run(
        program, capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[2]
    )
    assert_refused(
        command, ended.returncode, ended.stderr, "actor.layuot", "did you mean actor.layout"
    )
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "data.max_prompt_tokens: 16",
            "unknown key data.max_prompt_tokens: in a file write it nested, "
            "data: {max_prompt_tokens: ...}",
        ),
        ("data: {eval: null}", "data.eval is None; expected a list"),
        (
            "algorithm: {filter_function: module.name}",
            "algorithm.filter_function is 'module.name'; expected package.module:name, with a "
            "colon",
        ),
    ],
)
def test_what_is_expected_is_said_in_the_words_of_a_config(
    command: Command, capfd: pytest.CaptureFixture[str], text: str, named: str
) -> None:
    config = yaml.safe_load(text)
    for section, values in train_config(command.folder, command.model).items():
        if isinstance(config.get(section), dict):
            config[section] = values | config[section]
        else:
            config[section] = values
    code = command.exit_code("train", config=config)
    assert_refused(command, code, capfd.readouterr().err, named)


def test_an_evaluation_wants_a_set_and_says_what_a_training_config_needs(
    command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command.exit_code("evaluate", "data.eval=[]") == 2
    assert "data.eval is []; expected a list of at least 1" in capfd.readouterr().err
    training = train_config(command.folder, command.model)
    assert command.exit_code("evaluate", config=training) == 2
    assert "A training run's needs --checkpoint final" in capfd.readouterr().err
