"""An agent that has to look facts up: follow a chain of keys through a table that only the tool
has.

A problem "k17 h3" names a key and a number of hops, 2 to 4. "get k17 h3" makes the tool say which
key stands behind k17 in this problem's own random table ("k4"); the agent asks on, counting down,
until it has followed all hops, and then answers with the last key modulo 10 ("#### 7"). No table is
ever told to the policy: an answer without the calls is right one time in ten. The demonstrations of
the cold start guess at once, stop early or ask for a wrong key at times.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.data.jsonl import write_rows
from vapo_megatron.weights.tiny import save_tiny_model, word_tokenizer

KEYS, FEWEST_HOPS, MOST_HOPS = 32, 2, 4
GUESS_SHARE, EARLY_SHARE, SLIP_SHARE = 0.3, 0.1, 0.12
TRAINING, HELD_OUT, LONGEST = 4096, 128, 64

# What the policy wrote ends with its end token; everything else follows without roles.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ ' ' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ ' ' + eos_token }}{% endif %}{% endfor %}"
)
WORDS = [
    *(f"k{key}" for key in range(KEYS)),
    *(f"h{hops}" for hops in range(MOST_HOPS + 1)),
    *(str(digit) for digit in range(10)),
    "get",
    "####",
    "?",
]


class Lookup:
    """The environment: it answers calls, and ends where there is none; the verifier grades the last
    message."""

    def __init__(self) -> None:
        self._table: list[int] = []

    async def reset(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        """The problem; the table stays here."""
        self._table = task["table"]
        return list(task["messages"])

    async def step(
        self, message: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], float | None, bool]:
        """What the tool says to a call; a malformed one is answered with a question mark."""
        words = message["content"].split()
        if words[:1] != ["get"]:
            return [], None, True
        return [{"role": "tool", "content": look_up(self._table, words)}], 0.0, False


def look_up(table: Sequence[int], words: Sequence[str]) -> str:
    """What the tool says to a call; a malformed one is answered with a question mark."""
    is_key = len(words) > 1 and words[1][:1] == "k" and words[1][1:].isdigit()
    return f"k{table[int(words[1][1:])]}" if is_key else "?"


def problem(
    rng: random.Random, number: int, fewest: int = FEWEST_HOPS, most: int = MOST_HOPS
) -> dict[str, Any]:
    """A row of data with a table of its own."""
    table = [rng.randrange(KEYS) for _ in range(KEYS)]
    key, hops = rng.randrange(KEYS), rng.randint(fewest, most)
    place = key
    for _ in range(hops):
        place = table[place]
    return {
        "id": f"chain-{number}",
        "problem": f"k{key} h{hops}",
        "answer": str(place % 10),
        "table": table,
    }


def demonstrations(rng: random.Random, rows: int) -> Iterator[dict[str, str]]:
    """Turns of imperfect episodes, each with the conversation before it as its problem."""
    made = 0
    while made < rows:
        row = problem(rng, made)
        key, hops = (int(word[1:]) for word in row["problem"].split())
        said, guesses = row["problem"], rng.random() < GUESS_SHARE
        while made < rows:
            ends = guesses or hops == 0 or (said != row["problem"] and rng.random() < EARLY_SHARE)
            asked = rng.randrange(KEYS) if rng.random() < SLIP_SHARE else key
            digit = rng.randrange(10) if guesses else key % 10
            turn = f"#### {digit}" if ends else f"get k{asked} h{hops}"
            yield {"id": f"turn-{made}", "problem": said, "response": turn}
            made += 1
            if ends:
                break
            key, hops = row["table"][asked], hops - 1
            said += f" {turn} <eos> k{key}"


def make_task(out: Path, seed: int, turns: int = 25_600) -> None:
    """Write train.jsonl, eval.jsonl, sft.jsonl and model/ into out."""
    rng = random.Random(seed)
    rows = [problem(rng, number) for number in range(TRAINING + HELD_OUT)]
    write_rows(out / "train.jsonl", iter(rows[:TRAINING]))
    write_rows(out / "eval.jsonl", iter(rows[TRAINING:]))
    write_rows(out / "sft.jsonl", demonstrations(rng, turns))
    tokenizer = word_tokenizer(WORDS, LONGEST, CHAT_TEMPLATE)
    shape = TinyModel(vocab_size=len(tokenizer), max_positions=LONGEST, seed=seed)
    save_tiny_model(shape, tokenizer, out / "model")
