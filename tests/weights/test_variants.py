"""Shapes that nobody chose compute what transformers computes, and come back to the bit.

VARIANTS of each family (3), from SEED (1); others are tried by
`SEED=7 VARIANTS=20 pytest -m full tests/weights/test_variants.py`.
"""

import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from family_table import FAMILIES
from family_variants import variant
from hf_models import forward, megatron, read_tensors, write_model
from ranks import run_ranks

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.models.registry import read_spec
from vapo_megatron.weights.convert import hf_to_megatron, megatron_to_hf
from vapo_megatron.weights.load import load_hf

pytestmark = pytest.mark.full
COUNT = int(os.environ.get("VARIANTS", "3"))
SEED = os.environ.get("SEED", "1")


def sequence(number: int) -> torch.Tensor:
    return torch.randint(3, 90, (27,), generator=torch.Generator().manual_seed(number))


def logits(sources: list[Path]) -> list[Any]:
    answers = []
    for number, source in enumerate(sources):
        spec = read_spec(source)
        (chunk,), mesh = megatron(spec, LayoutConfig(), "lm")
        load_hf([chunk], spec, source, mesh, "lm")
        answers.append(forward(chunk, sequence(number))[:, : spec.vocab_size].numpy())
    return answers


def ignore(stage: str, total: int) -> Any:
    return lambda done: None


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_any_shape_is_exact_and_comes_back(tmp_path: Path, family: str) -> None:
    shapes = [variant(family, Random(f"{family}{SEED}{number}")) for number in range(COUNT)]
    sources = [
        write_model(tmp_path / f"model{number}", family, **shape)
        for number, shape in enumerate(shapes)
    ]
    (answers,) = run_ranks(1, logits, sources)
    for number, (shape, source) in enumerate(zip(shapes, sources, strict=True)):
        model = transformers.AutoModelForCausalLM.from_pretrained(source)
        with torch.no_grad():
            expected = model(sequence(number)[None]).logits[0]
        near = 3 * FAMILIES[family].logits * max(1.0, float(expected.abs().max()))
        error = (torch.from_numpy(answers[number]) - expected).abs().max()
        assert error <= near, f"{shape}: {error}"
        hf_to_megatron(source, tmp_path / f"megatron{number}", ignore)
        megatron_to_hf(tmp_path / f"megatron{number}", tmp_path / f"back{number}", ignore)
        tensors = read_tensors(source)
        back = read_tensors(tmp_path / f"back{number}")
        assert back.keys() == tensors.keys(), shape
        for name, tensor in tensors.items():
            assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name
