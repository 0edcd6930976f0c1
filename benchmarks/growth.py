"""How what rank 0 and data tools do grows with its input: exponents, 1 is linear and 2 quadratic.

    python -m benchmarks.growth [--repeats 3] [--json FILE]

Rows:

    pack        a micro-batch of one episode, by its segments of 200 tokens each
    fields      such an episode as a sample, by its segments
    preamble    prepare-data's search for evaluation problems, by rows that all share a preamble
    one by one  prompts of a chat template, by rows, each tokenized for itself
    prompts     the same as the first start makes them, many at a time
    kept        the same as every later start reads them
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import growth, in_turns, parser, publish, ratio_figure
from vapo_megatron.agents.recording import Recording, Segment
from vapo_megatron.config.data import PromptTemplate
from vapo_megatron.data import prompt_tokens
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.microbatch import pack
from vapo_megatron.data.rows import Problem
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.operations.preparation import OverlapIndex
from vapo_megatron.weights.tiny import CHATML_TEMPLATE, word_tokenizer

Work = Callable[[], Any]
_TOKENS = 100  # of a segment's prompt, and of its response
_PREAMBLE = "Solve the problem below step by step and put the final answer in a box at its end"
_PROMPT = Prompt("0", "", "", tuple(range(4, 4 + _TOKENS)))


def _turn(number: int) -> Sample:
    ids = np.full(_TOKENS, 5, np.int32)
    logprobs = np.zeros(_TOKENS, np.float32)
    return Sample(_PROMPT, 0, 0, number, ids, logprobs, "stop", 0, 0, versions=((0, _TOKENS),))


def _episode(segments: int) -> Recording:
    recording = Recording()
    for number in range(segments):
        segment = Segment([], [], list(_PROMPT.token_ids))
        segment.write(_turn(number), number, [])
        recording.segments.append(segment)
    return recording


def _fields(segments: int) -> Work:
    recording = _episode(segments)
    return lambda: recording.fields(())


def _pack(segments: int) -> Work:
    fields = _episode(segments).fields(())
    batch = from_samples([Sample(_PROMPT, 0, 0, 0, **fields, reward=1.0, correct=True)])
    return lambda: pack(batch, [0], 1, 1, 1, 0)


def _preamble(rows: int) -> Work:
    texts = [f"{_PREAMBLE}: how far is town {n} from town {n * n} by road?" for n in range(rows)]
    known = [("known", texts[3]), ("other", f"{_PREAMBLE}: what is half of a third?")]

    def search() -> None:
        index = OverlapIndex(known, texts)
        for text in texts:
            index.nearest(text)

    return search


def _problems(rows: int) -> list[Problem]:
    text = "a plus b is asked of you here " * 8
    return [Problem(str(n), f"{n} {text}", "1", f"f:{n}", "f") for n in range(rows)]


def _prompts(rows: int, tokenizer: TextTokenizer) -> Work:
    problems = _problems(rows)
    return lambda: prompt_tokens._encoded(problems, tokenizer)


def _one_by_one(rows: int, tokenizer: TextTokenizer) -> Work:
    problems = _problems(rows)
    return lambda: [tuple(tokenizer.encode_prompt(problem.problem)) for problem in problems]


def _kept(rows: int, tokenizer: TextTokenizer) -> Work:
    problems = _problems(rows)
    prompt_tokens.prompt_token_ids(problems, tokenizer)
    return lambda: prompt_tokens.prompt_token_ids(problems, tokenizer)


def _measured(
    what: str, sizes: Sequence[int], work_of: Callable[[int], Work], repeats: int
) -> tuple[dict[str, Any], list[list[float]]]:
    rounds = in_turns([work_of(size) for size in sizes], repeats)
    medians = [float(np.median(seconds)) for seconds in rounds]
    row = {
        "what": what,
        "sizes": f"{sizes[0]:,} to {sizes[-1]:,}",
        "first ms": medians[0] * 1e3,
        "last ms": medians[-1] * 1e3,
        "growth": growth(sizes, medians),
    }
    return row, rounds


def main() -> None:
    """Measure every row."""
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=3)
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = name
        word_tokenizer(["a", "plus", "b", "is"], 64, CHATML_TEMPLATE).save_pretrained(folder)
        tokenizer = TextTokenizer(folder, PromptTemplate())
        segments = (16, 64, 256)
        rows = (20_000, 40_000, 80_000)
        found = [
            _measured("pack", segments, _pack, args.repeats),
            _measured("fields", segments, _fields, args.repeats),
            _measured("preamble", (500, 2000, 8000), _preamble, args.repeats),
            _measured(
                "one by one", rows, lambda count: _one_by_one(count, tokenizer), args.repeats
            ),
            _measured("prompts", rows, lambda count: _prompts(count, tokenizer), args.repeats),
            _measured("kept", rows, lambda count: _kept(count, tokenizer), args.repeats),
        ]
    single, made, kept = (rounds[-1] for _, rounds in found[-3:])
    figures = [
        ratio_figure("prompts of 80,000 rows, one by one over many at a time", single, made),
        ratio_figure("prompts of 80,000 rows, one by one over kept", single, kept),
    ]
    title = "How does what rank 0 does grow?"
    publish(title, [row for row, _ in found], args.json, figures)


if __name__ == "__main__":
    main()
