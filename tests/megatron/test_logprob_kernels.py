"""The Triton kernels of log-probs and entropy, in Triton's interpreter on a CPU, against float64
and whole logits; cut over two ranks by hand. Whether a GPU compiles them is asked there
(docs/gpu.md)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vapo_megatron.config.model import ActorConfig, ModelConfig
from vapo_megatron.megatron.platform import Platform, current_platform
from vapo_megatron.megatron.precision import NeedsGpu, check_trainable

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


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, float]]:
    """The interpreter is chosen when Triton is imported, so it has a process of its own."""
    root = Path(__file__).parents[2]
    settings = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        env=os.environ | settings,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert not done.returncode, done.stderr
    errors: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return errors


@pytest.mark.parametrize("entropy", ["log-probs", "entropy"])
@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("case", CASES)
def test_passes_equal_whole_logits_in_float64(
    measured: dict[str, dict[str, float]], case: str, kernel: str, entropy: str
) -> None:
    found = measured[f"{case}, {kernel}, {entropy}"]
    # A log-partition of 500 is known to 3e-5 in fp32, and p as well.
    least = 1e-4 if "scale" in CASES[case] or "offset" in CASES[case] else 3e-6
    assert found["outputs"] < 3e-6
    assert found["kept"] < least and found["fresh"] < least
    assert found["bf16"] < 8e-3  # the interpreter cuts off what bfloat16 does not hold


@pytest.mark.gpu
@pytest.mark.skipif(not current_platform().is_cuda, reason="needs a CUDA GPU")
@pytest.mark.parametrize("entropy", [0.0, 1.0], ids=["log-probs", "entropy"])
@pytest.mark.parametrize("words", [151936, 49153])
def test_compiled_kernels_equal_plain_torch(words: int, entropy: float) -> None:
    """257 rows in chunks of 100, in bfloat16: both kernels round the same gradients once."""
    import torch

    from vapo_megatron.megatron.logprobs import LogProbs, _adds_narrow_products

    device = current_platform().device
    generator = torch.Generator(device).manual_seed(1)
    hidden = torch.randn(257, 256, generator=generator, device=device, dtype=torch.bfloat16)
    weight = torch.randn(words, 256, generator=generator, device=device, dtype=torch.bfloat16)
    weight *= 0.1
    labels = torch.randint(0, words - 3, (257,), generator=generator, device=device)
    grads = torch.randn(257, 2, generator=generator, device=device)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    found = {}
    for kernel in ("torch", "triton"):
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        outputs = torch.stack(
            LogProbs.apply(*inputs, labels, words - 3, 0.7, group, 100, kernel), -1
        )
        outputs.backward(grads * torch.tensor([1.0, entropy], device=device))
        found[kernel] = outputs.detach(), inputs[0].grad, inputs[1].grad
    assert (found["torch"][0] - found["triton"][0]).abs().max() < 1e-4
    for mine, theirs in zip(found["triton"][1:], found["torch"][1:], strict=True):
        assert (mine.float() - theirs.float()).norm() < 4e-3 * theirs.float().norm() > 0
    assert _adds_narrow_products(device), "the weight's gradient is added in pieces, slower"


def test_triton_on_a_cpu_is_refused() -> None:
    model = ModelConfig(path="unread", logprob_kernel="triton")
    with pytest.raises(NeedsGpu, match=r"^model.logprob_kernel=triton: .* set .*=torch$"):
        check_trainable(None, model, ActorConfig(), "actor", Platform("cpu", "gloo", "fork"))  # type: ignore[arg-type]


if __name__ == "__main__":
    print(json.dumps(worst_errors()))
