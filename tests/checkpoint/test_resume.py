"""A run that is stopped or killed, in whatever phase, and started again equals one that never was,
to the bit."""

import errno
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attempts
import pytest
import safetensors.torch
import torch.distributed as dist
from attempts import (
    End,
    World,
    fill_the_disk,
    fine_tune,
    kill_at,
    left_behind,
    live,
    lose_the_disk,
    make_world,
    metrics,
    refuse_checkpoints,
    refuse_sync,
)
from damage import flip
from ranks import run_ranks
from safetensors.numpy import load
from tiny_runs import make_model, sft_config

from vapo_megatron.checkpoint import recorded_rollouts
from vapo_megatron.checkpoint.checkpoints import CheckpointName, list_checkpoints
from vapo_megatron.checkpoint.host_memory import host_memory, host_memory_of
from vapo_megatron.checkpoint.manifest import GROUPS_FILE, Manifest, Progress
from vapo_megatron.checkpoint.resume import Resumed, open_resumed, restore_run_files
from vapo_megatron.config.run_directory import MARKER
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.errors import BadInput, TryAgain
from vapo_megatron.run import rank as run_rank
from vapo_megatron.run.failures import explain
from vapo_megatron.run.start import is_finished, prepare_start
from vapo_megatron.training.models import load_models
from vapo_megatron.weights.adapters import base_identity
from vapo_megatron.weights.export import stream_hf

RESUME = "run.resume=auto"
LAYOUTS: dict[int, dict[str, int]] = {1: {}, 2: {"tp": 2}}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, engine_of_runs: EngineAddress) -> World:
    return make_world(tmp_path_factory.mktemp("resume"), engine_of_runs)


@pytest.fixture(scope="module")
def straight(shared: World) -> Callable[[int], Path]:
    """The run directory of an uninterrupted run on so many ranks."""
    done: dict[int, Path] = {}

    def run(count: int) -> Path:
        if count not in done:
            config = config_of(
                shared, f"straight{count}", LAYOUTS[count], "checkpoint.every_minutes=null"
            )
            assert live(shared, config, count) == End(0, "")
            done[count] = Path(config.run.directory)
        return done[count]

    return run


def config_of(world: World, name: str, layout: Mapping[str, int], *overrides: str) -> TrainConfig:
    """What past steps said of returns is state as well."""
    return attempts.config_of(
        world, name, layout, "algorithm.advantage.calibration=trust", *overrides
    )


def checkpoint_names(config: TrainConfig) -> list[str]:
    """Oldest first."""
    return [path.name for path in list_checkpoints(Path(config.run.directory)).values()]


def recorded(config: TrainConfig) -> list[str]:
    return sorted(
        path.name for path in (Path(config.run.directory) / "recorded_rollouts").glob("*")
    )


def leftovers(config: TrainConfig) -> list[Path]:
    return list((Path(config.run.directory) / "checkpoints").glob(".*"))


def assert_equal(found: Path, expected: Path) -> None:
    assert metrics(found) == metrics(expected)
    files = left_behind(found)
    expected_files = left_behind(expected)
    assert files.keys() == expected_files.keys()
    assert [name for name in files if files[name] != expected_files[name]] == []


@pytest.mark.full
def test_killed_in_every_phase_on_two_ranks(shared: World, straight: Callable[[int], Path]) -> None:
    # What is written in the background may or may not be there when a kill comes; here every save
    # is waited for.
    config = config_of(shared, "killed", LAYOUTS[2], RESUME)
    traps = [
        # Phase, call and rank of the kill; the newest checkpoint after it.
        ("rollout", 2, 0, "step_000000_pretraining_000001"),
        ("value pretraining", 2, 1, "step_000000_pretraining_000003"),
        ("save", 4, 0, "step_000000"),
        ("policy update", 3, 1, "step_000001"),
    ]
    for phase, call, victim, newest in traps:
        end = live(shared, config, 2, partial(kill_at, phase, call, victim, waits=True))
        assert end.code == 75 and f"rank{victim} was killed by SIGKILL" in end.said, end
        assert checkpoint_names(config)[-1] == newest, phase
        assert bool(leftovers(config)) is (phase == "save"), (
            "what a save that was killed has written"
        )
        if phase == "value pretraining":
            assert recorded(config) == ["rollouts_00000.safetensors", "rollouts_00001.safetensors"]
    assert live(shared, config, 2) == End(0, "")
    assert_equal(Path(config.run.directory), straight(2))
    assert not leftovers(config) and not recorded(config)


@pytest.mark.full
def test_asked_to_stop_and_killed(shared: World, straight: Callable[[int], Path]) -> None:
    """On one rank; test_fault_soak.py does it on four."""
    config = config_of(shared, "stopped", LAYOUTS[1], RESUME, "checkpoint.every_minutes=null")
    end = live(shared, config, 1, stop="samples/step_000001.jsonl")
    assert end.code == 75 and "because of SIGUSR1" in end.said and "\n" not in end.said
    assert checkpoint_names(config)[-1] in end.said
    # In the rollout of step 3, when one of its groups is graded: nothing of step 2, and not that
    # group, is lost.
    rare = config_of(
        shared,
        "stopped",
        LAYOUTS[1],
        RESUME,
        "checkpoint.every_minutes=null",
        "checkpoint.every=100",
    )
    groups = config.batch.prompts_per_step
    end = live(shared, rare, 1, partial(kill_at, "grading", groups + 1, number=signal.SIGUSR1))
    assert end.code == 75 and "because of SIGUSR1" in end.said and "step_000002" in end.said
    assert list(
        (Path(config.run.directory) / "checkpoints" / "step_000002").rglob(
            "graded_groups.safetensors"
        )
    )
    assert live(shared, config, 1, partial(kill_at, "policy update", 1)).code == 75
    assert live(shared, config, 1) == End(0, "")
    assert_equal(Path(config.run.directory), straight(1))


def saved_groups(config: TrainConfig) -> int:
    """Graded groups in the newest checkpoint."""
    newest = Path(config.run.directory) / "checkpoints" / checkpoint_names(config)[-1]
    content = load((newest / GROUPS_FILE).read_bytes())
    return len(json.loads(content["facts"].tobytes()))


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2])
def test_a_signal_costs_no_group_that_was_collected(
    count: int, shared: World, straight: Callable[[int], Path]
) -> None:
    """Also where the state that they belong to is on the disk already, without them."""
    config = config_of(
        shared, f"collected{count}", LAYOUTS[count], RESUME, "checkpoint.every_minutes=null"
    )
    groups = config.batch.prompts_per_step
    parts = 3  # of scoring: by reference, policy and critic
    stops: list[tuple[str, int, int, str, set[int]]] = [
        # Place, call and rank of the signal; the newest checkpoint after it, and how many groups it
        # may have.
        ("scoring", parts + 1, count - 1, "step_000001", {groups}),
        # The groups of step 2 are not graded again.
        ("grading", 2, 0, "step_000002", set(range(1, groups + 1))),
        (
            "grading",
            1,
            0,
            "step_000002",
            set(range(2, groups + 1)),
        ),  # in the first rollout of an attempt
    ]
    for place, call, rank, newest, saved in stops:
        if [newest] == checkpoint_names(config)[-1:] and saved_groups(config) == groups:
            # All of step 3 were graded before the last signal was seen: none is left for this one.
            break
        end = live(
            shared, config, count, partial(kill_at, place, call, rank, number=signal.SIGUSR1)
        )
        who = "" if count == 1 else f" on rank {rank}"
        assert (
            end.code == 75
            and f"because of SIGUSR1{who}: start" in end.said
            and "\n" not in end.said
        ), end
        assert checkpoint_names(config)[-1] == newest, (place, call)
        assert saved_groups(config) in saved, (place, call)
    assert live(shared, config, count) == End(0, "")
    assert_equal(Path(config.run.directory), straight(count))
    assert not leftovers(config)


@pytest.mark.full
def test_adapters_go_on_as_well_and_only_on_their_base(shared: World) -> None:
    """Of actor and critic, on one base: killed in an update and gone on with, the run equals one
    that never was. The critic reads the answer as well."""
    adapters = (
        "actor.kind=adapter",
        "critic.kind=adapter",
        "model.adapter.rank=4",
        "critic.privileged_field=answer",
        "run.steps=2",
        "evaluation.every=2",
    )
    less = ("algorithm.kl.replace_reference_every=null", "value_pretraining.enabled=false")
    straight, killed = (
        config_of(
            shared, name, LAYOUTS[1], RESUME, "checkpoint.every_minutes=null", *adapters, *less
        )
        for name in ("adapters", "killed_adapters")
    )
    assert live(shared, straight, 1) == End(0, "")
    assert live(shared, killed, 1, partial(kill_at, "policy update", 3, waits=True)).code == 75
    assert checkpoint_names(killed) == ["step_000001"]
    assert live(shared, killed, 1) == End(0, "")
    assert_equal(Path(killed.run.directory), Path(straight.run.directory))
    halves = left_behind(Path(killed.run.directory))[
        "hf/final/actor_adapter/adapter_model.safetensors"
    ]
    assert any(
        tensor.any() for name, tensor in safetensors.torch.load(halves).items() if "lora_B" in name
    )
    longer = killed.model_copy(update={"run": killed.run.model_copy(update={"steps": 3})})
    weights = shared.model / "model.safetensors"
    content = weights.read_bytes()
    try:
        shutil.copy(make_model(shared.folder / "other", seed=1) / weights.name, weights)
        base_identity.cache_clear()
        said = refusal(longer)
    finally:
        weights.write_bytes(content)
        base_identity.cache_clear()
    assert (
        f"{shared.model}: its weights are not those that the adapters in" in said
        and "\n" not in said
    )
    assert refusal(longer) == "rank 0 would continue"


@pytest.mark.full
def test_it_stops_before_its_time_limit_and_each_try_progresses(
    shared: World, straight: Callable[[int], Path]
) -> None:
    config = config_of(shared, "limited", LAYOUTS[1], RESUME, "checkpoint.job_timeout_s=1e-7")
    seen: list[str] = []
    for _ in range(20):
        end = live(shared, config, 1)
        if end.code == 0:
            break
        assert end.code == 75 and "its time limit" in end.said
        assert checkpoint_names(config)[-1] not in seen
        seen.append(checkpoint_names(config)[-1])
    assert end.code == 0 and len(seen) >= 5
    assert_equal(Path(config.run.directory), straight(1))


@pytest.mark.full
def test_another_layout_goes_on_to_rounding(shared: World, straight: Callable[[int], Path]) -> None:
    """Saved by two tensor-parallel ranks, continued by two pipeline stages that share the critic's
    data."""
    source = straight(2)
    config = config_of(
        shared, "relaid", {"pp": 2}, RESUME, "critic.layout={}", "evaluation.every=null"
    )
    run_dir = Path(config.run.directory)
    shutil.copytree(source, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step_000003")
    shutil.rmtree(run_dir / "hf")
    assert live(shared, config, 2) == End(0, "")
    found = metrics(run_dir)[-1]
    expected = metrics(source)[-1]
    assert found["step"] == expected["step"] == 3
    for name in (
        "actor/grad_norm",
        "critic/grad_norm",
        "critic/value_loss",
        "actor/entropy",
        "actor/ref_kl",
    ):
        assert found[name] == pytest.approx(expected[name], rel=2e-3, abs=1e-5), name
    for name in ("reward/mean", "response_length/mean", "actor/lr", "rollout/weight_version"):
        assert found[name] == expected[name], name


def test_a_finished_run_has_nothing_to_do(
    shared: World, straight: Callable[[int], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in straight(1).rglob("*")}
    config = config_of(shared, "straight1", LAYOUTS[1], RESUME)
    assert live(shared, config, 1) == End(0, "")
    assert "straight1: finished already" in capfd.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in straight(1).rglob("*")}


@pytest.mark.full
def test_a_full_disk_loses_nothing(shared: World, straight: Callable[[int], Path]) -> None:
    config = config_of(
        shared, "full", LAYOUTS[1], RESUME, "checkpoint.every_minutes=null", "run.steps=4"
    )
    run_dir = Path(config.run.directory)
    shutil.copytree(straight(1), run_dir)
    before = checkpoint_names(config)
    end = live(shared, config, 1, partial(fill_the_disk, 200_000))
    assert end.code == 75 and "\n" not in end.said
    assert "checkpoints/step_000004: cannot be saved (File too large)" in end.said
    assert checkpoint_names(config) == before and not leftovers(config), (
        "nothing half-written is left, nothing whole is gone"
    )


def spoil(limit: int) -> None:
    """Fill the disk, and once a run has begun, put files in the place of folders that it writes to:
    before that they would be refused."""
    fill_the_disk(limit)
    restore = run_rank.restore_run_files

    def restore_and_spoil(run_dir: Path, *args: Any) -> None:
        restore(run_dir, *args)
        for folder in ("samples", "evaluation"):
            shutil.rmtree(run_dir / folder, ignore_errors=True)
            (run_dir / folder).touch()

    run_rank.restore_run_files = restore_and_spoil


def test_refused_writes_are_dropped_or_kept_in_memory(
    shared: World,
    straight: Callable[[int], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Files to read and models of single steps are left out, each named and counted; the state of
    the run is kept."""
    more = ("checkpoint.every_minutes=null", "run.steps=5", "evaluation.every=4", "export.every=4")
    config = config_of(shared, "elsewhere", LAYOUTS[1], RESUME, *more, "cluster.restarts=1")
    run_dir = Path(config.run.directory)
    kept = host_memory_of(Path(config.run.directory))
    shutil.copytree(straight(1), run_dir)
    (run_dir / "hf" / "step_000004").touch()  # nothing can be written below it
    before = checkpoint_names(config)
    end = live(shared, config, 1, partial(spoil, 200_000))
    assert (
        end.code == 75 and "cannot be saved (File too large)" in end.said and "\n" not in end.said
    )
    state = next(iter((kept / "checkpoints").iterdir()))
    assert (
        f"the state is saved in host memory, {state}: a start on this machine finds it there"
        in end.said
    )
    assert (
        checkpoint_names(config) == before and state.name == "step_000005" and not leftovers(config)
    )
    assert failures(run_dir)[4] == 1 + 1 + 2, (
        "samples, tried again with estimates; answers to one set; two models"
    )
    assert failures(run_dir)[5] == failures(run_dir)[4] + 1 + 1, "it went on to the end"
    said = "".join(capfd.readouterr())
    for output in ("samples of step 4 are", "step_000004_sums.jsonl is", *MODELS_OF_STEP_4):
        assert re.search(
            rf"{output} not kept: .*cannot be written \((Not a directory|File exists)\): make room",
            said,
        )
    with host_memory(tmp_path):
        assert state.is_dir(), "the start of another run leaves it alone"
    for folder in ("samples", "evaluation"):
        (run_dir / folder).unlink()
    assert live(shared, config, 1, partial(kill_at, "policy update", 1)) == End(0, ""), (
        "no step is repeated"
    )
    assert [row["step"] for row in metrics(run_dir)][-5:] == [1, 2, 3, 4, 5] and not kept.exists()
    assert checkpoint_names(config)[-1] == "step_000005"
    assert (run_dir / "hf" / "final" / "actor" / "model.safetensors").is_file()


MODELS_OF_STEP_4 = ("hf/step_000004/actor is", "hf/step_000004/critic is")


def failures(run_dir: Path) -> dict[int, float]:
    """By step, how often the disk has refused something that a run can do without."""
    return {row["step"]: row.get("tracking/failures", 0) for row in metrics(run_dir)}


@pytest.fixture
def copy(
    shared: World, straight: Callable[[int], Path], request: pytest.FixtureRequest
) -> tuple[TrainConfig, Path]:
    """A run of one rank with two more steps to make, and its newest checkpoint."""
    name = f"copy_{abs(hash(request.node.name))}"
    config = config_of(shared, name, LAYOUTS[1], RESUME, "run.steps=5")
    shutil.copytree(straight(1), Path(config.run.directory))
    return config, Path(config.run.directory) / "checkpoints" / "step_000003"


def refusal(config: TrainConfig) -> str:
    """What a start says, before any rank is started or else on one rank."""
    try:
        start = prepare_start(config, lambda: None, lambda: None)
        assert start.checkpoint is not None
        return str(run_ranks(1, opened, config, start.checkpoint)[0])
    except BadInput as error:
        return str(error)


def opened(config: TrainConfig, checkpoint: Path) -> str:
    try:
        load_models(config, open_resumed(checkpoint))
    except BadInput as error:
        return str(error)
    return f"rank {dist.get_rank()} would continue"


def resumed_policies(config: TrainConfig, checkpoint: Path) -> dict[str, bytes]:
    """What the first MLP of actor and reference holds where a run resumes."""
    models = load_models(config, open_resumed(checkpoint))
    found = {}
    for name, model in {"actor": models.actor, "reference": models.reference}.items():
        assert model is not None
        model.offloader.onload_only("weights")
        tensors = {
            key: tensor.numpy().tobytes()
            for bucket in stream_hf(model.chunks, model.spec, model.mesh, "lm")
            for key, tensor in bucket
        }
        found[name] = tensors["model.layers.0.mlp.down_proj.weight"]
    return found


def test_a_replaced_reference_is_the_saved_one_after_a_resume(
    copy: tuple[TrainConfig, Path],
) -> None:
    """It was replaced after step 2."""
    config, checkpoint = copy
    (before,) = run_ranks(1, resumed_policies, config, checkpoint.with_name("step_000002"))
    (after,) = run_ranks(1, resumed_policies, config, checkpoint)
    assert before["reference"] == before["actor"] == after["reference"] != after["actor"]


@pytest.mark.full
def test_a_fixed_reference_is_the_start_after_a_resume(shared: World) -> None:
    less = ("algorithm.kl.replace_reference_every=null", "value_pretraining.enabled=false")
    config = config_of(shared, "fixed_reference", LAYOUTS[1], "run.steps=1", *less)
    assert live(shared, config, 1) == End(0, "")
    checkpoint = Path(config.run.directory) / "checkpoints" / "step_000001"
    (found,) = run_ranks(1, resumed_policies, config, checkpoint)
    start = safetensors.torch.load_file(shared.model / "model.safetensors")
    weight = start["model.layers.0.mlp.down_proj.weight"].numpy().tobytes()
    assert found["reference"] == weight != found["actor"]


@pytest.fixture(scope="module")
def recording(shared: World) -> TrainConfig:
    """A run of one rank that stopped when it had recorded two rollouts."""
    config = config_of(shared, "recording", LAYOUTS[1], RESUME, "checkpoint.job_timeout_s=1e-7")
    assert [live(shared, config, 1).code for _ in range(2)] == [75, 75]
    assert checkpoint_names(config)[-1] == "step_000000_pretraining_000002"
    return config


@pytest.mark.parametrize(
    "harm,message",
    [
        (flip, r"rollouts_00001.safetensors has changed since it was saved"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1]),
            r"rollouts_00001.safetensors has \d+ bytes",
        ),
        (Path.unlink, r"rollouts_00001.safetensors is missing: the checkpoint is damaged"),
    ],
)
def test_a_damaged_record_is_refused_by_name(
    recording: TrainConfig, harm: Callable[[Path], Any], message: str
) -> None:
    path = Path(recording.run.directory) / "recorded_rollouts" / "rollouts_00001.safetensors"
    whole = path.read_bytes()
    harm(path)
    said = refusal(recording)
    path.write_bytes(whole)
    assert str(path) in said and "\n" not in said
    with pytest.raises(BadInput, match=message):
        raise BadInput(said)
    assert refusal(recording) == "rank 0 would continue"


def flip_a_bit(checkpoint: Path) -> None:
    flip(max((checkpoint / "critic").glob("*.distcp"), key=lambda path: path.stat().st_size))


def cut_short(checkpoint: Path) -> None:
    path = next((checkpoint / "actor").glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-1])


def mix(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "critic")
    shutil.copytree(checkpoint.with_name("step_000002") / "critic", checkpoint / "critic")


def of_the_future(checkpoint: Path) -> None:
    content = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(content | {"format": 99}))


@pytest.mark.parametrize(
    "harm,message",
    [
        (
            flip_a_bit,
            r"step_000003: the content of critic/__0_\d.distcp has changed since it was saved",
        ),
        (
            cut_short,
            r"step_000003: actor/__0_\d.distcp has \d+ bytes, its manifest says \d+: "
            r"the checkpoint is damaged",
        ),
        (mix, r"step_000003: (the content of )?critic/\S+ (has|is) .* damaged"),
        (of_the_future, r"format 99, this version reads format 3"),
        (
            lambda checkpoint: (checkpoint / "manifest.json").unlink(),
            r"step_000003: manifest.json is missing",
        ),
    ],
)
def test_damaged_checkpoint_refused_by_name_and_can_be_deleted(
    copy: tuple[TrainConfig, Path], harm: Callable[[Path], Any], message: str
) -> None:
    config, checkpoint = copy
    harm(checkpoint)
    (checkpoint.parent / ".step_000004.half").mkdir()
    before = stamps(config)
    said = refusal(config)
    assert stamps(config) == before, "nothing is written before all of it is proven"
    assert "\n" not in said
    with pytest.raises(BadInput, match=message):
        raise BadInput(said)
    shutil.rmtree(checkpoint)
    assert refusal(config) == "rank 0 would continue"


def test_run_with_changed_checkpoint_ends_before_directory_does(
    shared: World, copy: tuple[TrainConfig, Path]
) -> None:
    """It is found while models load, and engines of the run are not started then."""
    config, checkpoint = copy
    flip_a_bit(checkpoint)
    before = stamps(config)
    end = live(shared, config, 1)
    assert end.code == 2 and "\n" not in end.said
    assert re.search(
        r"step_000003: the content of critic/__0_\d\.distcp has changed since it was saved",
        end.said,
    )
    logs = Path(config.run.directory) / "logs"
    changed = {path for path, stamp in stamps(config).items() if before.get(path) != stamp}
    assert all(path.is_relative_to(logs) for path in changed), changed


def test_config_that_does_not_fit_is_refused_before_any_change(
    copy: tuple[TrainConfig, Path],
) -> None:
    config, _ = copy
    other = config.model_copy(
        update={"batch": config.batch.model_copy(update={"samples_per_prompt": 2})}
    )
    before = (Path(config.run.directory) / "config.yaml").read_bytes()
    assert refusal(other).startswith("batch.samples_per_prompt=2: the run was saved with 4")
    assert (Path(config.run.directory) / "config.yaml").read_bytes() == before
    meant = other.run.model_copy(update={"allow_config_change": ("batch.samples_per_prompt",)})
    assert refusal(other.model_copy(update={"run": meant})) == "rank 0 would continue"


@pytest.mark.parametrize(
    "harm", [lambda lines: lines[1:], lambda lines: [*lines[:-1], lines[-1].replace("plus", "+")]]
)
def test_other_problems_under_same_path_are_refused_untouched(
    copy: tuple[TrainConfig, Path], harm: Callable[[list[str]], list[str]]
) -> None:
    config, checkpoint = copy
    (checkpoint.parent / ".step_000004.half").mkdir()
    path = Path(config.data.train)
    before = stamps(config)
    lines = path.read_text().splitlines(keepends=True)
    try:
        path.write_text("".join(harm(lines)))
        said = refusal(config)
    finally:
        path.write_text("".join(lines))
    assert re.match(r"data: (prompts|fingerprint) is \w+ and was \w+ in the checkpoint", said), said
    assert stamps(config) == before


def stamps(config: TrainConfig) -> dict[Path, int]:
    """When each file and folder of a run was written."""
    return {path: path.stat().st_mtime_ns for path in Path(config.run.directory).rglob("*")}


def test_exported_models_without_saved_state_stay(copy: tuple[TrainConfig, Path]) -> None:
    """What an attempt leaves that ended after an export and before a checkpoint; nobody has to come
    for it."""
    config, checkpoint = copy
    run_dir = Path(config.run.directory)
    shutil.rmtree(checkpoint.parent)
    exported = {path: path.read_bytes() for path in run_dir.rglob("*.safetensors")}
    assert exported and prepare_start(config, lambda: None, lambda: None).checkpoint is None
    assert sorted(path.name for path in run_dir.iterdir()) == [MARKER, "config.yaml", "hf"]
    assert {path: path.read_bytes() for path in exported} == exported


@pytest.mark.parametrize("others", [True, False])
def test_checkpoint_that_was_being_replaced_is_resumed_from(
    copy: tuple[TrainConfig, Path], others: bool
) -> None:
    """Of a run that was killed between two renames, where a file system cannot exchange names."""
    config, checkpoint = copy
    checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.1a2b.old"))
    checkpoint.with_name(f".{checkpoint.name}.1a2b").mkdir()
    for path in () if others else list_checkpoints(Path(config.run.directory)).values():
        shutil.rmtree(path)
    assert prepare_start(config, lambda: None, lambda: None).checkpoint == checkpoint


def test_another_model_under_the_same_path_is_refused_untouched(
    copy: tuple[TrainConfig, Path],
) -> None:
    config, checkpoint = copy
    (checkpoint.parent / ".step_000004.half").mkdir()
    before = stamps(config)
    path = Path(config.model.path) / "config.json"
    content = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(content) | {"num_hidden_layers": 1}))
        said = refusal(config)
    finally:
        path.write_text(content)
    assert said.startswith(
        f"model.path={config.model.path}: config.json differs from the model's in "
        f"{checkpoint}/actor"
    )
    assert stamps(config) == before


@pytest.mark.parametrize("times,code", [(1, 0), (2, 75)])
def test_a_save_that_fails_is_tried_once_more(
    shared: World, straight: Callable[[int], Path], times: int, code: int
) -> None:
    more = ("checkpoint.every_minutes=null", "run.steps=4", "evaluation.every=4")
    config = config_of(shared, f"refused{times}", LAYOUTS[1], RESUME, *more)
    shutil.copytree(straight(1), Path(config.run.directory))
    before = checkpoint_names(config)
    end = live(shared, config, 1, partial(refuse_checkpoints, errno.EIO, times))
    assert end.code == code, end
    assert checkpoint_names(config) == (
        [before[-1], "step_000004"] if code == 0 else before
    ) and not leftovers(config)
    if code:
        assert (
            "checkpoints/step_000004: cannot be saved (Input/output error), tried twice: make room"
            in end.said
        )


def test_recorded_rollout_refused_by_the_disk_interrupts_the_run(shared: World) -> None:
    config = config_of(shared, "unrecorded", LAYOUTS[1], RESUME)
    end = live(shared, config, 1, partial(refuse_sync, recorded_rollouts, "recorded_rollouts", 2))
    assert end.code == 75, end
    assert (
        "rollouts_00000.safetensors: cannot be written (Input/output error): make room there, then "
        "start" in end.said
    )


@pytest.mark.parametrize(
    ("number", "method", "part"),
    [
        (errno.EIO, "unlink", "samples/step_000004.jsonl"),
        (errno.EROFS, "unlink", "evaluation.json"),
        (errno.ESTALE, "rename", "checkpoints/.step_000003.ab.old"),
    ],
)
def test_run_directory_that_cannot_be_changed_interrupts_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, method: str, part: str
) -> None:
    """It can be put back later: one line and exit code 75, which keeps a copy of the state in host
    memory."""
    run_dir = tmp_path / "run"
    facts = {"run_id": "r", "step": 3, "kind": "train", "models": (), "world_size": 1}
    manifest = Manifest.model_validate(
        facts | {"checkpoint_id": "c", "layouts": {}, "metrics": {}, "files": {}}
    )
    resumed = Resumed(tmp_path / "copy", CheckpointName(3), manifest, Progress(step=3))
    later = run_dir / "samples" / "step_000004.jsonl"
    kept = run_dir / "samples" / "step_000003.jsonl"
    for path in (
        later,
        kept,
        run_dir / "evaluation.json",
        run_dir / "checkpoints/.step_000003.ab.old/file",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    config = SftConfig.model_validate(sft_config(tmp_path, tmp_path))
    act = getattr(Path, method)

    def refused(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == run_dir / part:
            raise OSError(number, os.strerror(number), str(path))
        return act(path, *args, **kwargs)

    monkeypatch.setattr(Path, method, refused)
    with pytest.raises(OSError) as raised:
        restore_run_files(run_dir, resumed, config)
    said = explain(raised.value, "rank 0")
    assert (
        isinstance(said, TryAgain)
        and str(run_dir / part) in str(said)
        and os.strerror(number) in str(said)
    )
    monkeypatch.setattr(Path, method, act)
    restore_run_files(run_dir, resumed, config)
    assert (
        not later.exists() and kept.exists() and (run_dir / "checkpoints" / "step_000003").is_dir()
    )


@pytest.mark.full
def test_lost_disk_interrupts_the_run_and_its_state_is_kept(
    shared: World, straight: Callable[[int], Path]
) -> None:
    more = (
        "checkpoint.every=6",
        "checkpoint.every_minutes=null",
        "run.steps=6",
        "cluster.restarts=1",
    )
    config = config_of(shared, "gone", LAYOUTS[1], RESUME, *more)
    run_dir = Path(config.run.directory)
    shutil.copytree(straight(1), run_dir)
    end = live(shared, config, 1, partial(lose_the_disk, run_dir, "rollout", 2))  # in step 5
    assert end.code == 75 and "\n" not in end.said and "Stale file handle" in end.said, end
    state = host_memory_of(run_dir) / "checkpoints" / "step_000004"
    assert (
        f"the state is saved in host memory, {state}: a start on this machine finds it there"
        in end.said
    )
    assert checkpoint_names(config)[-1] == "step_000003" and state.is_dir()
    assert live(shared, config, 1) == End(0, "")
    assert [row["step"] for row in metrics(run_dir)][-6:] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("steps", [3, pytest.param(2, marks=pytest.mark.full)])
def test_the_final_model_is_made_up_for(
    shared: World, straight: Callable[[int], Path], steps: int
) -> None:
    """Of a run that was ended between its last checkpoint and its export, or that did more than it
    is to do now."""
    config = config_of(shared, f"unexported{steps}", LAYOUTS[1], RESUME, f"run.steps={steps}")
    run_dir = Path(config.run.directory)
    shutil.copytree(straight(1), run_dir)
    shutil.rmtree(run_dir / "hf" / "final")
    assert live(shared, config, 1) == End(0, "")
    assert left_behind(run_dir) == left_behind(straight(1))
    cards = [path / "hf/final/actor/README.md" for path in (run_dir, straight(1))]
    for card in cards:
        text = card.read_text()
        assert "after step 3." in text and "95 % interval" in text
        assert "| response tokens | " in text and "| hours, without GPUs | " in text
    longer = config.model_copy(update={"run": config.run.model_copy(update={"steps": 4})})
    assert is_finished(config) and not is_finished(longer)


def test_the_last_checkpoint_is_made_up_for(shared: World, straight: Callable[[int], Path]) -> None:
    """Of a run that was killed while it wrote it, after its export and its last row."""
    config = config_of(shared, "unsaved", LAYOUTS[1], RESUME, "run.steps=3")
    run_dir = Path(config.run.directory)
    shutil.copytree(straight(1), run_dir)
    *earlier, last = list_checkpoints(run_dir).values()
    assert is_finished(config) and earlier
    shutil.rmtree(last)
    assert not is_finished(config)
    assert live(shared, config, 1) == End(0, "")
    assert left_behind(run_dir) == left_behind(straight(1))
    shutil.rmtree(run_dir / "checkpoints")
    assert is_finished(config), "somebody needed the room"


def test_fine_tuning_goes_on_as_well(tmp_path: Path) -> None:
    """A step per attempt, as its time limit is always near; the last start finds nothing to do."""
    model = make_model(tmp_path / "model")
    user = sft_config(tmp_path, model)
    user["data"]["steps"] = 3
    ends = []
    for name, limits in (("straight", [None]), ("limited", [1e-9] * 4)):
        for limit in limits:
            user["run"] = {"name": name, "root": str(tmp_path / "runs"), "resume": "auto"}
            keep = {"last": 1, "best": "sft/nll_loss" if name == "straight" else None}
            user["checkpoint"] = {
                "job_timeout_s": limit,
                "every": None,
                "every_minutes": 1000,
                "keep": keep,
            }
            ends.append(fine_tune(SftConfig.model_validate(user)))
    assert [end.code for end in ends] == [0, 75, 75, 0, 0]
    straight = tmp_path / "runs" / "straight"
    limited = tmp_path / "runs" / "limited"
    assert metrics(limited) == metrics(straight) and len(metrics(straight)) == 3
    highest = max(metrics(straight), key=lambda row: row["sft/nll_loss"])["step"]
    assert {name.step for name in list_checkpoints(straight)} == {highest, 3}, (
        "the best, and the last"
    )
    shutil.rmtree(limited / "hf")
    files = {path: path.stat().st_mtime_ns for path in limited.rglob("*")}
    rows = Path(user["data"]["path"])
    content = rows.read_text()
    rows.write_text(content.replace("1 plus 1", "2 plus 1"))
    end = fine_tune(SftConfig.model_validate(user))
    assert end.code == 2 and f"data.path={rows}: its fingerprint is" in end.said
    assert files == {path: path.stat().st_mtime_ns for path in limited.rglob("*")}, (
        "refused before anything is changed"
    )
    rows.write_text(content)
    (limited / "hf").mkdir()
    (limited / "hf" / "final").touch()  # nothing can be written below it
    end = fine_tune(SftConfig.model_validate(user))
    assert (
        end.code == 75
        and "hf/final/step.json: cannot be written" in end.said
        and "run.resume=auto" in end.said
    )
    (limited / "hf" / "final").unlink()
    assert fine_tune(SftConfig.model_validate(user)).code == 0
    weights = "hf/final/actor/model.safetensors"
    assert (limited / weights).read_bytes() == (straight / weights).read_bytes()
    for epochs, finished in ((1, True), (2, False)):  # two steps an epoch
        user["data"] |= {"steps": None, "epochs": epochs}
        assert is_finished(SftConfig.model_validate(user)) is finished
