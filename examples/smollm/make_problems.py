"""Small sums, differences and products, as expressions and in words.

Problems that are evaluated have templates and pairs of numbers that training never sees.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

# By operation: {a} and {b} are the numbers, in this order.
TRAIN_TEMPLATES = {
    "sum": (
        "What is {a} + {b}?",
        "Compute {a} + {b}.",
        "Add {a} and {b}. What do you get?",
        "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
        "A box holds {a} {things} and a bag holds {b}. How many {things} are there together?",
    ),
    "difference": (
        "What is {a} - {b}?",
        "Compute {a} - {b}.",
        "Subtract {b} from {a}. What do you get?",
        "{name} has {a} {things} and gives {b} away. How many {things} are left?",
        "There were {a} {things} in a shop and {b} were sold. How many {things} remain?",
    ),
    "product": (
        "What is {a} * {b}?",
        "Compute {a} * {b}.",
        "Multiply {a} by {b}. What do you get?",
        "{name} buys {a} boxes with {b} {things} each. How many {things} is that?",
        "There are {a} rows of {b} {things}. How many {things} are there?",
    ),
}
HELD_OUT_TEMPLATES = {
    "sum": (
        "Calculate {a} + {b}.",
        "What is the sum of {a} and {b}?",
        "{name} found {a} {things} in the morning and {b} in the evening. "
        "How many {things} did {name} find?",
    ),
    "difference": (
        "Calculate {a} - {b}.",
        "What is the difference between {a} and {b}?",
        "Of {a} {things}, {name} lost {b}. How many {things} does {name} still have?",
    ),
    "product": (
        "Calculate {a} * {b}.",
        "What is the product of {a} and {b}?",
        "{a} friends bring {b} {things} each. How many {things} do they bring?",
    ),
}
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Lucas", "Mia", "Noah")
THINGS = ("apples", "books", "coins", "eggs", "flowers", "marbles", "pencils", "shells")
# A sixth of the pairs of numbers is held out.
HELD_OUT_SHARE = 6


@dataclass(frozen=True)
class Pair:
    """Two numbers and what is done with them."""

    operation: str
    a: int
    b: int

    @property
    def answer(self) -> int:
        """The result."""
        if self.operation == "sum":
            return self.a + self.b
        if self.operation == "difference":
            return self.a - self.b
        return self.a * self.b


def number_pairs(draw: random.Random) -> tuple[list[Pair], list[Pair]]:
    """Pairs for training and held-out pairs, each in random order, with no pair in both."""
    training: list[Pair] = []
    held_out: list[Pair] = []
    for operation in TRAIN_TEMPLATES:
        largest = 9 if operation == "product" else 40
        numbers = range(2, largest + 1)
        pairs = [Pair(operation, a, b) for a in numbers for b in numbers]
        if operation == "difference":
            pairs = [pair for pair in pairs if pair.a > pair.b]
        draw.shuffle(pairs)
        count = len(pairs) // HELD_OUT_SHARE
        held_out += pairs[:count]
        training += pairs[count:]
    draw.shuffle(training)
    draw.shuffle(held_out)
    return training, held_out


def rows(
    pairs: Sequence[Pair],
    templates: Mapping[str, Sequence[str]],
    count: int,
    draw: random.Random,
) -> list[dict[str, str]]:
    """So many different problems, with as many of each operation."""
    by_operation = {
        operation: [pair for pair in pairs if pair.operation == operation]
        for operation in templates
    }
    problems: dict[str, dict[str, str]] = {}
    while len(problems) < count:
        operation = list(templates)[len(problems) % len(templates)]
        pair = draw.choice(by_operation[operation])
        template = draw.choice(templates[operation])
        problem = template.format(
            a=pair.a, b=pair.b, name=draw.choice(NAMES), things=draw.choice(THINGS)
        )
        problems.setdefault(
            problem,
            {
                "problem": problem,
                "answer": str(pair.answer),
                "operation": operation,
                "template": template,
            },
        )
    return list(problems.values())


def main(
    out: Annotated[Path, typer.Option(help="folder for train.jsonl and held_out.jsonl")],
    seed: Annotated[int, typer.Option(help="of the numbers and the split")] = 1,
    training: Annotated[int, typer.Option(help="training problems")] = 1200,
    held_out: Annotated[int, typer.Option(help="held-out problems")] = 192,
) -> None:
    """Write problems to train on and problems of other templates and numbers to evaluate."""
    draw = random.Random(seed)
    pairs_of_training, pairs_held_out = number_pairs(draw)
    files = {
        "train.jsonl": rows(pairs_of_training, TRAIN_TEMPLATES, training, draw),
        "held_out.jsonl": rows(pairs_held_out, HELD_OUT_TEMPLATES, held_out, draw),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, problems in files.items():
        text = "".join(json.dumps(problem) + "\n" for problem in problems)
        (out / name).write_text(text, encoding="utf-8")
        typer.echo(f"{out / name}: {len(problems)} problems")


if __name__ == "__main__":
    typer.run(main)
