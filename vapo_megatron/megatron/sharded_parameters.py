"""Parameters of our own modules in a checkpoint that loads at any layout."""

from collections.abc import Mapping
from typing import Any

from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


def cut_by_heads(
    parameters: Mapping[str, Tensor], prefix: str, offsets: Any, metadata: Any, tp_group: Any
) -> dict[str, Any]:
    """A module's sharded_state_dict of the parameters of which a tensor-parallel rank has its own
    heads' part, along the first dimension.

    prefix, offsets, metadata: as megatron.core.dist_checkpointing gives them.
    """
    state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        dict(parameters),
        prefix,
        dict.fromkeys(parameters, 0),
        offsets,
        tp_group=tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )
    return state
