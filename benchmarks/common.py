"""What the benchmarks share: timing, tables that can be kept as JSON, lengths, model shapes,
batches, ranks."""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import transformers
from rich.console import Console
from rich.table import Table

from vapo_megatron.config.model import ActorConfig, ModelConfig
from vapo_megatron.data.balance import Cost, MicrobatchPlan, plan_microbatches
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.microbatch import padded_lengths
from vapo_megatron.engines.weight_sync.logprob_difference import probe_batch
from vapo_megatron.files import atomic_write
from vapo_megatron.megatron.mesh import make_mesh
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.monitoring.timers import MemoryGauge, host_gauge
from vapo_megatron.training.losses import NegativeLogLikelihood


@dataclass(frozen=True)
class Shape:
    """A Qwen2.5-shaped model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool = False

    def hf_config(self) -> Any:
        """Its config as transformers has it."""
        return transformers.Qwen2Config(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.ffn,
            vocab_size=self.vocab,
            max_position_embeddings=32768,
            tie_word_embeddings=self.tied,
        )

    def spec(self) -> ModelSpec:
        """What Megatron's model is built from."""
        with tempfile.TemporaryDirectory() as directory:
            self.hf_config().save_pretrained(directory)
            return read_spec(Path(directory))


SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 128, 512, tied=True),
    "10m": Shape(256, 8, 8, 4, 768, 4096, tied=True),
    "50m": Shape(512, 12, 8, 4, 1536, 8192, tied=True),
    # As wide and deep as SmolLM2-135M.
    "135m": Shape(576, 30, 9, 3, 1536, 49152, tied=True),
    "0.7b": Shape(1024, 28, 16, 4, 5632, 151936, tied=True),
    "1.5b": Shape(1536, 28, 12, 2, 8960, 151936, tied=True),
    "7b": Shape(3584, 28, 28, 4, 18944, 152064),
    "32b": Shape(5120, 64, 40, 8, 27648, 152064),
    # As wide as Qwen2.5-32B with 6 of its 64 layers: what a rank of a PP=8 job about holds.
    "32b-slice": Shape(5120, 6, 40, 8, 27648, 152064),
}


def parser(doc: str | None) -> argparse.ArgumentParser:
    """An argument parser that every benchmark adds its own arguments to."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--json", type=Path, help="file to write the results to, with date and hardware"
    )
    return made


@dataclass(frozen=True)
class Figure:
    """A ratio that releases are compared by, above 1 where ours is better; low and high: its
    quartiles over rounds."""

    name: str
    ratio: float
    low: float
    high: float


def ratio_figure(name: str, theirs: Sequence[float], ours: Sequence[float]) -> Figure:
    """How many times as long theirs takes: rounds of one run, compared round by round."""
    low, middle, high = np.percentile(np.divide(theirs, ours), [25, 50, 75])
    return Figure(name, float(middle), float(low), float(high))


def growth(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The exponent of cost as work grows: 1 is linear, 2 quadratic."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def publish(
    title: str, rows: Sequence[dict[str, Any]], file: Path | None, figures: Sequence[Figure] = ()
) -> None:
    """Print rows of equal keys as a table, then figures; write them with date and hardware where a
    file is named."""
    table = Table(title=title)
    for index, heading in enumerate(rows[0]):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(shown, row.values()))
    facts = machine()
    console = Console(width=150)
    console.print("   ".join(f"{name}: {value}" for name, value in facts.items()))
    console.print(table)
    for figure in figures:
        console.print(
            f"{figure.name}: {figure.ratio:.3g} ({figure.low:.3g} to {figure.high:.3g})",
            highlight=False,
        )
    if file is not None:
        found = {
            "title": title,
            "machine": facts,
            "rows": list(rows),
            "figures": [asdict(figure) for figure in figures],
        }
        with atomic_write(file) as out:
            json.dump(found, out, indent=1)


def shown(value: Any) -> str:
    """A cell of a table: 17,100 and not 1.71e+04."""
    if isinstance(value, float) and 1000 <= abs(value) < 1e15:
        return f"{float(f'{value:.3g}'):,.0f}"
    return (
        f"{value:,.4g}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


def machine() -> dict[str, str]:
    """Date, accelerator or processor, and versions."""
    import megatron.core

    cuda = current_platform().is_cuda
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": torch.cuda.get_device_name()
        if cuda
        else f"{_cpu_name()}, {os.cpu_count()} cores",
        # What runs now that the benchmark is over, processes of others among it.
        "other work": f"{psutil.cpu_percent(interval=1.0) / 100 * (os.cpu_count() or 1):.1f} cores",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "megatron-core": megatron.core.__version__,
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def in_turns(steps: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Seconds of each step, round by round, after one round that does not count: what disturbs one
    disturbs all."""
    found: list[list[float]] = [[] for _ in steps]
    for repeat in range(repeats + 1):
        for step, seconds in zip(steps, found, strict=True):
            current_platform().synchronize()
            start = time.perf_counter()
            step()
            current_platform().synchronize()
            if repeat:
                seconds.append(time.perf_counter() - start)
    return found


def memory_gauge() -> MemoryGauge:
    """Of the accelerator's memory; without one, of what this process holds resident."""
    marks = list(current_platform().memory_gauges().values())
    return MemoryGauge(*marks[0]) if marks else host_gauge()


def anonymous_bytes(process: int | str = "self") -> int:
    """Memory of a process that is no page of a file; 0 once it has ended."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)


def heavy_tailed_lengths(
    count: int, mean: float, longest: int, seed: int = 0, sigma: float = 0.8
) -> list[int]:
    """Lengths of reasoning responses, as they are drawn: log-normal, cut at `longest`, with the
    mean asked for."""
    draws = np.exp(np.random.default_rng(seed).normal(0.0, sigma, count))
    low, high = 0.0, float(longest) / float(draws.min())
    for _ in range(60):
        middle = (low + high) / 2
        if np.minimum(draws * middle, longest).mean() < mean:
            low = middle
        else:
            high = middle
    return [max(2, int(n)) for n in np.minimum(draws * low, longest)]


def sample_batch(lengths: Sequence[int], vocab: int, seed: int = 0) -> ExperienceBatch:
    """Samples of random tokens, a prompt of one token and responses for the rest: every position
    has a loss."""
    generator = torch.Generator().manual_seed(seed)
    return probe_batch(
        [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]
    )


@contextmanager
def one_rank() -> Iterator[None]:
    """A world of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        _join(0, 1, folder)
        yield
        dist.destroy_process_group()


def over_ranks(
    world_size: int, function: Callable[..., dict[str, Any]], *args: Any
) -> dict[str, Any]:
    """function(*args) on world_size ranks of this machine; what rank 0 returned."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            _rank, (world_size, folder, function, args), nprocs=world_size, start_method="spawn"
        )
        return dict(json.loads((Path(folder) / "answer.json").read_text()))


def _rank(
    rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    _join(rank, world_size, folder)
    answer = function(*args)
    if rank == 0:
        (Path(folder) / "answer.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def _join(rank: int, world_size: int, folder: str) -> None:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron's schedules count on it
    current_platform().bind(rank)
    store = f"file://{Path(folder) / 'store'}"
    dist.init_process_group(
        current_platform().world_backend, init_method=store, rank=rank, world_size=world_size
    )


# Padding of a sequence, for up to eight context-parallel ranks
_ALIGNMENT = 16


class Planner:
    """What training/shards.py asks of a model: a plan for so many data-parallel ranks, at the costs
    of 7B."""

    name = "actor"
    replays = False
    shares_prompts = False

    def __init__(self, dp_size: int, max_tokens: int = 32768, cp_size: int = 1) -> None:
        """Not more ranks than there are in the world, unless plans alone are asked for."""
        self._max_tokens = max_tokens
        spec = SHAPES["7b"].spec()
        self._cost = Cost(float(spec.parameter_count()), float(spec.attention_width))
        self.mesh = _Line(dp_size, cp_size)

    def plan(
        self,
        lengths: torch.Tensor,
        samples: Sequence[int],
        segments: torch.Tensor | None = None,
        shared: None = None,
    ) -> MicrobatchPlan:
        """As Trainable.plan."""
        settings: dict[str, Any] = {
            "max_tokens": self._max_tokens,
            "cost": self._cost,
            "alignment": _ALIGNMENT,
        }
        return plan_microbatches(samples, lengths.numpy(), dp_size=self.mesh.dp_size, **settings)

    def padded(self, positions: Sequence[int]) -> list[int]:
        """As Trainable.padded."""
        return padded_lengths(positions, _ALIGNMENT, _ALIGNMENT)


@dataclass(frozen=True)
class _Line:
    """A mesh of data-parallel and context-parallel ranks alone."""

    dp_size: int
    cp_size: int

    @property
    def dp_rank(self) -> int:
        return self.dp_rank_of(dist.get_rank())

    def dp_rank_of(self, rank: int) -> int:
        """As Mesh.dp_rank_of."""
        return rank // self.cp_size

    def cp_rank_of(self, rank: int) -> int:
        """As Mesh.cp_rank_of."""
        return rank % self.cp_size

    def reporter(self, dp_rank: int, cp_rank: int = 0) -> int:
        """As Mesh.reporter."""
        return dp_rank * self.cp_size + cp_rank


def sft_loss(batch: ExperienceBatch) -> Any:
    """The plainest loss there is: the mean negative log-likelihood of all response tokens."""
    return NegativeLogLikelihood(torch.full((batch.response_tokens,), 1 / batch.response_tokens))


def random_model(
    shape: Shape, config: ActorConfig, dtype: str, optimizer: bool = True, gradients: bool = False
) -> Trainable:
    """Collective: a policy with Megatron's own random weights: with its optimizer, ready to be
    trained; without one, frozen unless gradients are wanted, which then are in bfloat16 and of this
    rank's samples alone."""
    mesh = make_mesh(config.layout)
    model = ModelConfig(path="none", dtype=dtype)
    trainable = Trainable(shape.spec(), model, config, mesh, "lm", name="actor", seed=1)
    if optimizer:
        trainable.prepare()
    elif not gradients:
        trainable.freeze()
    return trainable


def gradient_step(trainable: Trainable, batch: ExperienceBatch) -> Callable[[], object]:
    """Collective: forward and backward, which need no optimizer."""
    loss = sft_loss(batch)
    return lambda: trainable.gradients(batch, range(batch.samples), loss)
