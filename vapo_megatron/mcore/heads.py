"""The two heads: log-probs and entropy without ever holding the logits, and values."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor


class _LogProbs(torch.autograd.Function):
    """log p(label) and entropy of softmax(h W^T / temperature), W cut along the vocabulary over a group.

    Forward and backward hold `chunk` rows of logits at a time, in fp32; logits are computed again in backward.
    """

    @staticmethod
    def _rows(
        h: Tensor, weight: Tensor, labels: Tensor, vocab: tuple[int, int], temperature: float, group: Any
    ) -> tuple[Tensor, ...]:
        """Statistics of some rows. vocab: first word of this rank, number of real words over all ranks."""
        first, real = vocab
        logits = torch.matmul(h, weight.t()).float()
        if temperature != 1.0:
            logits /= temperature
        if first + weight.shape[0] > real:
            logits[:, max(real - first, 0) :] = float("-inf")
        top = logits.amax(-1)
        if group.size() > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        logits -= top[:, None]
        mine = (labels >= first) & (labels < first + weight.shape[0])
        index = (labels - first).clamp(0, weight.shape[0] - 1)
        exp = logits.exp()
        logits = logits.masked_fill(exp == 0, 0.0)
        label_logit = logits.gather(1, index[:, None])[:, 0] * mine
        sums = torch.stack((exp.sum(-1), label_logit, (exp * logits).sum(-1)))
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        log_z = sums[0].log()
        return logits, exp, mine, index, sums[0], sums[1] - log_z, log_z - sums[2] / sums[0]

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab: tuple[int, int],
        temperature: float,
        group: Any,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = [], []
        for i in range(0, len(h), chunk):
            rows = _LogProbs._rows(h[i : i + chunk], weight, labels[i : i + chunk], vocab, temperature, group)
            logprobs.append(rows[5])
            entropies.append(rows[6])
        logprob, entropy = torch.cat(logprobs), torch.cat(entropies)
        ctx.save_for_backward(h, weight, labels, entropy)
        ctx.rest = vocab, temperature, group, chunk
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprob, grad_entropy = grads
        h, weight, labels, entropy = ctx.saved_tensors
        vocab, temperature, group, chunk = ctx.rest
        # Most losses have no entropy term, whose gradient would cost as much again.
        through_entropy = bool(grad_entropy.count_nonzero())
        grad_h = torch.empty_like(h)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for i in range(0, len(h), chunk):
            part = slice(i, i + chunk)
            logits, exp, mine, index, z, _, _ = _LogProbs._rows(
                h[part], weight, labels[part], vocab, temperature, group
            )
            p = exp / z[:, None]
            grad = p * -grad_logprob[part, None]
            grad.scatter_add_(1, index[:, None], (grad_logprob[part] * mine)[:, None])
            if through_entropy:
                # d entropy / d logit = -p (log p + entropy)
                grad -= grad_entropy[part, None] * p * (logits - z.log()[:, None] + entropy[part, None])
            if temperature != 1.0:
                grad /= temperature
            grad = grad.to(h.dtype)
            grad_h[part] = grad @ weight
            grad_weight += (grad.t() @ h[part]).float()
        return grad_h, grad_weight.to(weight.dtype), None, None, None, None, None


class LogProbHead(tensor_parallel.ColumnParallelLinear):
    """The output layer; once labels are set it yields [s, b, 2] (log-prob, entropy) in place of logits.

    It takes the place of a built ColumnParallelLinear by `adopt`, so that names, initialisation and checkpoints stay
    Megatron's.
    """

    labels: Tensor | None
    rows: Tensor | None
    temperature: float
    chunk: int
    vocab_size: int

    @classmethod
    def adopt(cls, layer: Any, vocab_size: int, chunk: int) -> None:
        """Turn a Megatron output layer into this one. vocab_size: real words, padding rows aside."""
        layer.__class__ = cls
        layer.labels = layer.rows = None
        layer.temperature, layer.chunk, layer.vocab_size = 1.0, chunk, vocab_size

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        """input_ [s, b, hidden] (its sequence cut over TP under sequence parallel); labels [b, s].

        rows, indices into the s * b positions, are those that matter (the responses); all others yield 0 and cost no
        logits. The same on all ranks of the tensor-parallel group.
        """
        if self.labels is None:
            return super().forward(input_, weight=weight, runtime_gather_output=runtime_gather_output)
        weight = self.weight if weight is None else weight
        group = self.tp_group
        if self.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                input_, tensor_parallel_output_grad=True, group=group
            )
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(input_, group=group)
        s, b, width = hidden.shape
        flat, labels = hidden.reshape(s * b, width), self.labels.transpose(0, 1).reshape(-1)
        if self.rows is not None:
            flat, labels = flat[self.rows], labels[self.rows]
        logprob, entropy = _LogProbs.apply(
            flat,
            weight,
            labels,
            (group.rank() * weight.shape[0], self.vocab_size),
            self.temperature,
            group,
            self.chunk,
        )
        found = torch.stack((logprob, entropy), -1)
        if self.rows is not None:
            found = found.new_zeros(s * b, 2).index_copy(0, self.rows, found)
        return found.view(s, b, 2), None


class ValueHead(torch.nn.Module):
    """n numbers for each position, in fp32: its value (n = 1), or logits of a histogram over values.

    weight [n, hidden] and bias [n] are whole on every last-stage rank.
    """

    def __init__(self, config: Any, outputs: int, tp_group: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(outputs, config.hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(outputs, dtype=config.params_dtype))
        self.tp_group, self.sequence_cut = tp_group, config.sequence_parallel
        # Under sequence parallel each TP rank sees part of the tokens: Megatron sums gradients of marked parameters.
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        """input_ [s, b, hidden] -> [s, b, n]."""
        value = torch.nn.functional.linear(input_.float(), self.weight.float(), self.bias.float())
        if self.sequence_cut:
            value = tensor_parallel.gather_from_sequence_parallel_region(
                value, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return value, None
