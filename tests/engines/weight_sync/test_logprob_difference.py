"""What is judged after a weight sync, and how far it may be off."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from vapo_megatron.config.rollout import RolloutConfig, SyncConfig
from vapo_megatron.engines.engine_weights import EngineWeights
from vapo_megatron.engines.weight_sync.logprob_difference import (
    DifferenceTrend,
    Limits,
    LogprobDifference,
    compare_logprobs,
    limits_for,
)
from vapo_megatron.engines.weight_sync.session import EngineLost
from vapo_megatron.errors import RunFailed
from vapo_megatron.weights.fp8 import BlockFp8


def rows(values: list[float]) -> list[list[float]]:
    return [values[:30], values[30:]]


def with_differences(*changes: float) -> LogprobDifference:
    """Of 124 tokens, as a probe has them, the last ones of which are off by `changes` and the
    others by 0.01."""
    ours = [-float(i) for i in range(124)]
    theirs = [value + 0.01 for value in ours]
    for index, change in enumerate(changes, start=1):
        theirs[-index] = ours[-index] - change
    return compare_logprobs(rows(ours), rows(theirs), quantile=0.95)


def test_largest_quantile_and_mean_are_those_of_all_tokens() -> None:
    found = with_differences(3.0, 2.0)
    apart = torch.tensor([0.01] * 122 + [3.0, 2.0], dtype=torch.float64)
    assert found.largest == pytest.approx(3.0) and found.mean == pytest.approx(float(apart.mean()))
    assert found.quantile == pytest.approx(0.01)
    assert with_differences(*[1.0] * 7).quantile == pytest.approx(1.0), (
        "seven of 124 tokens are more than one in twenty"
    )


def test_bfloat16_forgives_rare_tokens_and_float32_forgives_none() -> None:
    rare = with_differences(2.0, 1.5)
    coarse = limits_for(SyncConfig(), "bfloat16")
    exact = SyncConfig(tolerance=0.02)
    assert coarse.excess(rare) is None
    assert limits_for(SyncConfig(), "float32").quantile == 1e-4, (
        "what contract 2 says of fp32 unless a config does"
    )
    strict = limits_for(exact, "float32")
    assert strict.share == 1.0
    found = compare_logprobs([[0.0, 0.0, 0.0]], [[0.01, 0.01, -0.03]], strict.share)
    assert "by 0.03 at most, rollout.sync.tolerance allows 0.02" in (strict.excess(found) or "")


def test_many_tokens_off_by_little_exceed_the_mean_alone() -> None:
    found = compare_logprobs([[-1.0] * 124], [[-1.2] * 124], 0.95)
    assert "by 0.2 on average, rollout.sync.tolerance allows 0.1" in (
        limits_for(SyncConfig(), "bfloat16").excess(found) or ""
    )
    assert limits_for(SyncConfig(tolerance=1.5), "bfloat16").excess(found) is None


def test_many_large_differences_are_reported_with_their_quantile() -> None:
    found = with_differences(*[0.7] * 9, 4.0)
    said = limits_for(SyncConfig(), "bfloat16").excess(found)
    assert said == "by 0.7 at the 0.95 quantile (at most 4), rollout.sync.tolerance allows 0.5"
    assert limits_for(SyncConfig(), "fp8").excess(found) is None, "FP8 has separate limits"
    assert "rollout.sync.tolerance allows 0.6" in (
        limits_for(SyncConfig(tolerance=0.6), "fp8").excess(found) or ""
    )


def test_limits_that_nobody_set_are_estimates_below_float32() -> None:
    assert (
        limits_for(SyncConfig(), "bfloat16").are_estimates
        and not limits_for(SyncConfig(), "float32").are_estimates
    )
    assert not limits_for(SyncConfig(tolerance=0.5), "bfloat16").are_estimates, (
        "the user's limit applies"
    )


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "fp8"])
def test_one_log_prob_that_is_no_number_exceeds_every_limit(broken: float, precision: str) -> None:
    limits = limits_for(SyncConfig(), precision)  # type: ignore[arg-type]
    found = compare_logprobs(
        [[-1.0] * 60, [-1.0] * 60], [[-1.0] * 59 + [broken], [-1.0] * 60], limits.share
    )
    assert found.largest == float("inf") and limits.excess(found) is not None


def test_of_several_engines_the_worst_counts_figure_by_figure() -> None:
    worst = LogprobDifference.worst(
        [LogprobDifference(1.0, 0.2, 0.05), LogprobDifference(0.5, 0.4, 0.01)]
    )
    assert worst == LogprobDifference(1.0, 0.4, 0.05)
    assert LogprobDifference.worst([]).largest == 0.0


def test_limits_are_those_of_the_coarser_precision() -> None:
    config = RolloutConfig()
    pool: Any = None
    assert EngineWeights(pool, config, "float32").limits == limits_for(config.sync, "float32")
    assert EngineWeights(pool, config, "bfloat16").limits == limits_for(config.sync, "bfloat16")
    quantised = EngineWeights(pool, config, "bfloat16", BlockFp8(False))
    assert quantised.limits == limits_for(config.sync, "fp8")


def checks(means: list[float]) -> list[str]:
    """What becomes of weight syncs after which every tensor is equal and log-probs differ by so
    much on average."""
    limits = Limits(0.95, 0.5, 0.1, are_estimates=True)
    sync = SimpleNamespace(differing_tensors=lambda buckets: [], served=["http://engine"])
    pool = SimpleNamespace(offload_kv_cache=lambda: None, admit=lambda *_, **__: None)
    weights = SimpleNamespace(
        _pool=pool,
        session=sync,
        limits=limits,
        _trend=DifferenceTrend(),
        version=1,
        _buckets=lambda *_: None,
        _bucket_limit=lambda: 1,
    )
    weights._refuse_or_warn = partial(EngineWeights._refuse_or_warn, weights)
    actor = SimpleNamespace(score=lambda batch, temperature: torch.zeros(batch.response_tokens, 2))
    said = []
    for mean in means:
        differences = {"http://engine": LogprobDifference(1.0, 0.3, mean)}
        sync.logprob_differences = lambda *_, differences=differences: differences
        try:
            EngineWeights.check(weights, actor, [[1, 2, 3]])  # type: ignore[arg-type]
            said.append("")
        except RunFailed as error:
            said.append(str(error))
    return said


def test_a_difference_that_keeps_growing_is_refused() -> None:
    up_and_down = [0.11, 0.3, 0.2, 0.32, 0.05, 0.5, 0.4, 0.2, 0.5, 0.5]
    assert run_ranks(1, checks, up_and_down)[0] == [""] * 10
    *warned, refused = run_ranks(1, checks, [0.01, 0.11, 0.2, 0.34, 0.34, 0.4])[0]
    assert warned == [""] * 5
    assert (
        "by 0.4 on average, by 0.11 at the first warning, and above 3 times that for 3 weight syncs"
        in refused
    )
    assert (
        "every tensor is equal" in refused
        and "rollout.sync.tolerance" in refused
        and "\n" not in refused
    )


class DyingSession:
    """One engine, which differs too much and dies while its tensors are compared, if it is to."""

    def __init__(self, url: str, dies: bool) -> None:
        self.url = url
        self.dies = dies
        self.served = [url]

    def logprob_differences(self, *_: Any) -> dict[str, LogprobDifference]:
        return {self.url: LogprobDifference(1.0, 0.3, 0.2)}

    def differing_tensors(self, buckets: Any) -> list[str]:
        if not self.dies:
            return []
        self.served = []
        raise EngineLost(f"{self.url} is gone")


def check_with_dying_engines(dying: set[int]) -> tuple[list[str], list[str]]:
    """Causes of the failures on this rank, and the engines that it puts into rotation."""
    rank = dist.get_rank()
    failed: list[str] = []
    admitted: list[str] = []
    pool = SimpleNamespace(
        offload_kv_cache=lambda: None,
        admit=lambda urls, survived: admitted.extend(urls),
        fail=failed.append,
    )
    weights: Any = EngineWeights(pool, RolloutConfig(), "bfloat16")  # type: ignore[arg-type]
    weights._session = DyingSession(f"http://engine:{rank}", rank in dying)
    weights._buckets = lambda *_: None
    actor: Any = SimpleNamespace(
        score=lambda batch, temperature: torch.zeros(batch.response_tokens, 2)
    )
    assert weights.check(actor, [[1, 2, 3]]).largest == 1.0
    return failed, admitted


@pytest.mark.parametrize("dying", [{0}, {0, 1}])
def test_engine_that_dies_in_comparison_is_replaced(dying: set[int]) -> None:
    """The run goes on with the others, or with none until one has started again."""
    urls = ["http://engine:0", "http://engine:1"]
    assert run_ranks(2, check_with_dying_engines, dying, deadline=60) == [
        ([f"{url} is gone"], []) if rank in dying else ([], [url]) for rank, url in enumerate(urls)
    ]


def test_means_within_their_limit_are_no_growth() -> None:
    """The first warning may come from the quantile alone."""
    warned = DifferenceTrend()
    assert [warned.growth(mean, 0.1) for mean in (0.02, 0.09, 0.09, 0.09, 0.09)] == [None] * 5
    assert [bool(warned.growth(mean, 0.1)) for mean in (0.11, 0.11, 0.11)] == [False, False, True]
