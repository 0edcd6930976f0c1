"""The Triton kernels of log-probs and entropy, in Triton's interpreter on a CPU, against float64
and whole logits; cut over two ranks by hand. Whether a GPU compiles them is asked there
(docs/gpu.md)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from logprob_errors import CASES

from vapo_megatron.config.model import ActorConfig, ModelConfig
from vapo_megatron.megatron.platform import Platform, current_platform
from vapo_megatron.megatron.precision import NeedsGpu, check_trainable


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, float]]:
    """What logprob_errors.py prints."""
    root = Path(__file__).parents[2]
    settings = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("logprob_errors.py"))],
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
