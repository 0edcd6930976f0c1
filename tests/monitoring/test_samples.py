"""Samples are kept group by group, in order, and can be read back."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import with_observation

from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.monitoring.samples import SampleWriter


def sample(group: int, index: int) -> Sample:
    return Sample(
        prompt=Prompt(id=f"p{group}", problem="1 + 1 = ?", answer="2", token_ids=(1, 2)),
        group=group,
        index=index,
        seed=0,
        response_ids=[5, 6, 7],
        rollout_logprobs=[-0.1, -0.2, -0.3],
        finish_reason="stop",
        weight_version=4,
        weight_version_oldest=4,
        text=f"ζ {group}\n{index}",
        reward=1.0,
        correct=True,
        grade_reason="equal",
    )


def test_the_first_groups_of_a_step_are_kept_whole(tmp_path: Path) -> None:
    samples = [sample(group, index) for index in (1, 0) for group in (9, 3, 5)]
    path = SampleWriter(tmp_path, groups_per_step=2).write(12, samples)
    assert path == tmp_path / "samples" / "step_000012.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(row["group"], row["index"]) for row in rows] == [(3, 0), (3, 1), (5, 0), (5, 1)]
    assert rows[1] == {
        "prompt_id": "p3",
        "group": 3,
        "index": 1,
        "problem": "1 + 1 = ?",
        "answer": "2",
        "response": "ζ 3\n1",
        "tokens": 3,
        "finish_reason": "stop",
        "reward": 1.0,
        "correct": True,
        "grade_reason": "equal",
        "weight_version": 4,
    }
    assert "ζ" in path.read_text(encoding="utf-8")


def test_nothing_is_kept_where_nothing_is_asked_for(tmp_path: Path) -> None:
    assert SampleWriter(tmp_path, groups_per_step=0).write(1, [sample(0, 0)]) is None
    assert SampleWriter(tmp_path, groups_per_step=2).write(1, []) is None
    assert list(tmp_path.iterdir()) == []


def test_first_step_keeps_all_samples_where_some_were_dropped(tmp_path: Path) -> None:
    def kept() -> dict[str, list[str]]:
        texts = {path.name: path.read_text().splitlines() for path in tmp_path.rglob("*.jsonl")}
        rows = {name: [json.loads(line) for line in lines] for name, lines in texts.items()}
        assert all(
            row["prompt_ids"] == [1, 2] and row["response_ids"] == [5, 6, 7]
            for r in rows.values()
            for row in r
        )
        return {name: [row["prompt_id"] for row in kept] for name, kept in rows.items()}

    trained, dropped = ([sample(group, 0) for group in groups] for groups in ((0, 1, 2), (3, 4)))
    writer = SampleWriter(tmp_path, groups_per_step=2)
    writer.write(1, trained, dropped)
    assert [row["prompt_id"] for row in writer.take()] == ["p0", "p1"], (
        "trackers get what people read"
    )
    both = {"step_000001.jsonl": ["p0", "p1"], "step_000001_others.jsonl": ["p2", "p3", "p4"]}
    assert kept() == both
    writer.write(1, trained, dropped)  # a run that was killed takes its first step again
    assert kept() == both
    writer.write(1, trained)  # with other responses, all of which had signal
    assert kept() == {"step_000001.jsonl": ["p0", "p1"]}
    SampleWriter(tmp_path / "later", groups_per_step=2).write(2, trained, dropped)
    assert [path.name for path in (tmp_path / "later/samples").iterdir()] == [
        "step_000002.jsonl"
    ], "of another policy"


def test_unwritable_samples_are_counted_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "samples").write_text("a full disk refuses as this file does")
    writer = SampleWriter(tmp_path, 2, with_tokens=1, decode=lambda ids: "".join(map(str, ids)))
    for step in (1, 2):
        assert writer.write(step, [sample(0, 0)]) is None
        # Its file is tried once more
        writer.add_estimates(step, torch.zeros(3), None, torch.tensor([0, 3]))
        assert len(writer.take()) == 1 and writer.failures == step
    (tmp_path / "samples").unlink()
    assert writer.write(3, [sample(0, 0)]) is not None
    assert (
        writer.failures
        == 2
        == sum("are not kept" in record.getMessage() for record in caplog.records)
    )


def test_estimates_of_an_episode_stand_at_what_the_policy_wrote(tmp_path: Path) -> None:
    episode = with_observation(sample(0, 0), 1, 2)
    episode.turn_rewards = np.array(
        [0.5] + [0.0] * (len(episode.response_ids) - 1), dtype=np.float32
    )
    episode.episode = {"turns": 2.0}
    writer = SampleWriter(tmp_path, 1, 1, lambda ids: "".join(f"<{number}>" for number in ids))
    writer.write(3, [episode])
    count = int(episode.loss_mask.sum())  # type: ignore[union-attr]
    writer.add_estimates(3, torch.arange(count) / 10, None, torch.tensor([0, count]))
    (row,) = writer.take()
    ids = episode.response_ids.tolist()
    shown = [(turn["observed"], turn["text"]) for turn in row["turns"]]
    texts = ["".join(f"<{number}>" for number in part) for part in (ids[:1], ids[1:3], ids[3:])]
    assert shown == [(False, texts[0]), (True, texts[1]), (False, texts[2])]
    assert (
        row["estimates"]["values"][:4] == [0.0, None, None, 0.1]
        and len(row["estimates"]["values"]) == count + 2
    )
    assert (
        row["estimates"]["rewards"][:2] == [0.5, None]
        and row["tokens"] == count
        and row["episode"] == {"turns": 2.0}
    )
