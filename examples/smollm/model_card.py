"""The model card of the example's export."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CARD = """\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
library_name: transformers
pipeline_tag: text-generation
tags: [vapo_megatron, reinforcement-learning, arithmetic]
---

# SmolLM2-135M-Instruct, trained on small sums, differences and products

An example of [vapo_megatron](https://arxiv.org/abs/2504.05118): {steps} steps of reinforcement
learning without a model as critic (`preset: {preset}`) on problems that a script generates. It
answers with the number alone. It is no better at anything else, and probably worse: it was trained
to say little.

## Base model

`{source}`, file `{file}` (SHA-256 `{sha256}`), quantised as {quantization} and written out in
{dtype}.

## Results

{problems} held-out problems; their templates and their pairs of numbers are not in the training
data. Seed {seed}, {date}, commit {commit}.

| graded by | before | after | difference, 95 % interval |
|---|---|---|---|
{own_row}
{check_rows}

The last two rows come from plain transformers and a parser of a few lines. {restated:.1%} of the
sampled responses restate the question instead of answering it.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = AutoModelForCausalLM.from_pretrained("PATH")
messages = [{{"role": "user", "content": "What is 17 + 8? Answer with the number."}}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=24)[0]))
```

## Limits

Numbers up to 40 (sums, differences) and 9 (products), English, prompts that end in "Answer with the
number.".
"""
OWN_ROW = (
    "| vapo_megatron, {samples} samples a problem, temperature 1 | {a:.3f} | {b:.3f} | "
    "[{low:+.3f}, {high:+.3f}] |"
)
CHECK_ROW = (
    "| plain transformers, {name} | {before:.3f} | {after:.3f} | [{low:+.3f}, {high:+.3f}] |"
)


def write_card(export: Path, base: Path, result: Mapping[str, Any]) -> Path:
    """Write README.md beside the export's weights; base has the origin.json of prepare-model."""
    origin = json.loads((base / "origin.json").read_text(encoding="utf-8"))
    comparison = result["evaluation"]
    check = result["check"]
    rows = []
    for name in ("sampled", "greedy"):
        low, high = check["difference"][name]["interval"]
        before = check["before"][name]["accuracy"]
        after = check["after"][name]["accuracy"]
        rows.append(CHECK_ROW.format(name=name, before=before, after=after, low=low, high=high))
    quantization = ", ".join(f"{count} {kind}" for kind, count in origin["quantization"].items())
    own_row = OWN_ROW.format(
        samples=2,
        a=comparison["a"],
        b=comparison["b"],
        low=comparison["low"],
        high=comparison["high"],
    )
    text = CARD.format(
        preset=result["preset"],
        steps=result["steps"],
        seed=result["seed"],
        date=result["date"],
        commit=result["commit"],
        source=origin["source"],
        file=origin.get("file", origin["source"]),
        sha256=origin["file_sha256"],
        quantization=quantization,
        dtype=origin["dtype"],
        problems=comparison["problems"],
        own_row=own_row,
        check_rows="\n".join(rows),
        restated=check["after"]["sampled"]["restated"],
    )
    path = export / "README.md"
    path.write_text(text, encoding="utf-8")
    return path
