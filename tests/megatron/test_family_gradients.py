"""Logits' log-probs and the gradient of every weight equal those of transformers, for every
family."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from batches import random_sequences
from family_table import FAMILIES, WITH_EXPERTS
from hf_models import VOCAB, read_tensors, write_model
from invariance import gather_gradients
from matrices import others_in_full
from ranks import run_ranks

from vapo_megatron.config.model import ActorConfig, LayoutConfig, ModelConfig, OptimizerSettings
from vapo_megatron.engines.weight_sync.logprob_difference import probe_batch
from vapo_megatron.megatron.mesh import make_mesh
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.training.losses import NegativeLogLikelihood
from vapo_megatron.weights.export import stream_hf
from vapo_megatron.weights.load import load_hf

# A row of the table, and changes to its sizes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
}
# Factors of embeddings that are also the head's, on two stages.
TIED: dict[str, tuple[str, dict[str, Any]]] = {
    "granite-tied": ("granite", {"tie_word_embeddings": True}),
    "gemma3-tied": ("gemma3_text", {}),
}
LENGTHS = (2, 9, 33)


def sequences() -> list[list[int]]:
    rows = random_sequences(len(LENGTHS), max(LENGTHS), VOCAB, seed=2)
    return [row[:n] for row, n in zip(rows, LENGTHS, strict=True)]


def megatron(model_dir: Path, layout: LayoutConfig) -> tuple[Any, dict[str, Any]]:
    spec = read_spec(model_dir)
    mesh = make_mesh(layout)
    # Clipping would scale the gradients in place.
    section = ActorConfig(layout=layout, optimizer=OptimizerSettings(lr=1e-6, clip_grad=0))
    actor = Trainable(
        spec, ModelConfig(path="unused", dtype="float32"), section, mesh, "lm", name="actor", seed=1
    )
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
                parameter.copy_(
                    parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)
                )
    gradients = {
        name: t.numpy().copy()
        for bucket in stream_hf(actor.chunks, spec, mesh, "lm")
        for name, t in bucket
    }
    return logprobs.numpy(), gradients


SPLIT = LayoutConfig(tp=2, sequence_parallel=True)
# Of a model with dense layers first, the first stage has layers of both kinds.
EXPERTS_SPLIT = LayoutConfig(pp=2, ep=2)
# Delta nets exchange tokens for heads over context-parallel ranks.
CONTEXT = LayoutConfig(cp=2)
# Of families alike in attention, MLP and experts one; their logits, all of them, are compared in
# tests/weights/test_logits.py.
SPLIT_IN_TEST = [
    (case, 2, SPLIT)
    for case in (
        "qwen2",
        "qwen3-tied",
        "ministral3",
        "gpt_oss",
        "granite",
        "gemma3_text",
        "glm4",
        "deepseek_v3",
        "deepseek_v32",
        "qwen3_5_moe_text",
    )
]
EXPERTS_IN_TEST = [
    (family, 4, EXPERTS_SPLIT) for family in ("glm4_moe", "minimax_m2", "glm4_moe_lite")
]
HYBRID = [
    pytest.param("qwen3_5_text", 2, CONTEXT),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in (
            ("qwen3_next", 2, CONTEXT),
            ("qwen3_5_text", 2, LayoutConfig()),
            ("qwen3_5_text", 2, LayoutConfig(tp=2)),
            ("qwen3_5_text", 2, LayoutConfig(pp=2, vpp=2)),
            ("qwen3_5_text", 4, LayoutConfig(tp=2, cp=2, sequence_parallel=True)),
            ("qwen3_5_moe_text", 4, LayoutConfig(cp=2, ep=4)),
        )
    ),
]


@pytest.mark.parametrize(
    ("case", "world_size", "layout"),
    [
        *others_in_full(((case, 2, SPLIT) for case in CASES), SPLIT_IN_TEST),
        *others_in_full(((family, 4, EXPERTS_SPLIT) for family in WITH_EXPERTS), EXPERTS_IN_TEST),
        *(
            pytest.param(case, 2, layout, marks=pytest.mark.full)
            for case, layout in (
                *((case, SPLIT) for case in TIED),
                *((case, LayoutConfig(pp=2)) for case in TIED),
                *((case, LayoutConfig(cp=2)) for case in ("gemma3_text", "gpt_oss", "ministral3")),
                ("gpt_oss", LayoutConfig(pp=2, vpp=2)),
            )
        ),
        # Stages of different lengths.
        *(
            pytest.param(case, 3, LayoutConfig(pp=3), marks=pytest.mark.full)
            for case in ("gpt_oss", "qwen3_5_text", "granite-tied", "gemma3-tied")
        ),
        *HYBRID,
    ],
)
def test_log_probs_and_every_gradient_equal_transformers(
    tmp_path: Path, case: str, world_size: int, layout: LayoutConfig
) -> None:
    family, sizes = (CASES | TIED)[case]
    near = FAMILIES[family]
    source = write_model(tmp_path / "model", family, **sizes)
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    rows = []
    for ids in sequences():
        tokens = torch.tensor(ids)
        rows.append(
            model(tokens[None, :-1]).logits[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        )
    expected = torch.cat(rows)
    (-expected.mean()).backward()
    put_gradients_in_place(model)
    model.save_pretrained(tmp_path / "gradients")
    wanted = {
        name: gradient
        for name, gradient in read_tensors(tmp_path / "gradients").items()
        if ".indexer." not in name
    }
    for logprobs, gradients in run_ranks(world_size, megatron, source, layout):
        assert (torch.from_numpy(logprobs) - expected.detach()).abs().max() < near.logits
        assert gradients.keys() == wanted.keys()
        for name, gradient in wanted.items():
            error = (torch.from_numpy(gradients[name]) - gradient).abs().max()
            assert error <= near.gradients * gradient.abs().max() + 1e-7, f"{name}: {error}"


@torch.no_grad()
def put_gradients_in_place(model: Any) -> None:
    """Saved in the place of the weights, gradients get the names of files: experts are one tensor
    in memory."""
    for name, parameter in model.named_parameters():
        if parameter.grad is None:  # indexers choose all tokens, and are not trained
            assert ".indexer." in name
            continue
        parameter.copy_(parameter.grad)
    for name, buffer in model.named_buffers():
        if name in model.state_dict():  # numbers that routers choose by: never trained
            buffer.zero_()
