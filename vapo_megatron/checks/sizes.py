"""The checks that need neither transformers nor Megatron-Core: most mistakes are refused before
those are imported."""

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Literal

from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.model import TrainableConfig
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.engines.engine_limits import check_context, check_engine_size
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.mesh import check_layout, check_model_layout, stage_pieces
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.weights.load import check_weights


def check_numbers(settings: TrainConfig | SftConfig | EvaluateConfig) -> None:
    """Raises BadInput where model, critic or layouts cannot be used; of a run that has not
    started."""
    if isinstance(settings, TrainConfig):
        check_train_numbers(settings, settings.cluster.ranks)
    elif isinstance(settings, SftConfig):
        check_sft_numbers(settings, settings.cluster.ranks)
    elif settings.model is not None:
        check_weights(Path(settings.model.path), read_spec(Path(settings.model.path)), "lm")


def check_train_numbers(config: TrainConfig, world_size: int | None) -> dict[str, ModelSpec]:
    """The specs of the run's models, by name.

    world_size: ranks of the run; None: not known yet, or chosen to fit.

    Raises:
        BadInput: the models cannot be read, cut as the layouts ask, or hold what the lengths ask
            for.
    """
    spec = read_spec(Path(config.model.path))
    specs = {name: check_source(config, *config.sources[name], spec) for name in config.model_sizes}
    if (
        world_size is not None
        and config.run.profile.steps
        and (last := max(config.run.profile.ranks)) >= world_size
    ):
        raise BadInput(
            f"run.profile.ranks: {last} with {world_size} ranks: they count from 0, name ranks "
            "below it"
        )
    for name, model in specs.items():
        layout = config.trainable(name).layout
        if world_size is not None:
            check_layout(layout, world_size, name)
        check_model_layout(model, layout, name)
    check_probe_layer(config, spec)
    if config.rollout.router_replay and not spec.num_experts:
        raise BadInput(
            f"rollout.router_replay: model.path is a {spec.family} model without experts, set it "
            "to false"
        )
    if world_size is not None and "actor" in specs:
        check_rollout_groups(config, world_size)
    check_lengths(config, spec)
    check_weights(Path(config.model.path), spec, "lm")
    value_head: Literal["saved", "new"] = "new" if config.critic.init == "policy" else "saved"
    for name, model in specs.items():
        if (source := config.sources[name][1]) != Path(config.model.path):
            check_weights(
                source, model, "value" if name == "critic" else "lm", value_head=value_head
            )
    return specs


def check_probe_layer(config: TrainConfig, spec: ModelSpec) -> None:
    """Raises BadInput where the probe reads a layer that the actor's last pipeline stage has
    not."""
    layer = config.critic.probe.layer
    layers = spec.num_layers
    first = stage_pieces(spec, config.actor.layout)[-1].start + 1
    if layer is not None and not first <= layer <= layers:
        raise BadInput(
            f"critic.probe.layer={layer}: expected {first} to {layers}, the layers on the actor's "
            "last pipeline stage: choose one of them, or lower actor.layout.pp"
        )


def check_sft_numbers(config: SftConfig, world_size: int | None) -> ModelSpec:
    """The policy's spec; as check_train_numbers."""
    spec = read_spec(Path(config.model.path))
    if world_size is not None:
        check_layout(config.actor.layout, world_size, "actor")
    check_model_layout(spec, config.actor.layout, "actor")
    check_weights(Path(config.model.path), spec, "lm")
    return spec


def check_source(config: TrainConfig, key: str, source: Path, policy: ModelSpec) -> ModelSpec:
    """A model's spec. Raises BadInput where it cannot read the policy's tokens, or so many of
    them."""
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    spec = read_spec(source, value_outputs=config.algorithm.value_loss.outputs)
    if spec.vocab_size < policy.vocab_size:
        raise BadInput(
            f"{key}={source}: it has {spec.vocab_size} words and model.path has "
            f"{policy.vocab_size}: give a model with the policy's tokenizer and no fewer words"
        )
    if spec.max_position_embeddings < longest <= policy.max_position_embeddings:
        raise BadInput(
            f"{key}={source}: its context is {spec.max_position_embeddings} tokens, and "
            f"data.max_prompt_tokens + sampling.max_new_tokens = {longest}: give a model with a "
            "longer one, or lower them"
        )
    return spec


def check_lengths(config: TrainConfig, spec: ModelSpec) -> None:
    """Raises BadInput where prompt and response cannot fit the model's context or a micro-batch."""
    prompt = config.data.max_prompt_tokens
    context = spec.max_position_embeddings
    for key, new_tokens, fewest in (
        ("sampling.max_new_tokens", config.sampling.max_new_tokens, fewest_continued(config)),
        ("evaluation.max_new_tokens", config.evaluation.max_new_tokens, None),
    ):
        if new_tokens is not None:
            check_context(prompt, key, new_tokens, config.rollout, context, fewest)
    longest, segments, key = longest_sample(config)
    if config.rollout.agent is not None:
        check_context(0, key, longest, config.rollout, context, fewest=1)
    for name in config.model_sizes:
        section = config.trainable(name)
        check_capacity(
            section, name, longest + (segments - 1) * (section.layout.alignment - 1), key
        )


def fewest_continued(config: TrainConfig) -> int | None:
    """Smallest number of tokens by which an engine continues a response; None: it writes whole
    ones, or turns."""
    rollout = config.rollout
    most = config.sampling.max_new_tokens
    if rollout.partial_responses.oversampling is not None:
        return 1
    if rollout.windows == 1 or rollout.agent is not None:
        return None
    window = -(-most // rollout.windows)
    return most - (-(-most // window) - 1) * window


def longest_sample(config: TrainConfig) -> tuple[int, int, str]:
    """Tokens and segments of a sample at most, and the keys that say so; every turn may begin a
    segment."""
    if config.rollout.agent is not None:
        return (
            config.rollout.episode.max_tokens,
            config.rollout.episode.max_turns,
            "rollout.episode.max_tokens",
        )
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    return longest, 1, "data.max_prompt_tokens + sampling.max_new_tokens"


def check_privileged(
    config: TrainConfig, critic: ModelSpec | None, tokens_of_rows: Mapping[str, int]
) -> None:
    """Raises BadInput where the critic has no room for the privileged tokens of a row beside the
    longest sample."""
    if critic is None or not tokens_of_rows:
        return
    row, tokens = max(tokens_of_rows.items(), key=itemgetter(1))
    longest, segments, key = longest_sample(config)
    section = config.critic
    context = critic.max_position_embeddings
    padded = longest + (segments - 1) * (section.layout.alignment - 1)
    room = min(context - longest, (section.longest_sample - padded) // segments)
    if tokens > room:
        raise BadInput(
            f"critic.privileged_field={section.privileged_field}: {row} has {tokens} tokens there, "
            f"and {key} = {longest} leaves room for {room} of the critic's context ({context}) and "
            f"of critic.max_tokens_per_microbatch={section.max_tokens_per_microbatch}, before each "
            f"of {segments} segments: shorten the text, leave the row out, or raise the latter"
        )


def check_capacity(section: TrainableConfig, name: str, longest: int, what: str) -> None:
    """Raises BadInput where the longest sample does not fit a micro-batch."""
    room = section.longest_sample
    whose = "actor" if name == "reference" else name
    if longest > room:
        raise BadInput(
            f"{whose}.max_tokens_per_microbatch={section.max_tokens_per_microbatch} with "
            f"{name}.layout.cp={section.layout.cp} holds samples of at most {room} tokens, padding "
            f"included, and {what} = {longest}: raise it, or {name}.layout.cp"
        )


def check_rollout_groups(config: TrainConfig, world_size: int) -> None:
    """Raises BadInput where engines cannot share the accelerators of the ranks, or have no key for
    those elsewhere."""
    platform = current_platform()
    rollout = config.rollout
    if rollout.external_urls:
        rollout.api_key()
        return
    if rollout.sync.only_changes:
        raise BadInput(
            "rollout.sync.only_changes=true: engines that the run starts lose their weights "
            "between weight syncs: leave it out, or give rollout.external_urls"
        )
    if not platform.is_cuda:
        if rollout.num_engines * rollout.nodes > world_size:
            parts = ""
            if rollout.nodes > 1:
                parts = f" x rollout.nodes={rollout.nodes}"
            raise BadInput(
                f"rollout.num_engines={rollout.num_engines}{parts} is above the {world_size} ranks "
                "of the run: a rank owns one engine, or one part of one, at most: lower it"
            )
        return
    check_engine_size(rollout, min(world_size, platform.device_count()), world_size)
