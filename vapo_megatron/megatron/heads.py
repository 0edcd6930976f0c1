"""The two heads: log-probs and entropy without holding the logits, and values."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor

from vapo_megatron.megatron.platform import current_platform

# Bytes of logits that are exponentiated at a time: on a CPU they stay in a core's cache through all
# passes over them.
_BLOCK_BYTES = {"cpu": 1 << 19, "cuda": 1 << 26}
# Rows of a weight's gradient that a product makes in fp32 at a time.
_CAST_ROWS = 4096


class LogProbs(torch.autograd.Function):
    """log p(label) and entropy of softmax(h W^T / temperature), with W cut along the vocabulary
    over a group.

    Forward and backward hold fp32 logits of at most `chunk` rows, and of two chunks only when going
    from one to the next. The last chunk's log-probabilities are kept from forward to backward,
    which begins with them; the other chunks' are recomputed from the log-partition of each
    row and so need no collective.
    """

    @staticmethod
    def _logits(h: Tensor, words: Tensor, temperature: float) -> Tensor:
        logits = _product(h, words.t())
        return logits if temperature == 1.0 else logits.div_(temperature)

    @staticmethod
    def _rows(
        h: Tensor,
        words: Tensor,
        labels: Tensor,
        first: int,
        temperature: float,
        group: Any,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """[3, rows] log p(label), entropy and log-partition; with `keep` also the log-probabilities
        [rows, words].
        first: number of this rank's first word."""
        logits = LogProbs._logits(h, words, temperature)
        # A rank of padding alone has no word: it adds nothing to any sum.
        top = logits.amax(-1) if len(words) else logits.new_full((len(h),), float("-inf"))
        if group.size() > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        sums = logits.new_zeros(3, len(h))
        for block in _blocks(logits):
            part = logits[block].sub_(top[block, None])
            p = part.exp()
            torch.sum(p, -1, out=sums[0, block])
            torch.sum(p.mul_(part), -1, out=sums[2, block])
        index, mine = _in_vocab_shard(labels, first, len(words))
        if len(words):
            sums[1] = logits.gather(1, index[:, None])[:, 0] * mine
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        log_z = sums[0].log()
        columns = torch.stack((sums[1] - log_z, log_z - sums[2] / sums[0], log_z + top))
        return columns, logits.sub_(log_z[:, None]) if keep else None

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        labels: Tensor,
        real: int,
        temperature: float,
        group: Any,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        """Collective over the group, which holds the vocabulary in order, equally many rows on each
        rank.

        Args:
            h: hidden states [t, width], the same on all ranks; their gradient is this rank's part
                of a sum.
            weight: [w, width], this rank's rows of the output layer.
            labels: int64 [t].
            real: words over all ranks; rows beyond are padding.
            chunk: rows of logits held at once, in fp32.

        Returns:
            Both float32 [t], the same on all ranks.
        """
        first = group.rank() * weight.shape[0]
        words = weight[: max(real - first, 0)]
        columns = []
        kept = None
        for i in range(0, len(h), chunk):
            part = slice(i, i + chunk)
            keep = i + chunk >= len(h) and any(ctx.needs_input_grad)
            rows, kept = LogProbs._rows(
                h[part], words, labels[part], first, temperature, group, keep
            )
            columns.append(rows)
        logprob, entropy, partition = torch.cat(columns, -1)
        ctx.save_for_backward(h, weight, labels, entropy, partition)
        # Not among the saved tensors, which all live until the end of backward.
        ctx.kept = kept
        ctx.rest = first, len(words), temperature, chunk
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprob, grad_entropy = grads
        h, weight, labels, entropy, partition = ctx.saved_tensors
        first, real, temperature, chunk = ctx.rest
        words = weight[:real]
        # Most losses have no entropy term, whose gradient would cost as much again.
        through_entropy = bool(grad_entropy.count_nonzero())
        grad_h = torch.zeros_like(h)
        # Nobody asks for it where the head is frozen.
        size = weight.shape if ctx.needs_input_grad[1] else (0, weight.shape[1])
        grad_weight = torch.zeros(size, dtype=torch.float32, device=weight.device)
        log_p = ctx.kept
        ctx.kept = None
        for i in reversed(range(0, len(h) if real else 0, chunk)):
            part = slice(i, i + chunk)
            of_label = grad_logprob[part, None] / temperature
            of_entropy = grad_entropy[part, None] / temperature
            index, mine = _in_vocab_shard(labels[part], first, real)
            if log_p is None:
                log_p = LogProbs._logits(h[part], words, temperature).sub_(partition[part, None])
            if through_entropy:
                # d entropy / d logit = -p (log p + entropy); d log p(label) / d logit = [label] - p
                p = log_p.exp()
                grad = log_p.add_(entropy[part, None]).mul_(-of_entropy).sub_(of_label).mul_(p)
                del p
            else:
                grad = log_p.exp_().mul_(-of_label)
            grad.scatter_add_(1, index[:, None], of_label * mine[:, None])
            log_p = None
            grad = grad.to(h.dtype)
            torch.mm(grad, words, out=grad_h[part])
            if len(grad_weight):
                _add_product(grad_weight[:real], grad.t(), h[part])
            del grad  # else it lives on beside the next chunk's
        of_weight = grad_weight.to(weight.dtype) if len(grad_weight) else None
        return grad_h, of_weight, None, None, None, None, None


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Runs of rows of logits [rows, words]."""
    rows = max(
        1, _BLOCK_BYTES[logits.device.type] // (logits.element_size() * max(1, logits.shape[1]))
    )
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def _in_vocab_shard(labels: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Index of each label among the `count` words of this rank from `first`, and whether it is one
    of them."""
    return (labels - first).clamp(0, max(count - 1, 0)), (labels >= first) & (
        labels < first + count
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b, multiplied and accumulated in fp32 whatever the type of a and b, and returned in
    fp32."""
    if a.dtype == torch.float32:
        return a @ b
    return (
        torch.mm(a, b, out_dtype=torch.float32)
        if current_platform().is_cuda
        else a.float() @ b.float()
    )


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in fp32, with at most _CAST_ROWS rows of the product in memory beside total."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
        return
    for rows, into in zip(a.split(_CAST_ROWS), total.split(_CAST_ROWS), strict=True):
        into += _product(rows, b)


class LogProbHead(tensor_parallel.ColumnParallelLinear):
    """The output layer; once labels are set it returns [s, b, 2] (log-prob, entropy) in place of
    logits.

    `adopt` turns a built ColumnParallelLinear into it, so that names, initialisation and
    checkpoints stay Megatron's.
    """

    labels: Tensor | None
    rows: Tensor | None
    temperature: float
    factor: float
    chunk: int
    vocab_size: int
    gives_states: bool
    tapped: Tensor | None

    @classmethod
    def adopt(cls, layer: Any, vocab_size: int, chunk: int, factor: float = 1.0) -> None:
        """Turn a Megatron output layer into this one. vocab_size: real words, padding rows aside.
        factor: of logits."""
        layer.__class__ = cls
        layer.gradient_accumulation_fusion = (
            False  # for ColumnParallelLinear's own products it would take apex
        )
        layer.labels = None
        layer.rows = None
        layer.gives_states = False
        layer.tapped = None
        layer.temperature = 1.0
        layer.chunk = chunk
        layer.vocab_size = vocab_size
        layer.factor = factor

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> Any:
        """input_ [s, b, hidden] (its sequence cut over TP under sequence parallel); labels [b, s].

        rows, indices into the s * b positions, are those that matter (the responses); all others
        yield 0 and cost no logits. The same on all ranks of the tensor-parallel group. With
        gives_states the hidden states, or those of the layer that is tapped, follow log-prob and
        entropy: [s, b, 2 + hidden].
        """
        if self.labels is None:
            logits, bias = super().forward(
                input_, weight=weight, runtime_gather_output=runtime_gather_output
            )
            return (logits if self.factor == 1.0 else logits * self.factor), bias
        weight = self.weight if weight is None else weight
        group, (b, s) = self.tp_group, self.labels.shape
        flat = self._rows_of(input_)
        labels = self.labels.transpose(0, 1).reshape(-1)
        if self.rows is not None:
            labels = labels[self.rows]
        logprob, entropy = LogProbs.apply(
            flat,
            weight,
            labels,
            self.vocab_size,
            self.temperature / self.factor,
            group,
            self.chunk,
        )
        columns = torch.stack((logprob, entropy), -1)
        if self.gives_states:
            states = flat if self.tapped is None else self._rows_of(self.tapped)
            columns = torch.cat((columns, states.float()), -1)
            self.tapped = None
        if self.rows is not None:
            columns = columns.new_zeros(s * b, columns.shape[1]).index_copy(0, self.rows, columns)
        return columns.view(s, b, -1), None

    def tap(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """A forward hook of a layer: its output [s, b, hidden] takes the place of the last hidden
        states."""
        self.tapped = output[0] if self.gives_states else None

    def _rows_of(self, states: Tensor) -> Tensor:
        """[s, b, hidden], its sequence cut as input_, -> [rows, hidden]."""
        if self.sequence_parallel:
            whole = tensor_parallel.gather_from_sequence_parallel_region(
                states, tensor_parallel_output_grad=True, group=self.tp_group
            )
        else:
            whole = tensor_parallel.copy_to_tensor_model_parallel_region(
                states, group=self.tp_group
            )
        flat = whole.reshape(-1, whole.shape[-1])
        return flat if self.rows is None else flat[self.rows]


class ValueHead(torch.nn.Module):
    """n fp32 numbers for each position: its value (n = 1), or logits of a histogram over values.

    weight [n, hidden] and bias [n] are whole on every last-stage rank.
    """

    def __init__(self, config: Any, outputs: int, tp_group: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(outputs, config.hidden_size, dtype=config.params_dtype)
        )
        self.bias = torch.nn.Parameter(torch.zeros(outputs, dtype=config.params_dtype))
        self.tp_group = tp_group
        self.sequence_cut = config.sequence_parallel
        # Under sequence parallel each TP rank sees part of the tokens: Megatron sums gradients of
        # marked parameters.
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> Any:
        """input_ [s, b, hidden] -> [s, b, n]."""
        value = torch.nn.functional.linear(input_.float(), self.weight.float(), self.bias.float())
        if self.sequence_cut:
            value = tensor_parallel.gather_from_sequence_parallel_region(
                value, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return value, None
