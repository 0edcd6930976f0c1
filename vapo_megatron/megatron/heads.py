"""The two heads: one yields log-probs and entropies, the other values."""

from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from vapo_megatron.config.model import LogProbKernel
from vapo_megatron.megatron.logprobs import LogProbs


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
    kernel: LogProbKernel
    vocab_size: int
    gives_states: bool
    tapped: Tensor | None

    @classmethod
    def adopt(
        cls,
        layer: Any,
        vocab_size: int,
        chunk: int,
        factor: float = 1.0,
        kernel: LogProbKernel = "torch",
    ) -> None:
        """Turn a Megatron output layer into this one.

        Args:
            vocab_size: real words, padding rows aside.
            chunk: rows of logits held at once.
            factor: of logits.
            kernel: see ModelConfig.logprob_kernel.
        """
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
        layer.kernel = kernel
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
            self.kernel,
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
