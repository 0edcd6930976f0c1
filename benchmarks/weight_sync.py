"""A weight sync to a real SGLang server against a plain memory copy of the same bytes, in one run.

    python -m benchmarks.weight_sync [--shape 50m] [--dtype bfloat16] [--layouts 1x1,2x1,2x2]
                                   [--engine-tp 1] [--transport auto] [--bucket-mib 512]
                                   [--small-bucket-mib 4] [--project-32b] [--json FILE]

A layout is TP x PP of the trainer, and x TP of the server where that is not --engine-tp. Each row
is a layout and what is done:

    stream         the model's shards become whole Hugging Face tensors in two buckets in turn, and
                   nothing else
    weight sync    the same, and a server takes them: every check of a training run is on
    gathered       where the server has the trainer's TP: the same with rollout.sync.gather=always
    small buckets  the same in as many buckets of at most --small-bucket-mib as that takes

Columns:

    buckets     how many there were
    ms a bucket of small buckets: what each takes more than its bytes, from the difference of both
                syncs; vapo-megatron plan counts it
    GB/s        bytes of the Hugging Face tensors over the time of the whole, median of several; the
                first two, in which buffers are made and placements learnt, are not among them
    of a copy   GB/s over that of a memory copy of the same bytes, bucket by bucket, in rank 0 of
                the same run
    gather      seconds of collectives and of waiting for other ranks; convert: of copies into
                place, and of checksums where one rank has all of a bucket; send: of announcing
                buckets and of answers, and else of checksums; load: of the server's loading, its
                checksums beside it. On rank 0
    MiB beyond  most memory of a rank beyond what it held before, over all ranks: RSS without a GPU
                (pages of shared buckets count in every rank), else allocated device memory

--project-32b, on GPUs, scales load, convert, send and gather by bytes to the 65.5 GB of Qwen2.5-32B
in bfloat16 on 8 GPUs: TP=8 for trainer and engine. It needs a run with tp 8 for its gather; of a
run with fewer it says what is missing.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import (
    SHAPES,
    Shape,
    in_turns,
    memory_gauge,
    over_ranks,
    parser,
    publish,
    random_model,
    ratio_figure,
)
from vapo_megatron.config.model import ActorConfig, LayoutConfig
from vapo_megatron.config.rollout import Dtype, RolloutConfig, SyncConfig
from vapo_megatron.engines.engine_weights import EngineWeights
from vapo_megatron.engines.pool import EnginePool
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.weights.export import make_slots, stream_hf
from vapo_megatron.weights.gather import PartTimes

REPEATS = 5
_FIRST = 2  # rounds that do not count
PARTS = ("gather", "convert", "send", "load")
_BYTES_32B = 65.5e9


def copy_seconds(total: int, bucket: int, device: torch.device) -> list[float]:
    """Of copying `total` bytes, bucket by bucket, between two buffers that were touched before."""
    source, target = (
        torch.ones(min(total, bucket), dtype=torch.uint8, device=device) for _ in range(2)
    )
    pieces = [min(bucket, total - start) for start in range(0, total, bucket)]
    return in_turns([lambda: [target[:n].copy_(source[:n]) for n in pieces]], REPEATS)[0]


def measure(work: Callable[[], dict[str, float]]) -> dict[str, Any]:
    """Collective: the middle one of several runs after the first two, its parts, and the memory of
    all ranks together."""
    found: list[tuple[float, dict[str, float]]] = []
    gauge = memory_gauge()
    gauge.reset()
    before = current_platform().memory_bytes()
    for _ in range(_FIRST + REPEATS):
        dist.barrier()
        start = time.perf_counter()
        parts = work()
        current_platform().synchronize()
        dist.barrier()
        found.append((time.perf_counter() - start, parts))
    beyond = torch.tensor([(gauge.peak() - before) / 2**20], device=current_platform().device)
    dist.all_reduce(beyond, op=dist.ReduceOp.MAX)
    rounds = sorted(found[_FIRST:], key=lambda one: one[0])
    seconds, parts = rounds[len(rounds) // 2]
    return {
        "seconds": seconds,
        "rounds": [one for one, _ in found[_FIRST:]],
        "parts": parts,
        "mib": float(beyond),
    }


def count_buckets(actor: Trainable, limit: int) -> int:
    """Collective: how many buckets of at most `limit` bytes the weights are."""
    return sum(1 for _ in stream_hf(actor.chunks, actor.spec, actor.mesh, "lm", limit))


def stream(actor: Trainable, bucket: int) -> dict[str, Any]:
    """measure() of the stream alone."""
    slots = make_slots(current_platform().device)

    def run() -> dict[str, float]:
        times = PartTimes()
        for _ in stream_hf(
            actor.chunks, actor.spec, actor.mesh, "lm", bucket, slots=slots, times=times
        ):
            pass
        return times.seconds

    answer = measure(run)
    slots.close()
    return answer


def sync_weights(
    actor: Trainable,
    shape: Shape,
    sync: SyncConfig,
    small_mib: int,
    engine_tp: int,
    dtype: Dtype,
    logs: Path,
) -> dict[str, dict[str, Any]]:
    """measure() of weight syncs to a server, in buckets as they are set and in small ones."""
    model_dir = logs / "model"
    if dist.get_rank() == 0:
        config = shape.hf_config()
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(model_dir)
    dist.barrier()
    rollout = RolloutConfig(
        tp=engine_tp,
        sync=sync,
        load_format="dummy",
        max_running_requests=8,
        max_total_tokens=4096,
        context_length=1024,
    )
    small = rollout.model_copy(update={"sync": sync.model_copy(update={"bucket_mib": small_mib})})
    answers = {}
    with EnginePool(rollout, model_dir, dtype, logs) as engines:
        engines.start()
        engines.wait_until_ready()
        configs = {"weight sync": rollout, "small buckets": small}
        if actor.mesh.tp_size == engine_tp > 1:
            gathered = sync.model_copy(update={"gather": "always"})
            configs["gathered"] = rollout.model_copy(update={"sync": gathered})
        for what, config in configs.items():
            with EngineWeights(engines, config, dtype) as weights:

                def run(weights: EngineWeights = weights) -> dict[str, float]:
                    weights.update_weights(actor)
                    return weights.sync_seconds

                answers[what] = measure(run)
    return answers


def one_layout(
    shape: Shape,
    tp: int,
    pp: int,
    sync: SyncConfig,
    small_mib: int,
    engine_tp: int,
    dtype: Dtype,
    logs: str,
) -> dict[str, Any]:
    """On every rank: the copy, the stream and the weight sync of a layout."""
    actor = random_model(
        shape, ActorConfig(layout=LayoutConfig(tp=tp, pp=pp)), dtype, optimizer=False
    )
    total = actor.spec.parameter_count() * getattr(torch, dtype).itemsize
    bucket = sync.bucket_bytes(current_platform().free_bytes())
    plain = (
        copy_seconds(total, bucket, current_platform().device) if dist.get_rank() == 0 else [0.0]
    )
    dist.barrier()
    return {
        "bytes": total,
        "copy": plain,
        "buckets": {
            "stream": count_buckets(actor, bucket),
            "weight sync": count_buckets(actor, bucket),
            "gathered": count_buckets(actor, bucket),
            "small buckets": count_buckets(actor, small_mib << 20),
        },
        "stream": stream(actor, bucket),
        **sync_weights(actor, shape, sync, small_mib, engine_tp, dtype, Path(logs)),
    }


def row(layout: str, what: str, answer: dict[str, Any]) -> dict[str, Any]:
    """One line of the table."""
    done, total = answer[what], answer["bytes"]
    more = answer["buckets"][what] - answer["buckets"]["weight sync"]
    longer = done["seconds"] - answer["weight sync"]["seconds"]
    cells = {
        "trainer": layout,
        "what": what,
        "GB": total / 1e9,
        "seconds": done["seconds"],
        "GB/s": total / done["seconds"] / 1e9,
        "of a copy": float(np.median(answer["copy"])) / done["seconds"],
        **{part: float(done["parts"].get(part, 0.0)) for part in PARTS},
        "MiB beyond": done["mib"],
        "buckets": answer["buckets"][what],
    }
    if more:
        cells["ms a bucket"] = 1e3 * longer / more
    return cells


def projection(answers: dict[str, dict[str, Any]]) -> str:
    """Seconds of a weight sync of 32B parameters, from the widest layout measured."""
    layout, answer = max(answers.items(), key=lambda item: int(item[0].split("x")[0]))
    parts = {
        part: answer["weight sync"]["parts"].get(part, 0.0) * _BYTES_32B / answer["bytes"]
        for part in PARTS
    }
    said = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in parts.items())
    whole = answer["weight sync"]["seconds"] * _BYTES_32B / answer["bytes"]
    missing = (
        ""
        if layout.startswith("8x")
        else f"; measured at {layout}: the gather over 8 GPUs is not in it"
    )
    return f"32B in bfloat16, scaled by bytes: {whole:.2f} s ({said}){missing}"


def main() -> None:
    """Print the table."""
    arguments_of = parser(__doc__)
    arguments_of.add_argument("--shape", choices=sorted(SHAPES), default="50m")
    arguments_of.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    arguments_of.add_argument("--layouts", default="1x1,2x1,2x2")
    arguments_of.add_argument("--engine-tp", type=int, default=1)
    arguments_of.add_argument("--transport", default="auto")
    arguments_of.add_argument("--bucket-mib", type=int, default=512)
    arguments_of.add_argument("--small-bucket-mib", type=int, default=4)
    arguments_of.add_argument("--project-32b", action="store_true")
    arguments = arguments_of.parse_args()
    if arguments.project_32b and not current_platform().is_cuda:
        arguments_of.error(
            "--project-32b is made of parts measured on GPUs, and there are none here"
        )
    sync = SyncConfig(transport=arguments.transport, bucket_mib=arguments.bucket_mib)
    answers: dict[str, dict[str, Any]] = {}
    for layout in arguments.layouts.split(","):
        tp, pp, *engine_tp = map(int, layout.split("x"))
        with tempfile.TemporaryDirectory() as logs:
            answers[layout] = over_ranks(
                tp * pp,
                one_layout,
                SHAPES[arguments.shape],
                tp,
                pp,
                sync,
                arguments.small_bucket_mib,
                engine_tp[0] if engine_tp else arguments.engine_tp,
                arguments.dtype,
                logs,
            )
    rows = [
        row(layout, what, answer)
        for layout, answer in answers.items()
        for what in ("stream", "weight sync", "gathered", "small buckets")
        if what in answer
    ]
    title = (
        f"{arguments.shape}, {arguments.dtype}, engine TP{arguments.engine_tp} unless said, "
        f"transport {arguments.transport}"
    )
    figures = [
        ratio_figure(
            f"{what} of TPxPP {layout}, a plain copy over it",
            answer["copy"],
            answer[what]["rounds"],
        )
        for layout, answer in answers.items()
        for what in ("stream", "weight sync")
    ]
    figures += [
        ratio_figure(
            f"weight sync of {layout}, gathered over not",
            answer["gathered"]["rounds"],
            answer["weight sync"]["rounds"],
        )
        for layout, answer in answers.items()
        if "gathered" in answer
    ]
    publish(title, rows, arguments.json, figures)
    copies = {
        layout: f"{answer['bytes'] / np.median(answer['copy']) / 1e9:.1f} GB/s"
        for layout, answer in answers.items()
    }
    print(f"plain copy: {json.dumps(copies)}")
    if arguments.project_32b:
        print(projection(answers))


if __name__ == "__main__":
    main()
