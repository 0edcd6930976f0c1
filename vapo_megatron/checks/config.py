"""The checks that a command started by hand makes before it imports the rest of the program: most
mistakes end here."""

import os
from importlib.util import find_spec
from pathlib import Path

from vapo_megatron.checks.limits import check_open_files
from vapo_megatron.config.critic_probes import CriticPretrainingConfig
from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.config.run_directory import check_folders, check_place
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.jsonl import read_rows
from vapo_megatron.data.rows import eval_problems, train_problems
from vapo_megatron.errors import BadInput
from vapo_megatron.models.model_files import read_config

_WANDB_MODES = ("online", "offline", "disabled")


def look_first(settings: TrainConfig | SftConfig | EvaluateConfig) -> None:
    """Files first, without any library; then the numbers of model and layout, which are read with
    torch.

    Raises:
        BadInput: the run directory is taken, or the model, the data or the sizes cannot be used.
            Whatever this lets pass is checked in full where the run is prepared; a run that may go
            on, or be finished, is left to that.
    """
    check_open_files()
    check_folders(Path(settings.run.directory))
    if settings.run.resume != "never" and Path(settings.run.directory).exists():
        return
    check_place(settings.run)
    if not isinstance(settings, EvaluateConfig):
        check_trackers(settings.monitoring)
    if settings.model is not None:
        read_config(Path(settings.model.path))
    if isinstance(settings, SftConfig):
        for _ in read_rows(Path(settings.data.path), "data.path"):
            pass
    else:
        if isinstance(settings, TrainConfig):
            # Else on records, with their own fields
            trains_on_rows = not isinstance(settings, CriticPretrainingConfig)
            train_problems(
                settings.data, settings.critic.privileged_field if trains_on_rows else None
            )
        for entry in settings.data.eval:
            eval_problems(entry, settings.data.fields)

    from vapo_megatron.checks.sizes import check_numbers

    check_numbers(settings)


def check_trackers(config: MonitoringConfig) -> None:
    """Raises BadInput where the package of a configured tracker is not installed, or that has no
    such mode."""
    mode = os.environ.get("WANDB_MODE")
    if config.wandb == "online" and mode and mode not in _WANDB_MODES:
        raise BadInput(
            f"WANDB_MODE={mode}: expected one of {', '.join(_WANDB_MODES)}; or set monitoring.wandb"
        )
    if config.wandb != "disabled" and find_spec("wandb") is None:
        raise BadInput(
            f"monitoring.wandb={config.wandb}: the package wandb is not installed: pip install "
            "'vapo-megatron[wandb]', or set it to disabled"
        )
    if config.mlflow is not None and find_spec("mlflow") is None:
        raise BadInput(
            f"monitoring.mlflow={config.mlflow}: the package mlflow is not installed: pip install "
            "'vapo-megatron[mlflow]', or set it to null"
        )
