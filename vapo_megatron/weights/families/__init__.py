"""The model families that are known, by the model_type of their config.json."""

from vapo_megatron.weights.families.family import Family
from vapo_megatron.weights.families.glm4_moe import GLM4_MOE
from vapo_megatron.weights.families.llama import LLAMA
from vapo_megatron.weights.families.mistral import MISTRAL
from vapo_megatron.weights.families.phi3 import PHI3
from vapo_megatron.weights.families.qwen2 import QWEN2
from vapo_megatron.weights.families.qwen3 import QWEN3
from vapo_megatron.weights.families.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (QWEN2, QWEN3, QWEN3_MOE, GLM4_MOE, LLAMA, MISTRAL, PHI3)
}
