"""VAPO (arXiv 2504.05118), read from top to bottom."""

from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.collect import collect
from vapo_megatron.training.reference import replace_reference
from vapo_megatron.training.run import Run
from vapo_megatron.training.score import score
from vapo_megatron.training.updates import update_critic, update_policy
from vapo_megatron.training.value_pretraining import pretrain_value


def train(run: Run) -> None:
    """Collective: the whole training of one rank.

    The critic first learns the returns of a policy that stands still (value pretraining, section 4.1). Then each step
    collects a group of responses a prompt, scores them with both models, estimates advantages with a lambda of its own
    for policy and critic (decoupled and length-adaptive GAE, sections 4.1 and 4.2), updates critic and policy
    (clip-higher, token-level loss, positive-example NLL, sections 4.2 and 4.3) and hands the weights to the engines.
    """
    if run.is_new:
        run.evaluate()
    if run.needs_value_pretraining:
        pretrain_value(run)

    for _ in run.steps():
        batch = collect(run)
        run.offload_engines()
        score(run, batch)
        estimate_advantages(run, batch)
        update_critic(run, batch)
        update_policy(run, batch)
        replace_reference(run)
        run.sync_weights()
        run.evaluate()
        run.export()
        run.record(batch)
        run.safe_point()

    run.finish()
