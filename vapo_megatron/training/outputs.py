"""The outputs of a run: its lines on the console, evaluations, and models as Hugging Face
directories.

A directory hf/<name> holds actor and critic; adapters are also written alone, as actor_adapter.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from vapo_megatron.checkpoint.checkpoints import FINAL, HF_FOLDER, final_dir, final_step, mark_final
from vapo_megatron.collectives import on_rank_zero
from vapo_megatron.config.data import EvalSet
from vapo_megatron.config.run import EVALUATION_SEED, EvaluationConfig, ExportConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.batch import offsets
from vapo_megatron.engines.pool import EnginePool, EnginesFailed
from vapo_megatron.evaluation.evaluator import Evaluator
from vapo_megatron.evaluation.model_card import write_card
from vapo_megatron.evaluation.sets import SetResult, numbered
from vapo_megatron.files import atomic_write
from vapo_megatron.megatron.offload import MemoryPlan
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.probe import Probe
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.metrics import read_metrics, totals
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.models import Models
from vapo_megatron.training.rollouts import Rollouts
from vapo_megatron.training.shards import ShardedBatch
from vapo_megatron.training.state import RunState
from vapo_megatron.weights.export import adapter_folder, save_adapters, save_hf


def gpus_held(external: int = 0) -> int:
    """The GPUs of a run: one a rank, and the external engines'."""
    if not current_platform().is_cuda:
        return 0
    return dist.get_world_size() + external


def export(
    models: Models, engines: EnginePool, config: TrainConfig, state: RunState, recorder: Recorder
) -> None:
    """Collective: write the models, where this step is one to do so."""
    if not state.is_due(config.export.every):
        return
    with recorder.phase("export"):
        if state.step == state.last_step:
            _save_final(models, engines, config, state)
        else:
            name = f"step_{state.step:06d}"
            chosen = chosen_models(models, config.export)
            save_models(models, engines, chosen, state, name, config, recorder.optional)


def export_critic(
    models: Models, engines: EnginePool, config: TrainConfig, state: RunState, recorder: Recorder
) -> None:
    """Collective: write the pretrained critic, where critics are exported."""
    chosen = [model for model in chosen_models(models, config.export) if model.name != "actor"]
    with recorder.timer("export"):
        save_models(models, engines, chosen, state, "value_pretrained", config)


def export_final(
    models: Models, engines: EnginePool, config: TrainConfig, state: RunState, recorder: Recorder
) -> None:
    """Collective: write the final model if it is missing. With no step left to do it is missing if
    an earlier attempt ended between its last save and the export, or if run.steps was lowered."""
    if on_rank_zero(partial(final_step, state.run_dir)) != state.step:
        with recorder.phase("export"):
            _save_final(models, engines, config, state)
    else:
        # Its card was written before the last step's row
        with recorder.optional("the card of the final model"):
            on_rank_zero(partial(_write_cards, state.run_dir, config))


def _write_cards(run_dir: Path, config: TrainConfig) -> None:
    for folder in sorted(final_dir(run_dir).iterdir()):
        if folder.is_dir():
            write_card(run_dir, folder, config)


def chosen_models(models: Models, config: ExportConfig) -> list[Trainable | Probe]:
    """The actor, and with export.critic the critic."""
    if config.critic and models.critic is not None:
        return [models.actor, models.critic]
    return [models.actor]


def save_models(
    models: Models,
    engines: EnginePool,
    chosen: list[Trainable | Probe],
    state: RunState,
    name: str,
    config: TrainConfig,
    optional: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Collective: write some models to hf/<name>, each with a model card. optional: entered, with
    its name, while a model is written."""
    with engines.kv_cache_offloaded():
        for model in chosen:
            models.memory.enter("export_policy" if model.name == "actor" else "export_critic")
            folder = state.run_dir / HF_FOLDER / name / model.name
            with optional(f"{HF_FOLDER}/{name}/{model.name}"):
                if isinstance(model, Probe):
                    on_rank_zero(partial(model.export, folder))
                    continue
                source = models.sources[model.name]
                save_hf(model.chunks, model.spec, model.mesh, model.head, source, folder)
                if model.adapter is not None and model.head == "lm":
                    save_adapters(
                        model.chunks,
                        model.spec,
                        model.mesh,
                        model.adapter,
                        source,
                        adapter_folder(folder),
                    )
                on_rank_zero(partial(write_card, state.run_dir, folder, config))
        models.memory.enter("rollout")


def _save_final(models: Models, engines: EnginePool, config: TrainConfig, state: RunState) -> None:
    on_rank_zero(partial(mark_final, state.run_dir, None))
    save_models(models, engines, chosen_models(models, config.export), state, FINAL, config)
    on_rank_zero(partial(mark_final, state.run_dir, state.step))


def evaluate(
    rollouts: Rollouts,
    sets: Sequence[EvalSet],
    config: EvaluationConfig,
    state: RunState,
    recorder: Recorder,
) -> None:
    """Collective: answer the evaluation sets, where this step is one to do so."""
    if state.step == 0:
        due = config.before_training
    else:
        due = state.is_due(config.every)
    if not due or not sets or rollouts.engines.failure is not None:
        return
    # The next safe point saves, and ends the run for it
    with (
        suppress(EnginesFailed),
        rollouts.engines.rank0_uses_engines(),
    ):
        if dist.get_rank() == 0:
            with recorder.phase("evaluation"):
                for result in evaluate_sets(
                    rollouts, sets, config, state.run_dir, state.step, recorder.optional
                ):
                    recorder.add(result.metrics())
                    recorder.console.note(result.line(f"step {state.step}"))
    if state.step == 0:
        recorder.write(0)


def evaluate_sets(
    rollouts: Rollouts,
    sets: Sequence[EvalSet],
    config: EvaluationConfig,
    run_dir: Path,
    step: int,
    optional: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> list[SetResult]:
    """On rank 0: the result of every set; raw outputs and evaluation.json go into the run
    directory. optional: entered, with the name of a file, while it is written."""
    verifier = rollouts.verifier
    assert verifier is not None, "responses are graded on rank 0"
    sampling = config.sampling_beside(rollouts.sampling)
    generator = rollouts.generator(sampling, rollouts.seed + EVALUATION_SEED)
    evaluator = Evaluator(verifier, rollouts.reward, optional=optional)
    results = []
    for entry, prompts in zip(sets, rollouts.evaluation_prompts, strict=True):
        problems = numbered(entry.name, prompts)
        responses = evaluator.answer(entry.name, problems, entry.samples, generator)
        if step:
            # Token ids are as long as the texts. Only the initial policy's are kept, for
            # value_pretraining.from.
            for response in responses:
                response.response_ids = None
        outputs = run_dir / "evaluation" / f"step_{step:06d}_{entry.name}.jsonl"
        results.append(
            evaluator.conclude(entry.name, problems, responses, entry.samples, outputs)[0]
        )
    with optional("evaluation.json"), atomic_write(run_dir / "evaluation.json") as file:
        content = {"step": step, "sampling": sampling.model_dump(mode="json")}
        json.dump(content | {"sets": [asdict(result) for result in results]}, file, indent=2)
    return results


def show_header(config: TrainConfig, models: Models, engines: int, recorder: Recorder) -> None:
    """Show what a run is made of. engines: their number."""
    world = dist.get_world_size()
    spec = models.actor.spec
    facts = {
        "model": f"{config.model.path} ({spec.family}, {spec.parameter_count():,} parameters)",
        "preset": config.preset or "none",
        **{name: config.trainable(name).layout.describe(world) for name in models.sources},
        "kernels": current_platform().capabilities(config.model.attention),
        "engines": f"{engines} x TP{config.rollout.tp}",
        "step": (
            f"{config.batch.prompts_per_step} prompts x {config.batch.samples_per_prompt} responses"
        ),
        "seed": config.run.seed,
        "run": recorder.run_dir,
    }
    recorder.console.header(f"vapo-megatron train: {config.run.name}", facts)


def record_step(
    batch: ShardedBatch, memory: MemoryPlan, state: RunState, recorder: Recorder
) -> None:
    """End the step: its metrics go into the files, its line onto the console."""
    timer = recorder.timer
    seconds = time.perf_counter() - state.started
    # Phases that are not part of every step would make the steps' times incomparable.
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
    estimates = batch.gather_on_rank0(kept, "values", "advantages")
    bounds = offsets(batch.table.response_lengths[:kept])
    recorder.estimates(state.step, estimates.get("values"), estimates.get("advantages"), bounds)
    recorder.add_cost()
    state.metrics = recorder.write(state.step)
    recorder.console.step(state.step, state.last_step, state.metrics)


def show_end(name: str, recorder: Recorder) -> None:
    """Show what evaluations have reached, what the run has cost, and where everything is."""
    run_dir = recorder.run_dir
    if recorder.is_main_rank:
        rows = read_metrics(recorder.run_dir)
    else:
        rows = []
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
    recorder.console.closing(f"{name} finished", reached | _cost(rows) | places)


def _cost(rows: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    cost = totals(rows)
    shown: dict[str, object] = {}
    if cost.gpu_hours:
        shown["GPU-hours"] = f"{cost.gpu_hours:,.2f}"
    elif cost.hours:
        shown["hours"] = f"{cost.hours:,.2f}"
    if cost.tokens:
        shown["response tokens"] = f"{cost.tokens:,.0f}"
    return shown
