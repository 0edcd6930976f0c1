"""The checks of a config and its files before anything is started."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from vapo_megatron.agents.agent import check_agent
from vapo_megatron.agents.tool_format import check_tool_parser
from vapo_megatron.checkpoint.checkpoints import latest_checkpoint
from vapo_megatron.checkpoint.recorded_rollouts import BYTES_PER_TOKEN
from vapo_megatron.checkpoint.sizes import (
    bytes_per_weight,
    checkpoint_bytes,
    largest_file_bytes,
    run_bytes,
    trained_parameters,
)
from vapo_megatron.checks.config import check_trackers
from vapo_megatron.checks.limits import (
    SHARED_MEMORY,
    check_file_size,
    check_open_files,
    check_shared_memory,
)
from vapo_megatron.checks.sizes import (
    check_capacity,
    check_privileged,
    check_sft_numbers,
    check_train_numbers,
)
from vapo_megatron.config.model import AdapterConfig, TrainableConfig
from vapo_megatron.config.proportions import proportions_left
from vapo_megatron.config.run_directory import check_room
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.config.verifiers import VERIFIERS
from vapo_megatron.data.prompts import eval_prompts, train_prompts
from vapo_megatron.data.records import KEY, Records
from vapo_megatron.data.sample import Prompt
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.engine_limits import check_load_format, engine_fp8
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.precision import NeedsGpu, check_trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.training.function_trial import try_functions
from vapo_megatron.training.sft import load_demonstrations, planned_steps
from vapo_megatron.training.user_functions import check_functions
from vapo_megatron.weights.fp8 import BlockFp8
from vapo_megatron.weights.hf_writer import MAX_SHARD_BYTES

# Share of training rows with a unique problem; the usual sets have a few duplicates.
_FEWEST_DISTINCT = 0.9
# Of training, as the model reads them, for people to look at.
_ROWS_SHOWN = 3
_CHARACTERS_SHOWN = 400


def cautions(
    config: TrainConfig, prompts: Sequence[Prompt], evaluations: Mapping[str, Sequence[Prompt]]
) -> Iterator[str]:
    """Yields a line for each likely mistake. prompts: of training; evaluations: of each set of
    data.eval."""
    sections: list[tuple[str, TrainableConfig]] = [("actor", config.actor)]
    if config.algorithm.uses_critic and config.critic.kind != "regression":
        sections.append(("critic", config.critic))
    for name, section in sections:
        warmup = config.trainable(name).optimizer.warmup_steps
        updates = config.run.steps
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
                f"data.eval: {seen} of the {len(rows)} problems of {name} are in data.train: their "
                "accuracy says nothing of new problems (vapo-megatron prepare-data --against "
                "leaves them out)"
            )
    yield from unused_settings(config)
    yield from proportions_left(config)


def check_limits(
    config: TrainConfig, specs: Mapping[str, ModelSpec], world_size: int | None
) -> None:
    """Raises BadInput where this machine's limits are below what a training run needs.

    specs: by model's name; world_size: None where it is not known yet.
    """
    check_open_files()
    ranks = world_size or max(config.model_sizes.values())
    needed = {}
    for name, spec in specs.items():
        width = bytes_per_weight(config.model.dtype)
        whole = spec.parameter_count() * width
        if name != "reference" and config.checkpoint.saves:
            trained = trained_parameters(config, name, spec)
            needed[f"a file of the checkpoint of the {name}"] = largest_file_bytes(
                trained, config.model.dtype, ranks
            )
        if name == "actor":
            needed["a file of the exported model"] = min(whole, MAX_SHARD_BYTES)
            sync = config.rollout.sync
            # Where it follows from the memory of GPUs, buckets are no files.
            needed[f"a bucket of weights (rollout.sync.bucket_mib={sync.bucket_mib})"] = min(
                whole, sync.bucket_bytes(free=0)
            )
    check_file_size(needed)
    if "actor" not in specs or config.rollout.external_urls:
        engines = 0
    elif gpus := current_platform().device_count():
        engines = gpus // config.rollout.tp
    else:
        engines = config.rollout.num_engines
    check_shared_memory(engines, config.rollout.tp)


def small_shared_memory(config: TrainConfig, specs: Mapping[str, ModelSpec]) -> Iterator[str]:
    """Yields a line where /dev/shm cannot hold this machine's copies of the state for restarts."""
    if not config.cluster.restarts:
        return
    trained = {
        name: trained_parameters(config, name, spec)
        for name, spec in specs.items()
        if name != "reference"
    }
    # A new copy, and the one before until that is whole
    needed = 2 * checkpoint_bytes(config, trained)
    state = os.statvfs(SHARED_MEMORY)
    free = state.f_bavail * state.f_frsize
    if state.f_blocks and free < needed:
        yield (
            f"{SHARED_MEMORY} has {free / 2**30:.1f} GiB free and two copies of the state take "
            f"{needed / 2**30:.1f} GiB on one machine: where they do not fit, a lost rank costs "
            "what follows the last checkpoint (enlarge it, or set cluster.restarts=0)"
        )


def unused_settings(config: TrainConfig) -> Iterator[str]:
    """Yields a line for each setting that has no effect, or takes the effect of another."""
    if config.model.adapter != AdapterConfig() and "adapter" not in (
        config.actor.kind,
        config.critic.kind,
    ):
        yield (
            "model.adapter is set and nothing uses it: whole models are trained; set "
            "actor.kind=adapter or critic.kind=adapter"
        )
    teacher = config.algorithm.kl.reference_path
    is_policy = teacher is not None and Path(teacher).resolve() == Path(config.model.path).resolve()
    if config.algorithm.kl.placement == "advantage" and is_policy:
        yield (
            "algorithm.kl.reference_path is model.path: the student is its own teacher, which "
            "pulls it back to where it starts"
        )
    if config.rollout.agent is None:
        return
    episode = config.rollout.episode
    if episode.max_tokens <= config.sampling.max_new_tokens:
        yield (
            f"rollout.episode.max_tokens={episode.max_tokens} leaves no room for a prompt and a "
            f"response of sampling.max_new_tokens={config.sampling.max_new_tokens}: episodes are "
            "cut"
        )
    if episode.call_timeout_s is not None and episode.call_timeout_s > episode.timeout_s:
        yield (
            f"rollout.episode.call_timeout_s={episode.call_timeout_s:g} is above "
            f"timeout_s={episode.timeout_s:g} and never reached"
        )


def check_teacher(config: TrainConfig) -> None:
    """Raises BadInput where only a teacher could teach, and none is named."""
    kl = config.algorithm.kl
    weighs_nothing = config.reward.correct == config.reward.incorrect == 0
    graded_by_reward = VERIFIERS[config.reward.verifier].grades == "score" or config.rollout.agent
    if kl.placement != "advantage" or kl.reference_path is not None:
        return
    if weighs_nothing and not graded_by_reward:
        raise BadInput(
            "algorithm.kl.reference_path=null: the reward weighs nothing (reward.correct=0, "
            "reward.incorrect=0) and the reference is the policy's own start, so nothing is "
            "learnt: name the teacher's directory"
        )


def _problem(prompt: Prompt, seen_by_agent: bool) -> str:
    """What makes a problem another one: its text, and for agents the fields that their tools and
    environments read."""
    if seen_by_agent:
        return json.dumps([prompt.problem, prompt.extra], sort_keys=True, default=str)
    return prompt.problem


def long_warmup(name: str, section: TrainableConfig, warmup: int, updates: int) -> Iterator[str]:
    """Yields a line if the warm-up takes more optimizer updates than the run has."""
    if warmup > updates:
        yield (
            f"{name}.optimizer.warmup_steps={section.optimizer.warmup_steps} ({warmup} updates) is "
            f"longer than the run ({updates}): the learning rate never reaches "
            f"{section.optimizer.lr:g}"
        )


def check_train(
    config: TrainConfig, world_size: int | None, facts: list[str] | None = None
) -> None:
    """Raises BadInput for anything in a training config that cannot work with these files on this
    many ranks.

    facts: gets a line on each part, for people; what only a machine without GPUs lacks is one of
        them then, no mistake.
    """
    check_trackers(config.monitoring)
    check_teacher(config)
    specs = check_train_numbers(config, world_size)
    check_limits(config, specs, world_size)
    report: list[str] = [] if facts is None else facts
    for name, model in specs.items():
        report.append(f"{name}: {model.family}, {model.parameter_count():,} parameters")
        try:
            check_trainable(model, config.model, config.trainable(name), name, current_platform())
        except NeedsGpu as error:
            if facts is None:
                raise
            report.append(f"{name}: not on this machine, which has no GPU: {error}")
    spec = read_spec(Path(config.model.path))
    tokenizer = TextTokenizer(Path(config.model.path), config.data.prompt)
    tokenizer.check_vocabulary(spec.vocab_size)
    for key, source in config.sources.values():
        if source != Path(config.model.path):
            tokenizer.check_same(source, key)
    imported = check_records(config, tokenizer, spec.vocab_size, specs.get("critic"), report)
    check_room(
        Path(config.run.directory), run_bytes(config, specs) + record_bytes(config) + imported
    )
    if "actor" not in specs:
        return
    check_load_format(Path(config.model.path), config.rollout)
    fp8 = engine_fp8(config.rollout, config.actor.precision, spec)
    prompts = train_prompts(config.data, tokenizer, config.critic.privileged_field)
    check_privileged(
        config, specs.get("critic"), {f"row {row.id}": len(row.privileged_ids) for row in prompts}
    )
    evaluations = {
        entry.name: eval_prompts(entry, config.data, tokenizer) for entry in config.data.eval
    }
    report += [
        f"{name}: {len(rows)} problems"
        for name, rows in {"data.train": prompts, **evaluations}.items()
    ]
    report += [_as_read(row, tokenizer) for row in prompts[:_ROWS_SHOWN]]
    tokenizer.stop_token_ids(config.sampling.stop)
    check_functions(config.algorithm)
    tried = try_functions(
        config.algorithm,
        prompts,
        config.batch.samples_per_prompt,
        tokenizer.decode,
        spec.vocab_size,
    )
    check_agent(config.rollout, tokenizer)
    if not config.rollout.external_urls:
        first_engine(config, fp8).check_arguments()
    parser = check_tool_parser(config.rollout, tokenizer)
    with VerifierPool(config.reward) as verifier:
        report.append(
            f"verifier: {', '.join(verifier.check(chain(prompts, *evaluations.values())))}"
        )
    said = (
        tokenizer.caution(),
        parser,
        *tried,
        *cautions(config, prompts, evaluations),
        *small_shared_memory(config, specs),
    )
    for caution in filter(None, said):
        print(f"vapo-megatron: caution: {caution}", file=sys.stderr, flush=True)


def _as_read(prompt: Prompt, tokenizer: TextTokenizer) -> str:
    """A row as the model reads it, special tokens included, on one line."""
    text = tokenizer.decode_all(prompt.token_ids)
    if len(text) > _CHARACTERS_SHOWN:
        half = _CHARACTERS_SHOWN // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return f"row {prompt.id}, {len(prompt.token_ids)} tokens, answer {prompt.answer[:80]}: {text!r}"


def check_records(
    config: TrainConfig,
    tokenizer: TextTokenizer,
    words: int,
    critic: ModelSpec | None,
    facts: list[str],
) -> int:
    """Bytes of the responses in value_pretraining.from, which are read once here; 0 for a resumed
    run, which has its copy. Raises BadInput if one cannot be used."""
    goes_on = (
        config.run.resume == "auto" and latest_checkpoint(Path(config.run.directory)) is not None
    )
    if not config.value_pretraining.records or goes_on:
        return 0
    sizes = []
    rewards: set[float] = set()
    for batch in Records(config, tokenizer, words).batches():
        sizes.append((batch.samples, len(batch.tokens)))
        rewards |= set(batch.rewards.unique().tolist())
        if batch.privileged_lengths is not None:
            check_privileged(
                config, critic, {f"a row of {KEY}": int(batch.privileged_lengths.max())}
            )
    if len(rewards) < 2:
        print(
            f"vapo-megatron: caution: {KEY}: all responses have the same reward, which explains "
            "nothing: record some that succeed and some that fail",
            file=sys.stderr,
            flush=True,
        )
    facts.append(f"{KEY}: {sum(samples for samples, _ in sizes)} responses in {len(sizes)} files")
    return BYTES_PER_TOKEN * sum(tokens for _, tokens in sizes)


def first_engine(config: TrainConfig, fp8: BlockFp8 | None) -> EngineServer:
    """The first engine of a run, to be asked about its arguments."""
    if current_platform().is_cuda:
        devices = range(config.rollout.tp // config.rollout.nodes)
    else:
        devices = None
    return EngineServer(
        config.model.path, config.rollout, config.model.dtype, Path(os.devnull), devices, fp8=fp8
    )


def check_sft(config: SftConfig, world_size: int) -> None:
    """Raises BadInput for anything in a fine-tuning config that cannot work."""
    check_trackers(config.monitoring)
    spec = check_sft_numbers(config, world_size)
    check_open_files()
    largest = largest_file_bytes(spec.parameter_count(), config.model.dtype, world_size)
    check_file_size({"a file of the checkpoint": largest})
    check_shared_memory(0, 1)
    check_trainable(spec, config.model, config.actor, "actor", current_platform())
    TextTokenizer(Path(config.model.path), config.data.prompt).check_vocabulary(spec.vocab_size)
    demonstrations = load_demonstrations(config)
    longest = int(demonstrations.lengths.max())
    check_capacity(config.actor, "actor", longest, "the longest demonstration of data.path")
    check_room(
        Path(config.run.directory), spec.parameter_count() * bytes_per_weight(config.model.dtype)
    )
    steps = planned_steps(config, demonstrations.samples)
    for caution in long_warmup("actor", config.actor, config.actor.optimizer.warmup_steps, steps):
        print(f"vapo-megatron: caution: {caution}", file=sys.stderr, flush=True)


def record_bytes(config: TrainConfig) -> int:
    """Bytes that value pretraining records, assuming maximum lengths of all prompts and
    responses."""
    settings = config.value_pretraining
    if not config.algorithm.uses_critic or not settings.enabled:
        return 0
    samples = settings.rollouts(config.samples) * config.samples
    return (
        samples * (config.data.max_prompt_tokens + config.sampling.max_new_tokens) * BYTES_PER_TOKEN
    )
