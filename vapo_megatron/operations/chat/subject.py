"""Whom `vapo-megatron chat` talks to: a checkpoint of a run, with its prompts and sampling, or a
model directory."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vapo_megatron.config.chat import ChatConfig, ChatDataConfig
from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.load import load_config
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.operations.exports import chosen_export, kind_of_run


@dataclass(frozen=True)
class Subject:
    """A conversation's settings and the critic beside the policy.

    critic: its Hugging Face directory; None: there is none to read, for the reason in
    without_values ("": nobody expects one). value_range: smallest and largest return of the run;
    None: unknown.
    """

    settings: ChatConfig
    critic: Path | None = None
    value_loss: ValueLossConfig = field(default_factory=ValueLossConfig)
    value_range: tuple[float, float] | None = None
    without_values: str = ""


def find_subject(place: Path, checkpoint: str, overrides: Sequence[str], presets: Path) -> Subject:
    """The subject at a run's directory, or in a Hugging Face directory.

    Args:
        checkpoint: name of an export of a training run; "": final, or else the newest.
        overrides: of the run's config; of a model directory, of ChatConfig.

    Raises:
        BadInput: there is neither, the run has no such export, or an override is wrong.
    """
    config = place / "config.yaml"
    if config.is_file():
        return _of_run(place, config, checkpoint, overrides, presets)
    if (place / "config.json").is_file() and checkpoint:
        raise BadInput(f"--checkpoint {checkpoint}: {place} is a model, not a run: leave it out")
    values = [f"model.path={place}", *overrides]
    return Subject(load_config(ChatConfig, None, values, presets))


def _of_run(
    run_dir: Path, config: Path, checkpoint: str, overrides: Sequence[str], presets: Path
) -> Subject:
    kind = kind_of_run(config)
    settings = load_config(kind, config, overrides, presets)
    if isinstance(settings, EvaluateConfig):
        if settings.model is None:
            raise BadInput(
                f"{config}: its model is on another server: ask that one, or give a run or model "
                "directory"
            )
        return Subject(
            ChatConfig(
                model=settings.model,
                data=ChatDataConfig(prompt=settings.data.prompt),
                sampling=settings.sampling,
                rollout=settings.rollout,
                seed=settings.run.seed,
            )
        )
    export = chosen_export(run_dir, checkpoint)
    model = settings.model.model_copy(update={"path": str(export / "actor")})
    data = ChatDataConfig(prompt=settings.data.prompt)
    if not isinstance(settings, TrainConfig):
        return Subject(ChatConfig(model=model, data=data, seed=settings.run.seed))
    chat = ChatConfig(
        model=model,
        data=data,
        sampling=settings.evaluation.sampling_beside(settings.sampling),
        rollout=settings.rollout.reading_checkpoints().model_copy(update={"agent": None}),
        seed=settings.run.seed,
    )
    reason = _without_values(settings, export)
    return Subject(
        chat,
        None if reason else export / "critic",
        settings.algorithm.value_loss,
        settings.return_range,
        reason,
    )


def _without_values(config: TrainConfig, export: Path) -> str:
    """Why the values of a run's critic cannot be shown; "" where they can."""
    if not config.algorithm.uses_critic:
        return f"algorithm.advantage.estimator={config.algorithm.advantage.estimator} has no critic"
    if not config.has_critic_model:
        return f"critic.kind={config.critic.kind} is not a separate model"
    if config.critic.privileged_field is not None:
        return (
            f"its critic also reads the field {config.critic.privileged_field} of a row, which a "
            "conversation does not have"
        )
    if not (export / "critic" / "config.json").is_file():
        return f"{export} has no critic (export.critic=true exports it)"
    return ""
