"""Layout does not change the mathematics: every split of one batch and one model gives what one
rank gives.

The one-rank reference is itself held to transformers with torch's AdamW in test_train_step.py. The
larger matrix is in test_invariance_full.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from invariance import OPTIMIZER, Split, assert_same, make_batch, make_models, run_split
from torch import Tensor

from vapo_megatron.algorithms.segments import last_tokens
from vapo_megatron.config.model import LayoutConfig, RecomputeConfig

pytestmark = pytest.mark.usefixtures("small_buckets")

WHOLE_MODELS = ("policy", "value", "nll", "terminal")
NAMES = (*WHOLE_MODELS, "adapter", "adapter-value")
OVERLAP = OPTIMIZER.model_copy(update={"overlap": True})
FULL = RecomputeConfig(granularity="full")
SELECTIVE = RecomputeConfig(granularity="selective")

FIRST = ("policy", "nll", "adapter-value")
SECOND = ("value", "terminal", "adapter")
# Split, cases, and whether `make test-full` alone trains them. Splits over ranks that cost most are
# given fewer cases; test_invariance_full.py has more layouts, and gives every case to every
# setting.
SPLITS: list[tuple[Split, tuple[str, ...], bool]] = [
    (Split(max_tokens=40), NAMES, True),
    (Split(8), ("policy", "value"), True),
    (Split(8), ("policy",), False),  # a rank without a sample
    (Split(4, LayoutConfig(tp=4, sequence_parallel=True), 60), ("nll",), True),
    (Split(2, LayoutConfig(tp=2, sequence_parallel=True), 40), ("adapter", "adapter-value"), False),
    *(
        (split, names, names is not in_test)
        for split, in_test in (
            (Split(2, LayoutConfig(cp=2), 40, recompute=SELECTIVE), FIRST),
            (Split(4, LayoutConfig(tp=2, pp=2), 40, recompute=FULL), SECOND),
            (Split(4, LayoutConfig(pp=2, vpp=2), 40, optimizer=OVERLAP), FIRST),
        )
        for names in (FIRST, SECOND)
    ),
    (Split(8, LayoutConfig(cp=8), 16), ("policy", "terminal"), True),
    (
        Split(8, LayoutConfig(tp=2, pp=2, cp=2, sequence_parallel=True), 40, optimizer=OVERLAP),
        ("policy", "value"),
        True,
    ),
    (
        Split(
            8,
            LayoutConfig(tp=2, pp=2, vpp=2, sequence_parallel=True),
            40,
            recompute=SELECTIVE,
            offload="always",
        ),
        ("policy", "value"),
        True,
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def reference(models: dict[tuple[str, bool], Path]) -> dict[str, Any]:
    return run_split(models, NAMES, Split())[0]


CASES = [
    pytest.param(split, names, id=f"{split}-{'-'.join(names)}", marks=[pytest.mark.full] * in_full)
    for split, names, in_full in SPLITS
]


@pytest.mark.parametrize("split,names", CASES)
def test_a_split_equals_one_rank(
    models: dict[tuple[str, bool], Path],
    reference: dict[str, Any],
    split: Split,
    names: tuple[str, ...],
) -> None:
    assert_same(run_split(models, names, split), {name: reference[name] for name in names})


def test_every_weight_of_the_reference_is_trained(reference: dict[str, Any]) -> None:
    for report in reference.values():
        assert all(step["grad_norm"] > 1e-3 for step in report["steps"])
        assert all(abs(gradient).max() > 0 for gradient in report["gradients"].values())


def test_terminal_rewards_meet_the_log_probs_of_last_tokens(
    models: dict[tuple[str, bool], Path],
) -> None:
    """The splits above read the same token; that it is the right one is seen in the log-probs of
    every single token."""
    batch = make_batch()
    assert batch.response_lengths[batch.rewards > 0].tolist() == [1, 2, 1]
    responses, last = last_tokens(batch.response_cu_seqlens)
    still = OPTIMIZER.model_copy(update={"lr": 1e-30})
    split = Split(4, LayoutConfig(cp=4), 32, optimizer=still)
    for report in run_split(models, ("terminal",), split):
        scores = torch.from_numpy(report["terminal"]["scores"])[:, 0]
        expected = -(scores[last] * batch.rewards[responses]).sum()
        assert report["terminal"]["steps"][-1]["nll_loss"] == pytest.approx(
            float(expected), rel=1e-5
        )


class LocalMean:
    """A loss as one gets it wrong: divided by the tokens of this rank, then averaged over ranks."""

    def __init__(self, loss: Any, split: Split) -> None:
        self.loss = loss
        self.split = split
        self.sums = loss.sums
        self.maxima = loss.maxima

    def __call__(self, outputs: Tensor, local: Any) -> tuple[Tensor, dict[str, Tensor]]:
        total, metrics = self.loss(outputs, local)
        everywhere = make_batch().response_tokens
        here = local.gather(torch.ones(everywhere)).sum().clamp(min=1)
        parts = self.split.world // (self.split.layout.tp * self.split.layout.pp)
        return total * everywhere / here / parts, metrics


def with_local_denominators(name: str, loss: Any, split: Split) -> LocalMean:
    """A mutation of every loss."""
    return LocalMean(loss, split)


@pytest.mark.parametrize(
    "split",
    [pytest.param(Split(2), marks=pytest.mark.full), Split(2, LayoutConfig(cp=2))],
    ids=str,
)
def test_local_denominator_fails_every_part_of_the_comparison(
    models: dict[tuple[str, bool], Path], reference: dict[str, Any], split: Split
) -> None:
    wrong = run_split(models, NAMES, split, with_local_denominators)[0]
    for name in NAMES:
        expected = {name: reference[name]}
        for part in ("steps", "gradients", "weights", "scores"):
            with pytest.raises(AssertionError, match=name):
                assert_same([{name: reference[name] | {part: wrong[name][part]}}], expected)
