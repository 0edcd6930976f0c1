"""GLM-5: DeepSeek-V3.2's latent attention, experts and indexers with its own sizes. Layers may
share the tokens that the indexer of an earlier one chose."""

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from vapo_megatron.models import deepseek_v32
from vapo_megatron.models.family import Family


class Config(deepseek_v32.Config):
    """GLM-5's."""

    rms_norm_eps: PositiveFloat = 1e-5
    q_lora_rank: PositiveInt | None = 2048
    qk_nope_head_dim: PositiveInt = 192
    v_head_dim: PositiveInt = 256
    n_group: PositiveInt | None = 1
    topk_group: PositiveInt | None = 1
    first_k_dense_replace: NonNegativeInt = 3


FAMILY = Family(
    "glm_moe_dsa",
    "GlmMoeDsa",
    Config,
    deepseek_v32.layers,
    deepseek_v32.features,
    deepseek_v32.tiny,
    engine=deepseek_v32.FAMILY.engine,
    without_indexers=deepseek_v32.without_indexers,
)
