"""transformers' classes for critics of families that have none.

A critic is exported as ...ForTokenClassification. Where transformers has no such class, register()
makes it:

    from vapo_megatron.models.token_classification import register
    register()
    critic = AutoModelForTokenClassification.from_pretrained(directory)
"""

from typing import Any

import transformers
from transformers.modeling_layers import GenericForTokenClassification

from vapo_megatron.models.registry import FAMILIES


def register() -> None:
    """Make the missing classes and tell AutoModelForTokenClassification of them."""
    for family in FAMILIES.values():
        name = family.classes + "ForTokenClassification"
        causal: Any = getattr(transformers, family.classes + "ForCausalLM")
        if causal.config_class in transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
            continue
        base = next(kind for kind in causal.__mro__ if kind.__name__.endswith("PreTrainedModel"))
        settings = {"config_class": causal.config_class}
        made = type(name, (GenericForTokenClassification, base), settings)
        transformers.AutoModelForTokenClassification.register(
            causal.config_class, made, exist_ok=True
        )
