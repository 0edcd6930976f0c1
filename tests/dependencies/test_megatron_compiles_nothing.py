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

# What `vapo-megatron train` does before it imports what ranks need.
_LEAN_PROGRAM = """
import sys
import torch
from vapo_megatron.megatron import cpu_torch

compiler = torch.compile
cpu_torch.import_megatron()
assert torch.compile is compiler, "the rest of the process has the real one"

import vapo_megatron.run.rank
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu
from megatron.core.transformer.attention import SelfAttention

cpu_torch.install()
assert "torch._inductor.compile_fx" not in sys.modules, "the compiler"
assert "wandb" not in sys.modules
assert bias_swiglu(torch.zeros(1, 4), torch.tensor([0.0, 0.0, 3.0, 3.0])).tolist() == [[0.0, 0.0]]
assert not hasattr(SelfAttention._apply_output_gate, "_torchdynamo_orig_callable")
import wandb
assert wandb.init
"""


def run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "CXX": "/no/compiler"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_functions_of_megatron_run_without_a_compiler() -> None:
    run(_PROGRAM)


def test_a_start_loads_neither_compiler_nor_tracker() -> None:
    run(_LEAN_PROGRAM)
