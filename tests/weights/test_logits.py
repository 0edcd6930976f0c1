"""A Megatron model filled from a directory computes what transformers computes from it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from family_table import FAMILIES
from hf_models import VOCAB, forward, megatron, write_model
from ranks import run_ranks

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.models.registry import read_spec
from vapo_megatron.weights.load import load_hf

IDS = torch.randint(0, VOCAB, (48,), generator=torch.Generator().manual_seed(3))
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, dict[str, Any]] = {
    **{family: {"family": family} for family in FAMILIES},
    # Wider, as their logits would all be near 0.
    "glm4_moe": {"family": "glm4_moe", "hidden_size": 64},
    "granite": {"family": "granite", "hidden_size": 64},
    "tied": {"family": "qwen3", "tie_word_embeddings": True},
    "theta": {"family": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "linear": {
        "family": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    },
    "llama3": {
        "family": "llama",
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3},
    },
    "yarn": {
        "family": "qwen2",
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN},
    },
    "yarn and a scale of its own": {
        "family": "granite",
        "hidden_size": 64,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN},
    },
    # Turned channels are stretched, the others of each head are not.
    **{
        f"yarn of a part, {family}": {
            "family": family,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e2,
                "partial_rotary_factor": 0.5,
                **YARN,
            },
        }
        for family in ("glm4", "glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5_text")
    },
    # The sequence is as long as the original context.
    **{
        f"longrope of {share:g}": {
            "family": "phi3",
            "hidden_size": 64,
            "original_max_position_embeddings": 48,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e2,
                "partial_rotary_factor": share,
                "short_factor": [1.0, 1.1, 1.3, 1.6][: int(4 * share)],
                "long_factor": [2.0, 3.0, 4.0, 5.0][: int(4 * share)],
            },
        }
        for share in (0.75, 1.0)
    },
    "window": {"family": "mistral", "sliding_window": 48},
}


def logits(layout: LayoutConfig, sources: list[Path]) -> list[np.ndarray]:
    """Logits [t, vocabulary] of each source, put together from the ranks' parts."""
    results = []
    for source in sources:
        spec = read_spec(source)
        (chunk,), mesh = megatron(spec, layout, "lm")
        load_hf([chunk], spec, source, mesh, "lm")
        part = forward(chunk, IDS).contiguous()
        parts = [torch.empty_like(part) for _ in range(mesh.tp_size)]
        dist.all_gather(parts, part, group=mesh.pg.tp)
        results.append(torch.cat(parts, -1)[:, :VOCAB].numpy())
    return results


@pytest.mark.parametrize("tp_size", [pytest.param(1, marks=pytest.mark.full), 2])
def test_logits_equal_those_of_transformers(tmp_path: Path, tp_size: int) -> None:
    sources = [write_model(tmp_path / name, **case) for name, case in CASES.items()]
    answers = run_ranks(tp_size, logits, LayoutConfig(tp=tp_size), sources)
    for i, (source, case) in enumerate(zip(sources, CASES.values(), strict=True)):
        with torch.no_grad():
            expected = transformers.AutoModelForCausalLM.from_pretrained(source)(IDS[None]).logits[
                0
            ]
        assert expected.std() > 0.3, source.name  # the comparison would be empty for outputs near 0
        for answer in answers:
            torch.testing.assert_close(
                torch.from_numpy(answer[i]),
                expected,
                rtol=FAMILIES[case["family"]].logits,
                atol=FAMILIES[case["family"]].logits,
                msg=lambda m, s=source: f"{s.name}: {m}",
            )
