"""The larger matrix: every split of up to eight ranks, with every kind of loss and model.

The switches that must not matter either (recompute, optimizer, overlap, sleep, micro-batches) take
turns over them. `make test-full` runs as many splits as show every pair of settings, and trains as
many cases on them as show every setting with every case. `make test-layouts` runs all the rest.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import invariance
import numpy as np
import pytest
from family_table import WITH_EXPERTS
from invariance import CASES, OPTIMIZER, Split, assert_same, make_models, run_split

from vapo_megatron.config.model import LayoutConfig, RecomputeConfig

pytestmark = pytest.mark.usefixtures("small_buckets")

EXPERTS = tuple(name for name, case in CASES.items() if case.family in WITH_EXPERTS)
DENSE = tuple(name for name in CASES if name not in EXPERTS)
OPTIMIZERS = (OPTIMIZER, OPTIMIZER.model_copy(update={"overlap": True}))
RECOMPUTES = (
    RecomputeConfig(),
    RecomputeConfig(granularity="selective"),
    RecomputeConfig(granularity="full"),
)


def layouts() -> list[tuple[int, LayoutConfig]]:
    """Ranks and layout of every way to cut a model of four layers over at most eight ranks."""
    found = []
    for tp, pp, cp, dp in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8)):
        # Four key-value heads are cut over at most four ranks.
        if tp * pp * cp * dp > 8 or tp > 4:
            continue
        for sequence_parallel in (False, True) if tp > 1 else (False,):
            for vpp in (None, 2) if pp == 2 else (None,):
                layout = LayoutConfig(
                    tp=tp, pp=pp, vpp=vpp, cp=cp, sequence_parallel=sequence_parallel
                )
                found.append((tp * pp * cp * dp, layout))
    return found


def splits() -> list[Split]:
    """Every layout, in turn with one of the switches' settings."""
    tokens = itertools.cycle((40, 40, 1000, 1000))
    turns = zip(
        layouts(), itertools.cycle(OPTIMIZERS), itertools.cycle(RECOMPUTES), tokens, strict=False
    )
    return [
        Split(
            world,
            layout,
            # A micro-batch holds the longest sample and as much as sequence parallelism may add.
            tokens if layout.cp == 1 else max(tokens // layout.cp, 16),
            optimizer,
            recompute,
            offload="always" if index % 5 == 0 else "auto",
        )
        for index, ((world, layout), optimizer, recompute, tokens) in enumerate(turns)
    ]


def settings(split: Split) -> list[tuple[str, Any]]:
    """What a split sets, by name."""
    return sorted(
        (
            split.layout.model_dump()
            | {
                "dp": split.world // split.layout.model_size,
                "packed": split.max_tokens * split.layout.cp >= 1000,
                "optimizer": OPTIMIZERS.index(split.optimizer),
                "recompute": RECOMPUTES.index(split.recompute),
                "offload": split.offload,
            }
        ).items()
    )


def pairs(split: Split) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Any two settings that stand together in a split."""
    return set(itertools.combinations(settings(split), 2))


def covering(splits: list[Split]) -> list[Split]:
    """A few splits, those of few ranks first, in which every pair of settings stands that stands in
    any."""
    chosen: list[Split] = []
    missing = set().union(*map(pairs, splits))
    while missing:
        best = max(splits, key=lambda split: len(pairs(split) & missing) / split.world**0.5)
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def shares(splits: list[Split]) -> list[tuple[str, ...]]:
    """Cases of each split, two at least, in which every setting stands with every case; on few
    ranks if possible."""
    shares: list[set[str]] = [set() for _ in splits]
    set_by = [frozenset(settings(split)) for split in splits]
    missing = {name: set().union(*set_by) for name in DENSE}

    def gain(place: tuple[int, str]) -> float:
        index, name = place
        return len(set_by[index] & missing[name]) / splits[index].world

    def give(places: Iterable[tuple[int, str]]) -> None:
        index, name = max((place for place in places if place[1] not in shares[place[0]]), key=gain)
        shares[index].add(name)
        missing[name] -= set_by[index]

    for index in sorted(range(len(splits)), key=lambda index: -splits[index].world) * 2:
        give((index, name) for name in DENSE)
    while any(missing.values()):
        give(itertools.product(range(len(splits)), DENSE))
    return [tuple(name for name in DENSE if name in share) for share in shares]


EXPERT_SPLITS = [
    Split(2, LayoutConfig(ep=2)),
    Split(
        2, LayoutConfig(tp=2, sequence_parallel=True), 60
    ),  # copies of every expert, with tokens of their own
    Split(4, LayoutConfig(ep=4), 40),
    Split(4, LayoutConfig(tp=2, ep=2, sequence_parallel=True), 60),
    Split(4, LayoutConfig(pp=2, ep=2), 40, recompute=RECOMPUTES[2]),
    Split(4, LayoutConfig(cp=2, ep=2), 40, optimizer=OPTIMIZERS[1]),
    Split(8, LayoutConfig(tp=2, pp=2, ep=2, sequence_parallel=True), 60),
]
BF16_SPLITS = [
    Split(4, LayoutConfig(tp=2, cp=2, sequence_parallel=True), 40, dtype="bfloat16"),
    Split(4, LayoutConfig(pp=2), 40, OPTIMIZERS[1], dtype="bfloat16"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def reference(models: dict[tuple[str, bool], Path]) -> dict[str, Any]:
    return run_split(models, tuple(CASES), Split())[0]


ALL = splits()
COVERING = covering(ALL)
SHARES = {str(split): share for split, share in zip(COVERING, shares(COVERING), strict=True)}


def rest(split: Split) -> tuple[str, ...]:
    """The cases of a split that `make test-full` leaves out."""
    return tuple(name for name in DENSE if name not in SHARES.get(str(split), ()))


@pytest.mark.parametrize(
    ("split", "names"),
    [
        pytest.param(split, SHARES[str(split)], id=str(split), marks=pytest.mark.full)
        for split in COVERING
    ]
    + [
        pytest.param(split, rest(split), id=f"{split}-rest", marks=pytest.mark.layouts)
        for split in ALL
        if rest(split)
    ],
)
def test_every_split_equals_one_rank(
    models: dict[tuple[str, bool], Path],
    reference: dict[str, Any],
    split: Split,
    names: tuple[str, ...],
) -> None:
    expected = {name: reference[name] for name in names}
    assert_same(run_split(models, names, split), expected)


@pytest.mark.full
@pytest.mark.parametrize("split", EXPERT_SPLITS, ids=str)
def test_experts_cut_over_ranks_equal_one_rank(
    models: dict[tuple[str, bool], Path], reference: dict[str, Any], split: Split
) -> None:
    expected = {name: reference[name] for name in EXPERTS}
    assert_same(run_split(models, EXPERTS, split), expected)


@pytest.mark.full
@pytest.mark.parametrize("split", BF16_SPLITS, ids=str)
def test_bf16_splits_are_as_near_to_fp32_as_one_rank_in_bf16(
    models: dict[tuple[str, bool], Path], split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("policy", "value", "nll")
    # A ratio beside its bound is clipped or not by how the processor rounds bf16, which moves
    # gradients by more than all rounding together: no ratio here is clipped.
    monkeypatch.setattr(invariance, "OBSERVED", {})
    monkeypatch.setattr(invariance, "BOUNDS", {"clip_low": 0.999, "clip_high": 1000.0})
    reference = run_split(models, names, Split())[0]
    # One rank with micro-batches of the same size: which tokens are packed together decides how
    # bf16 rounds, too.
    alone = Split(max_tokens=split.max_tokens * split.layout.cp, dtype="bfloat16")
    found = run_split(models, names, split)[0]
    single = run_split(models, names, alone)[0]
    for name in names:
        for kind in ("gradients", "weights"):
            for key, exact in reference[name][kind].items():
                rounding = np.linalg.norm(single[name][kind][key] - exact)
                if kind == "weights":
                    # They are kept in bf16: a few numbers may happen to lie near theirs on one
                    # rank. Of the value head's bias, one number, either neighbour is right.
                    rounding = max(
                        rounding, 2 ** -(8 if exact.size == 1 else 9) * np.linalg.norm(exact)
                    )
                assert np.linalg.norm(found[name][kind][key] - exact) <= 2 * rounding + 1e-6, (
                    f"{name}, {kind} of {key}"
                )
