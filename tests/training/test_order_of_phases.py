"""The order of the loop by what its real phases see and write, around models that only count their
updates."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from test_shards_on_threads import Planner
from threads import on_threads
from torch import Tensor
from written_rollouts import CUT, END, RIGHT, WRONG, WrittenEngines, serve_with, write_rollouts

from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.megatron.token_loss import StepResult
from vapo_megatron.monitoring.metrics import read_metrics
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.rollout.request import GenerationRequest, GroupRequest
from vapo_megatron.training import outputs
from vapo_megatron.training.loop import train
from vapo_megatron.training.models import Models
from vapo_megatron.training.skipped_updates import SkippedUpdates
from vapo_megatron.training.state import RunState

STEPS = 3
PROMPTS = 4
RESPONSES = 3  # of a step; value pretraining records two such rollouts
PRETRAINING = 2 * PROMPTS


def script(cursor: int) -> Sequence[Sequence[int]]:
    """One response of three is right; in value pretraining one is cut off."""
    last = CUT if cursor < PRETRAINING else END
    return [
        [10 + cursor, 20, RIGHT, END],
        [11 + cursor, WRONG, END],
        [12 + cursor, 21, 22, WRONG, last],
    ]


class Counted(Planner):
    """A model whose outputs say how many updates it has made: as a critic, V is 0.2 of the return
    for each of them."""

    onloaded: frozenset[str] = frozenset()
    dtype = torch.float32
    config = SimpleNamespace(precision=SimpleNamespace(fp8="none"))

    def __init__(self, name: str) -> None:
        super().__init__(tp=1, replays=False)
        self.name = name
        self.updates = 0
        # Of each update, the weight of responses that were cut off
        self.carried_of_cut: list[float] = []

    @property
    def offloader(self) -> "Counted":
        return self

    def send_all_but(self, *parts: str) -> None: ...

    def free_sent(self) -> None: ...

    def fetch(self, *parts: str, room: float = 0) -> float:
        return room

    def footprint(self) -> dict[str, Any]:
        return {}

    def head_has_gradient(self) -> bool:
        return True

    def score(
        self, batch: ExperienceBatch, read: Callable[[Tensor], Tensor] | None = None, **_: Any
    ) -> Tensor:
        if read is None:
            return torch.full((batch.response_tokens, 2), -1.0)
        right = [ids[-2] == RIGHT for ids in batch.tokens.split(batch.cu_seqlens.diff().tolist())]
        values = torch.tensor([0.2 * self.updates * (1.0 if ok else -1.0) for ok in right])
        return read(values.repeat_interleave(batch.response_lengths)[:, None])[:, None]

    def train_step(
        self, batch: ExperienceBatch, share: Any, loss: Any, keep_outputs: bool = False
    ) -> StepResult:
        cut = torch.tensor(
            [bool(ids[-1] == CUT) for ids in batch.tokens.split(batch.cu_seqlens.diff().tolist())]
        )
        self.carried_of_cut.append(
            float(loss.weights[cut.repeat_interleave(batch.response_lengths)].sum())
        )
        self.updates += 1
        return StepResult(1.0, 0.1, {"value_loss": 1.0} if self.name == "critic" else {})


class CountedEngines(WrittenEngines):
    """Has weights by version; remembers how many updates those had that answer the evaluation."""

    serving = 1
    finishes_old_groups = False
    sync_seconds: ClassVar[dict[str, float]] = {}
    sent_share = None
    count = 1

    def __init__(self) -> None:
        super().__init__(script)
        self.version = 0
        self.served = 0
        self.evaluated = list[tuple[int, int]]()

    def collect(
        self, request: GenerationRequest, on_done: Any, on_group: Any = None
    ) -> list[Sample]:
        self.evaluated.append((request.weight_version, self.served))
        samples = super().collect(request, on_done)
        for start in range(0, len(samples), 3):
            on_group(samples[start : start + 3])
        return samples

    def written(self, group: GroupRequest) -> list[Sample]:
        samples = super().written(group)
        for sample in samples:
            sample.versions = ((group.weight_version, len(sample.response_ids)),)
        return samples

    def busy_seconds(self) -> float:
        return 0.0

    def update_weights(self, actor: Counted, again: bool) -> None:
        self.version = self.version + 1
        self.served = actor.updates

    def check(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(largest=0.0, quantile=0.0, mean=0.0)

    def onload(self, *_: str) -> None: ...

    def wait_for_restart(self, make_room: Any) -> None: ...

    def offload_kv_cache(self) -> None: ...

    def pop_failures(self) -> list[str]:
        return []


def config_of(folder: Path, windows: int) -> TrainConfig:
    algorithm: dict[str, Any] = {"update": {"minibatch_size": 6}}
    if windows > 1:
        algorithm |= {"shaping": {"truncated": "window"}, "advantage": {"lambda_critic": 1.0}}
        algorithm |= {"importance_sampling": {"kind": "tis"}}
    return TrainConfig.model_validate(
        {
            "run": {"name": "run", "root": str(folder), "steps": STEPS},
            "model": {"path": str(folder / "unread"), "dtype": "float32"},
            "data": {
                "train": "unread.jsonl",
                "eval": [{"name": "sums", "path": "unread.jsonl", "samples": 3}],
            },
            "batch": {"prompts_per_step": PROMPTS, "samples_per_prompt": RESPONSES},
            "sampling": {"max_new_tokens": 24},
            "reward": {"correct": 1.0, "incorrect": -1.0},
            "rollout": {"windows": windows},
            "algorithm": algorithm,
            "value_pretraining": {"iterations": 2, "replay_epochs": 1, "minibatch_size": 7},
            "evaluation": {"every": 1},
        }
    )


def loop(folder: Path, windows: int) -> Any:
    config = config_of(folder, windows)
    engines = CountedEngines()
    run_dir = Path(config.run.directory)
    rollouts = write_rollouts(script, reward=config.reward)
    updates = SkippedUpdates()
    serve_with(rollouts, engines)
    rollouts.evaluation_prompts = [
        [Prompt("e0", "", "", (3, 7), cursor=50), Prompt("e1", "", "", (4, 7), cursor=51)]
    ]
    models: Any = Models(Counted("actor"), Counted("critic"))  # type: ignore[arg-type]
    models.updates = updates
    checkpointer: Any = SimpleNamespace(safe_point=lambda *_, **__: None)
    state = RunState(config.run, config.checkpoint, run_dir, checkpointer, updates)
    monitoring = MonitoringConfig(tensorboard=False)
    with Recorder(
        run_dir, monitoring, is_main_rank=True, decode=rollouts.tokenizer.decode
    ) as recorder:
        train(config, models, rollouts, state, recorder)
    rollouts.end()
    return models, engines, {row["step"]: row for row in read_metrics(run_dir)}, run_dir


@pytest.mark.parametrize("windows", [1, 2])
def test_each_phase_sees_what_the_phases_before_it_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, windows: int
) -> None:
    monkeypatch.setattr(outputs, "save_models", lambda *_: None)
    ((models, engines, rows, run_dir),) = on_threads(1, loop, tmp_path, windows)
    replayed = models.critic.updates - 2 * STEPS
    assert models.actor.updates == 2 * STEPS and replayed > 0

    # Evaluation comes after the weight sync: the engines have the policy of the step, and say so.
    assert engines.evaluated == [(0, 0), *((1 + step, 2 * step) for step in range(1, STEPS + 1))]
    for step in range(1, STEPS + 1):
        lines = (run_dir / "evaluation" / f"step_{step:06d}_sums.jsonl").read_text().splitlines()
        versions = {json.loads(line)["weight_version"] for line in lines}
        assert versions == {rows[step]["rollout/weight_version"] + 1} == {1 + step}

    # Explained variance is the critic's before the step's updates: 1 - (1 - 0.2 n)^2 after n
    # of them.
    for step in range(1, STEPS + 1):
        before = replayed + 2 * (step - 1)
        assert rows[step]["critic/explained_variance"] == pytest.approx(
            1 - (1 - 0.2 * before) ** 2, abs=1e-5
        ), step

    # Value pretraining has responses whole, with windows too: those that are cut off count as
    # wrong.
    assert any(models.critic.carried_of_cut[:replayed]), (
        "no response that was cut off is learnt from"
    )
