"""What keys of verl, slime and NeMo RL are called here, beside those of docs/glossary.md.

A key is known by its last name, so `actor_rollout_ref.rollout.n` is found whatever precedes it, or by the last two.
In brackets is what a number counts here, where that is something else there.
"""

OURS = {
    # verl
    "train_batch_size": "batch.prompts_per_step",
    "n": "batch.samples_per_prompt",
    "val_kwargs.n": "data.eval.samples",
    "ppo_mini_batch_size": "algorithm.update.minibatch_size (responses; prompts with minibatch_unit=groups)",
    "ppo_epochs": "algorithm.update.epochs",
    "ppo_max_token_len_per_gpu": "actor.max_tokens_per_microbatch, or critic.max_tokens_per_microbatch",
    "ppo_micro_batch_size_per_gpu": "actor.max_tokens_per_microbatch, or critic.max_tokens_per_microbatch (tokens)",
    "adv_estimator": "preset, or algorithm.advantage.estimator",
    "lam": "algorithm.advantage.lambda_policy and algorithm.advantage.lambda_critic",
    "clip_ratio": "algorithm.policy_loss.clip_low and algorithm.policy_loss.clip_high",
    "clip_ratio_low": "algorithm.policy_loss.clip_low",
    "clip_ratio_high": "algorithm.policy_loss.clip_high",
    "clip_ratio_c": "algorithm.policy_loss.dual_clip",
    "loss_agg_mode": "algorithm.policy_loss.aggregation",
    "entropy_coeff": "algorithm.policy_loss.entropy_coef",
    "use_kl_loss": "algorithm.kl.placement",
    "use_kl_in_reward": "algorithm.kl.placement",
    "kl_loss_coef": "algorithm.kl.coef",
    "filter_groups": "algorithm.dynamic_sampling.enabled",
    "overlong_buffer": "algorithm.shaping.soft_overlong",
    "overlong_buffer.len": "algorithm.shaping.soft_overlong.cache_length",
    "rollout_is": "algorithm.importance_sampling.kind",
    "critic_warmup": "value_pretraining.iterations",
    "val_files": "data.eval",
    "prompt_key": "data.fields.problem",
    "max_response_length": "sampling.max_new_tokens",
    "rollout.temperature": "sampling.temperature",
    "rollout.top_p": "sampling.top_p",
    "rollout.top_k": "sampling.top_k",
    "rollout.tensor_model_parallel_size": "rollout.tp",
    "custom_reward_function": "reward.function",
    "gpu_memory_utilization": "rollout.mem_fraction_static",
    "max_model_len": "rollout.context_length",
    "param_offload": "actor.offload, or critic.offload",
    "optimizer_offload": "actor.offload, or critic.offload",
    "total_epochs": "run.steps (rollouts)",
    "total_training_steps": "run.steps",
    "nnodes": "cluster.ranks (GPUs of all nodes)",
    "n_gpus_per_node": "cluster.ranks (GPUs of all nodes)",
    "experiment_name": "run.name",
    "project_name": "monitoring.wandb.project",
    "default_local_dir": "run.root",
    "logger": "monitoring.wandb.enabled",
    "resume_mode": "run.resume",
    "save_freq": "checkpoint.every",
    "test_freq": "evaluation.every",
    "val_before_train": "evaluation.before_training",
    # slime, whose arguments are typed with low lines
    "hf_checkpoint": "model.path",
    "prompt_data": "data.train",
    "input_key": "data.fields.problem",
    "label_key": "data.fields.answer",
    "custom_rm_path": "reward.function",
    "num_rollout": "run.steps",
    "rollout_batch_size": "batch.prompts_per_step",
    "n_samples_per_prompt": "batch.samples_per_prompt",
    "global_batch_size": "algorithm.update.minibatch_size",
    "rollout_max_response_len": "sampling.max_new_tokens",
    "rollout_temperature": "sampling.temperature",
    "max_tokens_per_gpu": "actor.max_tokens_per_microbatch, or critic.max_tokens_per_microbatch",
    "advantage_estimator": "preset, or algorithm.advantage.estimator",
    "lambd": "algorithm.advantage.lambda_policy and algorithm.advantage.lambda_critic",
    "eps_clip": "algorithm.policy_loss.clip_low and algorithm.policy_loss.clip_high",
    "eps_clip_high": "algorithm.policy_loss.clip_high",
    "eps_clip_c": "algorithm.policy_loss.dual_clip",
    "value_clip": "algorithm.value_loss.clip",
    "use_tis": "algorithm.importance_sampling.kind",
    "num_critic_only_steps": "value_pretraining.iterations",
    "critic_lr": "critic.optimizer.lr",
    "save_interval": "checkpoint.every",
    "eval_interval": "evaluation.every",
    "n_samples_per_eval_prompt": "data.eval.samples",
    # NeMo RL
    "num_prompts_per_step": "batch.prompts_per_step",
    "num_generations_per_prompt": "batch.samples_per_prompt",
    "train_global_batch_size": "algorithm.update.minibatch_size",
    "generation.max_new_tokens": "sampling.max_new_tokens",
    "ratio_clip_min": "algorithm.policy_loss.clip_low",
    "ratio_clip_max": "algorithm.policy_loss.clip_high",
    "ratio_clip_c": "algorithm.policy_loss.dual_clip",
    "reference_policy_kl_penalty": "algorithm.kl.coef",
}


def named_here(key: str) -> str | None:
    """What is said of a key that another trainer has: its name here, or why there is none; None for other keys."""
    name, last_two = key.rpartition(".")[2], ".".join(key.split(".")[-2:])
    if "lora" in key.split(".") or name.startswith("lora_"):
        return "there is no LoRA here, docs/lora.md says why and what helps instead"
    if name == "val_only":
        return "evaluation alone is a command: vapo-megatron evaluate CONFIG --checkpoint final"
    if (ours := OURS.get(last_two) or OURS.get(name)) is not None:
        return f"here it is {ours}"
    if key.partition(".")[0] in ("actor_rollout_ref", "trainer"):
        return "it looks like one of verl's: docs/glossary.md has the names here"
    return None
