"""The task of the ablation: choose an operation at every step, and see only at the step's end
whether it was right.

A problem "17 n9 m3" names a state x0, a number of steps n and a number m. A step writes its
operation, counts m down to 0, says how many steps are left, and then the state that follows; the
response ends with the state that it came to:

    A17 k3 k2 k1 k0 n8 4 C4 k3 k2 k1 k0 n7 31 ... n0 22 #### 22

In every state one of A, B and C is right, told nowhere. A right one leads to the state that follows
(one cycle through all). After a wrong one the step ends in a state "b" drawn at random, and b stays
b: where the response ought to be is lost, and so is its answer. So a decision shows m + 3 tokens
    later; the longer the response, the later, as m differs
between problems. In "hard" states the cold start is wrong more often than right, and "####" with
the state of that moment may come at any token. (With the state's last digit for an answer, models
learnt digits of training problems by heart.)
"""

import json
import random
from pathlib import Path
from typing import Annotated, Any

import typer

from examples.ablation.ablation_config import SETTINGS_FILE, Task, task_settings
from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.data.jsonl import write_rows
from vapo_megatron.errors import told_in_one_line
from vapo_megatron.files import atomic_write
from vapo_megatron.weights.tiny import save_tiny_model, word_tokenizer

# The prompt is <bos>, state, count and m; the solution follows at once, without roles.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ ' ' + message['content'] }}{% endfor %}"
)
OPERATIONS = ("A", "B", "C")
LOST = "X"  # the operation of states b
PROMPT_TOKENS = 4
SPARE_TOKENS = 2  # that an engine keeps free

Problem = tuple[int, int, int]  # state, steps, m


def longest_sequence(task: Task) -> int:
    """Tokens of the longest prompt with its solution: each step m + 4, the answer two, the end
    token."""
    return PROMPT_TOKENS + task.most_steps * (max(task.repeats) + 4) + 3


class Problems:
    """The cycle, the right operations of a seed, and its problems cut into training and
    evaluation."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.rng = task, random.Random(seed)
        order = list(range(task.states))
        self.rng.shuffle(order)
        self.successor = dict(zip(order, [*order[1:], order[0]], strict=True))
        self.right = [self.rng.choice(OPERATIONS) for _ in order]
        self.tempting = [
            self.rng.choice([o for o in OPERATIONS if o != right]) for right in self.right
        ]
        self.hard = set(self.rng.sample(order, task.hard_states))
        # No evaluation problem differs from a training problem in m alone: starts and lengths are
        # cut, not problems.
        pairs = [
            (state, steps)
            for state in order
            for steps in range(task.fewest_steps, task.most_steps + 1)
        ]
        self.rng.shuffle(pairs)
        cut = max(1, round(len(pairs) * task.evaluation_share))
        self.evaluation = sorted((*pair, m) for pair in pairs[:cut] for m in task.repeats)
        self.training = sorted((*pair, m) for pair in pairs[cut:] for m in task.repeats)

    def answer(self, problem: Problem) -> str:
        """The state that solves a problem."""
        state, steps, _ = problem
        for _ in range(steps):
            state = self.successor[state]
        return str(state)

    def row(self, problem: Problem) -> dict[str, Any]:
        """A problem as data.train and data.eval want it."""
        state, steps, m = problem
        return {
            "id": f"s{state}-n{steps}-m{m}",
            "problem": f"{state} n{steps} m{m}",
            "answer": self.answer(problem),
        }

    def operation(self, state: int) -> str:
        """What an unskilled solver does in a state."""
        right, chance = self.right[state], self.rng.random()
        if state in self.hard:
            return right if chance < self.task.hard_right else self.tempting[state]
        return (
            right
            if chance >= self.task.slip_share
            else self.rng.choice([o for o in OPERATIONS if o != right])
        )

    def chain(self, problem: Problem, best: bool = False) -> list[str]:
        """The words of a chain with its answer; best: with the right operation everywhere."""
        state, steps, m = problem
        lost, words = False, []
        for step in range(steps):
            operation = LOST if lost else self.right[state] if best else self.operation(state)
            words += [
                f"{operation}{state}",
                *(f"k{left}" for left in range(m, -1, -1)),
                f"n{steps - step - 1}",
            ]
            if not lost and operation != self.right[state]:
                lost, state = True, self.rng.randrange(self.task.states)
            else:
                state = self.successor[state]
            words.append(f"{'b' if lost else ''}{state}")
        return [*words, "####", str(state)]

    def solution(self, problem: Problem) -> str:
        """A solution as an unskilled solver writes it: a bare guess, a chain that breaks off
        anywhere, or a chain."""
        kind, words = self.rng.random(), self.chain(problem)
        if kind < self.task.direct_share:
            words = ["####", str(self.rng.randrange(self.task.states))]
        elif kind < self.task.direct_share + self.task.break_share:
            kept = words[: self.rng.randrange(1, len(words) - 2)]
            states = [word.removeprefix("b") for word in kept if word.removeprefix("b").isdigit()]
            words = [*kept, "####", states[-1] if states else str(problem[0])]
        return " ".join(words)


def make_task(task: Task, seed: int, out: Path) -> None:
    """Write train.jsonl, eval.jsonl, sft.jsonl and model/ into out, and task.json when all of it is
    there."""
    problems = Problems(task, seed)
    write_rows(out / "train.jsonl", map(problems.row, problems.training))
    write_rows(out / "eval.jsonl", map(problems.row, problems.evaluation))
    chosen = [problems.rng.choice(problems.training) for _ in range(task.cold_start_rows)]
    rows = (
        {"problem": problems.row(p)["problem"], "response": problems.solution(p)} for p in chosen
    )
    write_rows(out / "sft.jsonl", rows)
    letters = ("", "b", *OPERATIONS, LOST)
    words = [
        *(f"{letter}{state}" for letter in letters for state in range(task.states)),
        *(f"n{count}" for count in range(task.most_steps + 1)),
        *(f"k{count}" for count in range(max(task.repeats) + 1)),
        *(f"m{m}" for m in task.repeats),
        "####",
    ]
    longest = (
        longest_sequence(task) + SPARE_TOKENS
    )  # the reward model reads one token behind the end
    tokenizer = word_tokenizer(words, longest, CHAT_TEMPLATE)
    narrow = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16}
    shape = TinyModel(vocab_size=len(tokenizer), max_positions=longest, seed=seed, **narrow)
    save_tiny_model(shape, tokenizer, out / "model")
    with atomic_write(out / SETTINGS_FILE) as file:
        json.dump(task_settings(task, seed), file)


def main(
    out: Annotated[Path, typer.Option(help="folder to write the task and the model into")],
    seed: Annotated[
        int, typer.Option(help="of cycle, operations, split, solutions and weights")
    ] = 1,
    task: Annotated[str, typer.Option(help="the settings as JSON")] = "{}",
) -> None:
    """Make the ablation's task and its tiny untrained model."""
    with told_in_one_line("error"):
        make_task(Task.model_validate_json(task), seed, out)


if __name__ == "__main__":
    typer.run(main)
