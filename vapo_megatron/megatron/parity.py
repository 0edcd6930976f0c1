"""A saved Megatron model against transformers: log-probs, or values, of one fixed input."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.config.model import ActorConfig, CriticConfig, ModelConfig, TrainableConfig
from vapo_megatron.data.torchvision_ops import make_torchvision_importable
from vapo_megatron.errors import RunFailed
from vapo_megatron.megatron.mesh import make_mesh
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.schedule import packed_sequences
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.weights.hf_files import HFTensors
from vapo_megatron.weights.load import SCORE_BIAS, SCORE_WEIGHT, score_names
from vapo_megatron.weights.spec import Head, ModelSpec
from vapo_megatron.weights.torch_dist import load_model, read_model_card

# Of a log-prob or value in float32, in nats; what is mapped wrongly is off by more than 0.01 in any model tried.
TOLERANCE = 1e-3
TOKENS = 64
# Weights in float32, and half as much again for what loading and computing need beside them.
_BYTES_PER_PARAMETER = 6


def comparison(checkpoint: Path, hf_dir: Path) -> str:
    """Compare a saved Megatron model with the Hugging Face directory that it came from, or was converted to, in float32
    over TOKENS tokens, where there is memory for one model after the other; the result in one line. Not to be called
    where torch.distributed is initialised. Raises RunFailed where they differ by more than TOLERANCE."""
    card = read_model_card(checkpoint)
    outputs = "log-probs" if card.head == "lm" else "values"
    if card.head == "value" and not score_names(HFTensors(hf_dir)):
        return f"{outputs} not compared with transformers': the head is new"
    needed = card.spec.parameter_count(card.head) * _BYTES_PER_PARAMETER
    # transformers' model is computed by the CPU, Megatron's by the device.
    available = min(psutil.virtual_memory().available, current_platform().free_bytes())
    if needed > available:
        return (
            f"{outputs} not compared with transformers': that needs {needed / 2**30:.1f} GiB of memory and "
            f"{available / 2**30:.1f} GiB are free"
        )
    ids = _input(card.spec)
    expected = _of_transformers(hf_dir, card.head, ids)
    if not expected.any():
        return f"{outputs} not compared with transformers': the head is all zeros"
    actual = _of_megatron(checkpoint, replace(card.spec, vocab_divisible_by=1), card.head, ids)
    difference = float((actual - expected).abs().max())
    if not difference <= TOLERANCE:  # NaN differs
        raise RunFailed(
            f"{outputs} of Megatron and of transformers differ by up to {difference:.2g}, expected at most "
            f"{TOLERANCE:g}; nothing was kept"
        )
    return f"{outputs} of {len(ids)} tokens equal transformers' to {difference:.1e}"


def _input(spec: ModelSpec) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, spec.vocab_size, (min(TOKENS, spec.max_position_embeddings),), generator=generator)


def _log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Of each token after those before it: [t, vocabulary] -> [t - 1]."""
    return logits[:-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]


@torch.no_grad()
def _of_transformers(hf_dir: Path, head: Head, ids: Tensor) -> Tensor:
    make_torchvision_importable()
    # Its threads copy tensors while torch starts the pool of this one, which torch answers with "Invalid thread pool!".
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind = AutoModelForCausalLM if head == "lm" else AutoModel
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # AutoModel warns about the head that it leaves out
    try:
        model = kind.from_pretrained(hf_dir, dtype=torch.float32, local_files_only=True, trust_remote_code=False)
    finally:
        logging.set_verbosity(before)
    output = model.eval()(ids[None])
    if head == "lm":
        return _log_probs(output.logits[0], ids)
    weight, bias = _score(HFTensors(hf_dir))
    return output.last_hidden_state[0].float() @ weight.T + bias


def _score(tensors: HFTensors) -> tuple[Tensor, Tensor]:
    """Weight and bias of the value head of a directory that has one."""
    name = score_names(tensors)[0]
    bias = name.removesuffix(SCORE_WEIGHT) + SCORE_BIAS
    weight = tensors[name][:].float()
    return weight, tensors[bias][:].float() if bias in tensors.names else torch.zeros(len(weight))


@torch.no_grad()
def _of_megatron(checkpoint: Path, spec: ModelSpec, head: Head, ids: Tensor) -> Tensor:
    with _process_group_of_one():
        config: TrainableConfig = ActorConfig() if head == "lm" else CriticConfig()
        model = ModelConfig(path=str(checkpoint), dtype="float32", attention="sdpa")
        trainable = Trainable(
            spec, model, config, make_mesh(config.layout), head, name="actor" if head == "lm" else "critic", seed=0
        )
        load_model(trainable.chunks, checkpoint)
        device = current_platform().device
        packed = packed_sequences([len(ids)], device)
        (chunk,) = trainable.chunks
        inputs = ids[None].to(device), torch.arange(len(ids), device=device)[None]
        output = chunk.eval()(*inputs, None, packed_seq_params=packed)[0].float().cpu()
    return _log_probs(output[:, : spec.vocab_size], ids) if head == "lm" else output


@contextmanager
def _process_group_of_one() -> Iterator[None]:
    dist.init_process_group(current_platform().world_backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
