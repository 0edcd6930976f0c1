"""How much of a model's bfloat16 weights an update changes, and what sending only that takes.

    python -m benchmarks.changed_weights MODEL [--rates 1e-6 1e-5] [--updates 1 4 16]
                                       [--json FILE]

MODEL is a directory with a pretrained model: how many of its weights round to what they were
depends on their size. Float32 weights are trained by AdamW, (0.9, 0.95), on the log-probs of text
with random advantages, after ten updates of warm-up whose weights are thrown away, and rounded to
bfloat16 before and after. Columns:

    changed     share of the bfloat16 weights that an update, or several, changed
    sent        bytes of the changes over those of the weights
    find, apply seconds for the whole model: changed_words() in the trainer, apply_changes() in the
                engine, beside a copy of the same bytes
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import in_turns, parser, publish
from vapo_megatron.weights.changes import apply_changes, changed_words

_WARM_UP = 10
_BETAS = (0.9, 0.95)
_TEXTS = 8
_PROBLEM = "Question: what is {a} * {b} + {c}? Answer: {a} * {b} = {d}, and {d} + {c} = {e}."


def rounded(model: torch.nn.Module) -> Tensor:
    """All weights in bfloat16, one after another: uint8 [bytes]."""
    flat = torch.cat([p.detach().flatten().bfloat16() for p in model.parameters()])
    return flat[: len(flat) // 8 * 8].view(torch.uint8)


def texts(seed: int) -> list[str]:
    """Small problems with their solutions."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(2, 60, (_TEXTS, 3), generator=generator).tolist()
    return [_PROBLEM.format(a=a, b=b, c=c, d=a * b, e=a * b + c) for a, b, c in numbers]


def main() -> None:
    """Measure each learning rate."""
    arguments = parser(__doc__)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5])
    arguments.add_argument("--updates", type=int, nargs="+", default=[1, 4, 16])
    arguments.add_argument("--repeats", type=int, default=3)
    args = arguments.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = []
    for rate in args.rates:
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=_BETAS, weight_decay=0.1)

        def update(step: int, model=model, optimizer=optimizer) -> None:  # type: ignore[no-untyped-def]
            batch = tokenizer(texts(step), return_tensors="pt", padding=True)
            logits = model(**batch).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
            advantages = torch.randn(_TEXTS, generator=torch.Generator().manual_seed(step))
            is_text = batch.attention_mask[:, 1:]
            loss = -(logprobs * advantages[:, None] * is_text).sum() / is_text.sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        for step in range(_WARM_UP):
            update(step)
        before = rounded(model)
        for step in range(max(args.updates)):
            update(_WARM_UP + step)
            if step + 1 in args.updates:
                rows.append(row(rate, step + 1, before, rounded(model), args.repeats))
                print(rows[-1], flush=True)
    publish("How much of the weights does an update change?", rows, args.json)


def row(
    rate: float, updates: int, before: Tensor, after: Tensor, repeats: int
) -> dict[str, object]:
    """The table's row."""
    is_other = before.view(torch.int16) != after.view(torch.int16)
    changes = changed_words(before, after)
    found: dict[str, object] = {
        "learning rate": rate,
        "updates": updates,
        "changed": float(is_other.float().mean()),
        "sent": 1.0 if changes is None else changes.numel() / after.numel(),
    }
    if changes is None:
        return found | {"find s": "", "apply s": "", "copy s": ""}
    target = before.clone()
    find, apply, copy = in_turns(
        [
            lambda: changed_words(before, after),
            lambda: apply_changes(target, changes),
            lambda: target.copy_(before),
        ],
        repeats,
    )
    apply_changes(target, changes)
    assert torch.equal(target, after)
    return found | {"find s": min(find), "apply s": min(apply), "copy s": min(copy)}


if __name__ == "__main__":
    main()
