"""The models that a run has exported: which there are, and which one is meant."""

from pathlib import Path

import yaml

from vapo_megatron.checkpoint.checkpoints import CHECKPOINT_FOLDER, FINAL, HF_FOLDER
from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput


def exports_of(run_dir: Path) -> dict[str, Path]:
    """The folders of a run's exported policies by name, the one to take first: final, then the
    newest step."""
    folders = {
        path.parent.parent.name: path.parent.parent
        for path in (run_dir / HF_FOLDER).glob("*/actor/config.json")
    }
    ordered = sorted(folders, key=lambda name: (name == FINAL, name), reverse=True)
    return {name: folders[name] for name in ordered}


def chosen_export(run_dir: Path, checkpoint: str) -> Path:
    """The folder hf/<checkpoint> of a run. checkpoint "": final, or else the newest.

    Raises:
        BadInput: the run has no such export.
    """
    there = exports_of(run_dir)
    if checkpoint in there:
        return there[checkpoint]
    if there and not checkpoint:
        return next(iter(there.values()))
    if there:
        raise BadInput(
            f"--checkpoint {checkpoint}: {run_dir / HF_FOLDER} holds {', '.join(there)}: name one "
            "of them"
        )
    raise BadInput(
        f"{run_dir}: has no exported model in {HF_FOLDER}/: export one with vapo-megatron "
        f"convert-megatron-to-hf --checkpoint {run_dir / CHECKPOINT_FOLDER}/step_N --out "
        f"{run_dir / HF_FOLDER}/step_N/actor"
    )


def kind_of_run(config: Path) -> type[TrainConfig | SftConfig | EvaluateConfig]:
    """The config of the command that wrote a run's config.yaml."""
    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return TrainConfig  # loading it names the fault
    sections = content if isinstance(content, dict) else {}
    if "algorithm" in sections:
        return TrainConfig
    if "actor" in sections:
        return SftConfig
    return EvaluateConfig
