"""Decides where a run begins: from scratch, at its saved state, or not at all because it is
finished."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vapo_megatron.checkpoint.checkpoints import (
    CHECKPOINT_FOLDER,
    HF_FOLDER,
    final_step,
    latest_checkpoint,
    list_checkpoints,
    restore_replaced,
)
from vapo_megatron.checkpoint.manifest import check_structure, read_manifest, read_progress
from vapo_megatron.checkpoint.resume import Start, check_config_change
from vapo_megatron.config.run_directory import check_folders, check_place, make_run_dir
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.prompts import PromptSource, train_prompts
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import BadInput
from vapo_megatron.files import cannot_write
from vapo_megatron.models.registry import read_spec
from vapo_megatron.monitoring.metrics import read_metrics
from vapo_megatron.training.sft import load_demonstrations, planned_steps
from vapo_megatron.weights.adapters import base_identity
from vapo_megatron.weights.torch_dist import read_model_card

Settings = TrainConfig | SftConfig

_logger = logging.getLogger(__name__)


def prepare_start(settings: Settings, check: Callable[[], None], take: Callable[[], None]) -> Start:
    """foresee_start, and have a run directory; once for all ranks.

    take: called before the run directory is changed, or found to be as it will stay; raises
        BadInput where somebody
    else works in it. May be called again.
    """
    run_dir = Path(settings.run.directory)

    def take_and_restore() -> None:
        take()
        try:
            restore_replaced(run_dir)
        except OSError as error:
            raise cannot_write(run_dir / CHECKPOINT_FOLDER, error) from None

    start = foresee_start(settings, check, take_and_restore)
    if start.finished:
        _logger.info(
            "%s: finished already, nothing to do (a larger number of steps would continue it)",
            run_dir,
        )
    elif start.checkpoint is None:
        # Two starts at once would both begin in a folder that is empty, or came to nothing.
        take()
        replaces = settings.run.overwrite or settings.run.resume == "auto"
        # Models that an attempt exported before its first checkpoint stay: the same steps write the
        # same ones again.
        make_run_dir(
            settings,
            settings.run.model_copy(update={"overwrite": replaces}),
            not settings.run.overwrite,
        )
    return start


def foresee_start(
    settings: Settings, check: Callable[[], None], take: Callable[[], None] = lambda: None
) -> Start:
    """Decide where the run begins, and check all that can be checked before anything starts.
    Nothing is changed.

    check: raises BadInput for a config that cannot work; take: as in prepare_start. Raises BadInput
        where the config
    cannot work, does not fit the saved state, or that is damaged.
    """
    run_dir = Path(settings.run.directory)
    check_folders(run_dir)
    if settings.run.resume == "auto":
        if is_finished(settings):
            return Start(finished=True)
        if run_dir.exists():
            take()
        if (checkpoint := latest_checkpoint(run_dir)) is not None:
            _check_saved(settings, checkpoint, check)
            return Start(checkpoint)
    check()
    if settings.run.resume == "never":
        check_place(settings.run)
    return Start()


def _check_saved(settings: Settings, checkpoint: Path, check: Callable[[], None]) -> None:
    """Raises BadInput if the run cannot continue from this state."""
    manifest = read_manifest(checkpoint)
    if isinstance(settings, SftConfig):
        kind = "sft"
    else:
        if _has_actor(settings):
            kind = "train"
        else:
            kind = "pretrain-critic"
    if manifest.kind != kind:
        raise BadInput(
            f"run.name={settings.run.name}: {checkpoint} is of a {manifest.kind} run: choose "
            "another name"
        )
    check_structure(checkpoint, manifest)
    check_config_change(settings, checkpoint, settings.run.allow_config_change)
    check()
    _check_fit(settings, checkpoint)
    if isinstance(settings, TrainConfig) and _has_actor(settings):
        # The same prompts, in the same order, as up to the saved state.
        tokenizer = TextTokenizer(Path(settings.model.path), settings.data.prompt)
        prompts = train_prompts(settings.data, tokenizer, settings.critic.privileged_field)
        source = PromptSource(
            prompts, settings.run.seed, settings.data.shuffle, settings.data.weights
        )
        source.restore(read_progress(checkpoint, manifest).prompts)


def _has_actor(settings: Settings) -> bool:
    """Whether there is a policy besides the critic."""
    return isinstance(settings, SftConfig) or "actor" in settings.model_sizes


def prepare_from_copy(settings: Settings, copy: Path, take: Callable[[], None]) -> Start:
    """prepare_start where ranks were lost and a copy of their state is left, newer than the last
    checkpoint.

    Raises:
        BadInput: the config differs from the copy's, or another run uses the run directory.
    """
    take()
    check_config_change(settings, copy, settings.run.allow_config_change)
    return Start(copy)


def is_finished(settings: Settings) -> bool:
    """Whether the last step that the config asks for is in the metrics, in the final model and,
    unless all checkpoints were removed, in a checkpoint.

    Raises:
        BadInput: the number of steps follows from data.path, and that cannot be read.
    """
    run_dir = Path(settings.run.directory)
    if not _has_actor(settings):
        return (run_dir / HF_FOLDER / "value_pretrained" / "critic").is_dir()
    exported = final_step(run_dir)
    if exported is None:
        return False
    if isinstance(settings, TrainConfig):
        steps = settings.run.steps
    else:
        steps = settings.data.steps or planned_steps(
            settings, load_demonstrations(settings).samples
        )
    measured = max((row["step"] for row in read_metrics(run_dir)), default=0)
    if min(exported, measured) < steps:
        return False
    # A run that is killed here was still writing its last one.
    saved = max(list_checkpoints(run_dir), default=None)
    return saved is None or saved.step >= steps or not settings.checkpoint.saves


def _check_fit(settings: Settings, checkpoint: Path) -> None:
    """Raises BadInput where a model of the config has another shape than the one that was saved."""
    if _has_actor(settings):
        models = {"actor": ("model.path", Path(settings.model.path))}
    else:
        models = {}
    if isinstance(settings, TrainConfig) and settings.has_critic_model:
        models["critic"] = settings.critic_source
    for name, (key, path) in models.items():
        card = read_model_card(checkpoint / name)
        now = read_spec(path)
        saved = card.spec
        # The dtype is what the weights lie in at that path, which a resumed run does not read.
        if replace(now, dtype=saved.dtype, value_outputs=saved.value_outputs) != saved:
            raise BadInput(
                f"{key}={path}: config.json differs from the model's in {checkpoint / name}: give "
                "back the model that the run started from, or choose another run.name"
            )
        if card.base is not None and card.base != base_identity(path):
            raise BadInput(
                f"{key}={path}: its weights are not those that the adapters in {checkpoint / name} "
                "belong to: give back the model that the run started from, or choose another "
                "run.name"
            )
