"""Logits' log-probs and the gradient of every weight equal those of transformers, for every family."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from batches import random_sequences
from hf_models import read_tensors
from invariance import gather_gradients
from ranks import run_ranks

from vapo_megatron.config.model import ActorConfig, LayoutConfig, ModelConfig, OptimizerSettings
from vapo_megatron.engines.weight_sync.logprob_difference import probe_batch
from vapo_megatron.megatron.mesh import make_mesh
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.training.losses import NegativeLogLikelihood
from vapo_megatron.weights.export import stream_hf
from vapo_megatron.weights.load import load_hf
from vapo_megatron.weights.spec import read_spec

VOCAB = 67
SHAPE = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=VOCAB,
    max_position_embeddings=256,
)
FAMILIES = {
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=16),
    "qwen3-tied": transformers.Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "llama": transformers.LlamaConfig(**SHAPE),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=None),
}
LENGTHS = (2, 9, 33)


def sequences() -> list[list[int]]:
    rows = random_sequences(len(LENGTHS), max(LENGTHS), VOCAB, seed=2)
    return [row[:n] for row, n in zip(rows, LENGTHS, strict=True)]


def megatron(model_dir: Path, layout: LayoutConfig) -> tuple[Any, dict[str, Any]]:
    spec, mesh = read_spec(model_dir), make_mesh(layout)
    # Clipping would scale the gradients in place.
    section = ActorConfig(layout=layout, optimizer=OptimizerSettings(lr=1e-6, clip_grad=0))
    actor = Trainable(spec, ModelConfig(path="unused", dtype="float32"), section, mesh, "lm", name="actor", seed=1)
    load_hf(actor.chunks, spec, model_dir, mesh, "lm")
    actor.prepare()
    batch = probe_batch(sequences())
    logprobs = actor.score(batch)[:, 0]
    weights = torch.full((batch.response_tokens,), 1 / batch.response_tokens)
    actor.train_step(batch, range(batch.samples), NegativeLogLikelihood(weights))
    gather_gradients(actor)
    with torch.no_grad():
        # Gradients take the places of the weights, so that the one mapping gives them their names.
        for chunk in actor.chunks:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter))
    gradients = {name: t.numpy().copy() for bucket in stream_hf(actor.chunks, spec, mesh, "lm") for name, t in bucket}
    return logprobs.numpy(), gradients


SPLIT = LayoutConfig(tp=2, sequence_parallel=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_every_gradient_equal_transformers(tmp_path: Path, family: str) -> None:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(tmp_path / "model")
    rows = []
    for ids in sequences():
        tokens = torch.tensor(ids)
        rows.append(model(tokens[None, :-1]).logits[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0])
    expected = torch.cat(rows)
    (-expected.mean()).backward()
    with torch.no_grad():
        # Saved in the place of the weights, gradients get the names of files: experts are one tensor in memory.
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    model.save_pretrained(tmp_path / "gradients")
    wanted = read_tensors(tmp_path / "gradients")
    for logprobs, gradients in run_ranks(2, megatron, tmp_path / "model", SPLIT):
        assert (torch.from_numpy(logprobs) - expected.detach()).abs().max() < 1e-5
        assert gradients.keys() == wanted.keys()
        for name, gradient in wanted.items():
            error = (torch.from_numpy(gradients[name]) - gradient).abs().max()
            assert error <= 1e-5 * gradient.abs().max() + 1e-7, f"{name}: {error}"
