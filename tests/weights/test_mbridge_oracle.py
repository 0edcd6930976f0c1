"""mbridge, which shares no code with this package, cuts and names every parameter alike."""

from itertools import product
from pathlib import Path

import pytest
import torch
from hf_models import megatron, read_tensors, write_model
from matrices import others_in_full
from ranks import run_ranks

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.models.registry import read_spec
from vapo_megatron.weights.load import load_hf
from vapo_megatron.weights.mapping import FUSED_NAMES, local_parameters

pytest.importorskip(
    "mbridge", reason="mbridge is not installed: pip install --no-deps mbridge==0.15.1"
)

from mbridge import AutoBridge
from mbridge.core.parallel_states import ParallelStates

FUSED = {separate: fused for fused, separate in FUSED_NAMES.items()}
FAMILIES = ["qwen2", "qwen3", "qwen3_moe", "llama"]


def differences(layout: LayoutConfig, source: Path) -> list[str]:
    """Parameters of this rank that are not what mbridge makes of the directory."""
    spec = read_spec(source)
    chunks, mesh = megatron(spec, layout, "lm", spec.dtype)
    load_hf(chunks, spec, source, mesh, "lm")
    place = ParallelStates(
        tp_size=layout.tp, tp_rank=mesh.tp_rank, pp_size=layout.pp, vpp_size=layout.vpp or 1
    )
    bridge = AutoBridge.from_pretrained(str(source), parallel_states=place)
    bridge.vocab_size = spec.vocab_size
    bridge.padded_vocab_size = spec.padded_vocab_size(layout.tp)
    tensors = read_tensors(source)
    wrong = []
    for entry, parameter in local_parameters(chunks, spec, "lm", mesh.tp_size):
        name = entry.rule.megatron
        if entry.layer is not None:
            if not (spec.num_experts and name == "pre_mlp_layernorm.weight"):
                name = FUSED.get(name, name)
            name = (
                f"decoder.layers.{entry.layer}.{name}{'' if entry.expert is None else entry.expert}"
            )
        hf_names = bridge._weight_name_mapping_mcore_to_hf(name)
        whole = bridge._weight_to_mcore_format(name, [tensors[hf_name] for hf_name in hf_names])
        size, rank = (1, 0) if entry.expert is not None else (layout.tp, mesh.tp_rank)
        shard = bridge._weight_split_across_tp(name, whole, parameter, size)[rank]
        if not torch.equal(shard, parameter):
            wrong.append(f"{name}: {list(shard.shape)} and {list(parameter.shape)}")
    return wrong


LAYOUTS = [
    (1, LayoutConfig()),
    (2, LayoutConfig(tp=2)),
    (4, LayoutConfig(tp=2, pp=2)),
    (2, LayoutConfig(ep=2)),
]
IN_TEST = [
    ("qwen2", LAYOUTS[2]),
    ("qwen3", LAYOUTS[1]),
    ("qwen3_moe", LAYOUTS[2]),
    ("qwen3_moe", LAYOUTS[3]),
    ("llama", LAYOUTS[1]),
]


# Untied and with a vocabulary that every layout divides: mbridge changes a table of its own class
# for tied models, and pads by a multiple of its own.
@pytest.mark.parametrize(("family", "cut"), others_in_full(product(FAMILIES, LAYOUTS), IN_TEST))
def test_mbridge_makes_the_same_shards(
    tmp_path: Path, family: str, cut: tuple[int, LayoutConfig]
) -> None:
    world_size, layout = cut
    if layout.ep > 1 and family != "qwen3_moe":
        pytest.skip(f"{family} has no experts")
    source = write_model(tmp_path / "model", family, dtype=torch.bfloat16, vocab_size=132)
    assert run_ranks(world_size, differences, layout, source) == [[]] * world_size
