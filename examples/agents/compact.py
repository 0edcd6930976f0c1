"""An agent whose context is compacted: it looks facts up as in lookup.py, and writes itself a
summary before its context is full.

A problem "k17 h6" has 4 to 7 hops. After every second call the agent is asked for a summary ("sum")
and continues from that alone: "k4 h4", the key that it has reached and the hops that are left. A
wrong summary leads the rest astray, and nothing shows it before the answer is graded. Each
continued context is a segment of the episode. The demonstrations of the cold start guess, stop
early, ask for wrong keys and summarise wrongly at times.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.agents import lookup
from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.data.jsonl import write_rows
from vapo_megatron.data.sample import Sample
from vapo_megatron.weights.tiny import save_tiny_model, word_tokenizer

KEYS, FEWEST_HOPS, MOST_HOPS = lookup.KEYS, 4, 7
CALLS = 2  # of a segment, before a summary is asked for
SUMMARISE = "sum"
GUESS_SHARE, EARLY_SHARE, SLIP_SHARE, WRONG_SUMMARY_SHARE = 0.15, 0.05, 0.05, 0.15
TRAINING, HELD_OUT, LONGEST = 4096, 128, 128
WORDS = [
    *(f"k{key}" for key in range(KEYS)),
    *(f"h{hops}" for hops in range(MOST_HOPS + 1)),
    *(str(digit) for digit in range(10)),
    "get",
    "####",
    "?",
    SUMMARISE,
]


async def play(task: dict[str, Any], base_url: str, http_client: Any) -> None:
    """Let the policy call the tool until it answers, and summarise after every second call; the
    verifier grades the last message."""

    async def ask() -> dict[str, Any]:
        body = {"messages": messages}
        answer = await http_client.post(f"{base_url}/chat/completions", json=body)
        answer.raise_for_status()
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message

    messages = list(task["messages"])
    calls = 0
    while True:
        message = await ask()
        words = message["content"].split()
        if words[:1] != ["get"]:
            return
        messages += [message, {"role": "tool", "content": lookup.look_up(task["table"], words)}]
        calls += 1
        if calls % CALLS == 0:
            messages.append({"role": "user", "content": SUMMARISE})
            summary = await ask()
            messages = [{"role": "user", "content": summary["content"]}]


def without_summaries(sample: Sample, decode: Callable[[Sequence[int]], str]) -> Tensor:
    """For algorithm.mask_function: false for the tokens of summaries, the turns that end where a
    segment does. bool [response]."""
    kept = torch.ones(len(sample.response_ids), dtype=torch.bool)
    for start, end, _ in sample.turns:
        if end in sample.segment_starts:
            kept[start:end] = False
    return kept


def demonstrations(rng: random.Random, rows: int) -> Iterator[dict[str, str]]:
    """Turns of imperfect episodes, each with its context before it as its problem."""
    made = 0
    while made < rows:
        row = lookup.problem(rng, made, FEWEST_HOPS, MOST_HOPS)
        said = row["problem"]
        key, hops = (int(word[1:]) for word in said.split())
        guesses = rng.random() < GUESS_SHARE
        calls = 0
        while made < rows:
            ends = guesses or hops <= 0 or (calls > 0 and rng.random() < EARLY_SHARE)
            asked = rng.randrange(KEYS) if rng.random() < SLIP_SHARE else key
            digit = rng.randrange(10) if guesses else key % 10
            turn = f"#### {digit}" if ends else f"get k{asked} h{hops}"
            yield {"id": f"turn-{made}", "problem": said, "response": turn}
            made += 1
            if ends:
                break
            key, hops = row["table"][asked], hops - 1
            said += f" {turn} <eos> k{key}"
            calls += 1
            if calls % CALLS == 0 and made < rows:
                if rng.random() < WRONG_SUMMARY_SHARE:
                    key, hops = rng.randrange(KEYS), rng.randrange(MOST_HOPS)
                summary = f"k{key} h{hops}"
                yield {
                    "id": f"turn-{made}",
                    "problem": f"{said} {SUMMARISE}",
                    "response": summary,
                }
                made += 1
                said = summary


def make_task(out: Path, seed: int, turns: int = 38_400) -> None:
    """Write train.jsonl, eval.jsonl, sft.jsonl and model/ into out."""
    rng = random.Random(seed)
    rows = [
        lookup.problem(rng, number, FEWEST_HOPS, MOST_HOPS) for number in range(TRAINING + HELD_OUT)
    ]
    write_rows(out / "train.jsonl", iter(rows[:TRAINING]))
    write_rows(out / "eval.jsonl", iter(rows[TRAINING:]))
    write_rows(out / "sft.jsonl", demonstrations(rng, turns))
    tokenizer = word_tokenizer(WORDS, LONGEST, lookup.CHAT_TEMPLATE)
    shape = TinyModel(vocab_size=len(tokenizer), max_positions=LONGEST, seed=seed)
    save_tiny_model(shape, tokenizer, out / "model")
