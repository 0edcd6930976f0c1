"""What a run says of itself: at its head, after each step, at its end."""

import time

import psutil
import torch.distributed as dist

from vapo_megatron.checkpoint.checkpoints import final_dir
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.batch import offsets
from vapo_megatron.megatron.offload import MemoryPlan
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.metrics import read_metrics
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.models import Models
from vapo_megatron.training.shards import ShardedBatch
from vapo_megatron.training.state import RunState


def show_header(config: TrainConfig, models: Models, engines: int, recorder: Recorder) -> None:
    """Show what a run is made of. engines: their number."""
    world, spec = dist.get_world_size(), models.actor.spec
    facts = {
        "model": f"{config.model.path} ({spec.family}, {spec.parameter_count():,} parameters)",
        "preset": config.preset or "none",
        "actor": config.actor.layout.describe(world),
        "critic": config.critic.layout.describe(world) if models.critic is not None else "none",
        "kernels": current_platform().capabilities(),
        "engines": f"{engines} x TP{config.rollout.tp}",
        "step": f"{config.batch.prompts_per_step} prompts x {config.batch.samples_per_prompt} responses",
        "seed": config.run.seed,
        "run": recorder.run_dir,
    }
    recorder.console.header(f"vapo-megatron train: {config.run.name}", facts)


def record_step(batch: ShardedBatch, memory: MemoryPlan, state: RunState, recorder: Recorder) -> None:
    """End the step: its metrics go into the files, its line onto the console."""
    timer = recorder.timer
    seconds = time.perf_counter() - state.started
    # What is not part of every step would make the steps' times incomparable.
    seconds -= timer.seconds("evaluation") + timer.seconds("export")
    recorder.add(
        {
            names.STEP_TIME: seconds,
            names.TOKENS_PER_SECOND: float(batch.table.lengths.sum()) / seconds,
            "memory/rank_gib": current_platform().memory_bytes() / 2**30,
            names.PROCESS_MEMORY: psutil.Process().memory_info().rss / 2**30,
            names.HOST_MEMORY_USED: psutil.virtual_memory().percent / 100,
        }
        | memory.metrics()
        | state.updates.metrics()
    )
    kept = recorder.estimated(batch.table.group_ids)
    estimates = batch.first(kept, "values", "advantages")
    bounds = offsets(batch.table.response_lengths[:kept])
    recorder.estimates(state.step, estimates.get("values"), estimates.get("advantages"), bounds)
    state.metrics = recorder.write(state.step)
    recorder.console.step(state.step, state.last_step, state.metrics)


def show_end(name: str, recorder: Recorder) -> None:
    """Show what evaluations have reached, and where everything is."""
    run_dir, rows = recorder.run_dir, read_metrics(recorder.run_dir) if recorder.is_main_rank else []
    reached: dict[str, object] = {
        metric: f"{values[0]:.3f} -> {values[-1]:.3f}" if len(values) > 1 else f"{values[0]:.3f}"
        for metric in sorted({metric for row in rows for metric in row if "_avg@" in metric})
        if (values := [row[metric] for row in rows if metric in row])
    }
    places = {
        "metrics": run_dir / "metrics.jsonl",
        "samples": run_dir / "samples",
        "model": final_dir(run_dir) / "actor",
    }
    recorder.console.closing(f"{name} finished", reached | places)
