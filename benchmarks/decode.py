"""Seconds of a decoding step of one engine, by the number of running responses, beside what `plan`
assumes.

    python -m benchmarks.decode [--shapes 1.5b 7b] [--running 32 128 256] [--tokens 128] [--fp8]
    [--json FILE] python -m benchmarks.decode --shapes tiny --running 2 4 --tokens 8       the same
    code on a CPU

A server with random weights answers as many requests at once as shall run, all in one HTTP request,
with log-probs, as a run asks. Each answer has `tokens` tokens, then twice as many: the difference
is so many decoding steps, without prefill and without the cost of a request. Medians of several
such pairs.

    context    tokens of a response and its prompt, on average over the steps that are timed
    step ms    of a decoding step, as measured
    work ms    by plan's formulas: reading weights and cache, or multiplying
    beyond ms  step less work
    planned ms work and hardware.efficiency.decode_overhead + running x request_overhead

The line below the table has the two overheads that fit `beyond ms` best: overrides for `plan`. A
shape is measured with as many running responses as its KV cache has room for, with --mem-fraction
of the GPU; more are left out.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.common import SHAPES, Shape, parser, publish
from vapo_megatron.config.plan import EfficiencyConfig, HardwareConfig, Kind
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.server.client import EngineClient
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.operations.plan.inputs import Hardware
from vapo_megatron.operations.plan.rollout import PlannedEngine, decode_seconds
from vapo_megatron.weights.fp8 import BlockFp8

KINDS: dict[str, Kind] = {
    "H100": "h100-80g",
    "H200": "h200-141g",
    "A100": "a100-80g",
    "B200": "b200-180g",
}
PROMPT = 64


def hardware() -> Hardware:
    """As plan has this GPU; an H100 where it is another, or none."""
    name = torch.cuda.get_device_name() if current_platform().is_cuda else ""
    return Hardware(
        HardwareConfig(
            kind=next((kind for part, kind in KINDS.items() if part in name), "h100-80g")
        )
    )


async def answer(client: EngineClient, running: int, tokens: int, vocab: int, seed: int) -> float:
    """Seconds of `running` responses of so many tokens, to prompts that no cache has: others for
    each number."""
    prompts = np.random.default_rng((running, seed)).integers(0, vocab, (running, PROMPT)).tolist()
    sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    start = time.perf_counter()
    completions = await client.generate(prompts, [sampling] * running)
    seconds = time.perf_counter() - start
    assert {len(completion.token_ids) for completion in completions} == {tokens}
    return seconds


async def step_seconds(
    client: EngineClient, running: Sequence[int], vocab: int, given: Any
) -> list[float]:
    """Seconds of a decoding step for each number of running responses."""
    medians = []
    for count in running:
        await answer(client, count, 8, vocab, 0)  # compiles, where anything is left to compile
        pairs = []
        for repeat in range(given.repeats):
            short, long = [
                await answer(client, count, n * given.tokens, vocab, 10 * repeat + n)
                for n in (1, 2)
            ]
            pairs.append((long - short) / given.tokens)
        medians.append(float(np.median(pairs)))
    await client.close()
    return medians


def measure(name: str, shape: Shape, given: Any) -> list[dict[str, Any]]:
    """The rows of one shape, by one server."""
    longest = PROMPT + 2 * given.tokens + 8
    config = RolloutConfig(
        load_format="dummy",
        context_length=longest,
        mem_fraction_static=given.mem_fraction,
        quantization="fp8" if given.fp8 else "none",
        server_args={
            name: yaml.safe_load(value)
            for name, value in (pair.split("=", 1) for pair in given.server_args)
        },
    )
    engine = PlannedEngine(shape.spec(), config, 2, hardware(), 0.0)
    running = [count for count in given.running if count * longest <= engine.cache_tokens]
    if not running:
        return []
    config = config.model_copy(update={"max_running_requests": max(running)})
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        hf_config = shape.hf_config()
        hf_config.architectures = ["Qwen2ForCausalLM"]
        hf_config.save_pretrained(model)
        devices = [0] if current_platform().is_cuda else None
        fp8 = BlockFp8.of(shape.spec()) if given.fp8 else None
        with EngineServer(
            model, config, "bfloat16", Path(folder) / "engine.log", devices, fp8=fp8
        ) as server:
            seconds = asyncio.run(
                step_seconds(EngineClient(server.address), running, shape.vocab, given)
            )
    rows = []
    for count, step in zip(running, seconds, strict=True):
        context = PROMPT + 1.5 * given.tokens
        planned, assumed = decode_seconds(engine, count, context), engine.hardware.efficiency
        work = planned - assumed.decode_overhead - count * assumed.request_overhead
        rows.append(
            {
                "shape": name,
                "running": count,
                "context": context,
                "tok/s": count / step,
                "step ms": 1e3 * step,
                "work ms": 1e3 * work,
                "beyond ms": 1e3 * (step - work),
                "planned ms": 1e3 * planned,
            }
        )
    return rows


def fitted(rows: Sequence[dict[str, Any]]) -> str:
    """What is beyond work, as a constant and a part of each running response; neither is
    negative."""
    running, beyond = (
        np.array([row[key] for row in rows], dtype=float) for key in ("running", "beyond ms")
    )
    each, constant = np.polyfit(running, beyond, 1)
    if each < 0:
        each, constant = 0.0, max(0.0, float(beyond.mean()))
    elif constant < 0:
        each, constant = max(0.0, float(running @ beyond / (running @ running))), 0.0
    assumed = EfficiencyConfig()
    return (
        f"hardware.efficiency.decode_overhead={constant / 1e3:.2g} (assumed "
        f"{assumed.decode_overhead:g}) hardware.efficiency.request_overhead={each / 1e3:.2g} "
        f"(assumed {assumed.request_overhead:g})"
    )


def main() -> None:
    """A row for each shape and number of running responses."""
    arguments = parser(__doc__)
    arguments.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1.5b", "7b"])
    arguments.add_argument("--running", type=int, nargs="+", default=[32, 128, 256])
    arguments.add_argument("--tokens", type=int, default=128, help="decoding steps that are timed")
    arguments.add_argument(
        "--repeats", type=int, default=3, help="pairs of a short and a long answer"
    )
    arguments.add_argument(
        "--fp8", action="store_true", help="weights and products of the layers in FP8"
    )
    arguments.add_argument(
        "--mem-fraction", type=float, default=0.85, help="of the GPU, for weights and cache"
    )
    arguments.add_argument(
        "--server-args", nargs="*", default=[], metavar="NAME=VALUE", help="further ones of SGLang"
    )
    given = arguments.parse_args()
    rows = [row for name in given.shapes for row in measure(name, SHAPES[name], given)]
    if not rows:
        arguments.error(
            f"--running {given.running}: the KV cache of none fits, take fewer or a smaller shape"
        )
    publish(
        f"decoding, {'fp8' if given.fp8 else 'bf16'}, prompts of {PROMPT} tokens", rows, given.json
    )
    if len({row["running"] for row in rows}) > 1:
        print(fitted(rows))


if __name__ == "__main__":
    main()
