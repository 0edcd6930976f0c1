"""Recorded rollouts are files: a selection equals the one from memory, and memory
holds none of it."""

import errno
import os
import random
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import with_observation, with_segment
from damage import flip

from vapo_megatron.checkpoint import recorded_rollouts
from vapo_megatron.checkpoint.manifest import (
    FileFacts,
    Manifest,
    check_contents,
    check_structure,
    needed_files,
)
from vapo_megatron.checkpoint.recorded_rollouts import (
    BYTES_PER_TOKEN,
    RecordedRollouts,
    remove_unneeded,
    write_rollout,
)
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.errors import BadInput
from vapo_megatron.files import CannotWrite
from vapo_megatron.training.value_pretraining import Targets
from vapo_megatron.weights.hf_writer import write_json


def some_samples(
    seed: int, groups: int, size: int = 3, longest: int = 30, observed: bool = False
) -> list[Sample]:
    """Graded samples of random lengths, tokens, log-probs and grades, with observations where asked
    for."""
    rng = random.Random(seed)
    samples = []
    for group in range(groups):
        prompt = Prompt(
            str(group), "", "", tuple(rng.randrange(99) for _ in range(rng.randint(1, 9)))
        )
        prompt = replace(prompt, privileged_ids=tuple(range(seed))) if observed else prompt
        for index in range(size):
            n = rng.randint(1, longest)
            correct = rng.random() < 0.5
            ids = [rng.randrange(99) for _ in range(n)]
            logprobs = [-rng.random() for _ in range(n)]
            reason = "length" if rng.random() < 0.3 else "stop"
            made = Sample(
                prompt,
                group,
                index,
                0,
                ids,
                logprobs,
                reason,
                0,
                0,
                reward=float(correct),
                correct=correct,
            )  # type: ignore[arg-type]
            if observed and index:
                made = with_observation(made, n // 2, index)
                made = with_segment(made, n // 2, 3) if index == 2 else made
                made.turn_rewards = np.where(made.loss_mask, 0.25, 0.0).astype(np.float32)  # type: ignore[arg-type]
            samples.append(made)
    return samples


def recorded(run_dir: Path, rollouts: list[list[Sample]]) -> RecordedRollouts:
    record = RecordedRollouts(run_dir)
    for samples in rollouts:
        record.add(
            record.next_name, write_rollout(from_samples(samples), run_dir / record.next_name)
        )
    return record


def in_memory(rollouts: list[list[Sample]]) -> ExperienceBatch:
    """The same samples as one batch, whose groups are numbered on."""
    samples: list[Sample] = []
    for rollout in rollouts:
        first = samples[-1].group + 1 if samples else 0
        for sample in rollout:
            sample.group += first
        samples += rollout
    batch = from_samples(samples)
    batch.prompt_keys = None  # a record has its own prompt_ids
    return batch


def selected_of(record: RecordedRollouts, samples: list[int]) -> ExperienceBatch:
    chosen = torch.tensor(samples)
    return record.table.select(chosen).batch(**record.tokens_of(chosen))


def assert_same(found: ExperienceBatch, expected: ExperienceBatch) -> None:
    assert found.tensors().keys() == expected.tensors().keys()
    for name, tensor in expected.tensors().items():
        assert (
            torch.equal(found.tensors()[name], tensor)
            and found.tensors()[name].dtype == tensor.dtype
        ), name


@pytest.fixture
def rollouts() -> list[list[Sample]]:
    return [
        some_samples(seed, groups, observed=seed == 2) for seed, groups in ((1, 4), (2, 1), (3, 5))
    ]


def test_what_is_selected_is_what_memory_would_give(
    tmp_path: Path, rollouts: list[list[Sample]]
) -> None:
    record = recorded(tmp_path, rollouts)
    again = RecordedRollouts(tmp_path, record.files)
    whole = in_memory(rollouts)
    for selected in ([0], [29, 0, 13, 12, 14, 3], list(range(30)), list(reversed(range(30)))):
        expected = whole.select(selected)
        assert_same(selected_of(record, selected), expected)
        assert_same(selected_of(again, selected), expected)
    for name in (
        "group_ids",
        "rewards",
        "correct",
        "truncated",
        "response_lengths",
        "prompt_lengths",
    ):
        assert torch.equal(getattr(again.table, name), getattr(whole, name)), name
    assert again.prompt_ids.dtype == torch.int64 and torch.equal(
        again.prompt_ids, record.prompt_ids
    )
    assert len(again.prompt_ids.unique()) == 10 and again.files == record.files
    assert again.next_name == record.next_name == "recorded_rollouts/rollouts_00003.safetensors"


def test_targets_of_a_part_know_the_whole_group(
    tmp_path: Path, rollouts: list[list[Sample]]
) -> None:
    shaping = {"soft_overlong": {"max_length": 30, "cache_length": 20}}
    config = AlgorithmConfig.model_validate({"shaping": shaping})
    targets = Targets(recorded(tmp_path, rollouts), config)
    whole = targets.select(range(30)).local
    part = targets.select([7, 21]).local
    placed = whole.select([7, 21]).turn_rewards
    assert (
        placed is not None
        and part.turn_rewards is not None
        and torch.equal(part.turn_rewards, placed)
    )
    expected = whole.select([7, 21]).returns
    assert part.returns is not None and expected is not None and torch.equal(part.returns, expected)
    assert len(part.returns.unique()) > 1


def resident(kind: str) -> int:
    """Bytes of this process that are resident: RssAnon, its own; RssFile, mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{kind}:"))


def test_memory_holds_a_mini_batch_and_not_the_record(tmp_path: Path) -> None:
    groups = 64
    length = 40_000
    ids = torch.arange(length).numpy()
    logprobs = torch.zeros(length).numpy()
    samples = [
        Sample(Prompt("", "", "", (1,)), g, 0, 0, ids, logprobs, "stop", 0, 0, reward=1.0)
        for g in range(groups)
    ]
    written = recorded(tmp_path, [samples]).files
    size = next(iter(written.values())).bytes
    assert size == pytest.approx(groups * length * BYTES_PER_TOKEN, rel=0.01)
    del samples
    own = resident("RssAnon")
    mapped = resident("RssFile")
    record = RecordedRollouts(tmp_path, written)
    grown = []
    for sample in range(groups):
        assert int(selected_of(record, [sample]).tokens.sum()) == 1 + length * (length - 1) // 2
        grown.append(resident("RssAnon") - own)
    assert resident("RssFile") - mapped > size // 2, "the file was read through a mapping"
    assert max(grown) < size // 4, "and not into memory of this process"


def make_checkpoint(run_dir: Path, step: str, record: dict[str, FileFacts]) -> Path:
    """A checkpoint without models."""
    checkpoint = run_dir / "checkpoints" / step
    checkpoint.mkdir(parents=True)
    settings = {
        "checkpoint_id": "u",
        "run_id": "r",
        "step": 0,
        "kind": "train",
        "models": (),
        "world_size": 1,
    }
    manifest = Manifest.model_validate(
        settings | {"layouts": {}, "metrics": {}, "files": {}, "record": record}
    )
    write_json(checkpoint / "manifest.json", manifest.model_dump(mode="json"))
    return checkpoint


def refusal(checkpoint: Path) -> str | None:
    """What is said of a checkpoint before it is gone on from."""
    manifest = Manifest.model_validate_json((checkpoint / "manifest.json").read_text())
    try:
        check_structure(checkpoint, manifest)
    except BadInput as error:
        return str(error)
    return check_contents(checkpoint, needed_files(checkpoint, manifest))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (
            Path.unlink,
            "rollouts_00001.safetensors is missing: the checkpoint is damaged; restore it from a "
            "copy",
        ),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "rollouts_00001.safetensors has"),
        (flip, "rollouts_00001.safetensors has changed since it was saved (sha256"),
    ],
)
def test_harm_to_a_file_is_told_by_its_name(
    tmp_path: Path, rollouts: list[list[Sample]], harm: Callable[[Path], None], said: str
) -> None:
    record = recorded(tmp_path, rollouts)
    checkpoint = make_checkpoint(tmp_path, "step_000000_pretraining_000003", record.files)
    assert refusal(checkpoint) is None
    path = tmp_path / "recorded_rollouts" / "rollouts_00001.safetensors"
    harm(path)
    found = refusal(checkpoint)
    assert found is not None and said in found and str(path) in found and "\n" not in found
    first = {
        name: facts for name, facts in record.files.items() if name.endswith("00000.safetensors")
    }
    assert refusal(make_checkpoint(tmp_path, "step_000000_pretraining_000001", first)) is None


def test_files_go_when_no_checkpoint_needs_them(
    tmp_path: Path, rollouts: list[list[Sample]]
) -> None:
    record = recorded(tmp_path, rollouts)
    names = sorted(record.files)
    older = make_checkpoint(
        tmp_path, "step_000000_pretraining_000002", {name: record.files[name] for name in names[:2]}
    )
    make_checkpoint(tmp_path, "step_000000", {})
    (tmp_path / "recorded_rollouts" / ".rollouts_00003.safetensors.half").write_bytes(
        b"left by a kill"
    )
    manifest = (older / "manifest.json").read_text()
    (older / "manifest.json").write_text("{")
    remove_unneeded(tmp_path)
    assert len(list((tmp_path / "recorded_rollouts").iterdir())) == 4, (
        "a checkpoint that cannot be read may need any of them"
    )
    (older / "manifest.json").write_text(manifest)
    remove_unneeded(tmp_path)
    assert sorted(path.name for path in (tmp_path / "recorded_rollouts").iterdir()) == [
        Path(name).name for name in names[:2]
    ]
    shutil.rmtree(older)
    remove_unneeded(tmp_path)
    assert not (tmp_path / "recorded_rollouts").exists()


def test_what_cannot_be_removed_stays(tmp_path: Path) -> None:
    (tmp_path / "recorded_rollouts" / "a folder").mkdir(parents=True)
    remove_unneeded(tmp_path)
    assert (tmp_path / "recorded_rollouts" / "a folder").is_dir()


@pytest.mark.parametrize("refusals", [1, 2])
def test_a_file_system_that_refuses_is_asked_twice(
    tmp_path: Path, rollouts: list[list[Sample]], monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    """To map a file as well as to write it; what it refuses then interrupts a run, as it may
    pass."""
    left = 0

    def refused(do: Callable[..., object], *args: object, **named: object) -> object:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return do(*args, **named)

    refuses = pytest.raises(
        CannotWrite, match=r"rollouts_00000\.safetensors: cannot be \w+ \(Stale file handle\)"
    )
    outcome: AbstractContextManager[object] = refuses if refusals == 2 else nullcontext()
    monkeypatch.setattr(recorded_rollouts, "sync", partial(refused, recorded_rollouts.sync))
    left = refusals
    with outcome:
        recorded(tmp_path, rollouts[:1])
    record = recorded(tmp_path, rollouts[:1])
    monkeypatch.setattr(
        recorded_rollouts, "safe_open", partial(refused, recorded_rollouts.safe_open)
    )
    left = refusals
    with outcome:
        assert RecordedRollouts(tmp_path, record.files).files == record.files


def test_what_is_no_record_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "recorded_rollouts" / "rollouts_00000.safetensors"
    path.parent.mkdir()
    path.write_bytes(b"x" * 40)
    with pytest.raises(
        BadInput,
        match=r"rollouts_00000.safetensors: cannot be read \(.*every rank has to see the same",
    ):
        RecordedRollouts(
            tmp_path,
            {"recorded_rollouts/rollouts_00000.safetensors": FileFacts(bytes=40, sha256="")},
        )
