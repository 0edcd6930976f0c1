"""TEMPO (Tree-Estimated Mean Prefix Value for Policy Optimization, arXiv 2509.18314): GRPO and, at
tokens where the responses of a group part, temporal differences of the mean returns of their prefix
tree."""

import torch
from torch import Tensor

from vapo_megatron.algorithms.advantages import grpo
from vapo_megatron.algorithms.prefix_tree import tree_means
from vapo_megatron.algorithms.registry import estimator
from vapo_megatron.algorithms.segments import last_tokens, segment_sum, to_tokens


@estimator("tempo", groups=True, per_token=True)
def tempo(
    rewards: Tensor,
    group_ids: Tensor,
    hashes: Tensor,
    cu_seqlens: Tensor,
    penalty: Tensor,
    eps: float = 1e-6,
) -> Tensor:
    """A_t = z + V(s_(t+1)) - V(s_t), z the response's reward normalised in its group, as in GRPO:
    float32 [T].

    V(s) is the mean of z over all responses of the group that pass s, the response's own included;
    behind the last token it is z. Between branches the difference is 0, and A_t is GRPO's.

    Args:
        rewards: [S], of whole groups.
        penalty: float32 [T], KL penalties; a response's reward is less by their sum.
        group_ids: int64 [S].
        hashes: int64 [T], of each response token's prefix (prefix_tree.prefix_hashes).
        cu_seqlens: int64 [S + 1].
        eps: is added to the standard deviation of a group.
    """
    normalised = grpo(rewards - segment_sum(penalty, cu_seqlens), group_ids, eps).double()
    values = tree_means(hashes, cu_seqlens, group_ids, normalised)
    responses, last = last_tokens(cu_seqlens)
    following = torch.roll(values, -1)
    following[last] = normalised[responses]
    return (to_tokens(normalised, cu_seqlens) + following - values).float()
