"""Models of a run as Hugging Face directories: hf/<name>/actor and critic; adapters also alone, actor_adapter."""

from functools import partial

from vapo_megatron.checkpoint.checkpoints import FINAL, HF_FOLDER, begin_final, end_final, final_step
from vapo_megatron.collectives import on_rank_zero
from vapo_megatron.config.run import ExportConfig
from vapo_megatron.engines.engines import Engines
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.models import Models
from vapo_megatron.training.state import RunState
from vapo_megatron.weights.save import adapter_folder, save_adapters, save_hf


def export(models: Models, engines: Engines, config: ExportConfig, state: RunState, recorder: Recorder) -> None:
    """Collective: write the models, where this step is one to do so."""
    if not state.is_due(config.every):
        return
    with recorder.phase("export"):
        if state.step == state.last_step:
            _save_final(models, engines, config, state)
        else:
            save_models(models, engines, chosen_models(models, config), state, f"step_{state.step:06d}")


def export_critic(models: Models, engines: Engines, config: ExportConfig, state: RunState) -> None:
    """Collective: write the pretrained critic, where critics are exported."""
    chosen = [model for model in chosen_models(models, config) if model.name != "actor"]
    save_models(models, engines, chosen, state, "value_pretrained")


def export_final(models: Models, engines: Engines, config: ExportConfig, state: RunState, recorder: Recorder) -> None:
    """Collective: write the final model unless it is there: no step was left to do, because an earlier attempt was
    saved and ended before the export, or run.steps is lower now."""
    if on_rank_zero(partial(final_step, state.run_dir)) != state.step:
        with recorder.phase("export"):
            _save_final(models, engines, config, state)


def chosen_models(models: Models, config: ExportConfig) -> list[Trainable]:
    """The actor, and the critic where it is asked for."""
    return [model for model in models.trained if model.name == "actor" or config.critic]


def save_models(models: Models, engines: Engines, chosen: list[Trainable], state: RunState, name: str) -> None:
    """Collective: write some models to hf/<name>."""
    with engines.kv_cache_offloaded():
        for model in chosen:
            models.memory.enter("export_policy" if model.name == "actor" else "export_critic")
            folder = state.run_dir / HF_FOLDER / name / model.name
            source = models.sources[model.name]
            save_hf(model.chunks, model.spec, model.mesh, model.head, source, folder)
            if model.adapter is not None and model.head == "lm":
                save_adapters(model.chunks, model.spec, model.mesh, model.adapter, source, adapter_folder(folder))
        models.memory.enter("rollout")


def _save_final(models: Models, engines: Engines, config: ExportConfig, state: RunState) -> None:
    on_rank_zero(partial(begin_final, state.run_dir))
    save_models(models, engines, chosen_models(models, config), state, FINAL)
    on_rank_zero(partial(end_final, state.run_dir, state.step))
