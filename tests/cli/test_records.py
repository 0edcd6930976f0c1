"""Recorded responses for value pretraining: every format says the same, and what does not say
enough is refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow
import pytest
import torch
from batches import with_observation, with_segment
from commands import Command, assert_refused
from pyarrow import parquet
from threads import on_threads
from tiny_runs import problems, train_config, write_config

from vapo_megatron.checkpoint.manifest import PretrainingProgress
from vapo_megatron.checkpoint.recorded_rollouts import RecordedRollouts
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.data import EvalSet
from vapo_megatron.config.load import load_config
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.records import KEY, Records, record_files
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import BadInput
from vapo_megatron.evaluation.responses import response_of
from vapo_megatron.models.registry import read_spec
from vapo_megatron.monitoring.samples import SampleWriter
from vapo_megatron.rewards.math import Grade
from vapo_megatron.rewards.pool import Case
from vapo_megatron.training.outputs import evaluate_sets
from vapo_megatron.training.rollouts import Rollouts
from vapo_megatron.training.value_pretraining import import_records

# Problem by its place in data.train, response, whether it was cut off, whether it is correct.
DRAWN = [
    (0, "#### 0", False, True),
    (1, "plus plus 1 2 3 4 5 6", True, False),
    (0, "1 #### 7", False, False),
]
ROW = {"problem": "1 plus 1", "response": "#### 2", "result": True}


def config_of(folder: Path, model: Path, *sources: Path) -> TrainConfig:
    config = train_config(folder, model)
    return TrainConfig.model_validate(
        config | {"value_pretraining": {"from": [str(path) for path in sources]}}
    )


def config_file(folder: Path, model: Path, source: Path) -> Path:
    """config_of, as a file."""
    settings = train_config(folder, model) | {"value_pretraining": {"from": [str(source)]}}
    return write_config(folder / "records.yaml", settings)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def samples_of(tokenizer: TextTokenizer, rows: list[dict[str, Any]]) -> list[Sample]:
    """DRAWN as the run's engines give it."""
    drawn = []
    for number, (place, text, cut, correct) in enumerate(DRAWN):
        problem = rows[place]["problem"]
        prompt = Prompt(f"p{place}", problem, "", tuple(tokenizer.encode_prompt(problem)))
        ids = tokenizer.encode_response(text) + ([] if cut else [tokenizer.eos_id])
        sample = Sample(
            prompt, place, number, 0, ids, [0.0] * len(ids), "length" if cut else "stop", 0, 0, text
        )  # type: ignore[arg-type]
        sample.reward = 1.0 if correct else -1.0
        sample.correct = correct
        drawn.append(sample)
    return drawn


def recorded(folder: Path, tokenizer: TextTokenizer, kind: str) -> Path:
    """DRAWN in one of the formats."""
    rows = problems(8)
    samples = samples_of(tokenizer, rows)
    if kind == "run":
        (folder / "earlier").mkdir()
        (folder / "earlier/config.yaml").touch()
        (folder / "earlier/metrics.jsonl").touch()
        SampleWriter(folder / "earlier", 8).write(1, samples)
        # Of a policy that has moved: passed over
        SampleWriter(folder / "earlier", 8).write(2, samples)
        return folder / "earlier"
    if kind == "first_evaluation":  # the run's own code, before its first step and after its second
        (folder / "earlier/evaluation").mkdir(parents=True)
        (folder / "earlier/config.yaml").touch()
        (folder / "earlier/metrics.jsonl").touch()
        for step in (0, 2):
            evaluate_in_the_run(folder / "earlier", samples, tokenizer, step)
        return folder / "earlier"
    if kind == "evaluation":
        answers = [(response_of(sample, tokenizer.decode), sample) for sample in samples]
        for response, sample in answers:
            response.correct = bool(sample.correct)
        written = [response.row(sample.prompt) for response, sample in answers]
        path = write(folder / "evaluated/evaluation/sums.jsonl", written)
        (folder / "evaluated/config.yaml").touch()
        write(path.with_name("sums_problems.jsonl"), [{"id": "of another kind"}])
        return folder / "evaluated"
    if kind == "evaluation_folder":
        return recorded(folder, tokenizer, "first_evaluation") / "evaluation"
    if kind in ("verifiers", "prime_rl"):
        return write(folder / "results.jsonl", [trace(s, tokenizer, kind) for s in samples])
    if kind in ("trl", "trl_special"):
        read = tokenizer.decode if kind == "trl" else None
        table = [
            {
                "step": 1,
                "prompt": read(s.prompt.token_ids)
                if read
                else tokenizer.prompt_text(s.prompt.problem),
                "completion": s.text,
                "accuracy_reward": s.reward,
                "advantage": 0.5,
            }
            for s in samples
            if not s.truncated
        ]
        (folder / "completions").mkdir()
        path = folder / "completions/completions_00001.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(table), path)
        return path.parent
    if kind in ("slime", "slime_rewards"):
        dumped: list[dict[str, Any]] = [
            {
                "tokens": [*sample.prompt.token_ids, *sample.response_ids.tolist()],
                "response_length": len(sample.response_ids),
                "response": tokenizer.decode_all(sample.response_ids.tolist()),
                "reward": sample.reward,
                "status": "truncated" if sample.truncated else "completed",
                "loss_mask": [1] * len(sample.response_ids),
            }
            for sample in samples
        ]
        if kind == "slime_rewards":
            for row in dumped:
                row["reward"] = {"score": row["reward"], "acc": row["reward"] > 0, "pred": "3"}
            # Left out of training there: passed over
            zeros = {"loss_mask": [0] * dumped[0]["response_length"], "reward": {"a": 1, "b": 2}}
            dumped = [dumped[0] | zeros, *dumped, dumped[0] | {"remove_sample": True}]
        torch.save({"rollout_id": 0, "samples": dumped}, folder / "dump.pt")
        return folder / "dump.pt"
    # Neither special tokens nor why it ended; the response that fills its room is left out
    if kind == "verl":
        lines = [
            (tokenizer.decode(sample.prompt.token_ids), sample)
            for sample in samples
            if not sample.truncated
        ]
        rows = [
            {"input": text, "output": s.text, "score": s.reward, "step": 1, "acc": s.correct}
            for text, s in lines
        ]
        return write(folder / "verl/1.jsonl", rows).parent
    assert kind == "rows"
    return write(
        folder / "rows.jsonl",
        [
            {
                "prompt": sample.prompt.problem,
                "response": sample.text,
                "result": sample.correct,
                "finish_reason": sample.finish_reason,
            }
            for sample in samples
        ],
    )


def trace(sample: Sample, tokenizer: TextTokenizer, kind: str) -> dict[str, Any]:
    """As verifiers saves it, of prime-rl with tokens."""
    row = {
        "example_id": sample.group,
        "prompt": [{"role": "user", "content": sample.prompt.problem}],
        "completion": [{"role": "assistant", "content": sample.text}],
        "reward": sample.reward,
        "is_truncated": sample.truncated,
        "error": None,
        "metrics": {"correct_answer": 1.0},
    }
    if kind == "prime_rl":
        ids = sample.response_ids.tolist()
        tokens = {"prompt_ids": list(sample.prompt.token_ids), "completion_ids": ids}
        tokens |= {"completion_mask": [1] * len(ids), "prompt_mask": [0] * len(ids)}
        step = {"tokens": tokens, "reward": None, "is_truncated": sample.truncated}
        row |= {"trajectory": [step], "completion": "not read"}
    return row


def evaluate_in_the_run(
    folder: Path, samples: list[Sample], tokenizer: TextTokenizer, step: int
) -> None:
    """The evaluation of a run of two problems, with these responses in place of an engine's, graded
    as they are."""

    def generate(prompts: list[Prompt], k: int, keep: Any, on_done: Any) -> None:
        for prompt in prompts:
            drawn = [response_of(s, tokenizer.decode) for s in samples if s.prompt.id == prompt.id]
            keep((2 * drawn)[:k])

    def grade_batch(cases: list[Case], on_done: Any) -> list[Grade]:
        texts = {response_of(s, tokenizer.decode).text: bool(s.correct) for s in samples}
        return [Grade(texts[case.response], "equal") for case in cases]

    settings = config_of(folder, Path("unread"))
    rollouts = SimpleNamespace(
        verifier=SimpleNamespace(grade_batch=grade_batch),
        sampling=settings.sampling,
        seed=1,
        evaluation_prompts=[[samples[0].prompt, samples[1].prompt]],
        reward=settings.reward,
        generator=lambda *_: generate,
    )
    entry = EvalSet(name="sums", path="unread", samples=2)
    evaluate_sets(cast(Rollouts, rollouts), [entry], settings.evaluation, folder, step)


# How often the response that was cut off is in a file.
REPEATS = {"verl": 0, "trl": 0, "trl_special": 0, "first_evaluation": 2, "evaluation_folder": 2}
OWN = ("run", "first_evaluation", "evaluation", "evaluation_folder", "rows")
OTHERS = ("slime", "slime_rewards", "verl", "verifiers", "prime_rl", "trl", "trl_special")


@pytest.mark.parametrize("kind", [*OWN, *OTHERS])
def test_every_format_gives_the_drawn_tokens_and_rewards(
    kind: str, tmp_path: Path, model: Path
) -> None:
    config = config_of(tmp_path, model)
    tokenizer = TextTokenizer(model, config.data.prompt)
    drawn = samples_of(tokenizer, problems(8))
    wanted = [drawn[0], drawn[2], *[drawn[1]] * REPEATS.get(kind, 1)]
    config = config_of(tmp_path, model, recorded(tmp_path, tokenizer, kind))
    (batch,) = Records(config, tokenizer, read_spec(model).vocab_size).batches()
    lines = [
        batch.tokens[a:b].tolist()
        for a, b in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
    ]
    assert lines == [[*sample.prompt.token_ids, *sample.response_ids.tolist()] for sample in wanted]
    assert batch.rewards.tolist() == [sample.reward for sample in wanted]
    assert batch.correct.tolist() == [sample.correct for sample in wanted]
    assert batch.truncated.tolist() == [sample.truncated for sample in wanted]
    assert batch.group_ids.tolist() == [0, 0, 1, 1][: len(wanted)], (
        "responses to one prompt are a group"
    )
    assert batch.prompt_keys is not None
    assert len(batch.prompt_keys.unique()) == len(batch.group_ids.unique()), (
        "and each prompt is known by a key"
    )


SCORED = [
    ({}, {"score": 1.0}, (1.0, True)),
    ({}, {"result": -1}, (-1.0, False)),
    ({}, {"reward": -1.0, "score": 0.2}, (-1.0, False)),
    ({"verifier": "code"}, {"acc": 1, "score": 0.3}, (1.0, True)),
    ({"verifier": "function", "function": "any:f"}, {"score": 0.7}, (0.7, True)),
    ({"verifier": "function", "function": "any:f"}, {"score": 0.5}, (0.5, False)),
    (
        {"verifier": "function", "function": "any:f", "correct_above": None},
        {"score": 1.0},
        (1.0, False),
    ),
]


@pytest.mark.parametrize(("reward", "result", "expected"), SCORED)
def test_a_number_is_a_reward_of_this_run(
    reward: dict[str, Any],
    result: dict[str, Any],
    expected: tuple[float, bool],
    tmp_path: Path,
    model: Path,
) -> None:
    path = write(tmp_path / "rows.jsonl", [{"problem": "1 plus 1", "response": "#### 2"} | result])
    config = config_of(tmp_path, model, path).model_copy(update={"reward": RewardConfig(**reward)})
    (batch,) = Records(config, TextTokenizer(model, config.data.prompt), 100).batches()
    assert (batch.rewards.item(), batch.correct.item()) == (pytest.approx(expected[0]), expected[1])


def test_the_masks_of_a_run_are_those_that_its_samples_had(tmp_path: Path, model: Path) -> None:
    tokenizer = TextTokenizer(model, config_of(tmp_path, model).data.prompt)
    masked, _, plain = samples_of(tokenizer, problems(8))
    masked.loss_mask = np.arange(len(masked.response_ids)) != 1
    (tmp_path / "earlier").mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / "earlier" / name).touch()
    SampleWriter(tmp_path / "earlier", 8, decode=tokenizer.decode).write(1, [masked, plain])
    config = config_of(tmp_path, model, tmp_path / "earlier")
    (batch,) = Records(config, tokenizer, read_spec(model).vocab_size).batches()
    expected = from_samples([masked, plain])
    assert torch.equal(batch.tokens, expected.tokens) and expected.loss_mask is not None
    assert batch.loss_mask is not None and torch.equal(batch.loss_mask, expected.loss_mask)


def test_dropped_groups_are_read_with_trained_ones(tmp_path: Path, model: Path) -> None:
    tokenizer = TextTokenizer(model, config_of(tmp_path, model).data.prompt)
    drawn = samples_of(tokenizer, problems(8))
    run = tmp_path / "earlier"
    write(run / "metrics.jsonl", [])
    (run / "config.yaml").touch()
    SampleWriter(run, 8).write(1, [drawn[0], drawn[2]], [drawn[1]])
    batches = list(Records(config_of(tmp_path, model, run), tokenizer, 100).batches())
    assert [batch.rewards.tolist() for batch in batches] == [[1.0, -1.0], [-1.0]], (
        "each response once"
    )
    assert batches[1].tokens.tolist() == [
        *drawn[1].prompt.token_ids,
        *drawn[1].response_ids.tolist(),
    ]


def test_episodes_are_read_as_they_were_played(tmp_path: Path, model: Path) -> None:
    """Observations, segments, rewards of turns and of the agent: a critic learns from them as it
    would in the run."""
    settings = train_config(tmp_path, model) | {
        "rollout": {"agent": "a:b", "episode": {"max_tokens": 64}}
    }
    tokenizer = TextTokenizer(model, config_of(tmp_path, model).data.prompt)
    drawn = samples_of(tokenizer, problems(8))
    run = tmp_path / "earlier"
    played = [with_segment(with_observation(sample, 1, 2), 2, 12) for sample in drawn[:2]]
    played[0].turn_rewards = np.array(
        [0.25] + [0.0] * (len(played[0].response_ids) - 1), dtype=np.float32
    )
    # Not of reward.correct and incorrect
    played[0].reward = 0.75
    played[1].reward = 0.5
    played[1].correct = True
    for number, sample in enumerate(played):
        sample.text = tokenizer.decode(sample.response_ids.tolist())
        sample.episode = {"turns": 3.0}
        sample.group = number
    (run / "samples").mkdir(parents=True)
    (run / "config.yaml").write_text("rollout:\n  agent: a:b\n")
    evaluated = [
        response_of(sample, tokenizer.decode).row(sample.prompt) for sample in (*played, drawn[2])
    ]
    write(run / "evaluation/step_000000_sums.jsonl", evaluated)
    with pytest.raises(BadInput, match="evaluations keep no tokens of episodes: name files"):
        list(record_files([str(run)]))
    (run / "metrics.jsonl").touch()
    SampleWriter(run, 8, decode=tokenizer.decode).write(1, played[:1], played[1:])

    def read(config: dict[str, Any]) -> list[ExperienceBatch]:
        config = config | {"value_pretraining": {"from": [str(run)]}}
        return list(Records(TrainConfig.model_validate(config), tokenizer, 100).batches())

    for batch, sample in zip(read(settings), played, strict=True):
        expected = from_samples([sample])
        names = (
            "tokens",
            "loss_mask",
            "segment_starts",
            "segments",
            "turn_rewards",
            "rewards",
            "correct",
            "truncated",
        )
        for name in names:
            found = getattr(batch, name)
            wanted = getattr(expected, name)
            assert found is wanted is None or torch.equal(found, wanted), name
    with pytest.raises(BadInput, match="episode without its tokens, or in a run without"):
        read(train_config(tmp_path, model))
    for changes, said in (
        ({"segment_starts": [0]}, "segment_starts are no observations"),
        ({"segment_starts": [1, -1]}, "segment_starts are no observations"),
        ({"segment_starts": 3}, "segment_starts are no observations"),
        ({"turn_rewards": [[99, 0.5]]}, "turn_rewards no numbers at tokens"),
        ({"turn_rewards": [[-1, 0.5]]}, "turn_rewards no numbers at tokens"),
        ({"turn_rewards": [[0, "high"]]}, "turn_rewards no numbers at tokens"),
        ({"turn_rewards": [0.5]}, "turn_rewards no numbers at tokens"),
        (
            {"response_ids": [5] * 64, "response": "", "loss_mask": None},
            "above rollout.episode.max_tokens=64",
        ),
    ):
        path = run / "samples/step_000001.jsonl"
        row = json.loads(path.read_text())
        write(path, [row | changes])
        with pytest.raises(BadInput, match=f"step_000001.jsonl:1: .*{said}"):
            read(settings)
        write(path, [row])
    # At a token that a mask of the run's own had covered
    write(path, [row | {"turn_rewards": [[1, 0.5]]}])
    assert len(read(settings)) == 2


class State:
    """What import_records needs of RunState."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.recorded = RecordedRollouts(run_dir)
        self.points = 0
        self.pretraining = PretrainingProgress()

    def safe_point(self, rollouts: Any, milestone: bool) -> None:
        self.points += 1


def test_a_resumed_run_imports_nothing_again(tmp_path: Path, model: Path) -> None:
    tokenizer = TextTokenizer(model, config_of(tmp_path, model).data.prompt)
    sources = [recorded(tmp_path, tokenizer, kind) for kind in ("rows", "slime")]
    records = Records(config_of(tmp_path, model, *sources), tokenizer, 100)
    state = State(tmp_path)
    on_threads(1, import_records, records, None, state)
    assert (state.recorded.table.samples, state.pretraining.iterations, state.points) == (6, 2, 1)
    assert len(state.recorded.prompt_ids.unique()) == 2, "one prompt is the same in both files"
    tokens: ExperienceBatch = next(iter(records.batches()))
    assert torch.equal(state.recorded.tokens_of(torch.arange(3))["tokens"], tokens.tokens)
    shutil.rmtree(tmp_path / "verl", ignore_errors=True)
    sources[0].unlink()
    on_threads(1, import_records, records, None, state)
    assert state.recorded.table.samples == 6


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no result": ({"result": None}, ("rows.jsonl:1", "result is missing")),
    "a result of another scale": (
        {"result": 0},
        ("rows.jsonl:1", "result 0", "reward.incorrect=-1"),
    ),
    "not finite": ({"result": float("inf")}, ("result is inf",)),
    "no response": ({"response": ""}, ("rows.jsonl:1", "response or output")),
    "no prompt": ({"problem": 3}, ("problem or prompt",)),
    "another tokenizer's text": (
        {"response": "the answer"},
        ("are another text", "another tokenizer"),
    ),
    "another tokenizer's ids": (
        {"response_ids": [5, 9000]},
        ("response_ids has 9000", "another tokenizer"),
    ),
    "ids that are another text": (
        {"response_ids": [5, 6]},
        ("are another text", "another tokenizer"),
    ),
    "no ids": ({"response_ids": [True]}, ("no list of token ids",)),
    "text that may be cut": (
        {"response": "1 1 1 1 1 1 1 1"},
        ("8 tokens", "truncated text", "finish_reason"),
    ),
    "fewer tokens than there were": ({"tokens": 7}, ("3 tokens", "was 7", "truncated text")),
    "too long": (
        {"response": "1 " * 8 + "1", "finish_reason": "length"},
        ("above sampling.max_new_tokens=8",),
    ),
    "a long prompt": ({"prompt_ids": [5] * 17}, ("17 tokens", "data.max_prompt_tokens=16")),
    "not at its end": ({"finish_reason": "abort"}, ("finish_reason 'abort'",)),
    "an episode": ({"episode": {"turns": 2}}, ("agent's episode",)),
    "a prompt of verl's that is unknown": (
        {"problem": None, "input": "3 plus 9"},
        ("its input", "data.train"),
    ),
    "a mask of another length": (
        {"loss_mask": [1, 0]},
        ("loss_mask is no list of 0 and 1 for the 3 tokens",),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_record_that_cannot_be_used_is_named(
    case: str, command: Command, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    changes, named = REFUSED[case]
    path = write(
        tmp_path / "rows.jsonl", [{k: v for k, v in (ROW | changes).items() if v is not None}]
    )
    code = command.exit_code("train", f"value_pretraining.from=[{path}]")
    assert_refused(command, code, capfd.readouterr().err, str(path), *named)


@pytest.mark.parametrize("suffix", [".jsonl", ".pt"])
def test_what_the_critic_alone_reads_comes_from_the_record(
    suffix: str, command: Command, capfd: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    def recorded_with(more: dict[str, Any]) -> Path:
        if suffix == ".jsonl":
            return write(tmp_path / "rows.jsonl", [ROW | more, ROW | more])
        tokens = {"tokens": [5, 6, 7], "response_length": 2, "reward": 1.0, "status": "completed"}
        torch.save({"samples": [tokens | more] * 2}, tmp_path / "rows.pt")
        return tmp_path / "rows.pt"

    path = recorded_with({"answer": "7 7"})
    keys = ("critic.privileged_field=answer",)
    config = load_config(TrainConfig, config_file(tmp_path, model, path), keys, PRESETS)
    tokenizer = TextTokenizer(model, config.data.prompt)
    (batch,) = Records(config, tokenizer, 100).batches()
    assert batch.privileged_tokens is not None and batch.privileged_lengths is not None
    assert batch.privileged_tokens.tolist() == tokenizer.encode_response("7 7") * 2
    assert batch.privileged_lengths.tolist() == [2, 2]
    first = f"{tmp_path / f'rows{suffix}'}:{int(suffix == '.jsonl')}"
    for more, named in (
        ({}, (first, "critic.privileged_field")),
        ({"answer": "7 " * 120}, ("120 tokens", KEY)),
    ):
        path = recorded_with(more)
        code = command.exit_code("train", f"{KEY}=[{path}]", *keys)
        assert_refused(command, code, capfd.readouterr().err, "answer", *named)


def _step(read: list[int], wrote: list[int], **more: Any) -> dict[str, Any]:
    return {"tokens": {"prompt_ids": read, "completion_ids": wrote, **more}}


def test_a_trace_of_several_turns_is_masked_where_others_wrote(tmp_path: Path, model: Path) -> None:
    steps = [_step([5, 6], [7, 8], completion_mask=[1, 1]), _step([5, 6, 7, 8, 9, 4], [3])]
    row = {"reward": 1.0, "trajectory": steps, "is_truncated": False}
    config = config_of(tmp_path, model, write(tmp_path / "t.jsonl", [row]))
    tokenizer = TextTokenizer(model, config.data.prompt)
    (batch,) = Records(config, tokenizer, 100).batches()
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 4, 3]
    assert batch.loss_mask is not None
    assert batch.loss_mask.tolist() == [False, False, True, True, False, False, True]


_MESSAGES = {
    "prompt": [{"role": "user", "content": "1 plus 2"}],
    "completion": [{"role": "assistant", "content": "#### 3"}],
    "reward": 1.0,
}
_CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
WITHOUT_TOKENS: dict[str, tuple[dict[str, Any], str]] = {
    "several turns": ({"completion": [*_MESSAGES["completion"]] * 3}, "has 3 messages"),  # type: ignore[misc]
    "a tool call": ({"completion": [_CALL]}, "has tool_calls"),
    "a plain prompt": ({"prompt": "1 plus 2"}, "no list of messages"),
    "no tokens": ({"trajectory": [{"tokens": None}]}, "step 0 of its trajectory has no tokens"),
    "no prompt in a step": (
        {"trajectory": [_step([5], [6]), {"tokens": {"completion_ids": [7]}}]},
        "prompt_ids of step 1 of its trajectory is None, expected a list",
    ),
    "no list of tokens": (
        {"trajectory": [{"tokens": {"prompt_ids": [5], "completion_ids": "6 7"}}]},
        "completion_ids of step 0 of its trajectory is 6 7, expected a list",
    ),
    "no list of masks": (
        {"trajectory": [_step([5], [6], completion_mask="1")]},
        "completion_mask of step 0 of its trajectory is 1, expected a list",
    ),
    "another history": (
        {"trajectory": [_step([5], [6]), _step([5, 7], [8])]},
        "step 1 of its trajectory rewrites the history",
    ),
    "a broken episode": ({"error": "timeout"}, "an episode that broke (timeout)"),
    "two rewards": ({"completion": "3", "advantage": 1.0, "a": 1.0, "b": 0.0}, "reward, a, b"),
    "messages for a text": (
        {"completion": "3", "advantage": 1.0},
        "its prompt is [{'role': 'user'",
    ),
    "messages for verl": ({"completion": None, "input": [5, 6]}, "no text in input"),
    "a list that says how it ended": ({"completion": [], "is_truncated": []}, "has 0 messages"),
    "a reward of parts": (
        {"completion": None, "reward": {"a": 1, "b": 0}},
        "has a, b and no score",
    ),
}


@pytest.mark.parametrize("case", WITHOUT_TOKENS)
def test_what_others_records_lack_is_named(
    case: str, command: Command, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    changes, named = WITHOUT_TOKENS[case]
    row = {k: v for k, v in (_MESSAGES | changes).items() if v is not None}
    if case == "two rewards":
        del row["reward"]
        named = "are a, b"
    path = write(tmp_path / "rows.jsonl", [row])
    code = command.exit_code("train", f"{KEY}=[{path}]")
    assert_refused(command, code, capfd.readouterr().err, f"{path}:1", named)


def test_rollouts_without_names_are_refused(
    command: Command, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "rollouts.bin").write_bytes(b"\x93")
    code = command.exit_code("train", f"{KEY}=[{tmp_path / 'rollouts.bin'}]")
    assert_refused(command, code, capfd.readouterr().err, "rollouts.bin", "train_rollouts.jsonl")
    (tmp_path / "c.parquet").write_bytes(b"no")
    code = command.exit_code("train", f"{KEY}=[{tmp_path / 'c.parquet'}]")
    assert_refused(command, code, capfd.readouterr().err, "c.parquet", "as parquet")


class Harmful:
    """Would write a file, were it unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_dump_is_not_run(
    command: Command, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    torch.save({"samples": [Harmful(tmp_path / "harm")]}, tmp_path / "dump.pt")
    code = command.exit_code("train", f"value_pretraining.from=[{tmp_path / 'dump.pt'}]")
    assert_refused(command, code, capfd.readouterr().err, "dump.pt", "without running code")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("odd", [{"tokens": "5 6 7"}, {"loss_mask": 1}])
def test_a_sample_of_slime_without_lists_is_refused(
    odd: dict[str, Any], command: Command, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    row = {"tokens": [5, 6, 7], "response_length": 2, "reward": 1.0, "status": "completed"}
    torch.save({"samples": [row | odd]}, tmp_path / "dump.pt")
    code = command.exit_code("train", f"value_pretraining.from=[{tmp_path / 'dump.pt'}]")
    assert_refused(command, code, capfd.readouterr().err, "dump.pt:0", "is no list")


def test_a_response_of_slime_that_did_not_end_is_refused(
    command: Command, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    row = {"tokens": [5, 6, 7], "response_length": 2, "reward": 1.0, "status": "aborted"}
    torch.save({"samples": [row]}, tmp_path / "dump.pt")
    code = command.exit_code("train", f"value_pretraining.from=[{tmp_path / 'dump.pt'}]")
    assert_refused(command, code, capfd.readouterr().err, "dump.pt:0", "finish_reason 'aborted'")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            ["value_pretraining.from=[nowhere.jsonl]"],
            ("nowhere.jsonl", "no such file", "value_pretraining.from"),
        ),
        (["value_pretraining.from=[{}]"], ("holds none of",)),
        (["value_pretraining.from=[x]", "value_pretraining.enabled=false"], ("enabled=false",)),
        (["value_pretraining.from=[x]", "value_pretraining.iterations=2"], ("iterations=2",)),
        (["value_pretraining.form=[x]"], ("value_pretraining.from",)),
    ],
)
def test_what_excludes_records_is_named(
    overrides: list[str],
    named: tuple[str, ...],
    command: Command,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "empty").mkdir()
    code = command.exit_code("train", *(text.format(tmp_path / "empty") for text in overrides))
    assert_refused(command, code, capfd.readouterr().err, *named)


def test_a_check_counts_the_records(
    command: Command, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", [ROW, ROW, ROW | {"problem": "2 plus 2"}])
    assert command.exit_code("train", "--check", f"value_pretraining.from=[{path}]") == 0, (
        capfd.readouterr().err
    )
    assert "3 responses in 1 files" in capfd.readouterr().out


def test_a_check_shows_rows_with_their_special_tokens(
    command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    command.exit_code("train", "--check")
    shown = [line for line in capfd.readouterr().out.splitlines() if line.startswith("row ")]
    assert len(shown) == 3 and shown[0].startswith("row p0, ")
    assert all("<|im_start|>user" in line and "tokens, answer" in line for line in shown)
