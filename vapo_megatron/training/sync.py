"""Weight sync: the engines get the actor's weights, and both must then compute the same."""

from contextlib import suppress
from functools import partial

from torch import Tensor

from vapo_megatron.engines.pool import EnginesFailed
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.models import Models
from vapo_megatron.training.rollouts import Rollouts


def sync_weights(
    models: Models, rollouts: Rollouts, recorder: Recorder, again: bool = False
) -> None:
    """Collective: the engines get the actor's weights; engine and trainer must then agree on the
    probe.

    Engines that fail during the sync are left out while others remain. If none remains and none can
    be restarted, EnginePool.failure says so when this returns.

    again: sync the weights of the last sync once more, for engines that replace failed ones.

    Raises:
        RunFailed: a tensor was not taken or not sent, or log-probs differ by more than the
            tolerance.
    """
    if again and models.served is not None:
        _sync_served(models, rollouts, recorder, models.served)
        return
    engines = rollouts.engines
    weights = rollouts.engine_weights
    at_step = not again
    if at_step:
        with suppress(EnginesFailed), engines.rank0_uses_engines():
            rollouts.prepare_sync(recorder)
    while True:
        engines.wait_for_restart(partial(models.memory.enter, "rollout"))
        engines.offload_kv_cache()
        models.memory.enter("weight_sync")
        with recorder.timer("weight_sync"):
            engines.onload("weights")
            weights.update_weights(models.actor, again)
        if at_step and weights.finishes_old_groups:
            models.served = models.actor.weights_on_host()
        if engines.serving:
            for part, seconds in weights.sync_seconds.items():
                recorder.add({f"weight_sync/{part}_seconds": seconds})
            if weights.sent_share is not None:
                recorder.add({names.SENT_SHARE: weights.sent_share})
            check_engines(models, rollouts, recorder)
        if engines.serving or engines.failure is not None:
            break
        again = True
    causes = engines.pop_failures()
    rollouts.engine_failures += len(causes)
    for cause in causes:
        recorder.console.alarm(f"an engine failed: {cause}")
    if at_step:
        failures = float(rollouts.engine_failures)
        serving = float(engines.serving)
        recorder.add({names.ENGINE_FAILURES: failures, "rollout/engines": serving})
        rollouts.engine_failures = 0


def _sync_served(
    models: Models, rollouts: Rollouts, recorder: Recorder, served: list[Tensor]
) -> None:
    """Collective: sync the weights of the last weight sync, whose version marks the engines'
    groups. The actor may be newer, and has its own weights again when this returns."""
    models.memory.enter("weight_sync")
    newer = models.actor.weights_on_host()
    models.actor.put_weights(served)
    models.served = None
    try:
        sync_weights(models, rollouts, recorder, again=True)
    finally:
        models.memory.enter("weight_sync")
        models.actor.put_weights(newer)
        models.served = served


def check_engines(models: Models, rollouts: Rollouts, recorder: Recorder) -> None:
    """Collective: compare log-probs of engines and trainer on the probe.

    The actor's weights and the engines' caches are never on the device together: both may not have
    room.

    Raises:
        RunFailed: they differ by more than the tolerance.
    """
    engines = rollouts.engines

    def make_room_for_engines() -> None:
        models.memory.enter("rollout")
        engines.onload("kv_cache")

    engines.offload_kv_cache()
    models.memory.enter("weight_sync")
    with recorder.timer("sync_check"):
        report = rollouts.engine_weights.check(
            models.actor, rollouts.probe, before_asking=make_room_for_engines
        )
    name = "rollout/train_infer_logprob_diff"
    recorder.add(
        {name: report.largest, f"{name}_quantile": report.quantile, f"{name}_mean": report.mean}
    )
