"""What a config may mean but most often does not: told before the run starts, which goes on all the same."""

from collections.abc import Iterator, Mapping, Sequence

from vapo_megatron.config.model import TrainableConfig
from vapo_megatron.config.proportions import proportions_left
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.sample import Prompt

# Well above what any model of ours, the smallest included, was trained with (3e-3).
_LARGEST_LR = 1e-2


def cautions(
    config: TrainConfig, prompts: Sequence[Prompt], evaluations: Mapping[str, Sequence[Prompt]]
) -> Iterator[str]:
    """One line for each.

    Args:
        config: of the run.
        prompts: of training.
        evaluations: prompts of each set of data.eval, by its name.
    """
    sections: list[tuple[str, TrainableConfig]] = [("actor", config.actor)]
    if config.algorithm.uses_critic:
        sections.append(("critic", config.critic))
    for name, section in sections:
        if section.optimizer.lr > _LARGEST_LR:
            yield f"{name}.optimizer.lr={section.optimizer.lr:g} is far above what trains a language model (1e-6..1e-3)"
    if len(prompts) < config.batch.prompts_per_step:
        yield (
            f"data.train={config.data.train} holds {len(prompts)} prompts and batch.prompts_per_step="
            f"{config.batch.prompts_per_step}: each step has some of them several times"
        )
    known = {prompt.problem for prompt in prompts}
    for name, rows in evaluations.items():
        if seen := sum(prompt.problem in known for prompt in rows):
            yield (
                f"data.eval: {seen} of the {len(rows)} problems of {name} are in data.train: their accuracy says "
                "nothing of new problems (tools/prepare_data.py --against leaves them out)"
            )
    yield from _mini_batch(config)
    yield from proportions_left(config)


def _mini_batch(config: TrainConfig) -> Iterator[str]:
    update, batch = config.algorithm.update, config.batch
    groups = update.minibatch_unit == "groups"
    rollout = batch.prompts_per_step * (1 if groups else batch.samples_per_prompt)
    if update.minibatch_size is not None and update.minibatch_size > rollout:
        yield (
            f"algorithm.update.minibatch_size={update.minibatch_size} is above the {rollout} {update.minibatch_unit} "
            "of a step: each pass over a rollout is one update"
        )
