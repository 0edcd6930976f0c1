"""Prints errors of the log-prob kernels in Triton's interpreter, which is chosen when Triton is
imported. It has a process without Megatron, whose import takes longer than the kernels."""

import json
from typing import Any

ROWS = 7
# Fewer words than a block, and three blocks of which the last is not full.
CASES = {
    "few words": {"words": [61]},
    "odd words in blocks": {"words": [299]},
    "one word": {"words": [1]},
    "temperature": {"words": [299], "temperature": 0.7},
    "two ranks": {"words": [150, 149], "temperature": 1.3},
    "a rank of padding": {"words": [150, 0]},
    "large logits": {"words": [299], "scale": 60.0},
    "one row": {"words": [61], "rows": 1},
    "a rank far below": {"words": [64, 64], "offset": -500.0},
}


def worst_errors() -> dict[str, dict[str, float]]:
    """In a process with TRITON_INTERPRET=1: the largest differences of each case from float64."""
    from vapo_megatron.megatron import logprob_torch, logprob_triton

    logprob_triton._BLOCK = 128
    return {
        f"{name}, {passes.__name__.rpartition('_')[2]}, {'entropy' if entropy else 'log-probs'}": (
            errors(passes, entropy, **case)
        )
        for name, case in CASES.items()
        for passes in (logprob_torch, logprob_triton)
        for entropy in (False, True)
    }


def errors(
    passes: Any,
    entropy: bool,
    words: list[int],
    rows: int = ROWS,
    temperature: float = 1.0,
    scale: float = 3.0,
    offset: float = 0.0,
) -> dict[str, float]:
    """offset: of the second rank's logits."""
    import torch

    from vapo_megatron.megatron import logprobs

    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, sum(words), generator=generator) * scale
    logits[:, words[0] :] += offset
    # The first and the last word of a shard among them.
    labels = torch.tensor([0, words[0] - 1, sum(words) - 1, words[0] % sum(words)] * 2)[:rows]
    of_logprob = torch.randn(rows, generator=generator)
    of_entropy = torch.randn(rows, generator=generator) if entropy else None

    exact = logits.double().requires_grad_()
    log_p = (exact / temperature).log_softmax(-1)
    expected = torch.stack((log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)))
    weights = torch.stack((of_logprob, torch.zeros(rows) if of_entropy is None else of_entropy))
    (expected * weights).sum().backward()
    assert exact.grad is not None

    pieces = [piece.contiguous() for piece in logits.split(words, 1)]
    firsts = [sum(words[:rank]) for rank in range(len(words))]
    fresh = [piece.clone() for piece in pieces]
    logprobs._passes = lambda kernel: passes  # type: ignore[assignment]
    found = [
        logprobs._statistics(piece, labels - first, temperature, "triton")
        for piece, first in zip(pieces, firsts, strict=True)
    ]
    outputs = outputs_over_ranks(found)
    _, spread, partition = outputs

    def grads(pieces: list[Any], tops: list[Any], dtype: torch.dtype) -> torch.Tensor:
        made = [
            passes.gradient(
                piece.clone(),
                top,
                labels - first,
                temperature,
                partition,
                spread,
                of_logprob,
                of_entropy,
                dtype,
            )
            for piece, first, top in zip(pieces, firsts, tops, strict=True)
            if piece.shape[1]
        ]
        assert all(grad.dtype == dtype for grad in made)
        return torch.cat(made, 1)

    tops = [local[0] for local in found]
    size = max(1e-3, exact.grad.abs().max().item())
    return {
        "outputs": (outputs[:2] - expected).abs().max().item()
        / max(1.0, expected.abs().max().item()),
        "kept": (grads(pieces, tops, torch.float32) - exact.grad).abs().max().item() / size,
        "fresh": (grads(fresh, [None] * len(words), torch.float32) - exact.grad).abs().max().item()
        / size,
        "bf16": (grads(fresh, [None] * len(words), torch.bfloat16) - exact.grad).abs().max().item()
        / size,
    }


def outputs_over_ranks(found: list[Any]) -> Any:
    """logprobs._outputs of the first of len(found) ranks, whose statistics these are."""
    import torch.distributed as dist

    from vapo_megatron.megatron import logprobs

    parts: list[Any] = []

    class Group:
        def size(self) -> int:
            return len(found)

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if op == dist.ReduceOp.MAX:
            for local in found:
                tensor.copy_(tensor.maximum(local[0]))
        elif len(parts) < len(found):
            parts.append(tensor.clone())
        else:
            tensor.copy_(sum(parts))

    dist.all_reduce = all_reduce
    for local in found:  # each rank's part, before there is a sum
        logprobs._outputs(local, Group())
    return logprobs._outputs(found[0], Group())


if __name__ == "__main__":
    print(json.dumps(worst_errors()))
