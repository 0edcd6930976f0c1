"""Where a run begins: anew, or at the saved state of its last life; or not at all, where it is finished."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vapo_megatron.checkpoint.config_change import check_config_change
from vapo_megatron.checkpoint.manifest import check_structure, read_manifest
from vapo_megatron.checkpoint.units import newest_unit, remove_leftovers
from vapo_megatron.config.load import dump_config
from vapo_megatron.config.run_directory import make_run_dir
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.monitoring.metrics import read_metrics

Settings = TrainConfig | SftConfig


@dataclass(frozen=True)
class Start:
    """Where a run begins. unit: the saved state; None for a new run."""

    unit: Path | None = None
    finished: bool = False


def prepare_start(settings: Settings, check: Callable[[], None]) -> Start:
    """Check what can be checked before anything starts, and have a run directory; once for all ranks.

    Args:
        settings: the config of the run.
        check: raises BadInput for a config that cannot work.

    Raises:
        BadInput: the config cannot work, does not fit the saved state, or that is damaged; nothing was changed.
    """
    run_dir = Path(settings.run.directory)
    if settings.run.resume == "never":
        check()
        make_run_dir(settings, settings.run)
        return Start()
    steps = settings.run.steps if isinstance(settings, TrainConfig) else settings.data.steps
    if is_finished(run_dir, steps):
        print(f"vapo-megatron: {run_dir}: finished already, nothing to do (a larger number of steps would go on)")
        return Start(finished=True)
    unit = newest_unit(run_dir)
    if unit is None:
        check()
        make_run_dir(settings, settings.run.model_copy(update={"overwrite": _may_replace(settings, run_dir)}))
        return Start()
    manifest = read_manifest(unit)
    kind = "train" if isinstance(settings, TrainConfig) else "sft"
    if manifest.kind != kind:
        raise BadInput(f"run.name={settings.run.name}: {unit} is of a {manifest.kind} run: choose another name")
    check_structure(unit, manifest)
    check_config_change(settings, unit, settings.run.allow_config_change)
    check()
    remove_leftovers(run_dir)
    dump_config(settings, run_dir / "config.yaml")
    return Start(unit)


def is_finished(run_dir: Path, steps: int | None) -> bool:
    """Whether the last step is in the metrics and the final model is there; steps None: whatever the last step was."""
    if not (run_dir / "checkpoints" / "final").is_dir():
        return False
    done = max((row["step"] for row in read_metrics(run_dir)), default=0)
    return steps is None or done >= steps


def _may_replace(settings: Settings, run_dir: Path) -> bool:
    """Whether what an earlier life has left, which saved no state, may go: not if it has exported models."""
    exports = run_dir / "checkpoints"
    if settings.run.overwrite or not exports.is_dir() or not any(exports.iterdir()):
        return True
    raise BadInput(
        f"run.resume=auto: {run_dir} has exported models and no saved state to go on from: choose another run.name, or "
        "set run.overwrite=true to start anew"
    )
