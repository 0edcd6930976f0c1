"""Keys and places in a torch_dist checkpoint are those of Megatron's own sharded state dicts, at
every layout."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from family_table import FAMILIES, WITH_EXPERTS
from hf_models import megatron, write_model
from matrices import others_in_full
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from ranks import run_ranks

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.spec import Head
from vapo_megatron.weights.mapping import entries
from vapo_megatron.weights.torch_dist import model_state
from vapo_megatron.weights.torch_dist_files import place_of

Part = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def parts(layout: LayoutConfig, sources: list[Path], head: Head) -> list[list[Part]]:
    """(key, shape of the whole, offsets, sizes) of each tensor that this rank would save, of each
    source."""
    found = []
    for source in sources:
        chunks, _ = megatron(read_spec(source), layout, head)
        state: dict[str, Any] = model_state(chunks)
        apply_factories(state)
        tensors = list(nested_values(state))
        assert all(isinstance(tensor, ShardedTensor) for tensor in tensors)
        found.append(
            [
                (
                    t.key,
                    t.global_shape,
                    t.global_offset,
                    (*(1,) * t.prepend_axis_num, *t.local_shape),
                )
                for t in tensors
            ]
        )
    return found


LAYOUTS = {
    "tp1": (1, LayoutConfig()),
    "tp2_pp2_vpp2": (4, LayoutConfig(tp=2, pp=2, vpp=2)),
    "ep2": (2, LayoutConfig(ep=2)),
}
IN_TEST: list[tuple[str, Head]] = [("tp1", "value"), ("tp2_pp2_vpp2", "lm"), ("ep2", "lm")]


@pytest.mark.parametrize(
    ("cut", "head"), others_in_full(product(LAYOUTS, ("lm", "value")), IN_TEST)
)
def test_places_are_megatrons_own(tmp_path: Path, cut: str, head: Head) -> None:
    world_size, layout = LAYOUTS[cut]
    families = WITH_EXPERTS if layout.ep > 1 else sorted(FAMILIES)
    sources = [
        write_model(tmp_path / family, family, tie_word_embeddings=family == "qwen3")
        for family in families
    ]
    ranks = run_ranks(world_size, parts, layout, sources, head)
    for i, source in enumerate(sources):
        spec = read_spec(source)
        covered: dict[str, set[tuple[int, ...]]] = {}
        full = {}
        for key, shape, offsets, _ in (part for rank in ranks for part in rank[i]):
            full[key] = shape
            covered.setdefault(key, set()).add(tuple(offsets))
        known = [place_of(entry, spec) for entry in entries(spec, head)]
        assert full.keys() == {place.key for place in known}
        for place in known:
            rows = (
                spec.padded_vocab_size(layout.tp)
                if place.full[0] == spec.vocab_size
                else place.full[0]
            )
            assert full[place.key] == (rows, *place.full[1:]), (source.name, place.key)
            # Whatever lies in a layer, and in an expert, begins at the indices of both.
            assert (*place.stacked, *(0 for _ in place.shape)) in covered[place.key]
