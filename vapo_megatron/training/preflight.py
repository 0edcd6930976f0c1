"""What can be known to fail before anything is started is found here."""

from pathlib import Path

from vapo_megatron.checkpoint.size import bytes_per_weight, run_bytes
from vapo_megatron.config.model import TrainableConfig
from vapo_megatron.config.run_directory import check_room
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.experience.prompts import eval_prompts, train_prompts
from vapo_megatron.experience.tokenizer import TextTokenizer
from vapo_megatron.mcore.layer_spec import uses_transformer_engine
from vapo_megatron.mcore.mesh import check_layout
from vapo_megatron.mcore.model import check_model_layout
from vapo_megatron.mcore.platform import current_platform
from vapo_megatron.mcore.precision import check_delayed_scaling, check_trainable
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.rollout.context import check_context
from vapo_megatron.training.recorded_rollouts import BYTES_PER_TOKEN
from vapo_megatron.training.sft import load_demonstrations
from vapo_megatron.training.user_functions import check_functions
from vapo_megatron.weight_sync.quantization import engine_fp8
from vapo_megatron.weights.load import check_weights
from vapo_megatron.weights.spec import ModelSpec, read_spec


def check_train(config: TrainConfig, world_size: int) -> None:
    """Raises BadInput for anything in a training config that cannot work with these files on this many ranks."""
    spec = read_spec(Path(config.model.path))
    check_layout(config.actor.layout, world_size, "actor")
    check_model_layout(spec, config.actor.layout, "actor")
    if config.algorithm.uses_critic:
        critic_spec = check_critic_source(config, spec)
        check_layout(config.critic.layout, world_size, "critic")
        check_model_layout(critic_spec, config.critic.layout, "critic")
    uses_transformer_engine(config.model.attention, current_platform())
    sections: dict[str, TrainableConfig] = {"actor": config.actor}
    check_trainable(spec, config.model, config.actor, "actor", current_platform())
    if config.algorithm.uses_critic:
        sections["critic"] = config.critic
        check_trainable(critic_spec, config.model, config.critic, "critic", current_platform())
    check_delayed_scaling(sections)
    if config.rollout.router_replay and not spec.num_experts:
        raise BadInput(f"rollout.router_replay: model.path is a {spec.family} model without experts, set it to false")
    check_rollout_groups(config, world_size)
    engine_fp8(config.rollout, config.actor.precision, spec)
    check_lengths(config, spec)
    check_weights(Path(config.model.path), spec, "lm")
    if config.algorithm.uses_critic and config.critic.init_path:
        check_weights(Path(config.critic.init_path), critic_spec, "value", value_head="saved")
    tokenizer = TextTokenizer(Path(config.model.path), config.data.prompt)
    tokenizer.check_vocabulary(spec.vocab_size)
    train_prompts(config.data, tokenizer)
    for evaluation in config.data.eval:
        eval_prompts(evaluation, config.data, tokenizer)
    check_functions(config.algorithm)
    VerifierPool(config.reward).close()  # a function of the user's must be importable
    check_room(Path(config.run.directory), run_bytes(config, spec.parameter_count()) + record_bytes(config))


def check_critic_source(config: TrainConfig, policy: ModelSpec) -> ModelSpec:
    """The critic's spec. Raises BadInput where critic.init_path cannot value the policy's tokens."""
    source = Path(config.critic.init_path or config.model.path)
    spec = read_spec(source, value_outputs=config.algorithm.value_loss.outputs)
    if spec.vocab_size != policy.vocab_size:
        raise BadInput(
            f"critic.init_path={config.critic.init_path}: it has {spec.vocab_size} words and model.path has "
            f"{policy.vocab_size}: give a critic with the policy's tokenizer"
        )
    return spec


def check_sft(config: SftConfig, world_size: int) -> None:
    """Raises BadInput for anything in a fine-tuning config that cannot work."""
    spec = read_spec(Path(config.model.path))
    check_layout(config.actor.layout, world_size, "actor")
    check_model_layout(spec, config.actor.layout, "actor")
    uses_transformer_engine(config.model.attention, current_platform())
    check_trainable(spec, config.model, config.actor, "actor", current_platform())
    check_weights(Path(config.model.path), spec, "lm")
    TextTokenizer(Path(config.model.path), config.data.prompt).check_vocabulary(spec.vocab_size)
    longest = int(load_demonstrations(config).lengths.max())
    check_capacity(config.actor, "actor", longest, "the longest demonstration of data.path")
    check_room(Path(config.run.directory), spec.parameter_count() * bytes_per_weight(config.model.dtype))


def check_lengths(config: TrainConfig, spec: ModelSpec) -> None:
    """Raises BadInput where prompt and response cannot fit the model's context or a micro-batch."""
    prompt = config.data.max_prompt_tokens
    for key, new_tokens in (
        ("sampling.max_new_tokens", config.sampling.max_new_tokens),
        ("evaluation.max_new_tokens", config.evaluation.max_new_tokens),
    ):
        if new_tokens is not None:
            check_context(prompt, key, new_tokens, config.rollout, spec.max_position_embeddings)
    longest = prompt + config.sampling.max_new_tokens
    for name, section in (("actor", config.actor), ("critic", config.critic)):
        if name == "critic" and not config.algorithm.uses_critic:
            continue
        check_capacity(section, name, longest, "data.max_prompt_tokens + sampling.max_new_tokens")


def check_capacity(section: TrainableConfig, name: str, longest: int, what: str) -> None:
    """Raises BadInput where the longest sample does not fit a micro-batch."""
    room = section.longest_sample
    if longest > room:
        raise BadInput(
            f"{name}.max_tokens_per_microbatch={section.max_tokens_per_microbatch} with cp={section.layout.cp} holds "
            f"samples of at most {room} tokens, padding included, and {what} = {longest}: raise it, or {name}.layout.cp"
        )


def check_rollout_groups(config: TrainConfig, world_size: int) -> None:
    """Raises BadInput where engines cannot share the accelerators of the ranks, or have no key for those elsewhere."""
    platform, rollout = current_platform(), config.rollout
    if rollout.external_urls:
        rollout.api_key()
        return
    if not platform.is_cuda:
        if rollout.num_engines > world_size:
            raise BadInput(
                f"rollout.num_engines={rollout.num_engines} is above the {world_size} ranks of the run: a rank owns "
                "one engine at most, lower it"
            )
        return
    local = min(world_size, platform.device_count())
    if local % rollout.tp:
        raise BadInput(f"rollout.tp={rollout.tp} does not divide the {local} GPUs of a node: choose a divisor")


def record_bytes(config: TrainConfig) -> int:
    """Bytes of what value pretraining records, were every prompt and response as long as it may be."""
    settings, batch = config.value_pretraining, config.batch
    if not config.algorithm.uses_critic or not settings.enabled:
        return 0
    samples = settings.iterations * batch.prompts_per_step * batch.samples_per_prompt
    return samples * (config.data.max_prompt_tokens + config.sampling.max_new_tokens) * BYTES_PER_TOKEN
