"""The task of the ablation: follow a fixed permutation of states for k steps and say where you are, modulo `answers`.

It is the quickstart's task with fewer answers. A bare guess is right once in `answers` times and takes 3 tokens, a
chain takes 2 k + 3 and is right as often as none of its k steps slips: whether a policy learns to reason or to give up
depends on what its critic makes of the first token.
"""

import json
import random
from pathlib import Path
from typing import Annotated, Any

import typer
from ablation_config import SETTINGS_FILE, Task, task_settings

from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.errors import told_in_one_line
from vapo_megatron.experience.jsonl import write_rows
from vapo_megatron.weights.tiny import TinyModel, save_tiny_model, word_tokenizer

# The prompt is <bos>, the state and the count; the solution follows at once, without roles.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ ' ' + message['content'] }}{% endfor %}"
LONGEST_SEQUENCE = 128

Pair = tuple[int, int]


class Problems:
    """The permutation of a seed, and the pairs (x0, k) cut into training and evaluation."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.rng = task, random.Random(seed)
        order = list(range(task.states))
        self.rng.shuffle(order)
        self.successor = dict(zip(order, order[1:] + order[:1], strict=True))
        counts = range(task.fewest_steps, task.most_steps + 1)
        pairs = [(state, steps) for state in range(task.states) for steps in counts]
        self.rng.shuffle(pairs)
        self.evaluation = sorted(pairs[: task.evaluation_problems])
        self.training = sorted(pairs[task.evaluation_problems :])

    def answer(self, pair: Pair) -> int:
        """What solves (x0, k)."""
        state, steps = pair
        for _ in range(steps):
            state = self.successor[state]
        return state % self.task.answers

    def row(self, pair: Pair) -> dict[str, Any]:
        """A problem as data.train and data.eval want it."""
        state, steps = pair
        return {"id": f"s{state}-c{steps}", "problem": f"s{state} c{steps}", "answer": str(self.answer(pair))}

    def solution(self, pair: Pair) -> str:
        """A solution as an unskilled solver writes it: some are bare guesses, and any step may slip."""
        task = self.task
        if self.rng.random() < task.direct_share:
            return f"#### {self.rng.randrange(task.answers)}"
        state, steps = pair
        words = []
        for count in range(steps - 1, -1, -1):
            slips = self.rng.random() < task.slip_share
            state = self.rng.randrange(task.states) if slips else self.successor[state]
            words.append(f"s{state} c{count}")
        return " ".join([*words, f"#### {state % task.answers}"])


def make_task(task: Task, seed: int, out: Path) -> None:
    """Write train.jsonl, eval.jsonl, sft.jsonl and model/ into out, and task.json when all of it is there."""
    problems = Problems(task, seed)
    write_rows(out / "train.jsonl", map(problems.row, problems.training))
    write_rows(out / "eval.jsonl", map(problems.row, problems.evaluation))
    chosen = [problems.rng.choice(problems.training) for _ in range(task.cold_start_rows)]
    write_rows(out / "sft.jsonl", ({"problem": f"s{p[0]} c{p[1]}", "response": problems.solution(p)} for p in chosen))
    words = [
        *(f"s{state}" for state in range(task.states)),
        *(f"c{count}" for count in range(task.most_steps + 1)),
        *(str(digit) for digit in range(task.answers)),
        "####",
    ]
    tokenizer = word_tokenizer(words, LONGEST_SEQUENCE, CHAT_TEMPLATE)
    shape = TinyModel(vocab_size=len(tokenizer), max_positions=LONGEST_SEQUENCE, seed=seed)
    save_tiny_model(shape, tokenizer, out / "model")
    with atomic_write(out / SETTINGS_FILE) as file:
        json.dump(task_settings(task, seed), file)


def main(
    out: Annotated[Path, typer.Option(help="folder to write the task and the model into")],
    seed: Annotated[int, typer.Option(help="of permutation, split, solutions and weights")] = 1,
    task: Annotated[str, typer.Option(help="the settings as JSON")] = "{}",
) -> None:
    """Make the ablation's task and its tiny untrained model."""
    with told_in_one_line("error"):
        make_task(Task.model_validate_json(task), seed, out)


if __name__ == "__main__":
    typer.run(main)
