"""Checks a trained model without any code of vapo_megatron: plain transformers, and a parser of its
own.

An answer is right if its last integer is the reference and it is no sum, difference or product that
was left to do.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.smollm.grading import SUFFIX, is_right, restates  # noqa: E402

MAX_NEW_TOKENS = 24
BATCH = 32
RESAMPLES = 10_000


def respond(directory: Path, problems: Sequence[str], sampled: bool, seed: int) -> list[str]:
    """A response to each problem; sampled at temperature 1, or the most probable tokens."""
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.do_sample = sampled
    model.generation_config.temperature = 1.0
    model.generation_config.top_k = 0
    model.generation_config.top_p = 1.0
    torch.manual_seed(seed)
    responses: list[str] = []
    for start in range(0, len(problems), BATCH):
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": problem + SUFFIX}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for problem in problems[start : start + BATCH]
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            outputs = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS)
        generated = outputs[:, inputs["input_ids"].shape[1] :]
        responses += tokenizer.batch_decode(generated, skip_special_tokens=True)
        print(f"  {len(responses)}/{len(problems)}", file=sys.stderr, flush=True)
    return responses


def interval(values: Sequence[float]) -> list[float]:
    """95 % percentile bootstrap interval of the mean."""
    draw = random.Random(0)
    means = sorted(sum(draw.choices(values, k=len(values))) / len(values) for _ in range(RESAMPLES))
    return [means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]]


def check(directory: Path, rows: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Accuracy of a model: sampled and greedy, with intervals, and the share of restated
    problems."""
    problems = [row["problem"] for row in rows]
    result: dict[str, Any] = {"problems": len(rows)}
    for name, sampled in (("sampled", True), ("greedy", False)):
        print(f"{directory}: {name}", file=sys.stderr, flush=True)
        responses = respond(directory, problems, sampled, seed)
        right = [
            float(is_right(response, row["answer"]))
            for response, row in zip(responses, rows, strict=True)
        ]
        result[name] = {
            "accuracy": sum(right) / len(right),
            "interval": interval(right),
            "restated": sum(map(restates, responses)) / len(responses),
            "right": right,
            "examples": list(zip(problems[:6], responses[:6], strict=True)),
        }
    return result


def main(
    before: Annotated[Path, typer.Option(help="the model before training")],
    after: Annotated[Path, typer.Option(help="the export of the run")],
    problems: Annotated[Path, typer.Option(help="held_out.jsonl")],
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    limit: Annotated[int, typer.Option(help="problems to answer, the first ones")] = 192,
    seed: Annotated[int, typer.Option(help="of sampling")] = 0,
) -> None:
    """Answer held-out problems with both models, and compare."""
    lines = problems.read_text(encoding="utf-8").splitlines()[:limit]
    rows = [json.loads(line) for line in lines]
    results = {"before": check(before, rows, seed), "after": check(after, rows, seed)}
    summary: dict[str, Any] = {"torch_threads": torch.get_num_threads()}
    for name in ("sampled", "greedy"):
        differences = [
            late - early
            for early, late in zip(
                results["before"][name].pop("right"),
                results["after"][name].pop("right"),
                strict=True,
            )
        ]
        mean = sum(differences) / len(differences)
        summary[name] = {"difference": mean, "interval": interval(differences)}
    text = json.dumps({**results, "difference": summary}, indent=2, ensure_ascii=False)
    out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
