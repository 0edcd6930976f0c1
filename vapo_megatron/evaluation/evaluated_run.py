"""`vapo-megatron evaluate --checkpoint`: what a training run has exported, evaluated as the run itself does it."""

from pathlib import Path

from pydantic import ValidationError

from vapo_megatron.checkpoint.checkpoints import CHECKPOINT_FOLDER
from vapo_megatron.checkpoint.final_model import HF_FOLDER
from vapo_megatron.config.data import EvaluationDataConfig, ProblemsConfig
from vapo_megatron.config.run import EVALUATION_SEED, RunPlace
from vapo_megatron.config.train import EvaluateConfig, TrainConfig
from vapo_megatron.errors import BadInput


def evaluation_of(config: TrainConfig, checkpoint: str) -> EvaluateConfig:
    """The evaluation of the policy in hf/<checkpoint> of a run: the sets, prompts, seeds, sampling and verifier of the
    run's own evaluations. It has a run directory of its own, <run.name>_<checkpoint>.

    Raises:
        BadInput: data.eval is empty, or the run has no such export.
    """
    run, data = config.run, config.data
    if not data.eval:
        raise BadInput("data.eval is empty: name a set to answer, 'data.eval=[{name: aime2024, path: FILE}]'")
    exports = Path(run.directory) / HF_FOLDER
    actor = exports / checkpoint / "actor"
    there = sorted(path.parent.parent.name for path in exports.glob("*/actor/config.json"))
    if checkpoint not in there:
        saved = Path(run.directory) / CHECKPOINT_FOLDER / checkpoint
        remedy = f"expected one of {', '.join(there)}" if there else "give run.root and run.name of a run with exports"
        if (saved / "actor").is_dir():
            remedy = f"make it: python tools/convert_megatron_to_hf.py --checkpoint {saved} --out {actor}"
        raise BadInput(f"--checkpoint {checkpoint}: {actor} holds no model: {remedy}")
    try:
        place = RunPlace(
            name=f"{run.name}_{checkpoint}",
            root=run.root,
            seed=run.seed + EVALUATION_SEED,
            overwrite=run.overwrite,
            resume=run.resume,
        )
    except ValidationError as error:
        (key, *_), what = error.errors()[0]["loc"], error.errors()[0]["msg"]
        raise BadInput(f"--checkpoint {checkpoint}: run.{key} of its evaluation cannot be used: {what}") from None
    return EvaluateConfig(
        run=place,
        model=config.model.model_copy(update={"path": str(actor)}),
        data=EvaluationDataConfig(**{name: getattr(data, name) for name in ProblemsConfig.model_fields}),
        sampling=config.evaluation.sampling_beside(config.sampling),
        rollout=config.rollout.reading_checkpoints(),
        reward=config.reward,
    )
