"""The reference policy: what the KL penalty keeps the policy near to."""

from vapo_megatron.config.policy import KlConfig
from vapo_megatron.training.models import Models


def replace_reference(models: Models, config: KlConfig, step: int) -> None:
    """The policy of every kl.replace_reference_every-th step becomes the reference (DeepSeek-R1, arXiv 2501.12948)."""
    every = config.replace_reference_every
    if models.reference is not None and every is not None and step % every == 0:
        models.memory.enter("replace_reference")
        models.reference.copy_from(models.actor)
