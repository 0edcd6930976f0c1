"""The size of buckets: by what is free on the fullest GPU, the same on all ranks, and kept."""

from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks

from vapo_megatron.config.rollout import RolloutConfig, SyncConfig
from vapo_megatron.engines import engine_weights
from vapo_megatron.engines.engine_weights import EngineWeights

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "bucket"),
    [
        (80 * GIB, 4096 * MIB),
        (32 * GIB, 4096 * MIB),
        (16 * GIB - 1, 1984 * MIB),
        (GIB, 128 * MIB),
        (1, 64 * MIB),
        (0, 512 * MIB),
    ],
)
def test_a_bucket_takes_an_eighth_of_the_free_memory(free: int, bucket: int) -> None:
    assert SyncConfig().bucket_bytes(free) == bucket


def test_a_size_that_is_set_is_taken_whatever_is_free() -> None:
    assert SyncConfig(bucket_mib=100).bucket_bytes(GIB) == 100 * MIB


def sizes(free_gib: list[tuple[float, float]], urls: tuple[str, ...] = ()) -> list[int]:
    """MiB of a bucket at each sync, with so much memory free on the two ranks."""
    pool: Any = None
    weights = EngineWeights(pool, RolloutConfig(external_urls=urls), "bfloat16")
    chosen = []
    for by_rank in free_gib:

        class Platform:
            is_cuda = True
            free_bytes = staticmethod(lambda by_rank=by_rank: int(by_rank[dist.get_rank()] * GIB))

        engine_weights.current_platform = Platform  # type: ignore[assignment, misc]
        chosen.append(weights._bucket_limit() // MIB)
    return chosen


def test_ranks_agree_on_a_size_and_keep_it_while_it_fits() -> None:
    free = [(16.0, 8.0), (60.0, 60.0), (5.0, 40.0), (16.0, 3.0), (60.0, 60.0)]
    for chosen in run_ranks(2, sizes, free):
        assert chosen == [1024, 1024, 1024, 384, 384]


def test_a_full_gpu_gets_the_smallest_buckets() -> None:
    assert run_ranks(2, sizes, [(60.0, 0.0)]) == [[64], [64]]


def test_memory_of_engines_elsewhere_is_not_known() -> None:
    urls = ("http://127.0.0.1:1",)
    for chosen in run_ranks(2, sizes, [(60.0, 60.0)], urls):
        assert chosen == [512]
