"""Names under which SGLang takes an argument and which would hide that the trainer sets it."""

import argparse

import pytest

from vapo_megatron.engines.inside.server_main import other_name


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--tp-size", "2", "--no-fused", "--gemm-backend", "x", "--unknown", "-5"], None),
        (["--tp-size", "2", "--tensor-parallel-size", "4"], "tensor_parallel_size: write tp_size"),
        (["--ep", "2"], "ep: write ep_size"),
        (["--attn", "2"], "attn: write attn_dp_size"),
    ],
)
def test_one_name_of_each_argument_is_taken(given: list[str], told: str | None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp-size", "--tensor-parallel-size")
    parser.add_argument("--ep-size", "--ep")
    parser.add_argument("--attn-dp-size")
    parser.add_argument("--gemm-backend", dest="gemm_runner_backend")
    parser.add_argument("--fused", action=argparse.BooleanOptionalAction)
    assert other_name(parser, given) == told
