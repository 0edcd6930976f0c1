"""One update of sequences of unequal length against transformers with padding-free batches, and on
a GPU with Liger's kernels.

    python -m benchmarks.update_beside_transformers [--shape 1.5b] [--total 131072] [--json FILE]

Both sides get the same sequences, whose lengths are log-normal, and put them one behind the other
into micro-batches of at most --tokens tokens, without padding. Both compute the mean negative
log-likelihood of every token, gradients of all micro-batches together, and one update with AdamW,
gradients clipped.

"forward+backward" is without the update. transformers takes packed sequences by their position ids:
FlashAttention where it is installed, else flex_attention on a GPU and scaled_dot_product_attention
with a mask on a CPU. Where liger_kernel is installed and a GPU is there its norms, rotary
embeddings, MLP and its loss without logits are used. transformers' weights, gradients and optimizer
states have --dtype; ours keeps gradients, main weights and moments in float32, and computes every
token's entropy with its log-prob. Both sides take turns, round by round; medians.
"""

import argparse
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import (
    SHAPES,
    gradient_step,
    heavy_tailed_lengths,
    in_turns,
    one_rank,
    parser,
    publish,
    random_model,
    ratio_figure,
    sft_loss,
    transformers,
)
from vapo_megatron.config.model import ActorConfig
from vapo_megatron.engines.weight_sync.logprob_difference import probe_batch
from vapo_megatron.megatron.platform import current_platform

Step = Callable[[], object]
_IGNORED = -100


def sequences_of(given: argparse.Namespace) -> list[list[int]]:
    """Random tokens, about --total of them together; no sequence is longer than a micro-batch."""
    longest = min(given.longest, given.tokens)
    lengths = heavy_tailed_lengths(given.total // given.mean, given.mean, longest)
    generator = torch.Generator().manual_seed(0)
    vocab = SHAPES[given.shape].vocab
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def packed(sequences: Sequence[list[int]], tokens: int) -> list[dict[str, Tensor]]:
    """Micro-batches of at most `tokens` tokens as transformers takes them: int64 [1, n] each.

    A sequence begins where its position is 0; no token is predicted from the sequence before it.
    """
    rows: list[list[list[int]]] = []
    rooms: list[int] = []
    # The longest first, each into the first micro-batch that has room for it.
    for sequence in sorted(sequences, key=len, reverse=True):
        place = next((i for i, room in enumerate(rooms) if room >= len(sequence)), None)
        if place is None:
            place = len(rows)
            rows.append([])
            rooms.append(tokens)
        rows[place].append(sequence)
        rooms[place] -= len(sequence)
    device = current_platform().device
    batches = []
    for row in rows:
        labels = [token for sequence in row for token in (_IGNORED, *sequence[1:])]
        positions = [place for sequence in row for place in range(len(sequence))]
        columns = {
            "input_ids": [token for sequence in row for token in sequence],
            "labels": labels,
            "position_ids": positions,
        }
        batches.append({name: torch.tensor([ids], device=device) for name, ids in columns.items()})
    return batches


def attention_of_peer() -> str:
    """What transformers computes packed attention with here."""
    if not current_platform().is_cuda:
        return "sdpa"
    if find_spec("flash_attn_interface"):
        return "flash_attention_3"
    if find_spec("flash_attn"):
        return "flash_attention_2"
    return "flex_attention"


def peer(given: argparse.Namespace, sequences: Sequence[list[int]]) -> tuple[str, Step, Step]:
    """transformers: its name with what it uses, its forward and backward, and its whole update."""
    name = f"transformers, {attention_of_peer()}"
    if current_platform().is_cuda and find_spec("liger_kernel"):
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        apply_liger_kernel_to_qwen2()
        name += ", Liger"
    model: Any = transformers.AutoModelForCausalLM.from_config(
        SHAPES[given.shape].hf_config(),
        dtype=getattr(torch, given.dtype),
        attn_implementation=attention_of_peer(),
    ).to(current_platform().device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    batches = packed(sequences, given.tokens)
    predicted = sum(len(sequence) - 1 for sequence in sequences)

    def forward_backward() -> float:
        optimizer.zero_grad()
        losses = []
        for batch in batches:
            loss = model(**batch, use_cache=False, num_items_in_batch=predicted).loss
            loss.backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).sum())

    def whole() -> None:
        forward_backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return name, forward_backward, whole


def ours(given: argparse.Namespace, sequences: Sequence[list[int]]) -> tuple[Step, Step]:
    """The same of a Trainable at TP=1."""
    config = ActorConfig(max_tokens_per_microbatch=given.tokens)
    model = random_model(SHAPES[given.shape], config, given.dtype)
    batch = probe_batch(sequences)
    loss = sft_loss(batch)
    return gradient_step(model, batch), lambda: model.train_step(batch, range(batch.samples), loss)


def main() -> None:
    """A row for each part of the update."""
    arguments = parser(__doc__)
    arguments.add_argument("--shape", choices=SHAPES, default="10m")
    arguments.add_argument("--total", type=int, default=8192, help="tokens of the update")
    arguments.add_argument("--mean", type=int, default=256, help="tokens of a sequence")
    arguments.add_argument("--longest", type=int, default=2048, help="tokens of a sequence")
    arguments.add_argument("--tokens", type=int, default=2048, help="of a micro-batch at most")
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments.add_argument("--repeats", type=int, default=3)
    given = arguments.parse_args()
    sequences = sequences_of(given)
    total = sum(map(len, sequences))
    with one_rank():
        name, *theirs = peer(given, sequences)
        rows, figures = [], []
        parts = ("forward+backward", "update")
        for part, mine, other in zip(parts, ours(given, sequences), theirs, strict=True):
            seconds = in_turns((mine, other), given.repeats)
            for side, took in zip(("ours", name), seconds, strict=True):
                middle = float(np.median(took))
                rows.append({"part": part, "of": side, "seconds": middle, "tok/s": total / middle})
            figures.append(ratio_figure(f"{part}, transformers over ours", *seconds[::-1]))
    title = (
        f"{given.shape}, {len(sequences)} sequences of {total} tokens, the longest "
        f"{max(map(len, sequences))}, {given.dtype}"
    )
    publish(title, rows, given.json, figures)


if __name__ == "__main__":
    main()
