"""One long response trains over context-parallel ranks as on one: `make test-long` has it with
131,072 tokens."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import make_batch
from hf_models import write_model
from ranks import run_ranks
from trainables import loss_of, make_trainable

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.weights.export import stream_hf

TOKENS = int(os.environ.get("LONG_TOKENS", "8192"))
# With these AdamW's first step is nearly the gradient itself: g / (|g| + 1).
GRADIENT_STEP = {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0, "clip_grad": 1e9}


def trained(folder: Path, tokens: int, cp: int) -> Any:
    """Gradients, their norm, a score's sum, and the peak of this rank's memory in MiB."""
    batch = make_batch([(3, 5), (16, tokens - 16)])  # every second one is correct
    trainable = make_trainable(
        folder,
        "lm",
        optimizer=GRADIENT_STEP,
        layout=LayoutConfig(cp=cp),
        max_tokens_per_microbatch=tokens // cp + 64,
    )

    def weights() -> dict[str, torch.Tensor]:
        stream = stream_hf(trainable.chunks, trainable.spec, trainable.mesh, "lm")
        return {name: tensor.clone() for bucket in stream for name, tensor in bucket}

    before = weights()
    loss = loss_of(trainable, batch)
    result = trainable.train_step(batch, range(batch.samples), loss)
    after = weights()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    gradients = {name: (before[name] - after[name]).numpy() for name in before}
    return gradients, result.grad_norm, peak


@pytest.mark.full
@pytest.mark.parametrize("cp", [2, 4])
def test_a_long_response_has_the_gradients_of_one_rank(tmp_path: Path, cp: int) -> None:
    shape = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "head_dim": 16,
        "max_position_embeddings": TOKENS,
    }
    folder = write_model(tmp_path / "model", "qwen3", **shape)
    seconds = 240.0 + TOKENS / 16
    ((expected, norm, peak),) = run_ranks(1, trained, folder, TOKENS, 1, deadline=seconds)
    for found, found_norm, found_peak in run_ranks(
        cp, trained, folder, TOKENS, cp, deadline=seconds
    ):
        assert found_norm == pytest.approx(norm, rel=1e-4)
        for name, gradient in expected.items():
            error = abs(found[name] - gradient).max()
            assert error <= 1e-3 * abs(gradient).max() + 1e-7, name
        print(f"CP {cp}, {TOKENS} tokens: {found_peak} MiB a rank, {peak} MiB on one rank")
