"""Weight sync: the engines get the actor's weights, and both must then compute the same."""

from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.models import Models
from vapo_megatron.training.rollouts import Rollouts


def sync_weights(models: Models, rollouts: Rollouts, recorder: Recorder) -> None:
    """Collective: the engines get the actor's weights; engine and trainer must then agree on the probe.

    Raises:
        RunFailed: a tensor was not taken or not sent, or log-probs differ by more than the tolerance.
    """
    engines = rollouts.engines
    rollouts.prepare_sync(recorder)
    engines.offload_kv_cache()
    models.memory.enter("weight_sync")
    with recorder.timer("weight_sync"):
        engines.onload("weights")
        engines.update_weights(models.actor)
        recorder.add({f"weight_sync/{part}_seconds": seconds for part, seconds in engines.sync_seconds.items()})
    check_engines(models, rollouts, recorder)


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
        found = engines.check(models.actor, rollouts.probe, before_asking=make_room_for_engines)
    name = "rollout/train_infer_logprob_diff"
    recorder.add({name: found.largest, f"{name}_quantile": found.quantile, f"{name}_mean": found.mean})
