"""Weight sync: the engines get the actor's weights, and both must then compute the same."""

from contextlib import suppress

from vapo_megatron.engines.engines import EnginesFailed
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.models import Models
from vapo_megatron.training.rollouts import Rollouts


def sync_weights(models: Models, rollouts: Rollouts, recorder: Recorder, again: bool = False) -> None:
    """Collective: the engines get the actor's weights; engine and trainer must then agree on the probe.

    Engines that fail in it are left out, as long as there are others. Where none is left for good, Engines.failure says
    so when this returns.

    again: the weights of the last weight sync, for engines that have taken the place of those that had them.

    Raises:
        RunFailed: a tensor was not taken or not sent, or log-probs differ by more than the tolerance.
    """
    engines, at_step = rollouts.engines, not again
    if again and models.served is not None:  # the actor may be newer: engines get what their groups are marked with
        models.memory.enter("weight_sync")
        newer, served = models.actor.weights_on_host(), models.served
        models.actor.put_weights(served)
        models.served = None
        try:
            return sync_weights(models, rollouts, recorder, again=True)
        finally:
            models.memory.enter("weight_sync")
            models.actor.put_weights(newer)
            models.served = served
    if at_step:
        with suppress(EnginesFailed), engines.attended():
            rollouts.prepare_sync(recorder)
    while True:
        engines.offload_kv_cache()
        models.memory.enter("weight_sync")
        with recorder.timer("weight_sync"):
            engines.onload("weights")
            engines.update_weights(models.actor, again)
        if at_step and engines.write_old_groups:
            models.served = models.actor.weights_on_host()
        if engines.serving:
            recorder.add({f"weight_sync/{part}_seconds": seconds for part, seconds in engines.sync_seconds.items()})
            check_engines(models, rollouts, recorder)
        if engines.serving or engines.failure is not None:
            break
        again = True
    for cause in engines.take_failures():
        recorder.console.alarm(f"an engine failed: {cause}")
    if at_step:
        recorder.add({names.ENGINE_FAILURES: float(engines.take_count()), "rollout/engines": float(engines.serving)})


def check_engines(models: Models, rollouts: Rollouts, recorder: Recorder) -> None:
    """Collective: compare log-probs of engines and trainer on the probe.

    The actor's weights and the engines' caches are never on the device together: both may not have room.

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
        report = engines.check(models.actor, rollouts.probe, before_asking=make_room_for_engines)
    name = "rollout/train_infer_logprob_diff"
    recorder.add({name: report.largest, f"{name}_quantile": report.quantile, f"{name}_mean": report.mean})
