"""Log-probs and entropy equal the plain way, gradients too, and no more than a chunk of fp32 logits ever exists."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import VOCAB, megatron, write_model
from ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.weights.spec import read_spec

ROWS, WIDTH, CHUNK, TEMPERATURE = 61, 32, 8, 0.7


class LogitsWatch(TorchDispatchMode):
    """Sees every fp32 tensor that is made with a side of `words`: the most rows of one, the most elements at a time."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.most_rows, self.most_elements = words, 0, 0
        self.alive: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32 and self._holds_logits(tensor):
                self.most_rows = max(self.most_rows, tensor.numel() // max(self.words, 1))
                self.alive.append(weakref.ref(tensor))
        tensors = [tensor for ref in self.alive if (tensor := ref()) is not None]
        storages = {tensor.data_ptr(): tensor.numel() for tensor in tensors}
        self.most_elements = max(self.most_elements, sum(storages.values()))
        self.alive = [weakref.ref(tensor) for tensor in tensors]
        return result

    def _holds_logits(self, tensor: Tensor) -> bool:
        return tensor.ndim >= 2 and self.words in tensor.shape and WIDTH not in tensor.shape


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [ROWS, 1, WIDTH], weight [VOCAB, WIDTH], labels [ROWS], gradients of both outputs [ROWS, 2]."""
    generator = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(ROWS, 1, WIDTH, generator=generator), torch.randn(VOCAB, WIDTH, generator=generator)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    return hidden, weight, labels, torch.randn(ROWS, 2, generator=generator)


def plain(entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [ROWS, 2] and the gradients of hidden states and weight, from whole logits."""
    hidden, weight, labels, grads = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    log_p = (hidden[:, 0] @ weight.t() / TEMPERATURE).log_softmax(-1)
    outputs = torch.stack((log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)), -1)
    outputs.backward(grads * torch.tensor([1.0, float(entropy)]))
    assert hidden.grad is not None and weight.grad is not None
    return outputs.detach(), hidden.grad, weight.grad


def chunked(model_dir: Path, tp: int, entropy: bool, vocab_multiple: int) -> dict[str, Any]:
    """The same from the output layer, on one of tp ranks, and what was seen while it worked."""
    spec = read_spec(model_dir, vocab_divisible_by=vocab_multiple)
    chunks, mesh = megatron(spec, LayoutConfig(tp=tp), "lm")
    layer = chunks[0].output_layer
    hidden, weight, labels, grads = inputs()
    rows = layer.weight.shape[0]
    first = mesh.tp_rank * rows
    with torch.no_grad():  # padding rows keep their NaN: what reads one shows it
        mine = weight[first : first + rows]
        layer.weight[: len(mine)] = mine
    layer.labels, layer.rows, layer.temperature, layer.chunk = labels[None], None, TEMPERATURE, CHUNK
    hidden.requires_grad_()
    with LogitsWatch(len(mine)) as watch:
        outputs, _ = layer(hidden)
        outputs.backward((grads * torch.tensor([1.0, float(entropy)]))[:, None])
    return {
        "outputs": outputs[:, 0].detach().numpy(),
        "hidden": hidden.grad.numpy(),
        "weight": layer.weight.grad[: len(mine)].numpy(),
        "padding": layer.weight.grad[len(mine) :].abs().sum().item(),
        "first": first,
        "rows": watch.most_rows,
        "chunks": watch.most_elements / max(len(mine), 1) / CHUNK,
    }


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.mark.parametrize("entropy", [False, True], ids=["log-probs", "entropy"])
@pytest.mark.parametrize("tp,vocab_multiple", [(1, 1), (2, 1), (2, 256)], ids=["TP1", "TP2", "TP2-rank-of-padding"])
def test_the_head_equals_the_plain_way_and_holds_one_chunk(
    model_dir: Path, tp: int, vocab_multiple: int, entropy: bool
) -> None:
    outputs, hidden, weight = plain(entropy)
    for rank in run_ranks(tp, chunked, model_dir, tp, entropy, vocab_multiple):
        assert torch.allclose(torch.from_numpy(rank["outputs"]), outputs, rtol=1e-5, atol=1e-5)
        assert torch.allclose(torch.from_numpy(rank["hidden"]), hidden, rtol=1e-5, atol=1e-5)
        mine = weight[rank["first"] : rank["first"] + len(rank["weight"])]
        assert torch.allclose(torch.from_numpy(rank["weight"]), mine, rtol=1e-5, atol=1e-5)
        assert rank["padding"] == 0
        assert rank["rows"] <= CHUNK
        assert rank["chunks"] <= 2, "more than a chunk's logits and their exponentials"


def test_the_watch_sees_the_plain_ways_logits() -> None:
    with LogitsWatch(VOCAB) as watch:
        plain(True)
    assert watch.most_rows == ROWS and watch.most_elements >= 2 * ROWS * VOCAB
