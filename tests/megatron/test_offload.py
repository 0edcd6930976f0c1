"""Models that leave the device and return: nothing is lost, what is offloaded holds no memory, and
phases hold what they say. The device is the CPU here; tests/megatron/test_gpu_precision.py does the
same on a GPU."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import make_batch
from hf_models import write_model
from ranks import run_ranks
from trainables import loss_of, make_trainable, weights_digest

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.megatron.offload import (
    ONLOADED,
    PARTS,
    Footprint,
    MemoryPlan,
    Offloader,
    Part,
    _HostBuffer,
)
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.trainable import Trainable

pytestmark = pytest.mark.usefixtures("small_buckets")

STEPS = 3


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


def bytes_held(trainable: Trainable) -> int:
    """Of all tensors of a model that this rank trains with, whatever the account says."""
    tensors: list[torch.Tensor] = []
    for chunk in trainable.wrapped:
        tensors += [t for p in chunk.parameters() for t in (p.data, p.main_grad)]
    for one in getattr(trainable._optimizer, "chained_optimizers", [trainable._optimizer]):
        tensors += [p for group in one.optimizer.param_groups for p in group["params"]]
        tensors += [
            t
            for state in one.optimizer.state.values()
            for t in state.values()
            if isinstance(t, torch.Tensor)
        ]
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def train(model_dir: Path, dtype: str, optimizer: dict[str, Any], sleeps: bool) -> Any:
    """What a few steps yield; with sleeps, everything leaves between any two phases."""
    trainable = make_trainable(
        model_dir,
        "lm",
        dtype=dtype,
        optimizer=optimizer,
        layout=LayoutConfig(tp=2),
        offload="always" if sleeps else "never",
    )
    batch = make_batch()
    found = []
    held = []
    loss = loss_of(trainable, batch)
    for _ in range(STEPS):
        trainable.offloader.onload_only()
        held.append(bytes_held(trainable))
        trainable.offloader.onload_only("weights")
        found.append(float(trainable.score(batch).double().sum()))
        trainable.offloader.onload_only("weights", "gradients", "optimizer")
        found.append(trainable.train_step(batch, range(batch.samples), loss).grad_norm)
    trainable.offloader.onload_only()
    # Wakes what it needs
    found.append(trainable.train_step(batch, range(batch.samples), loss).grad_norm)
    return found, weights_digest(trainable), held


@pytest.mark.parametrize(
    "dtype,optimizer",
    [
        pytest.param("bfloat16", {}, marks=pytest.mark.full),
        ("float32", {"overlap": True}),
    ],
)
def test_training_goes_on_to_the_bit(
    model_dir: Path, dtype: str, optimizer: dict[str, Any]
) -> None:
    onloaded = run_ranks(4, train, model_dir, dtype, optimizer, False)
    slept = run_ranks(4, train, model_dir, dtype, optimizer, True)
    for (found, digest, held), (expected, expected_digest, expected_held) in zip(
        slept, onloaded, strict=True
    ):
        assert found == expected and digest == expected_digest
        assert held == [0] * STEPS and min(expected_held) > 0


def test_bytes_survive_in_pieces() -> None:
    buffer = _HostBuffer(pinned=False, piece_bytes=64)
    source = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    buffer.reserve(1000)
    assert buffer.bytes == 1000
    sizes = [1, 63, 64, 65, 200, 607]
    bounds = torch.tensor([0, *sizes]).cumsum(0).tolist()
    for start, size in zip(bounds, sizes, strict=False):
        for span, at in buffer.spans(start, size):
            span.copy_(source[start + at : start + at + len(span)])
    for start, size in zip(bounds, sizes, strict=False):
        back = torch.cat([span for span, _ in buffer.spans(start, size)])
        assert torch.equal(back, source[start : start + size])
    buffer.reserve(500)
    assert buffer.bytes == 1000


def test_views_and_shared_storages_come_back() -> None:
    whole = torch.arange(12.0)
    tensors: dict[Part, list[torch.Tensor]] = {
        "weights": [whole[:6], whole[6:]],
        "gradients": [torch.ones(5)],
        "optimizer": [whole[2:4], torch.full((3,), 7.0)],
    }
    view = whole.view(3, 4)
    own = tensors["optimizer"][1]
    offloader = Offloader(lambda part: tensors[part], current_platform(), enabled=True)
    assert [offloader.footprint()[part].device for part in PARTS] == [48, 20, 12]
    offloader.onload_only()
    assert whole.untyped_storage().nbytes() == own.untyped_storage().nbytes() == 0
    assert [offloader.footprint()[part] for part in PARTS] == [
        Footprint(0, 48),
        Footprint(0, 0),
        Footprint(0, 12),
    ]
    offloader.onload_only("weights")
    assert torch.equal(view, torch.arange(12.0).view(3, 4)) and own.untyped_storage().nbytes() == 0
    whole += 1
    offloader.onload_only(*PARTS)
    assert torch.equal(own, torch.full((3,), 7.0)) and torch.equal(
        tensors["gradients"][0], torch.zeros(5)
    )
    offloader.onload_only()
    offloader.require("weights")
    assert torch.equal(view, torch.arange(12.0).view(3, 4) + 1)


def test_without_leave_to_sleep_everything_stays() -> None:
    tensors: dict[Part, list[torch.Tensor]] = {part: [torch.ones(4)] for part in PARTS}
    offloader = Offloader(lambda part: tensors[part], current_platform(), enabled=False)
    offloader.onload_only()
    assert offloader.onloaded == set(PARTS) and all(
        offloader.footprint()[part] == Footprint(16, 0) for part in PARTS
    )


def test_weights_leave_again_only_if_they_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors: dict[Part, list[torch.Tensor]] = {part: [torch.arange(9.0)] for part in PARTS}
    weights = tensors["weights"][0]
    copied: list[Part] = []
    copy = Offloader._copy_to_host

    def counted(self: Offloader, part: Part, storages: Any) -> None:
        copied.append(part)
        copy(self, part, storages)

    monkeypatch.setattr(Offloader, "_copy_to_host", counted)
    offloader = Offloader(lambda part: tensors[part], current_platform(), enabled=True)
    offloader.onload_only()
    assert copied == ["weights", "optimizer"]
    for changed in (False, True, False):
        offloader.onload_only("weights")
        expected = weights.clone()
        if changed:
            weights[8] += 1
            expected = weights.clone()
        copied.clear()
        offloader.onload_only()
        assert copied == ["weights"] * changed
        offloader.onload_only("weights")
        assert torch.equal(weights, expected)


def test_parts_arrive_while_others_leave_where_both_fit() -> None:
    for room, changes in (
        (0.0, [-3, 0, 1, 1, 1]),
        (2.0, [1, 1, -3, 0, 1]),
        (9.0, [1, 1, 1, -3, 0]),
    ):
        log: list[int] = []
        models: dict[str, Any] = {"actor": Model(PARTS, log), "critic": Model(PARTS, log)}
        models["critic"].onloaded = frozenset()
        memory = MemoryPlan(models, free_bytes=lambda room=room: room)  # type: ignore[misc]
        memory.enter("update_critic")
        assert [change for change in log if change] == [change for change in changes if change]
        assert models["critic"].onloaded == frozenset(PARTS) and not models["actor"].onloaded


def test_what_may_stay_stays_and_is_not_fetched() -> None:
    actor: Any = Model(PARTS, [])
    critic: Any = Model(PARTS, [])
    stays = dict(ONLOADED) | {"rollout": {"actor": frozenset(PARTS), "critic": frozenset(PARTS)}}
    memory = MemoryPlan({"actor": actor, "critic": critic}, stays=stays)
    for phase, kept in (
        ("rollout", PARTS),
        ("score_policy", ("weights",)),
        ("rollout", ("weights",)),
    ):
        memory.enter(phase)  # type: ignore[arg-type]
        assert actor.onloaded == frozenset(kept)
    assert not critic.onloaded


def by_phases(model_dir: Path, stays: Any, room: float) -> Any:
    """What steps yield whose models move between phases."""
    models = {
        name: make_trainable(
            model_dir, "lm", dtype="bfloat16", optimizer={"overlap": True}, offload="always"
        )
        for name in ("actor", "critic")
    }
    offloaders = {name: model.offloader for name, model in models.items()}
    memory = MemoryPlan(offloaders, stays=stays, free_bytes=lambda: room)
    batch = make_batch()
    found = []
    for _ in range(STEPS):
        memory.enter("rollout")
        for name, score, update in (
            ("actor", "score_policy", "update_policy"),
            ("critic", "score_values", "update_critic"),
        ):
            model = models[name]
            loss = loss_of(model, batch)
            memory.enter(score)  # type: ignore[arg-type]
            found.append(float(model.score(batch).double().sum()))
            memory.enter(update)  # type: ignore[arg-type]
            found.append(model.train_step(batch, range(batch.samples), loss).grad_norm)
    return found, [weights_digest(model) for model in models.values()]


def test_steps_are_the_same_whatever_stays(model_dir: Path) -> None:
    everything = {name: frozenset(PARTS) for name in ("actor", "critic")}
    half = {"actor": frozenset(PARTS[:1])}
    results = [
        run_ranks(2, by_phases, model_dir, stays, room)
        for stays, room in (
            (ONLOADED, 0.0),
            (ONLOADED, math.inf),
            (dict.fromkeys(ONLOADED, everything), 0.0),
            (dict.fromkeys(ONLOADED, half), 4096.0),
        )
    ]
    assert all(result == results[0] for result in results[1:])


class Model:
    """Holds a byte a part, and tells a shared log of every change."""

    def __init__(self, parts: tuple[Part, ...], log: list[int]) -> None:
        self.parts = parts
        self.onloaded = frozenset(parts)
        self.sent: frozenset[Part] = frozenset()
        self.log = log

    def send_all_but(self, *parts: Part) -> None:
        self.sent = self.onloaded - frozenset(parts)

    def free_sent(self) -> None:
        self.log.append(-len(self.sent))
        self.onloaded -= self.sent
        self.sent = frozenset()

    def fetch(self, *parts: Part, room: float = math.inf) -> float:
        for part in sorted(frozenset(parts) & frozenset(self.parts) - self.onloaded):
            if room >= 1:
                room -= 1
                self.log.append(1)
                self.onloaded |= {part}
        return room

    def footprint(self) -> dict[Part, Footprint]:
        return {
            p: Footprint(2**30 * (p in self.onloaded), 2**30 * (p != "gradients"))
            for p in self.parts
        }


def test_nothing_leaves_for_rollouts_of_engines_elsewhere() -> None:
    log: list[int] = []
    models: dict[str, Any] = {"actor": Model(PARTS, log), "critic": Model(PARTS, log)}
    memory = MemoryPlan(models, shares_device=False)
    for phase, onloaded in (
        ("weight_sync", ("weights",)),
        ("rollout", ("weights",)),
        ("update_policy", PARTS),
    ):
        memory.enter(phase)
        assert models["actor"].onloaded == frozenset(onloaded) and not models["critic"].onloaded
        memory.settle()
    assert memory.metrics()["memory/rollout/device_gib"] == 1


def test_policy_as_its_own_reference_is_on_the_device_for_it() -> None:
    actor: Any = Model(PARTS, [])
    critic: Any = Model(PARTS, [])
    memory = MemoryPlan({"actor": actor, "critic": critic})
    memory.enter("score_reference")
    assert actor.onloaded == {"weights"} and not critic.onloaded


def test_phases_hold_what_they_name_and_free_before_they_take() -> None:
    log: list[int] = []
    models: dict[str, Any] = {
        "actor": Model(PARTS, log),
        "critic": Model(PARTS, log),
        "reference": Model(("weights",), log),
    }
    memory = MemoryPlan(models)
    for phase, held in ONLOADED.items():
        before = sum(len(model.onloaded) for model in models.values())
        log.clear()
        memory.enter(phase)
        for name, model in models.items():
            assert model.onloaded == held.get(name, frozenset()) & set(model.parts)
        after = sum(len(model.onloaded) for model in models.values())
        now = before
        peak = before
        for change in log:
            now += change
            peak = max(peak, now)
        assert peak == max(before, after)
    memory.settle()
    metrics = memory.metrics()
    assert metrics["memory/rollout/device_gib"] == 0 and metrics["memory/rollout/host_gib"] == 5
    assert (
        metrics["memory/update_critic/device_gib"] == 3
        and metrics["memory/critic/gradients_gib"] == 1
    )
    assert metrics["memory/export_policy/device_gib"] == 1
