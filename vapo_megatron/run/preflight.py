"""The checks of a config and its files before anything is started."""

import json
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from vapo_megatron.agents.episodes import check_agent
from vapo_megatron.checkpoint.checkpoints import latest_checkpoint
from vapo_megatron.checkpoint.dist_saver import bytes_per_weight, run_bytes
from vapo_megatron.checkpoint.recorded_rollouts import BYTES_PER_TOKEN
from vapo_megatron.config.model import TrainableConfig
from vapo_megatron.config.proportions import proportions_left
from vapo_megatron.config.run_directory import check_room
from vapo_megatron.config.train import SftConfig, TrainConfig
from vapo_megatron.data.prompts import eval_prompts, train_prompts
from vapo_megatron.data.records import KEY, Records
from vapo_megatron.data.sample import Prompt
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.engine_limits import engine_fp8
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.precision import check_trainable
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.run.first_checks import check_capacity, check_privileged, check_sft_numbers, check_train_numbers
from vapo_megatron.run.first_look import check_trackers
from vapo_megatron.training.sft import load_demonstrations, planned_steps
from vapo_megatron.training.user_functions import check_functions
from vapo_megatron.weights.fp8 import BlockFp8
from vapo_megatron.weights.spec import ModelSpec, read_spec

# Share of training rows with a problem of their own; the usual sets have a few rows twice.
_FEWEST_DISTINCT = 0.9


def cautions(
    config: TrainConfig, prompts: Sequence[Prompt], evaluations: Mapping[str, Sequence[Prompt]]
) -> Iterator[str]:
    """Yields a line for each likely mistake. prompts: of training; evaluations: of each set of data.eval."""
    largest, bucket = resource.getrlimit(resource.RLIMIT_FSIZE)[0], config.rollout.sync.bucket_mib
    if 0 <= largest < bucket << 20:  # -1: any size
        yield (
            f"the system lets files grow to {largest >> 20} MiB: checkpoints and the buckets of weights "
            f"(rollout.sync.bucket_mib={bucket}) may be larger; start from a shell with `ulimit -f unlimited`"
        )
    sections: list[tuple[str, TrainableConfig]] = [("actor", config.actor)]
    if config.algorithm.uses_critic:
        sections.append(("critic", config.critic))
    for name, section in sections:
        warmup, updates = config.trainable(name).optimizer.warmup_steps, config.run.steps
        updates *= config.updates_per_rollout(name)
        if name == "critic" and config.value_pretraining.enabled:
            updates += config.value_pretraining.updates(config.samples)
        yield from long_warmup(name, section, warmup, updates)
    files = ", ".join(map(str, config.data.train_files))
    problem = partial(_problem, seen_by_agent=config.rollout.agent is not None)
    problems = set(map(problem, prompts))
    if len(problems) < _FEWEST_DISTINCT * len(prompts):
        yield (
            f"data.train={files} holds {len(prompts)} rows and {len(problems)} different "
            f"problem{'s' if len(problems) > 1 else ''}: the others repeat them"
        )
    for name, rows in evaluations.items():
        if seen := sum(problem(prompt) in problems for prompt in rows):
            yield (
                f"data.eval: {seen} of the {len(rows)} problems of {name} are in data.train: their accuracy says "
                "nothing of new problems (vapo-megatron prepare-data --against leaves them out)"
            )
    yield from proportions_left(config)


def _problem(prompt: Prompt, seen_by_agent: bool) -> str:
    """What makes a problem another one: its text, and for agents the fields that their tools and environments read."""
    return json.dumps([prompt.problem, prompt.extra], sort_keys=True, default=str) if seen_by_agent else prompt.problem


def long_warmup(name: str, section: TrainableConfig, warmup: int, updates: int) -> Iterator[str]:
    """Yields a line if the warm-up takes more optimizer updates than the run has."""
    if warmup > updates:
        yield (
            f"{name}.optimizer.warmup_steps={section.optimizer.warmup_steps} ({warmup} updates) is longer than the "
            f"run ({updates}): the learning rate never reaches {section.optimizer.lr:g}"
        )


def check_train(config: TrainConfig, world_size: int | None, facts: list[str] | None = None) -> None:
    """Raises BadInput for anything in a training config that cannot work with these files on this many ranks.

    facts: gets a line on each part, for people; what only a machine without GPUs lacks is one of them then, no mistake.
    """
    check_trackers(config.monitoring)
    specs = check_train_numbers(config, world_size)
    report: list[str] = [] if facts is None else facts
    for name, model in specs.items():
        report.append(f"{name}: {model.family}, {model.parameter_count():,} parameters")
        try:
            check_trainable(model, config.model, config.trainable(name), name, current_platform())
        except BadInput as error:
            if facts is None or current_platform().is_cuda:
                raise
            report.append(f"{name}: not on this machine, which has no GPU: {error}")
    spec = read_spec(Path(config.model.path))
    tokenizer = TextTokenizer(Path(config.model.path), config.data.prompt)
    tokenizer.check_vocabulary(spec.vocab_size)
    for key, source in config.sources.values():
        if source != Path(config.model.path):
            tokenizer.check_same(source, key)
    imported = check_records(config, tokenizer, spec.vocab_size, specs.get("critic"), report)
    check_room(Path(config.run.directory), run_bytes(config, specs) + record_bytes(config) + imported)
    if "actor" not in specs:
        return
    fp8 = engine_fp8(config.rollout, config.actor.precision, spec)
    prompts = train_prompts(config.data, tokenizer, config.critic.privileged_field)
    check_privileged(config, specs.get("critic"), {f"row {row.id}": len(row.privileged_ids) for row in prompts})
    evaluations = {entry.name: eval_prompts(entry, config.data, tokenizer) for entry in config.data.eval}
    report += [f"{name}: {len(rows)} problems" for name, rows in {"data.train": prompts, **evaluations}.items()]
    check_functions(config.algorithm)
    check_agent(config.rollout, tokenizer)
    if not config.rollout.external_urls:
        first_engine(config, fp8).check_arguments()
    with VerifierPool(config.reward) as verifier:
        report.append(f"verifier: {', '.join(verifier.check(chain(prompts, *evaluations.values())))}")
    for caution in filter(None, (tokenizer.caution(), *cautions(config, prompts, evaluations))):
        print(f"vapo-megatron: caution: {caution}", file=sys.stderr, flush=True)


def check_records(
    config: TrainConfig, tokenizer: TextTokenizer, words: int, critic: ModelSpec | None, facts: list[str]
) -> int:
    """Bytes that the responses take that value_pretraining.from names, which are read once here; none where the run
    goes on and has its copy. Raises BadInput where one cannot be used."""
    goes_on = config.run.resume == "auto" and latest_checkpoint(Path(config.run.directory)) is not None
    if not config.value_pretraining.records or goes_on:
        return 0
    sizes = []
    for batch in Records(config, tokenizer, words).batches():
        sizes.append((batch.samples, len(batch.tokens)))
        if batch.privileged_lengths is not None:
            check_privileged(config, critic, {f"a row of {KEY}": int(batch.privileged_lengths.max())})
    facts.append(f"{KEY}: {sum(samples for samples, _ in sizes)} responses in {len(sizes)} files")
    return BYTES_PER_TOKEN * sum(tokens for _, tokens in sizes)


def first_engine(config: TrainConfig, fp8: BlockFp8 | None) -> EngineServer:
    """The first engine of a run, to be asked about its arguments."""
    devices = range(config.rollout.tp) if current_platform().is_cuda else None
    return EngineServer(config.model.path, config.rollout, config.model.dtype, Path(os.devnull), devices, fp8=fp8)


def check_sft(config: SftConfig, world_size: int) -> None:
    """Raises BadInput for anything in a fine-tuning config that cannot work."""
    check_trackers(config.monitoring)
    spec = check_sft_numbers(config, world_size)
    check_trainable(spec, config.model, config.actor, "actor", current_platform())
    TextTokenizer(Path(config.model.path), config.data.prompt).check_vocabulary(spec.vocab_size)
    demonstrations = load_demonstrations(config)
    longest = int(demonstrations.lengths.max())
    check_capacity(config.actor, "actor", longest, "the longest demonstration of data.path")
    check_room(Path(config.run.directory), spec.parameter_count() * bytes_per_weight(config.model.dtype))
    steps = planned_steps(config, demonstrations.samples)
    for caution in long_warmup("actor", config.actor, config.actor.optimizer.warmup_steps, steps):
        print(f"vapo-megatron: caution: {caution}", file=sys.stderr, flush=True)


def record_bytes(config: TrainConfig) -> int:
    """Bytes that value pretraining records, assuming maximum lengths of all prompts and responses."""
    settings = config.value_pretraining
    if not config.algorithm.uses_critic or not settings.enabled:
        return 0
    samples = settings.rollouts(config.samples) * config.samples
    return samples * (config.data.max_prompt_tokens + config.sampling.max_new_tokens) * BYTES_PER_TOKEN
