"""A bucket that an engine holds is changed in place, and no other one is."""

from typing import NamedTuple

import torch
from test_replay import UNKNOWN, Counting, Weights, as_loaded, some_weights

from vapo_megatron.engines.inside.strict_loading import StrictLoader
from vapo_megatron.engines.inside.strict_updates import take_message
from vapo_megatron.weights.bucket import Bucket, DeviceSlots, announce, pack, sum_of_words
from vapo_megatron.weights.changes import (
    NEEDS_WHOLE,
    Difference,
    changed_words,
    digest_of,
)


def weights_of(seed: int) -> Weights:
    """All of types that the engine keeps: what it rounds, it cannot give back."""
    weights = some_weights(seed)
    return weights | {"rounded": weights["rounded"].bfloat16()}


def one_bucket(weights: Weights) -> Bucket:
    return pack(list(weights.items()), DeviceSlots(torch.device("cpu")))


def end(loader: StrictLoader) -> list[str]:
    return take_message(loader, announce(None, "load", first=False, last=True))


def send_whole(loader: StrictLoader, weights: Weights) -> list[str]:
    bucket = one_bucket(weights)
    message = announce(bucket, "load", first=True, last=False) | {"changes_follow": True}
    return take_message(loader, message, bucket.buffer) + end(loader)


class Sent(NamedTuple):
    problems: list[str]
    changes: torch.Tensor


def send_changes(loader: StrictLoader, before: Weights, after: Weights, flip: int = 0) -> Sent:
    old, new = one_bucket(before), one_bucket(after)
    changes = changed_words(old.buffer, new.buffer)
    assert changes is not None
    difference = Difference(digest_of(old.checksums()), digest_of(new.checksums()), changes.numel())
    changes[-1] ^= flip
    message = announce(new, "load", first=True, last=False) | {"difference": difference}
    problems = take_message(loader, message, changes)
    return Sent(problems, changes)


def slightly_other(weights: Weights) -> Weights:
    """In a stacked parameter, in one that is transposed and cut, and in a bfloat16."""
    other = {name: tensor.clone() for name, tensor in weights.items()}
    other["up"][2, 1] += 1
    other["table"][1, 2] += 1
    other["rounded"][0, 1] += 1
    return other


def learnt(weights: Weights) -> tuple[StrictLoader, Counting]:
    """An engine that has these weights after two syncs."""
    model = Counting()
    loader = StrictLoader(model)
    for _ in range(2):
        assert send_whole(loader, weights) == UNKNOWN
    model.placed = 0
    return loader, model


def test_changes_reach_every_parameter_without_the_models_loader() -> None:
    weights = weights_of(1)
    loader, model = learnt(weights)
    for _ in range(3):
        other = slightly_other(weights)
        sent = send_changes(loader, weights, other)
        assert sent.problems == UNKNOWN
        assert loader.checksums == [int(sum_of_words(sent.changes))]
        assert end(loader) == []
        assert as_loaded(other, model)
        weights = other
    assert model.placed == 0


def test_an_engine_that_has_not_verified_its_copies_asks_for_the_whole_bucket() -> None:
    weights = weights_of(1)
    model = Counting()
    loader = StrictLoader(model)
    send_whole(loader, weights)
    assert send_changes(loader, weights, slightly_other(weights)).problems == [NEEDS_WHOLE]
    assert as_loaded(weights, model)


def test_changes_of_another_bucket_are_not_applied() -> None:
    weights = weights_of(1)
    loader, model = learnt(weights)
    last = slightly_other(weights)
    assert send_changes(loader, last, slightly_other(last)).problems == [NEEDS_WHOLE]
    assert as_loaded(weights, model)


def test_weights_that_someone_else_changed_are_noticed() -> None:
    weights = weights_of(1)
    loader, model = learnt(weights)
    model.table.data[0, 0] += 1
    assert send_changes(loader, weights, slightly_other(weights)).problems == [NEEDS_WHOLE]


def test_rows_that_the_engine_moved_are_noticed() -> None:
    """As SGLang interleaves gate and up of experts after a sync, where a kernel wants that."""
    weights = weights_of(1)
    loader, model = learnt(weights)
    model.gate_up.data[:] = model.gate_up.data.flip(0)
    assert send_changes(loader, weights, slightly_other(weights)).problems == [NEEDS_WHOLE]


def test_changes_do_not_follow_a_bucket_of_a_sender_that_sends_all() -> None:
    weights = weights_of(1)
    loader, model = learnt(weights)
    bucket = one_bucket(weights)
    message = announce(bucket, "load", first=True, last=False)
    assert take_message(loader, message, bucket.buffer) == UNKNOWN
    assert send_changes(loader, weights, slightly_other(weights)).problems == [NEEDS_WHOLE]
    assert as_loaded(weights, model)


def test_a_parameter_that_rounds_is_sent_whole() -> None:
    weights = some_weights(1)
    loader, _ = learnt(weights)
    other = {**weights, "up": weights["up"] + 1}
    assert send_changes(loader, weights, other).problems == [NEEDS_WHOLE]


def test_damaged_changes_have_another_checksum() -> None:
    weights = weights_of(1)
    loader, _ = learnt(weights)
    sent = send_changes(loader, weights, slightly_other(weights), flip=1)
    sent.changes[-1] ^= 1
    assert loader.checksums != [int(sum_of_words(sent.changes))]


def test_a_whole_bucket_may_follow_its_changes() -> None:
    """Another engine of the same broadcast could not apply them."""
    weights = weights_of(1)
    loader, model = learnt(weights)
    other = slightly_other(weights)
    send_changes(loader, weights, other)
    bucket = one_bucket(other)
    message = announce(bucket, "load", first=False, last=False)
    assert take_message(loader, message, bucket.buffer) == UNKNOWN
    assert as_loaded(other, model)
    written = dict(loader._written)
    assert end(loader) == []
    send_whole(loader, other)
    assert written == dict(loader._written), "its elements are counted once"
