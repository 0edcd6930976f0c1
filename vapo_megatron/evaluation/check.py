"""Checks an evaluation before anything starts."""

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError

from vapo_megatron.agents.agent import check_agent
from vapo_megatron.agents.tool_format import check_tool_parser
from vapo_megatron.checkpoint.checkpoints import CHECKPOINT_FOLDER, HF_FOLDER
from vapo_megatron.config.data import EvaluationDataConfig, ProblemsConfig
from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.model import ModelConfig
from vapo_megatron.config.run import EVALUATION_SEED, RunPlace
from vapo_megatron.config.run_directory import check_room
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.prompts import eval_prompts
from vapo_megatron.data.sample import Prompt
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.engine_limits import check_context, engine_devices
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.errors import BadInput
from vapo_megatron.evaluation.responses import complete_groups
from vapo_megatron.evaluation.sets import numbered
from vapo_megatron.megatron.platform import Platform
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.weights.hf_writer import CONFIG, carried_files
from vapo_megatron.weights.load import check_weights


@dataclass(frozen=True)
class Evaluation:
    """A checked evaluation. prompts: by the name of their set. A model on our own engines has a
    spec, a tokenizer, and engine_devices, the GPUs of each server (None: the CPU); an external
    server has none of them."""

    settings: EvaluateConfig
    prompts: dict[str, list[Prompt]]
    spec: ModelSpec | None = None
    tokenizer: TextTokenizer | None = None
    engine_devices: Sequence[range | None] = ()

    @property
    def model_name(self) -> str:
        """The model as the console and evaluation.json name it."""
        settings = self.settings
        if settings.server is not None:
            return f"{settings.server.model} at {settings.server.url}"
        assert settings.model is not None
        return settings.model.path

    def origin(self, name: str) -> str:
        """Fingerprint of everything that the responses to a set depend on, except their number."""
        settings = self.settings
        depends_on: dict[str, object] = {
            "seed": settings.run.seed,
            "sampling": settings.sampling.model_dump(mode="json"),
            "prompt": settings.data.prompt.model_dump(mode="json"),
            "problems": [[p.id, p.problem, list(p.token_ids)] for p in self.prompts[name]],
        }
        if settings.server is not None:
            depends_on["server"] = [
                settings.server.model,
                settings.server.api,
                settings.server.extra,
            ]
            # Our own engines get them as token ids.
            if before := [[p.id, *map(dict, p.before)] for p in self.prompts[name] if p.before]:
                depends_on["before"] = before
        else:
            assert settings.model is not None
            folder = Path(settings.model.path)
            depends_on["model"] = [
                [file.name, file.stat().st_size, file.stat().st_mtime_ns]
                for file in sorted(folder.glob("*.safetensors"))
            ]
            depends_on["model_files"] = {
                name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
                for name in (CONFIG, *carried_files("lm"))
                if (folder / name).is_file()
            }
            depends_on["dtype"] = settings.model.dtype
            if settings.rollout.server_args:
                depends_on["server_args"] = settings.rollout.server_args
            if settings.rollout.agent is not None:
                # An agent is given all of a row, and its grades are not made again.
                depends_on["agent"] = [
                    settings.rollout.agent,
                    settings.rollout.episode.model_dump(mode="json"),
                    settings.reward.correct_above,
                    [[p.answer, dict(p.extra)] for p in self.prompts[name]],
                ]
        return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]


def check_evaluation(settings: EvaluateConfig, platform: Platform) -> Evaluation:
    """Read everything but the weights. Raises BadInput for anything that cannot work."""
    if settings.server is not None:
        if settings.rollout.agent is not None:
            raise BadInput(
                f"rollout.agent={settings.rollout.agent} with server.url={settings.server.url}: "
                "episodes are played on our own engines, give model.path instead of server"
            )
        settings.server.api_key()
        check_room(Path(settings.run.directory))
        return Evaluation(settings, _prompts(settings, None))
    assert settings.model is not None
    spec, tokenizer = _read_model(settings, settings.model)
    check_agent(settings.rollout, tokenizer)
    devices = engine_devices(settings.rollout, platform)
    model_dir = Path(settings.model.path)
    EngineServer(
        model_dir, settings.rollout, settings.model.dtype, Path(os.devnull), devices[0]
    ).check_arguments()
    for caution in (check_tool_parser(settings.rollout, tokenizer), other_prompt(settings)):
        if caution:
            print(f"vapo-megatron: caution: {caution}", file=sys.stderr, flush=True)
    check_room(Path(settings.run.directory))
    return Evaluation(settings, _prompts(settings, tokenizer), spec, tokenizer, devices)


def read_inputs(settings: EvaluateConfig) -> str:
    """The output of `evaluate --check`: the problems and the model. A model that does not exist yet
    is no error.

    Raises BadInput for a file that cannot be used.
    """
    tokenizer = None
    model = "a server that is not ours"
    if settings.server is not None:
        settings.server.api_key()
    if settings.model is not None:
        model = f"model.path={settings.model.path}"
        if Path(settings.model.path).exists():
            spec, tokenizer = _read_model(settings, settings.model)
            model += f": {spec.family}, {spec.parameter_count():,} parameters"
        else:
            model += ": missing, which is right only if a run has yet to write it"
    prompts = _prompts(settings, tokenizer)
    if tokenizer is not None or settings.server is not None:
        _check_responses(Evaluation(settings, prompts))
    if caution := other_prompt(settings):
        print(f"vapo-megatron: caution: {caution}", file=sys.stderr, flush=True)
    return "\n".join([*(f"{name}: {len(rows)} problems" for name, rows in prompts.items()), model])


def _check_responses(plan: Evaluation) -> None:
    """Raises BadInput where an earlier start left responses of another evaluation."""
    settings = plan.settings
    if settings.run.resume == "never":
        return
    for entry in settings.data.eval:
        path = responses_path(settings, entry.name)
        complete_groups(path, entry.samples, plan.origin(entry.name))


def responses_path(settings: EvaluateConfig, name: str) -> Path:
    """The file of a set's responses."""
    return Path(settings.run.directory) / "evaluation" / f"{name}.jsonl"


def other_prompt(settings: EvaluateConfig) -> str | None:
    """A caution where the model is the export of a run that was trained with another prompt."""
    if settings.model is None:
        return None
    path = Path(settings.model.path)
    run_dir = path.parents[2] if len(path.parts) > 3 else path
    config = run_dir / "config.yaml"
    if path.parent.parent.name != HF_FOLDER or not config.is_file():
        return None
    try:
        trained = TrainConfig.model_validate(yaml.safe_load(config.read_text(encoding="utf-8")))
    except (ValidationError, yaml.YAMLError, OSError):
        return None  # of another version, or no run
    mine = settings.data.prompt.model_dump()
    theirs = trained.data.prompt.model_dump()
    apart = [key for key in mine if mine[key] != theirs.get(key)]
    if not apart:
        return None
    key = apart[0]
    return (
        f"data.prompt.{key}={mine[key]!r:.60}: {run_dir} was trained with {theirs.get(key)!r:.60}, "
        f"and a model answers best the prompts of its training: `vapo-megatron evaluate {config} "
        f"--checkpoint {path.parent.name}` asks with these"
    )


def _read_model(settings: EvaluateConfig, model: ModelConfig) -> tuple[ModelSpec, TextTokenizer]:
    directory = Path(model.path)
    spec = read_spec(directory)
    check_weights(directory, spec, "lm")
    prompt_tokens = settings.data.max_prompt_tokens
    new_tokens = settings.sampling.max_new_tokens
    check_context(
        prompt_tokens,
        "sampling.max_new_tokens",
        new_tokens,
        settings.rollout,
        spec.max_position_embeddings,
    )
    if settings.rollout.agent is not None:
        longest = settings.rollout.episode.max_tokens
        key = "rollout.episode.max_tokens"
        context = spec.max_position_embeddings
        check_context(0, key, longest, settings.rollout, context, fewest=1)
    tokenizer = TextTokenizer(directory, settings.data.prompt)
    tokenizer.check_vocabulary(spec.vocab_size)
    return spec, tokenizer


def _prompts(settings: EvaluateConfig, tokenizer: TextTokenizer | None) -> dict[str, list[Prompt]]:
    """The prompts of every set, without token ids where there is no tokenizer."""
    data = settings.data
    return {
        entry.name: numbered(entry.name, eval_prompts(entry, data, tokenizer))
        for entry in data.eval
    }


def facts(plan: Evaluation, run_dir: Path) -> dict[str, object]:
    """The lines at the head of the console."""
    settings, sampling = plan.settings, plan.settings.sampling
    model = plan.model_name
    engines = "none of our own"
    if plan.spec is not None:
        model = f"{model} ({plan.spec.family}, {plan.spec.parameter_count():,} parameters)"
        engines = f"{len(plan.engine_devices)} x TP{settings.rollout.tp}"
    return {
        "model": model,
        "sets": ", ".join(
            f"{entry.name} ({len(plan.prompts[entry.name])} problems x {entry.samples})"
            for entry in settings.data.eval
        ),
        "sampling": f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, at most "
        f"{sampling.max_new_tokens} tokens",
        "engines": engines,
        "seed": settings.run.seed,
        "run": run_dir,
    }


def at_its_place(config: TrainConfig, path: Path, overrides: Sequence[str]) -> TrainConfig:
    """The config of a run whose directory was copied or moved, with the directory that holds it:
    config.yaml has the place that the run was started in.

    Args:
        config: as it was read.
        path: the file that it was read from.
        overrides: of the command line; only run.root and run.name count.
    """
    folder = path.resolve().parent
    is_named = any(override.startswith(("run.root=", "run.name=")) for override in overrides)
    if path.name != "config.yaml" or is_named or not (folder / HF_FOLDER).is_dir():
        return config
    if folder == Path(config.run.directory).resolve():
        return config
    print(
        f"vapo-megatron: {path} lies in another place than it names ({config.run.directory}): the "
        f"exports beside it, in {folder}, are evaluated",
        file=sys.stderr,
    )
    run = config.run.model_copy(update={"root": str(folder.parent), "name": folder.name})
    return config.model_copy(update={"run": run})


def evaluation_of(config: TrainConfig, checkpoint: str) -> EvaluateConfig:
    """The evaluation of the policy in hf/<checkpoint> of a run: the sets, prompts, seeds, sampling
    and verifier of the run's own evaluations. It has its own run directory,
    <run.name>_<checkpoint>.

    Raises:
        BadInput: data.eval is empty, or the run has no such export.
    """
    run = config.run
    data = config.data
    if not data.eval:
        raise BadInput(
            "data.eval is empty: name a set to answer, 'data.eval=[{name: aime2024, path: FILE}]'"
        )
    exports = Path(run.directory) / HF_FOLDER
    actor = exports / checkpoint / "actor"
    there = sorted(path.parent.parent.name for path in exports.glob("*/actor/config.json"))
    if checkpoint not in there:
        saved = Path(run.directory) / CHECKPOINT_FOLDER / checkpoint
        if there:
            remedy = f"expected one of {', '.join(there)}"
        else:
            remedy = "give run.root and run.name of a run with exports"
        if (saved / "actor").is_dir():
            remedy = (
                f"make it: vapo-megatron convert-megatron-to-hf --checkpoint {saved} --out {actor}"
            )
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
        (key, *_), message = error.errors()[0]["loc"], error.errors()[0]["msg"]
        raise BadInput(
            f"--checkpoint {checkpoint}: run.{key} of its evaluation cannot be used: {message}"
        ) from None
    return EvaluateConfig(
        run=place,
        model=config.model.model_copy(update={"path": str(actor)}),
        data=EvaluationDataConfig(
            **{name: getattr(data, name) for name in ProblemsConfig.model_fields}
        ),
        sampling=config.evaluation.sampling_beside(config.sampling),
        rollout=config.rollout.reading_checkpoints(),
        reward=config.reward,
    )
