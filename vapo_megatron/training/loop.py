"""VAPO (arXiv 2504.05118), read from top to bottom."""

from vapo_megatron.config.train import TrainConfig
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.rollout.ledger import step_rule
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.collect import collect, spread
from vapo_megatron.training.models import Models, replace_reference
from vapo_megatron.training.outputs import (
    evaluate,
    export,
    export_critic,
    export_final,
    record_step,
    show_end,
)
from vapo_megatron.training.rollouts import Rollouts
from vapo_megatron.training.score import score
from vapo_megatron.training.state import RunState
from vapo_megatron.training.sync import sync_weights
from vapo_megatron.training.updates import update_critic, update_policy
from vapo_megatron.training.value_pretraining import pretrain_critic


def train(
    config: TrainConfig, models: Models, rollouts: Rollouts, state: RunState, recorder: Recorder
) -> None:
    """Collective: the whole training of one rank.

    First the critic learns the returns of the fixed policy (value pretraining, section 4.1). Then
    each step collects a group of responses per prompt, scores them with both models, estimates
    advantages with separate lambdas for policy and critic (decoupled and length-adaptive GAE,
    sections 4.1 and 4.2), updates critic and policy (clip-higher, token-level loss,
    positive-example NLL, sections 4.2 and 4.3) and syncs the weights to the engines.
    """
    algorithm = config.algorithm
    engines = rollouts.engines
    if state.is_new:
        evaluate(rollouts, config.data.eval, config.evaluation, state, recorder)
    if config.value_pretraining.enabled and state.needs_value_pretraining:
        pretrain_critic(config, models, rollouts, state, recorder)
        export_critic(models, engines, config, state, recorder)
        sync_weights(models, rollouts, recorder)
        state.end_pretraining(rollouts)

    rule = step_rule(config.batch, algorithm.dynamic_sampling, config.run.steps, config.rollout)
    rollouts.begin(rule, config.batch.samples_per_prompt, state.step)
    for step in state.steps(rollouts):
        with state.saved_if_stopped(rollouts) as heed_signals:
            batch = spread(collect(rollouts, algorithm, step, recorder), recorder)
            heed_signals()
            engines.offload()
            score(models, batch, algorithm, recorder, heed_signals)
        if models.updates.is_sound(batch):
            estimate_advantages(batch, algorithm, recorder, models.critic_is_new, state.returns)
            update_critic(models, batch, algorithm, state.seed, recorder)
            update_policy(models, batch, algorithm, state.seed, recorder)
        replace_reference(models, algorithm.kl, step)
        sync_weights(models, rollouts, recorder)
        rollouts.advance()  # asynchronous: engines generate while the trainer works
        evaluate(rollouts, config.data.eval, config.evaluation, state, recorder)
        export(models, engines, config, state, recorder)
        record_step(batch, models.memory, state, recorder)
        state.safe_point(rollouts)

    export_final(models, engines, config, state, recorder)
    show_end(config.run.name, recorder)
