"""What it costs rank 0 to make a prompt of a turn, and whether short conversations that stand in
for long ones decide as whole ones do.

    python -m benchmarks.agents_rendering [--templates FOLDER] [--tokenizer DIR]
    [--conversations 100] [--turns 50] [--json FILE]

A row for each chat template: our own (benchmarks/chat_templates.py), or the *.jinja files of a
folder. Of the requests of random conversations, `same` have the same tokens either way; for `whole`
the template wrote the whole history, and for `needed` of these it had to, as it rewrites what is
recorded. The times are CPU ms of one request with a history of so many turns of about 600 tokens,
`before` with every history rendered whole; `episode` is the sum over its turns, and `growth` the
exponent of that sum in their number (1 is linear, 2 quadratic).
"""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.chat_templates import CHAT_TEMPLATES
from benchmarks.common import growth, parser, publish
from vapo_megatron.agents import rendering
from vapo_megatron.agents.openai_format import Read, read_request
from vapo_megatron.agents.recording import (
    Message,
    Recording,
    as_templates_read,
    comparable,
)
from vapo_megatron.config.data import PromptTemplate
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.weights.tiny import tokenizer_from

_SPECIAL = ("<|im_end|>", "<|im_start|>")
TOOLS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds pages.",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    }
]
_WORDS = ("why", "because", "then", "so", "the", "text", "of", "content", "is", "a", "tool", "3")


class WholeRenderer(rendering.Renderer):
    """Renders every history whole."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        super().__init__(tokenizer)
        self._outlines = None


def with_template(folder: Path, template: str, tokenizer: Any) -> TextTokenizer:
    """A tokenizer with this chat template."""
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return TextTokenizer(folder, PromptTemplate(chat_template=True))


def byte_tokenizer() -> Any:
    """Of bytes, so that every text is read as it is."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=_SPECIAL[0],
        bos_token=_SPECIAL[1],
        clean_up_tokenization_spaces=False,
    )


class Conversation:
    """A recording, and what the endpoint does to it at a request."""

    def __init__(self, renderer: rendering.Renderer, tokenizer: TextTokenizer) -> None:
        self.recording = Recording()
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._before: list[Read] = []
        self._prepared: rendering.Prepared | None = None

    def ask(self, body: dict[str, Any]) -> list[int]:
        """The tokens of a request. Empty: it cannot be rendered."""
        self._prepared = None
        request, tools = read_request(body, self._before)
        self._before = request
        compared = [read.compared for read in request]
        segment = self.recording.segment_of(compared, tools or [])
        messages = [read.message for read in request]
        try:
            prepared = self._renderer.prepare(self.recording, segment, messages, tools or [])
        except ValueError:
            return []
        assert prepared is not None, "it may take long"
        self._prepared = prepared
        segment = prepared.segment
        return [*segment.prompt_ids, *segment.token_ids, *prepared.observed]

    def answer(self, answer: Message) -> None:
        """Record the answer to the last request."""
        prepared = self._prepared
        if prepared is None:
            return
        ids = self._tokenizer.encode_response(answer["content"])
        response = np.array([*ids, self._tokenizer.eos_id], np.int32)
        logprobs = np.zeros(len(response), np.float32)
        turn = Sample(Prompt("0", "", "", ()), 0, 0, 0, response, logprobs, "stop", 0, 0)
        segment = prepared.segment
        if not segment.turns:
            self.recording.segments.append(segment)
        segment.observe(prepared.observed)
        compared = [read.compared for read in self._before]
        compared += comparable([as_templates_read(answer)])
        segment.write(turn, self.recording.turns, compared)
        prepared.remember()


def random_requests(seed: int, turns: int) -> Iterator[tuple[dict[str, Any], Message]]:
    """Requests of an agent with their answers: calls and results, further questions, histories that
    it rewrites, conversations of a sub-agent, marks where they are not expected."""
    chance = random.Random(seed)
    tools = chance.choice([TOOLS, TOOLS, None])
    messages: list[Message] = [{"role": "user", "content": _text(chance)}]
    if chance.random() < 0.5:
        messages.insert(0, {"role": "system", "content": _text(chance)})
    others = [list(messages)]
    wild = chance.choice([0.0, 0.03, 0.2])
    for turn in range(turns):
        answer = _answer(chance, turn, tools, wild)
        yield json.loads(json.dumps({"messages": messages, "tools": tools})), answer
        messages = [*messages, dict(answer)]
        if chance.random() < wild / 2:
            messages[-1]["refusal"] = None
        if chance.random() < wild / 2:
            messages[-1]["reasoning_content"] = _text(chance)
        calls = answer.get("tool_calls") or []
        messages += [
            {"role": "tool", "content": _text(chance, wild), "tool_call_id": call["id"]}
            for call in calls
        ]
        if not calls or chance.random() < wild / 2:
            role = chance.choice(["user", "user", "tool", "developer"]) if wild else "user"
            messages.append({"role": role, "content": _text(chance, wild)})
        if chance.random() < wild:
            others.append(messages)
            messages = list(chance.choice(others))
            if chance.random() < 0.5:
                place = chance.randrange(len(messages))
                messages[place] = {**messages[place], "content": _text(chance)}


def _answer(chance: random.Random, turn: int, tools: Any, wild: float) -> Message:
    content = _text(chance, wild)
    if chance.random() < 0.5:
        opening = chance.choice(["<think>\n", "<think>\n", "", "\n"])
        content = f"{opening}{_text(chance, wild)}\n</think>\n\n{content}"
    if chance.random() < wild:
        content = chance.choice(["", " ", "\n", "x", content + "</think>", "<think>" + content])
    answer: Message = {"role": "assistant", "content": content}
    if tools and chance.random() < 0.7:
        arguments = json.dumps({"q": _text(chance), "n": chance.randrange(9)})
        if chance.random() < wild:
            arguments = chance.choice(["{no json", "[]", "{}", '{"<think>": null}'])
        count = chance.choice([1, 1, 1, 2])
        answer["tool_calls"] = [
            {
                "id": f"{100 * turn + number:09d}",
                "type": "function",
                "function": {"name": chance.choice(["search", "open"]), "arguments": arguments},
            }
            for number in range(count)
        ]
    return answer


def _text(chance: random.Random, wild: float = 0.0) -> str:
    words = chance.choices(_WORDS, k=chance.randrange(1, 12))
    if chance.random() < wild:
        odd = ["<think>", "</think>", "<tool_response>", "</tool_response>", "/nothink", "\n\n"]
        words.insert(chance.randrange(len(words) + 1), chance.choice([*odd, "<|channel|>final"]))
    return chance.choice([" ", " ", "\n"]).join(words)


def differences(
    tokenizer: TextTokenizer, conversations: int, turns: int
) -> tuple[int, int, int, int]:
    """Requests, those with the same tokens either way, those rendered whole, and those that had to
    be as they began a segment. No stand-in is compared with its conversation."""
    renderer = rendering.Renderer(tokenizer)
    renderer.first_checked = 0
    whole = WholeRenderer(tokenizer)
    asked = same = whole_ones = needed = 0
    for seed in range(conversations):
        ours = Conversation(renderer, tokenizer)
        theirs = Conversation(whole, tokenizer)
        for body, answer in random_requests(seed, turns):
            same += ours.ask(body) == theirs.ask(body)
            asked += 1
            ours.answer(answer)
            theirs.answer(answer)
        whole_ones += ours.recording.rendered_whole
        needed += sum(segment.by_template for segment in theirs.recording.segments)
    return asked, same, whole_ones, needed


def long_requests(turns: int) -> Iterator[tuple[dict[str, Any], Message]]:
    """Requests of a long episode, each turn of about 600 tokens of text."""
    messages: list[Message] = [{"role": "user", "content": "Find out who wrote it. " * 20}]
    for turn in range(turns):
        call = {"name": "search", "arguments": json.dumps({"q": f"who wrote it {turn}"})}
        answer: Message = {
            "role": "assistant",
            "content": "<think>\n" + "It may be found there. " * 50 + "\n</think>\n\nI search.",
            "tool_calls": [{"id": f"{turn:09d}", "type": "function", "function": call}],
        }
        yield json.loads(json.dumps({"messages": messages, "tools": TOOLS})), answer
        result = {
            "role": "tool",
            "content": "A line of a page.\n" * 70,
            "tool_call_id": f"{turn:09d}",
        }
        messages = [*messages, answer, result]


def seconds_by_turn(
    renderer: rendering.Renderer, tokenizer: TextTokenizer, turns: int
) -> list[float]:
    """CPU seconds of each request of an episode."""
    conversation = Conversation(renderer, tokenizer)
    seconds = []
    for body, answer in long_requests(turns):
        start = time.thread_time()
        conversation.ask(body)
        seconds.append(time.thread_time() - start)
        conversation.answer(answer)
    return seconds


def _median(renderer: rendering.Renderer, tokenizer: TextTokenizer, turns: int) -> np.ndarray:
    rounds = [seconds_by_turn(renderer, tokenizer, turns) for _ in range(4)]
    return np.median(rounds[1:], axis=0)  # the first one meets every stand-in for the first time


def main() -> None:
    """A row for each template."""
    arguments = parser(__doc__)
    arguments.add_argument("--templates", type=Path, help="folder with *.jinja files")
    arguments.add_argument("--tokenizer", type=Path, help="its directory; default: of bytes")
    arguments.add_argument("--conversations", type=int, default=100)
    arguments.add_argument("--turns", type=int, default=50)
    given = arguments.parse_args()
    templates = CHAT_TEMPLATES
    if given.templates is not None:
        files = sorted(given.templates.glob("*.jinja"))
        templates = {file.stem: file.read_text(encoding="utf-8") for file in files}
    of_texts = byte_tokenizer() if given.tokenizer is None else tokenizer_from(given.tokenizer)
    rows = []
    for name, template in templates.items():
        with TemporaryDirectory() as folder:
            try:
                tokenizer = with_template(Path(folder), template, of_texts)
            except Exception as error:  # of another kind of model
                print(f"{name}: left out ({error})")
                continue
            asked, same, rendered, needed = differences(tokenizer, given.conversations, 12)
            whole = _median(WholeRenderer(tokenizer), tokenizer, given.turns)
            ours = _median(rendering.Renderer(tokenizer), tokenizer, given.turns)
        counts = {"requests": asked, "same": same, "whole": rendered, "needed": needed}
        row: dict[str, Any] = {"template": name} | counts
        for turn in (1, 10, 25, given.turns):
            row[f"{turn} before"] = whole[turn - 1] * 1e3
            row[f"{turn}"] = ours[turn - 1] * 1e3
        sizes = range(10, given.turns + 1)
        for label, seconds in ((" before", whole), ("", ours)):
            row[f"episode{label}"] = seconds.sum() * 1e3
            row[f"growth{label}"] = growth(sizes, np.cumsum(seconds)[9:].tolist())
        rows.append(row)
    publish("Prompts of turns: CPU ms of a request", rows, given.json)


if __name__ == "__main__":
    main()
