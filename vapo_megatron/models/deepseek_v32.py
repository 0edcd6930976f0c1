"""DeepSeek-V3.2: DeepSeek-V3 whose attention reads the `index_topk` tokens that an indexer chooses
(DeepSeek Sparse Attention, arXiv 2512.02556, section 2.1).

Up to index_topk tokens it chooses all, and the model is DeepSeek-V3. So it is trained and served as
that, longer inputs are refused, and exports carry the indexers of the source unchanged.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import PositiveInt

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.models import deepseek_v3
from vapo_megatron.models.deepseek_v3 import count_dense_layers
from vapo_megatron.models.family import Family, refuse_unless
from vapo_megatron.models.layers import Layer

_SPARSE = "indexed_attention"
# The name of it in files of transformers 5.0 and a while after.
_LEGACY = "deepseek_sparse_attention"


class Config(deepseek_v3.Config):
    """DeepSeek-V3.2's. Which layers are dense is a list (transformers), or a number of first ones
    (the published file)."""

    reads_interleave: ClassVar[bool] = False

    index_topk: PositiveInt = 2048
    layer_types: list[str] | None = None
    mlp_layer_types: list[str] | None = None

    @property
    def context(self) -> int:
        """Longest input of which no token is left out."""
        return min(self.max_position_embeddings, self.index_topk)


def layers(config: Config) -> tuple[Layer, ...]:
    """DeepSeek-V3's."""
    kinds = config.layer_types
    refuse_unless(
        kinds is None or set(kinds) in ({_SPARSE}, {_LEGACY}),
        "layer_types",
        kinds,
        f"{_SPARSE!r} for every layer: choose another checkpoint",
    )
    first = config.first_k_dense_replace
    dense_layers = count_dense_layers(config, config.mlp_layer_types, first)
    return deepseek_v3.layers(config.model_copy(update={"first_k_dense_replace": dense_layers}))


def features(config: Config) -> Mapping[str, Any]:
    """Files have indexers, and may have layers for multi-token prediction after the last."""
    return {"predicts_ahead": True, "indexed": True}


def without_indexers(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the DeepSeek-V3 that computes the same up to index_topk tokens."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        dense_layers = config.get("first_k_dense_replace", 3)
    else:
        dense_layers = kinds.count("dense")
    left_out = ("auto_map", "index", "layer_types", "mlp_layer_types")
    kept = {key: value for key, value in config.items() if not key.startswith(left_out)}
    return kept | {
        "model_type": "deepseek_v3",
        "first_k_dense_replace": dense_layers,
        "moe_layer_freq": 1,
        "n_group": config.get("n_group") or 1,
        "topk_group": config.get("topk_group") or 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def tiny(shape: TinyModel) -> dict[str, Any]:
    """DeepSeek-V3's, with indexers that choose all tokens."""
    sizes = deepseek_v3.tiny(shape)
    turned = sizes["qk_rope_head_dim"]
    return sizes | {
        "index_topk": shape.max_positions,
        "index_n_heads": 2,
        "index_head_dim": 2 * turned,
    }


FAMILY = Family(
    "deepseek_v32",
    "DeepseekV32",
    Config,
    layers,
    features,
    tiny,
    engine=deepseek_v3.FAMILY.engine,
    without_indexers=without_indexers,
)
