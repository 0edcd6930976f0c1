"""Buckets whose placement was learnt are copied without the model's loader, and only where that
does the same."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
import torch
from test_strict_loading import StackingModel

from vapo_megatron.engines.inside.strict_loading import StrictLoader
from vapo_megatron.engines.inside.strict_updates import take_message
from vapo_megatron.weights.bucket import (
    NEEDS_GATHERED,
    DeviceSlots,
    NamedTensors,
    Purpose,
    announce,
    pack,
)

Weights = dict[str, torch.Tensor]


class Counting(StackingModel):
    """Counts the tensors that its loader places. Fills a vector's padding, and skips the experts of
    other ranks."""

    def __init__(self, effect: Callable[["Counting"], None] = lambda model: None) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.ones(4, 3))
        self.rounded = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
        self.config = SimpleNamespace(original_intermediate_size=3, intermediate_size=4)
        self.placed = 0
        self.effect = effect

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.placed += 1
            if name == "table":
                self.table.data[3:].fill_(0)
                self.table.data[:3].t().copy_(tensor[:, 1:4])
            elif name == "rounded":
                self.rounded.data.copy_(tensor)
            else:
                super().load_weights([(name, tensor)])
        self.effect(self)


def some_weights(seed: int) -> Weights:
    torch.manual_seed(seed)
    return {
        "gate": torch.randn(3, 2),
        "up": torch.randn(3, 2),
        "expert_of_another_rank": torch.randn(1, 3),
        "table": torch.randn(3, 5),
        "norm": torch.randn(2),
        "rounded": torch.randn(2, 2),
    }


UNKNOWN = ["expert_of_another_rank of shape [1, 3] is not known to the engine"]


def send(
    loader: StrictLoader, weights: Weights, purpose: Purpose = "load", size: int = 4
) -> list[str]:
    """A whole weight sync, in buckets."""
    problems = []
    tensors: NamedTensors = list(weights.items())
    slots = DeviceSlots(torch.device("cpu"))
    for index, start in enumerate(range(0, len(tensors), size)):
        bucket = pack(tensors[start : start + size], slots, index)
        message = announce(bucket, purpose, first=not start, last=False)
        problems += take_message(loader, message, bucket.buffer)
        assert loader.checksums == bucket.checksums()
        bucket.buffer.fill_(255)
    if purpose == "cover":
        return problems
    return problems + take_message(loader, announce(None, purpose, first=False, last=True))


def as_loaded(weights: Weights, model: Counting) -> bool:
    """Whether a model has exactly what its own loader makes of these weights."""
    fresh = Counting()
    fresh.load_weights(weights.items())
    return all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(model.parameters(), fresh.parameters(), strict=True)
    )


def test_later_syncs_are_copies_to_the_same_places() -> None:
    model = Counting()
    loader = StrictLoader(model)
    placed = []
    for seed in range(4):
        model.placed = 0
        assert send(loader, some_weights(seed)) == UNKNOWN
        assert as_loaded(some_weights(seed), model)
        placed.append(model.placed)
    # The second sync is compared with the loader's own.
    assert placed == [6, 6, 0, 0]
    assert send(loader, some_weights(3), "compare") == UNKNOWN
    changed = some_weights(3)
    changed["up"][2, 1] += 1
    assert send(loader, changed, "compare") == ["up differs", *UNKNOWN]


def test_what_a_replayed_sync_lacks_is_named() -> None:
    loader = StrictLoader(Counting())
    for seed in range(3):
        send(loader, some_weights(seed))
    short = some_weights(4)
    del short["rounded"], short["norm"]
    (unknown, *missing) = send(loader, short)
    assert unknown == UNKNOWN[0]
    assert [line.split()[0] for line in missing] == ["norm", "rounded"]
    short = some_weights(4) | {"up": torch.randn(2, 2)}
    assert any(line.startswith("up of shape [2, 2] does not fit") for line in send(loader, short))
    assert send(loader, some_weights(5)) == UNKNOWN


def test_other_buckets_are_learnt_for_themselves() -> None:
    model = Counting()
    loader = StrictLoader(model)
    for seed, size in enumerate((4, 4, 4, 2, 5, 2, 4, 1, 1, 1)):
        assert send(loader, some_weights(seed), size=size) == UNKNOWN
        assert as_loaded(some_weights(seed), model)


def test_parameters_in_other_memory_are_learnt_again() -> None:
    model = Counting()
    loader = StrictLoader(model)
    for seed in range(3):
        send(loader, some_weights(seed))
    model.norm.data = torch.zeros(2)
    assert send(loader, some_weights(7)) == UNKNOWN
    assert as_loaded(some_weights(7), model)


def transformed(model: Counting) -> None:
    """As models do that prepare a second form of a weight once all have come."""
    model.prepared = model.norm.data * 2  # type: ignore[assignment]


def read(model: Counting) -> None:
    """A value that a loader looks at may decide what it does."""
    float(model.norm.data[0])


@pytest.mark.parametrize("effect", [transformed, read])
def test_a_loader_that_does_more_than_copy_is_always_called(
    effect: Callable[[Counting], None],
) -> None:
    model = Counting(effect)
    loader = StrictLoader(model)
    for seed in range(4):
        model.placed = 0
        assert send(loader, some_weights(seed)) == UNKNOWN
        assert model.placed == 6 and as_loaded(some_weights(seed), model)
    if effect is transformed:
        assert torch.equal(model.prepared, model.norm.data * 2)


class Computing(Counting):
    """Puts a product in place of one tensor."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((n, t * 3 if n == "norm" else t) for n, t in weights)


def test_a_tensor_that_is_not_copied_as_it_came_is_never_replayed() -> None:
    model = Computing()
    loader = StrictLoader(model)
    placed = []
    for seed in range(4):
        model.placed = 0
        assert send(loader, some_weights(seed), size=6) == UNKNOWN
        placed.append(model.placed)
        tripled = some_weights(seed)
        tripled["norm"] *= 3
        assert as_loaded(tripled, model)
    assert placed == [6, 7, 1, 1], "the second is compared"


class Deriving(Counting):
    """Makes a second form of one weight when it comes, as SGLang's GemmaRMSNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_and_one = torch.ones(2)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            super().load_weights([(name, tensor)])
            if name == "norm":
                self.norm_and_one.copy_(self.norm.data).add_(1.0)


def test_a_second_form_of_a_weight_is_made_at_every_sync() -> None:
    model = Deriving()
    loader = StrictLoader(model)
    for seed in range(4):
        model.placed = 0
        whole(loader, seed)
        assert as_loaded(some_weights(seed), model)
        assert torch.equal(model.norm_and_one, some_weights(seed)["norm"] + 1)
    assert model.placed == 1
    assert masked(loader, some_weights(0)) == []
    own = some_weights(5)
    own["table"][:, [0, 4]] = torch.nan
    assert send_own(loader, own) == UNKNOWN
    assert as_loaded(some_weights(5), model)
    assert torch.equal(model.norm_and_one, some_weights(5)["norm"] + 1)
    assert masked(loader, some_weights(0), "norm") == [NEEDS_GATHERED]


class TriplingUp(Counting):
    """Puts a product in place of one half of a parameter."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((n, t * 3 if n == "up" else t) for n, t in weights)


def test_tensors_of_one_parameter_are_placed_the_same_way() -> None:
    model = TriplingUp()
    loader = StrictLoader(model)
    for seed in range(4):
        model.placed = 0
        whole(loader, seed)
        expected = some_weights(seed)
        assert torch.equal(model.gate_up.data, torch.cat([expected["gate"], expected["up"] * 3]))
    assert model.placed == 2, "gate and up"


def test_what_a_replayed_bucket_lacks_in_others_is_named() -> None:
    loader = StrictLoader(Deriving())
    for seed in range(3):
        whole(loader, seed)
    short = some_weights(3)
    del short["norm"]
    assert [line.split()[0] for line in send(loader, short, size=6)][1:] == ["norm"]


class Remembering(Counting):
    """Puts what came in the sync before in place of one tensor: a copy, but of other bytes."""

    norms = (torch.zeros(2), torch.ones(2))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "norm":
                self.norm.data.copy_(self.norms[0])
                self.norms = self.norms[::-1]
            else:
                super().load_weights([(name, tensor)])


def test_a_copy_of_something_else_is_never_replayed() -> None:
    model = Remembering()
    loader = StrictLoader(model)
    for seed in range(4):
        send(loader, some_weights(seed))
        assert torch.equal(model.norm.data, torch.full((2,), float(seed % 2)))


class Turning(Counting):
    """Puts tensors elsewhere from its second call on, which no watch can foresee."""

    calls = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.calls += 1
        other = {"gate": "up", "up": "gate"} if self.calls > 3 else {}
        super().load_weights((other.get(name, name), tensor) for name, tensor in weights)


def test_a_loader_that_changes_its_mind_is_found_out() -> None:
    model = Turning()
    loader = StrictLoader(model)
    for seed in range(3):
        send(loader, some_weights(seed))
        expected = some_weights(seed)
        order = ("up", "gate") if seed else ("gate", "up")
        assert torch.equal(model.gate_up.data, torch.cat([expected[name] for name in order]))


def masked(loader: StrictLoader, weights: Weights, hidden: str = "") -> list[str]:
    """What a loader says of a mask of all of these weights but the last element of one."""
    mask = {name: torch.ones_like(tensor) for name, tensor in weights.items()}
    if hidden:
        mask[hidden].view(-1)[-1] = 0
    return send(loader, mask, "cover", size=len(weights))


def send_own(loader: StrictLoader, weights: Weights) -> list[str]:
    """Weights as a bucket of own shares."""
    bucket = pack(list(weights.items()), DeviceSlots(torch.device("cpu")))
    bucket.own_shares = True
    message = announce(bucket, "load", first=True, last=False)
    problems = take_message(loader, message, bucket.buffer)
    assert loader.checksums == bucket.checksums()
    return problems + take_message(loader, announce(None, "load", first=False, last=True))


def whole(loader: StrictLoader, seed: int) -> None:
    assert send(loader, some_weights(seed), size=6) == UNKNOWN


def test_own_shares_are_taken_once_all_that_is_read_is_known_to_be_among_them() -> None:
    model = Counting()
    loader = StrictLoader(model)
    for seed in range(2):
        assert masked(loader, some_weights(0)) == [NEEDS_GATHERED], "learnt and compared first"
        whole(loader, seed)
    assert send_own(loader, some_weights(2))[0] == NEEDS_GATHERED
    assert as_loaded(some_weights(1), model), "what is refused changes nothing"
    whole(loader, 2)
    assert masked(loader, some_weights(0)) == []
    # A table's first and last column, and what belongs to another rank, are not read.
    mine = some_weights(3)
    mine["table"][:, [0, 4]] = torch.nan
    mine["expert_of_another_rank"].fill_(torch.nan)
    assert send_own(loader, mine) == UNKNOWN
    assert as_loaded(some_weights(3), model)
    whole(loader, 4)
    assert as_loaded(some_weights(4), model)


@pytest.mark.parametrize("name", ["gate", "up", "norm", "rounded"])
def test_own_shares_are_refused_where_one_element_that_is_read_is_not_among_them(name: str) -> None:
    loader = StrictLoader(Counting())
    for seed in range(2):
        whole(loader, seed)
    for hidden, answer in (("", []), (name, [NEEDS_GATHERED])):
        assert masked(loader, some_weights(0), hidden) == answer
    assert send_own(loader, some_weights(1))[0] == NEEDS_GATHERED


def test_what_is_not_read_may_be_missing_in_own_shares() -> None:
    loader = StrictLoader(Counting())
    for seed in range(2):
        whole(loader, seed)
    for name in ("table", "expert_of_another_rank"):
        assert masked(loader, some_weights(0), name) == []


def test_own_shares_are_refused_once_parameters_are_in_other_memory() -> None:
    model = Counting()
    loader = StrictLoader(model)
    for seed in range(2):
        whole(loader, seed)
    assert masked(loader, some_weights(0)) == []
    model.norm.data = torch.zeros(2)
    assert send_own(loader, some_weights(2))[0] == NEEDS_GATHERED
