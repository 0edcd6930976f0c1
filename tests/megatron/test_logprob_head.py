"""Log-probs and entropy equal the plain way, gradients too, no more than a chunk of fp32 logits
ever exists, and bfloat16 weights do not round what either head yields."""

import dataclasses
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hf_models
import pytest
import torch
from hf_models import VOCAB, megatron, write_model
from invariance import make_batch
from ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainables import make_trainable, policy_loss

from vapo_megatron.config.model import ActorConfig, LayoutConfig, ModelConfig
from vapo_megatron.megatron.heads import ValueHead
from vapo_megatron.megatron.logprobs import LogProbs
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec

ROWS = 61
WIDTH = 32
CHUNK = 8
TEMPERATURE = 0.7


class LogitsWatch(TorchDispatchMode):
    """Sees every fp32 tensor that is made with a side of `words`: the most rows of one, the most
    elements at a time."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = words
        self.most_rows = 0
        self.most_elements = 0
        self.products = 0
        self.alive: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_product = func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out)
        self.products += is_product and result.shape[-1] == self.words
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, Tensor)
                and tensor.dtype == torch.float32
                and self._holds_logits(tensor)
            ):
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
    """hidden [ROWS, 1, WIDTH], weight [VOCAB, WIDTH], labels [ROWS], gradients of both outputs
    [ROWS, 2]."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(ROWS, 1, WIDTH, generator=generator)
    weight = torch.randn(VOCAB, WIDTH, generator=generator)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    return hidden, weight, labels, torch.randn(ROWS, 2, generator=generator)


def outputs_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probs and entropies [rows, 2] from whole logits."""
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    return torch.stack((log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)), -1)


def single_rank(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = CHUNK) -> Tensor:
    """The same without whole logits, where the vocabulary is not cut."""
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    found = LogProbs.apply(
        hidden, weight, labels, group.size() * len(weight), TEMPERATURE, group, chunk
    )
    return torch.stack(found, -1)


def plain(entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [ROWS, 2] and the gradients of hidden states and weight, from whole logits."""
    hidden, weight, labels, grads = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    outputs = outputs_of(hidden[:, 0] @ weight.t(), labels)
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
    layer.labels = labels[None]
    layer.rows = None
    layer.temperature = TEMPERATURE
    layer.chunk = CHUNK
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
@pytest.mark.parametrize(
    "tp,vocab_multiple", [(1, 1), (2, 1), (2, 256)], ids=["TP1", "TP2", "TP2-rank-of-padding"]
)
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


def head_beside_fused_layers(model_dir: Path) -> Any:
    """The gradient of an output layer's weight, by way of logits, where other layers add theirs to
    the sum."""
    from megatron.core.tensor_parallel import layers

    from vapo_megatron.megatron import model

    settings = model.transformer_config

    def fused(*given: Any) -> Any:
        layers._grad_accum_fusion_available = False  # as where apex is not installed
        return dataclasses.replace(settings(*given), gradient_accumulation_fusion=True)

    hf_models.transformer_config = fused  # type: ignore[assignment]
    chunks, _ = megatron(read_spec(model_dir), LayoutConfig(), "lm")
    weight = chunks[0].output_layer.weight
    weight.main_grad = torch.zeros_like(weight)
    chunks[0].output_layer(inputs()[0])[0].sum().backward()
    return weight.grad[:VOCAB].numpy()


def test_without_apex_the_head_trains_beside_fused_layers(
    model_dir: Path,
) -> None:
    (found,) = run_ranks(1, head_beside_fused_layers, model_dir)
    assert torch.allclose(
        torch.from_numpy(found), inputs()[0].sum((0, 1)).expand(VOCAB, -1), rtol=1e-5, atol=1e-5
    )


def fuses_weight_gradients(model_dir: Path) -> tuple[bool, bool]:
    """Whether a layer that can add its gradient to main_grad is asked to, with and without that
    buffer."""
    batch = make_batch()
    asked = []
    prepared = make_trainable(model_dir, "lm")
    alone = Trainable(
        prepared.spec,
        ModelConfig(path="unread"),
        ActorConfig(),
        prepared.mesh,
        "lm",
        name="actor",
        seed=1,
    )
    for trainable in (prepared, alone):
        layer = trainable.chunks[0].decoder.layers[0].mlp.linear_fc1
        layer.fuse_wgrad_accumulation = True
        trainable.gradients(batch, range(batch.samples), policy_loss(batch, batch.rollout_logprobs))
        asked.append(layer.fuse_wgrad_accumulation)
    return asked[0], asked[1]


def test_gradients_without_an_optimizer_are_not_accumulated(
    model_dir: Path,
) -> None:
    assert run_ranks(1, fuses_weight_gradients, model_dir) == [(True, False)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_logits_are_not_rounded_to_the_weights_type(dtype: torch.dtype) -> None:
    """Operands as they are; what is made of them is exact to fp32, against float64."""
    hidden, weight, labels, grads = inputs()
    hidden = hidden[:, 0].to(dtype)
    weight = weight.to(dtype)
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    expected = outputs_of(exact[0] @ exact[1].t(), labels)
    expected.backward(grads.double())
    found = single_rank(hidden.requires_grad_(), weight.requires_grad_(), labels)
    found.backward(grads)
    rounded = outputs_of((hidden @ weight.t()).detach().double(), labels)
    error = (found - expected).abs().max()
    rounding = (rounded - expected).abs().max()
    assert error < 2e-5
    if dtype == torch.bfloat16:
        assert rounding > 100 * error, "the plain way rounds its logits"
    for mine, theirs in zip((hidden, weight), exact, strict=True):
        assert mine.grad is not None and theirs.grad is not None and mine.grad.dtype == dtype
        assert (mine.grad - theirs.grad).norm() < (
            4e-3 if dtype == torch.bfloat16 else 4e-6
        ) * theirs.grad.norm()


def test_gradients_can_be_asked_for_twice() -> None:
    """What stays of the last chunk is used up by the first backward pass; a second one computes it
    again."""
    hidden, weight, labels, grads = inputs()
    hidden.requires_grad_()
    outputs = single_rank(hidden[:, 0], weight, labels)
    first, second = (
        torch.autograd.grad(outputs, hidden, grads, retain_graph=True)[0] for _ in range(2)
    )
    assert torch.allclose(first, second, rtol=1e-5, atol=1e-5) and first.abs().sum() > 0


def test_the_last_chunks_logits_are_computed_once() -> None:
    hidden, weight, labels, grads = inputs()
    for chunk, products in ((ROWS, 1), (ROWS // 2 + 1, 3)):
        hidden.grad = None
        with LogitsWatch(VOCAB) as watch:
            outputs = single_rank(hidden.requires_grad_()[:, 0], weight, labels, chunk)
            outputs.backward(grads)
        assert watch.products == products


def test_values_are_not_rounded_to_the_weights_type() -> None:
    hidden, _, _, _ = inputs()
    config = SimpleNamespace(
        hidden_size=WIDTH, params_dtype=torch.bfloat16, sequence_parallel=False
    )
    head = ValueHead(config, 1, None)
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(5))
    expected = hidden.bfloat16().double() @ head.weight.double().t()
    values, _ = head(hidden.bfloat16())
    assert values.dtype == torch.float32
    assert (values - expected).abs().max() < 1e-5 < (values.bfloat16() - expected).abs().max() / 100
