"""Megatron-Core gives small functions to torch.compile as its modules are imported; on a CPU that
needs a C++ compiler, which a fresh machine lacks."""

import os
import subprocess
import sys

_PROGRAM = """
import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.router import TopKRouter

assert hasattr(SelfAttention._apply_output_gate, "_torchdynamo_orig_callable"), "no longer compiled"

from vapo_megatron.megatron import cpu_torch

cpu_torch.install()
for function in (SelfAttention._apply_output_gate, TopKRouter._apply_expert_bias):
    assert not hasattr(function, "_torchdynamo_orig_callable"), function

class Attention:
    pass

states = torch.ones(2, 3, dtype=torch.bfloat16)
gated = SelfAttention._apply_output_gate(Attention(), states, torch.zeros(2, 3))
assert gated.tolist() == [[0.5] * 3] * 2
"""


def test_functions_of_megatron_run_without_a_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM],
        env={**os.environ, "CXX": "/no/compiler"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
