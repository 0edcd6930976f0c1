"""The rollout side of a run: requests to engines, what goes into a checkpoint and comes out
of it."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from batches import take
from switch_rollout import Watched
from threads import on_threads
from tiny_runs import make_model, train_config
from written_rollouts import (
    CUT,
    END,
    RIGHT,
    WRONG,
    WordVerifier,
    WrittenEngines,
    serve_with,
    write_rollouts,
)

from vapo_megatron.checkpoint.checkpoints import CheckpointName
from vapo_megatron.checkpoint.manifest import Progress
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import BadInput, TryAgain
from vapo_megatron.models.registry import read_spec
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.rewards.math import FAILED, Grade
from vapo_megatron.rewards.pool import Case
from vapo_megatron.rollout.ledger import StepRule
from vapo_megatron.rollout.packed_groups import pack_groups, unpack_groups
from vapo_megatron.rollout.request import GenerationRequest, GroupRequest
from vapo_megatron.training.rollouts import Rollouts, age_metrics, make_rollouts
from vapo_megatron.weights.routed_experts import ExpertChoices

EXPERTS = ExpertChoices(layers=2, experts=4, per_token=2)


def mixed(cursor: int) -> Sequence[Sequence[int]]:
    """One right and one wrong, and of every third prompt two wrong ones."""
    return ((WRONG if cursor % 3 == 2 else RIGHT, END), (WRONG, *[9] * cursor, CUT))


class AheadEngines(WrittenEngines):
    """With a clock that ticks two seconds a reading."""

    count = 2
    version = 5

    def __init__(self) -> None:
        super().__init__(mixed)
        self.busy = 0.0
        self.now = 0.0
        loop = self.loop

        def tick() -> float:
            self.now += 2.0
            return self.now

        self.loop = SimpleNamespace(start=loop.start, run=loop.run, time=tick)  # type: ignore[assignment]

    def written(self, group: GroupRequest) -> list[Sample]:
        found = super().written(group)
        for sample in found:
            sample.versions = ((sample.weight_version, len(sample.response_ids)),)
        return found

    async def stop(self) -> None:
        """Nothing is under way that could be."""

    def busy_seconds(self) -> float:
        self.busy += 1.0
        return self.busy


def ahead(experts: ExpertChoices | None = EXPERTS, **engines: Any) -> Rollouts:
    rollouts = write_rollouts(mixed)
    serve_with(rollouts, AheadEngines())
    rollouts.routed_experts = experts
    for name, value in engines.items():
        setattr(rollouts.engines, name, value)
    return rollouts


def steps(rollouts: Rollouts, count: int = 1) -> tuple[list[list[Sample]], dict[str, float]]:
    """What is taken step by step; the row of the last."""
    taken = []
    row = {}
    for step in range(1, count + 1):
        with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
            taken.append(rollouts.take(recorder))
            rollouts.prepare_sync(recorder)
            rollouts.advance()
            row = recorder.write(step)
    return taken, row


def asked(rollouts: Rollouts) -> list[Any]:
    engines: Any = rollouts.engines
    return list(engines.requests)


@pytest.mark.parametrize("fixed", [False, True])
def test_engines_are_asked_with_what_the_run_is_configured_with(fixed: bool) -> None:
    rollouts = ahead(share_device=False)
    rollouts.begin(StepRule(2, 4), 2, step=1, fixed_policy=fixed)
    steps(rollouts)
    rollouts.end()
    for number, request in enumerate(asked(rollouts)):
        assert (request.prompt.cursor, request.samples, request.sampling) == (
            number,
            2,
            rollouts.sampling,
        )
        assert (request.max_new_tokens, request.seed, request.weight_version) == (24, 1, 5)
        assert request.routed_experts == (None if fixed else EXPERTS)
        assert request.goes_on is False and request.window is None
    # Steps 2 to 4 remain; separate engines write all of them for a fixed policy.
    assert len(asked(rollouts)) == (6 if fixed else 2)
    assert rollouts.stream is None


def test_engines_sharing_device_do_not_run_ahead_of_fixed_policy() -> None:
    rollouts = ahead(share_device=True)
    rollouts.begin(StepRule(2, 3), 2, 0, fixed_policy=True)
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        rollouts.take(recorder)
    assert len(asked(rollouts)) == 2 and rollouts.state() == ({}, {})
    rollouts.end()


@pytest.mark.parametrize(("windows", "window"), [(1, None), (2, 12), (5, 5)])
@pytest.mark.parametrize(
    ("any_order", "mode"), [(False, "wait"), (True, "wait"), (False, "retract")]
)
def test_responses_go_on_where_they_may_be_stopped(
    any_order: bool, mode: str, windows: int, window: int | None
) -> None:
    rollouts = ahead(sync_mode=mode)
    rollouts.begin(StepRule(2, 1, any_order=any_order, windows=windows), 2, 0)
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        rollouts.take(recorder)
    rollouts.end()
    for request in asked(rollouts):
        assert request.goes_on is (any_order or mode == "retract") and request.window == window


@pytest.mark.parametrize(
    ("staleness", "mode", "waits"), [(1, "wait", True), (0, "wait", False), (1, "retract", False)]
)
def test_a_weight_sync_waits_for_what_may_not_depend_on_timing(
    staleness: int, mode: str, waits: bool
) -> None:
    rollouts = ahead(sync_mode=mode)
    rollouts.begin(StepRule(2, 3, staleness=staleness), 2, 0)
    _, row = steps(rollouts)
    assert ("time/wait_for_engines" in row) == waits
    if waits:
        assert rollouts.stream is not None
        assert len(asked(rollouts)) >= 4
    rollouts.end()
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        rollouts.prepare_sync(recorder)


def test_a_step_that_worked_ahead_reports_ages_waits_and_speed() -> None:
    rollouts = ahead()
    rollouts.begin(StepRule(2, 3, staleness=1), 2, 0)
    taken, row = steps(rollouts, 2)
    rollouts.end()
    assert [[sample.prompt.cursor for sample in step] for step in taken] == [
        [0, 0, 1, 1],
        [2, 2, 3, 3],
    ]
    assert (
        row["rollout/age_mean"] == row["rollout/age_max"] == 0 and row["rollout/age_0_share"] == 1
    )
    tokens = sum(len(sample.response_ids) for sample in taken[1])
    # Clock: asked at 8 (after 2, 4, 6 of the first step), 10 for the speed, 12 for the waits: 6 s
    # since the last time.
    assert row["throughput/trainer_idle"] == pytest.approx(2 / 3)
    assert row["throughput/engines_idle"] == pytest.approx(1 - 1 / 12)
    assert row[names.ROLLOUT_SPEED] == pytest.approx(tokens / 6)
    assert row[names.FAILED_GRADES] == 0
    for reason in ("no_signal", "surplus", "stale"):
        assert row[f"rollout/dropped_{reason}"] == 0


def test_each_token_has_the_age_of_the_weights_that_drew_it() -> None:
    """Of a response whose window begins later, the tokens of this step alone; observations
    have no age."""
    samples: Any = [
        SimpleNamespace(versions=((4, 3), (6, 1)), window_start=None, written=np.ones(4, bool)),
        SimpleNamespace(
            versions=((5, 2), (6, 2)), window_start=3, written=np.array([1, 0, 0, 1, 0, 1, 1], bool)
        ),
    ]
    row = age_metrics(samples, version=6)
    assert row.pop("rollout/age_mean") == pytest.approx(1.0) and row.pop("rollout/age_max") == 2
    assert row == pytest.approx(
        {f"rollout/age_{age}_share": count / 7 for age, count in ((0, 3), (1, 1), (2, 3))}
    )


def test_a_synchronous_step_reports_its_speed_alone() -> None:
    rollouts = ahead()
    rollouts.begin(StepRule(2, 2), 2, 0)
    taken, row = steps(rollouts)
    rollouts.end()
    assert row[names.ROLLOUT_SPEED] == sum(len(sample.response_ids) for sample in taken[0]) / 2
    assert not [name for name in row if "age" in name or "dropped" in name or "idle" in name]
    assert "dynamic_sampling/prompts" not in row


def test_groups_without_signal_are_counted_step_by_step() -> None:
    rollouts = ahead()
    rollouts.begin(StepRule(2, 2, most_draws=6), 2, 0)
    _, row = steps(rollouts, 2)
    assert (row["dynamic_sampling/prompts"], row["dynamic_sampling/kept"]) == (3, 2)
    assert row["rollout/dropped_no_signal"] == 1
    assert rollouts.prompts is not None and rollouts.prompts.cursor == 5
    rollouts.end()


@pytest.mark.parametrize("experts", [None, EXPERTS])
def test_dropped_groups_are_reported_again_when_step_is_repeated(
    experts: ExpertChoices | None,
) -> None:
    rollouts = ahead(experts)
    rollouts.begin(rule := StepRule(4, 2, most_draws=12), 2, 0)
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        rollouts.take(recorder)
        assert rollouts.stream is not None and rollouts.prompts is not None
        (dropped,) = rollouts.stream.dropped
        assert [(s.prompt.cursor, s.group, s.reward) for s in dropped] == [(2, 4, -1.0)] * 2
        state, waiting = rollouts.state()  # a signal to stop comes before the step is trained
        again = ahead(experts)
        again.saved = (
            state,
            unpack_groups(pack_groups(waiting), rollouts.prompts.at, rollouts.tokenizer.decode),
        )
        again.begin(rule, 2, 0)
        again.take(recorder)
        assert again.stream is not None
        (same,) = again.stream.dropped
        for name in ("group", "index", "reward", "correct", "finish_reason", "text"):
            assert [getattr(s, name) for s in same] == [getattr(s, name) for s in dropped], name
        if experts is None:
            assert not asked(again), "they were neither written nor graded again"
        else:
            assert sorted(request.prompt.cursor for request in asked(again)) == [0, 1, 2, 3, 4], (
                "for their experts"
            )
        rollouts.advance()
        rollouts.take(recorder)
        assert [s.prompt.cursor for group in rollouts.stream.dropped for s in group] == [5, 5, 8, 8]
    rollouts.end()
    again.end()


def test_groups_that_wait_for_a_later_step_are_not_dropped() -> None:
    rollouts = ahead()
    rollouts.begin(StepRule(4, 3, most_draws=12, staleness=1), 2, 0)
    steps(rollouts)
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        rollouts.prepare_sync(recorder)  # all of steps 2 and 3 are graded
        rollouts.take(recorder)
    assert rollouts.stream is not None and rollouts.stream.ledger.graded
    assert [group[0].prompt.cursor for group in rollouts.stream.dropped] == [5, 8]
    rollouts.end()


def test_a_checkpoint_holds_the_groups_that_wait() -> None:
    rollouts = ahead(experts=None)
    rule = StepRule(2, 4, staleness=1)
    rollouts.begin(rule, 2, 0)
    steps(rollouts)
    state, waiting = rollouts.state()
    assert waiting and state["next"] == 6, "two more for the next step"
    expected, _ = steps(rollouts)
    rollouts.end()
    assert rollouts.state() == ({}, {})
    again = ahead(experts=None)
    again.saved = state, {2: expected[0][:2], 3: expected[0][2:]}
    # A run that was saved by memory alone after its last step is saved without beginning
    assert again.state() == again.saved
    assert again.prompts is not None
    again.prompts.cursor = 2
    again.begin(StepRule(2, 1), 2, 0, fixed_policy=True)
    again.end()
    assert again.saved is not None, "value pretraining leaves them for training"
    again.begin(rule, 2, 1)
    assert again.saved is None
    taken, _ = steps(again)
    again.end()
    assert [sample.response_ids.tolist() for sample in taken[0]] == [
        s.response_ids.tolist() for s in expected[0]
    ]
    assert not [r for r in asked(again)[2:] if r.prompt.cursor < 4], "they are not written again"


class Silent(AheadEngines):
    """Never answers."""

    async def generate(self, group: GroupRequest) -> list[Sample]:
        await asyncio.sleep(60)
        return []

    def overdue(self, came: int, wanted: int) -> TryAgain:
        return TryAgain(f"{came} of {wanted}")


def test_responses_that_do_not_come_in_time_are_not_waited_for() -> None:
    rollouts = ahead()
    serve_with(rollouts, Silent())
    rollouts.engines.collect_timeout_s = 0.05  # type: ignore[misc]
    rollouts.begin(StepRule(2, 1), 3, 0)
    with pytest.raises(TryAgain, match="0 of 6"):
        steps(rollouts)
    rollouts.end()


def test_a_step_says_how_far_it_is() -> None:
    rollouts = ahead()
    rollouts.begin(StepRule(2, 1), 2, 0)
    with Watched(Path("unused")) as recorder:
        rollouts.take(recorder)
    rollouts.end()
    assert recorder.progress == {"rollout": (4, 4)}


class Failing(WordVerifier):
    """A user's function that fails on every response."""

    def grade_batch(self, cases: Sequence[Case], on_done: Callable[..., None]) -> list[Grade]:
        return [Grade(False, next(iter(FAILED)), score=-1.0) for _ in cases]

    def refuse(self, what: str) -> None:
        raise BadInput(what)


def test_a_verifier_that_fails_on_all_is_refused() -> None:
    rollouts = ahead()
    rollouts.verifier = Failing(rollouts.reward)  # type: ignore[assignment]
    rollouts.begin(StepRule(2, 1), 2, 0)
    with pytest.raises(BadInput, match="failed on all of 2 responses"):
        steps(rollouts)
    rollouts.end()


def test_a_checkpoint_of_a_synchronous_run_holds_no_groups() -> None:
    rollouts = ahead()
    rollouts.begin(StepRule(2, 4), 2, 0)
    steps(rollouts)
    state, groups = rollouts.state()
    rollouts.end()
    assert state["next"] == 2 and state["drawn_at"] == {} and pack_groups(groups) == b""


def test_greedy_responses_are_asked_for_once_a_prompt_and_graded() -> None:
    rollouts = ahead()
    assert rollouts.prompts is not None
    with Watched(Path("unused")) as recorder:
        samples = rollouts.generate_greedy(take(rollouts.prompts, 3), recorder)
        assert "time/rollout_greedy" in recorder.write(1) and recorder.progress == {
            "rollout_greedy": (3, 3)
        }
    assert [sample.reward for sample in samples] == [1.0, 1.0, -1.0]
    for number, request in enumerate(asked(rollouts)):
        assert (request.prompt.cursor, request.samples, request.sampling.temperature) == (
            number,
            1,
            0.0,
        )
        assert (request.seed, request.weight_version, request.max_new_tokens) == (1, 5, 24)
    assert rollouts.sampling.temperature == 1.0, "training keeps its temperature"


def test_evaluation_uses_the_runs_engines_with_their_weights() -> None:
    rollouts = ahead()
    answers = []
    assert rollouts.prompts is not None
    requests: list[GenerationRequest] = []

    def collect(
        request: GenerationRequest, on_done: Callable[[int], None], keep: Callable[[Any], None]
    ) -> None:
        requests.append(request)
        for group in request.groups():
            keep(rollouts.engines.written(group))  # type: ignore[attr-defined]
        on_done(request.num_samples)

    rollouts.engines.collect = collect  # type: ignore[attr-defined]
    sampling = rollouts.sampling.model_copy(update={"temperature": 0.5})
    prompts = take(rollouts.prompts, 2)
    done = []
    rollouts.generator(sampling, 11)(prompts, 2, answers.append, done.append)
    (request,) = requests
    assert (request.prompts, request.samples_per_prompt, request.sampling) == (prompts, 2, sampling)
    assert (request.seed, request.weight_version, done) == (11, 5, [4])
    assert [[answer.text for answer in group] for group in answers] == [
        [f"{RIGHT} {END}", f"{WRONG} {CUT}"],
        [f"{RIGHT} {END}", f"{WRONG} 9 {CUT}"],
    ]


def test_engines_are_compared_on_what_the_policy_writes() -> None:
    def probe() -> list[list[int]]:
        rollouts = ahead()
        rollouts.begin(StepRule(2, 1), 2, 0)
        taken, _ = steps(rollouts)
        rollouts.end()
        rollouts.remember_probe(from_samples(taken[0]))
        return rollouts.probe

    assert on_threads(1, probe)[0] == [
        [0, 7, RIGHT, END],
        [0, 7, WRONG, CUT],
        [1, 7, RIGHT, END],
        [1, 7, WRONG, 9, CUT],
    ]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("rollouts")
    return TrainConfig.model_validate(
        train_config(folder, make_model(folder / "model")) | {"cluster": {"ranks": 1}}
    )


def made(config: TrainConfig, resumed: Any = None) -> Rollouts:
    """On one rank, with nothing behind engines and verifier but their names."""
    parts: Any = "engines", TextTokenizer(Path(config.model.path), config.data.prompt), "verifier"
    engines, tokenizer, verifier = parts

    def make() -> Rollouts:
        return make_rollouts(
            config,
            read_spec(Path(config.model.path)),
            engines,
            engines,
            tokenizer,
            verifier,
            resumed,
        )

    found: Rollouts = on_threads(1, make)[0]
    return found


def test_a_new_run_draws_its_prompts_from_the_beginning(config: TrainConfig) -> None:
    rollouts = made(config)
    assert rollouts.prompts is not None and (rollouts.prompts.cursor, len(rollouts.prompts)) == (
        0,
        8,
    )
    order = [prompt.id for prompt in take(rollouts.prompts, 8)]
    assert sorted(order) == [f"p{n}" for n in range(8)] != order
    shuffled = config.data.model_copy(update={"shuffle": False})
    straight = made(config.model_copy(update={"data": shuffled})).prompts
    assert straight is not None and [prompt.id for prompt in take(straight, 8)] == sorted(order)
    other = made(config.model_copy(update={"run": config.run.model_copy(update={"seed": 77})}))
    assert other.prompts is not None and [prompt.id for prompt in take(other.prompts, 8)] != order
    (evaluation,) = rollouts.evaluation_prompts
    assert [prompt.id for prompt in evaluation] == [f"p{n}" for n in range(8, 12)]
    assert (rollouts.engines, rollouts.verifier, rollouts.seed) == (
        "engines",
        "verifier",
        config.run.seed,
    )
    assert rollouts.sampling == config.sampling and rollouts.reward == config.reward
    assert (
        rollouts.routed_experts is None
        and rollouts.saved is None
        and rollouts.mask_function is None
    )
    assert rollouts.agent_settings is None
    playing = config.rollout.model_copy(update={"agent": "a:b"})
    assert made(config.model_copy(update={"rollout": playing})).agent_settings == playing
    masked = config.algorithm.model_copy(update={"mask_function": "a:b"})
    assert made(config.model_copy(update={"algorithm": masked})).mask_function == "a:b"
    assert [len(ids) for ids in rollouts.probe] == [32] * 4
    vocabulary = read_spec(Path(config.model.path)).vocab_size
    assert min(map(min, rollouts.probe)) >= 0 and max(map(max, rollouts.probe)) < vocabulary
    assert made(config).probe == rollouts.probe != other.probe
    assert isinstance(rollouts.tokenizer, TextTokenizer)


def test_experts_are_asked_for_where_the_trainer_replays_them(config: TrainConfig) -> None:
    replay = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"router_replay": True})}
    )
    spec = read_spec(Path(config.model.path))
    assert made(replay).routed_experts == ExpertChoices.of(spec)


def resumed(progress: Progress, graded: bytes = b"") -> Any:
    return SimpleNamespace(progress=progress, name=CheckpointName(3), read=lambda name: graded)


def test_resumed_run_continues_prompts_probe_and_groups(
    config: TrainConfig, tmp_path: Path
) -> None:
    config = config.model_copy(update={"run": config.run.model_copy(update={"root": tmp_path})})
    first = made(config)
    assert first.prompts is not None
    first.prompts.cursor = 5
    before = Progress(step=3, prompts=first.prompts.state(), probe=[[1, 2], [3]])
    rollouts = made(config, resumed(before))
    assert rollouts.prompts is not None and rollouts.prompts.cursor == 5
    assert rollouts.probe == [[1, 2], [3]] and rollouts.saved is None
    with pytest.raises(BadInput, match="data: seed is"):
        made(
            config.model_copy(update={"run": config.run.model_copy(update={"seed": 77})}),
            resumed(before),
        )

    waiting = ahead()
    waiting.begin(StepRule(2, 4, staleness=1), 2, 0)
    steps(waiting)
    state, graded = waiting.state()
    packed = pack_groups(graded)
    waiting.end()
    assert first.prompts.at(5) == rollouts.prompts.at(5)
    groups = replace_cursor(before, first, 2).model_copy(update={"groups": state})
    saved = made(config, resumed(groups, packed)).saved
    # Those of the step after may be graded as well, or under way.
    assert saved is not None and saved[0] == state and saved[1].keys() == graded.keys() >= {2, 3}
    for number, group in saved[1].items():
        assert [sample.prompt for sample in group] == [first.prompts.at(number)] * 2
        assert all(sample.text for sample in group)
    assert made(config, resumed(groups)).saved == (state, {}), "all of them were under way"


def replace_cursor(progress: Progress, rollouts: Rollouts, cursor: int) -> Progress:
    assert rollouts.prompts is not None
    return progress.model_copy(update={"prompts": rollouts.prompts.state() | {"cursor": cursor}})
