"""The quickstart task: follow a fixed permutation of 64 states for k steps and say the last digit
of where you are.

A problem "s17 c12" names a state x0 and a count k from 10 to 24. A solution writes one state and
one counter a step ("s40 c11 s3 c10 ... s22 c0") and ends with "#### 2", the state modulo 10. The
permutation is one cycle through all 64 states, told to the model nowhere: it has to be learnt from
the cold-start data and applied k times without a slip. A direct answer is right about one time in
ten.
"""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.data.jsonl import write_rows
from vapo_megatron.errors import told_in_one_line
from vapo_megatron.weights.tiny import save_tiny_model, word_tokenizer

STATES = 64
FEWEST_STEPS = 10
MOST_STEPS = 24
EVAL_PROBLEMS_A_DIGIT = 16
DIRECT_SHARE = 0.22
SLIP_SHARE = 0.035
LONGEST_SEQUENCE = 128  # 3 prompt tokens, 2 a step, 2 for the answer, the end token: 54 at most

# The prompt is <bos>, the state and the count; the solution follows at once, without roles.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ ' ' + message['content'] }}{% endfor %}"
)
WORDS = [
    *(f"s{state}" for state in range(STATES)),
    *(f"c{count}" for count in range(MOST_STEPS + 1)),
    *(str(digit) for digit in range(10)),
    "####",
]

Pair = tuple[int, int]


def single_cycle(rng: random.Random) -> list[int]:
    """A permutation f of the states, as f[state], that is one cycle through all of them."""
    order = list(range(STATES))
    rng.shuffle(order)
    successor = [0] * STATES
    for here, there in zip(order, order[1:] + order[:1], strict=True):
        successor[here] = there
    return successor


def answer(successor: list[int], pair: Pair) -> int:
    """The digit that solves the pair (x0, k): the state after k steps, modulo 10."""
    state, steps = pair
    for _ in range(steps):
        state = successor[state]
    return state % 10


def split(successor: list[int], rng: random.Random) -> tuple[list[Pair], list[Pair]]:
    """All pairs, cut into training pairs and held-out pairs of which each digit answers equally
    many."""
    pairs = [
        (state, steps) for state in range(STATES) for steps in range(FEWEST_STEPS, MOST_STEPS + 1)
    ]
    rng.shuffle(pairs)
    by_digit: dict[int, list[Pair]] = {digit: [] for digit in range(10)}
    for pair in pairs:
        by_digit[answer(successor, pair)].append(pair)
    held_out = {pair for alike in by_digit.values() for pair in alike[:EVAL_PROBLEMS_A_DIGIT]}
    return sorted(pair for pair in pairs if pair not in held_out), sorted(held_out)


def cold_start_response(
    successor: list[int],
    pair: Pair,
    rng: random.Random,
    guesses: float = DIRECT_SHARE,
    slips: float = SLIP_SHARE,
) -> str:
    """A solution as an unskilled solver writes it: some are bare guesses, and any step may slip to
    a wrong state."""
    if rng.random() < guesses:
        return f"#### {rng.randrange(10)}"
    state, steps = pair
    words = []
    for count in range(steps - 1, -1, -1):
        state = successor[state] if rng.random() >= slips else rng.randrange(STATES)
        words.append(f"s{state} c{count}")
    return " ".join([*words, f"#### {state % 10}"])


def _problem(pair: Pair, successor: list[int]) -> dict[str, Any]:
    state, steps = pair
    return {
        "id": f"s{state}-c{steps}",
        "problem": f"s{state} c{steps}",
        "answer": str(answer(successor, pair)),
    }


def _cold_start_rows(
    pairs: list[Pair], successor: list[int], rows: int, rng: random.Random
) -> Iterator[dict[str, Any]]:
    for index in range(rows):
        pair = rng.choice(pairs)
        response = cold_start_response(successor, pair, rng)
        yield {"id": f"sft-{index:05d}", "problem": f"s{pair[0]} c{pair[1]}", "response": response}


def make_task(out: Path, seed: int, sft_rows: int, family: str = "qwen3") -> str:
    """Write train.jsonl, eval.jsonl, sft.jsonl and model/ into out; return a two-line summary."""
    rng = random.Random(seed)
    successor = single_cycle(rng)
    training, held_out = split(successor, rng)

    write_rows(out / "train.jsonl", (_problem(pair, successor) for pair in training))
    write_rows(out / "eval.jsonl", (_problem(pair, successor) for pair in held_out))
    write_rows(out / "sft.jsonl", _cold_start_rows(training, successor, sft_rows, rng))
    tokenizer = word_tokenizer(WORDS, LONGEST_SEQUENCE, CHAT_TEMPLATE)
    shape = TinyModel(
        family=family,
        vocab_size=len(tokenizer),
        max_positions=LONGEST_SEQUENCE,
        tied=family == "qwen3",  # engines know no tied form of some others
        seed=seed,
    )
    parameters = save_tiny_model(shape, tokenizer, out / "model")

    guess, hits = Counter(answer(successor, pair) for pair in held_out).most_common(1)[0]
    return (
        f"{out}: {len(training)} training and {len(held_out)} evaluation problems, {sft_rows} "
        f"cold-start solutions; answering {guess} always is right {hits / len(held_out):.1%} of "
        f"the time\n{out / 'model'}: {family}, {parameters:,} parameters, {len(tokenizer)} tokens, "
        f"random weights (seed {seed})"
    )


def main(
    out: Annotated[Path, typer.Option(help="Directory to write the task and the model into.")],
    seed: Annotated[
        int, typer.Option(help="Seed of permutation, split, cold-start data and weights.")
    ] = 0,
    sft_rows: Annotated[int, typer.Option(min=1, help="Cold-start solutions to write.")] = 25_600,
    family: Annotated[str, typer.Option(help="A model type of docs/weights.md.")] = "qwen3",
) -> None:
    """Make the quickstart task and its tiny untrained model."""
    with told_in_one_line("error"):
        typer.echo(make_task(out, seed, sft_rows, family))


if __name__ == "__main__":
    typer.run(main)
