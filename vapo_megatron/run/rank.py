"""The body of a training rank: builds its parts, runs the loop, and closes them."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch.distributed as dist

from vapo_megatron.agents.leftovers import leftovers_end
from vapo_megatron.checkpoint.checkpointer import Checkpointer
from vapo_megatron.checkpoint.checkpoints import HF_FOLDER
from vapo_megatron.checkpoint.resume import (
    Resumed,
    SavedModel,
    Start,
    open_resumed,
    restore_run_files,
)
from vapo_megatron.checkpoint.state_saver import SavedRun, run_id_of
from vapo_megatron.collectives import broadcast_value, on_rank_zero
from vapo_megatron.config.critic_probes import CriticPretrainingConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.records import Records
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.engine_limits import engine_fp8
from vapo_megatron.engines.engine_weights import EngineWeights
from vapo_megatron.engines.pool import EnginePool
from vapo_megatron.files import refusals_interrupt
from vapo_megatron.megatron.offload import ONLOADED, MemoryPlan, Residency
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.models.registry import read_spec
from vapo_megatron.monitoring.console import RunConsole
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.monitoring.timers import MemoryGauge, PhaseTimer, host_gauge
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.rollout.dispatcher import connect
from vapo_megatron.run.ranks import end_from_thread
from vapo_megatron.run.watchdog import Watchdog
from vapo_megatron.training.loop import train
from vapo_megatron.training.models import Models, load_model, load_models
from vapo_megatron.training.outputs import gpus_held, show_header
from vapo_megatron.training.rollouts import Rollouts, make_rollouts
from vapo_megatron.training.skipped_updates import SkippedUpdates
from vapo_megatron.training.state import RunState
from vapo_megatron.training.sync import check_engines, sync_weights
from vapo_megatron.training.value_pretraining import pretrain_value
from vapo_megatron.weights.export import save_hf


def needed_alone(config: TrainConfig, world: int, device_bytes: int) -> Residency:
    """Only what a phase needs stays on the device."""
    return ONLOADED


def train_rank(
    config: TrainConfig,
    run_dir: Path,
    start: Start,
    residency: Callable[[TrainConfig, int, int], Residency] = needed_alone,
) -> None:
    """Collective: the whole training of one rank. What it owns (verifiers, engines) ends with it,
    however it ends.

    residency: of the config, the number of ranks and the bytes of the device, asked on rank 0, as
    moves may be collective.
    """
    is_main_rank = dist.get_rank() == 0
    model_dir = Path(config.model.path)
    platform = current_platform()
    tokenizer = TextTokenizer(model_dir, config.data.prompt)
    spec = read_spec(model_dir)
    gauges = {name: MemoryGauge(*calls) for name, calls in platform.memory_gauges().items()}
    timer = PhaseTimer({"memory": host_gauge()} | gauges, platform.synchronize)
    if start.checkpoint is not None:
        resumed = open_resumed(start.checkpoint, start.copy)
    else:
        resumed = None
    with ExitStack() as stack:
        stack.enter_context(leftovers_end(config.rollout.agent if is_main_rank else None))
        stack.callback(watch(config, run_dir).close)
        fp8 = engine_fp8(config.rollout, config.actor.precision, spec)
        engines = stack.enter_context(
            EnginePool(config.rollout, model_dir, config.model.dtype, run_dir / "logs", fp8)
        )
        weights = stack.enter_context(
            EngineWeights(engines, config.rollout, config.model.dtype, fp8)
        )
        if is_main_rank:
            verifier = stack.enter_context(VerifierPool(config.reward))
        else:
            verifier = None
        if not engines.share_device:
            engines.start()  # while the models load
        console = RunConsole(enabled=is_main_rank)
        console.note("loading the models")
        with timer("load_models"), console.phase("load models"):
            world = dist.get_world_size()
            stays = on_rank_zero(partial(residency, config, world, platform.device_bytes()))
            models = load_models(config, resumed, stays)
        if resumed is not None and is_main_rank:
            restore_run_files(run_dir, resumed, config)
        recorder = stack.enter_context(
            Recorder(
                run_dir,
                config.monitoring,
                is_main_rank,
                start_step=resumed.progress.step + 1 if resumed is not None else 0,
                timer=timer,
                decode=tokenizer.decode,
                gpus=gpus_held(config.rollout.tp * len(config.rollout.external_urls)),
            )
        )
        updates = SkippedUpdates(resumed.progress.updates if resumed is not None else None)
        models.judge_updates(updates)
        rollouts = make_rollouts(config, spec, engines, weights, tokenizer, verifier, resumed)
        stack.callback(rollouts.close_agents)
        stack.callback(rollouts.end)
        start_engines(engines, recorder)
        if is_main_rank:
            ends = tokenizer.stop_token_ids(config.sampling.stop)
            rollouts.use(connect(engines, config.rollout, ends, spec.vocab_size))
        show_header(config, models, engines.count, recorder)
        agree(config, models, rollouts, recorder, resumed)
        saved = SavedRun(config, "train", run_dir, models.saved(), run_id_of(resumed))
        checkpointer = Checkpointer(config.checkpoint, saved, recorder, resumed, start.memory)
        stack.enter_context(refusals_interrupt())
        state = RunState(
            config.run,
            config.checkpoint,
            run_dir,
            checkpointer,
            updates,
            resumed,
            models.probe,
            config.critic.regression,
        )
        if state.step == state.last_step:
            state.safe_point(rollouts)  # it resumes from a copy that no disk has
        train(config, models, rollouts, state, recorder)


def pretrain_critic_rank(config: CriticPretrainingConfig, run_dir: Path, start: Start) -> None:
    """Collective: value pretraining on recorded responses, with neither actor nor engines; ends
    with a value checkpoint where a run has its own."""
    is_main_rank = dist.get_rank() == 0
    source = config.critic_source[1]
    tokenizer = TextTokenizer(Path(config.model.path), config.data.prompt)
    policy = read_spec(Path(config.model.path))
    if start.checkpoint is not None:
        resumed = open_resumed(start.checkpoint, start.copy)
    else:
        resumed = None
    with ExitStack() as stack:
        stack.callback(watch(config, run_dir).close)
        with (timer := PhaseTimer())("load_models"):
            critic = load_model("critic", config, resumed, {})
        if resumed is not None and is_main_rank:
            restore_run_files(run_dir, resumed, config)
        start_step = int(resumed is not None)
        recorder = stack.enter_context(
            Recorder(run_dir, config.monitoring, is_main_rank, start_step, timer=timer)
        )
        updates = SkippedUpdates(resumed.progress.updates if resumed is not None else None)
        critic.accepts = updates.accepts
        saved = {"critic": SavedModel(critic, source)}
        if resumed is not None:
            resumed.restore_generators(saved)
            recorder.console.note(f"resumes from {resumed.checkpoint}")
        whole = SavedRun(config, "pretrain-critic", run_dir, saved, run_id_of(resumed))
        checkpointer = Checkpointer(config.checkpoint, whole, recorder, resumed, start.memory)
        stack.enter_context(refusals_interrupt())
        state = RunState(config.run, config.checkpoint, run_dir, checkpointer, updates, resumed)
        memory = MemoryPlan({"critic": critic.offloader})
        records = Records(config, tokenizer, policy.vocab_size)
        pretraining = config.value_pretraining
        algorithm = config.pretraining_algorithm
        pretrain_value(
            critic, memory, None, pretraining, algorithm, config.batch, state, recorder, records
        )
        memory.enter("export_critic")
        folder = run_dir / HF_FOLDER / "value_pretrained" / "critic"
        with recorder.timer("export"):
            save_hf(critic.chunks, critic.spec, critic.mesh, critic.head, source, folder)
        state.end_pretraining(None)
        recorder.console.note(
            f"a run starts from it: critic.init=value_checkpoint critic.init_path={folder}"
        )


def watch(config: TrainConfig, run_dir: Path) -> Watchdog:
    """A watchdog beside this rank."""
    rank = dist.get_rank()
    count = dist.get_world_size()
    longest = config.cluster.collective_timeout_s
    return Watchdog(
        config.robustness.hangs, run_dir / "logs", rank, count, longest, end_from_thread
    )


def start_engines(engines: EnginePool, recorder: Recorder) -> None:
    """Collective: the engines answer when this returns."""
    recorder.console.note("waiting for the engines, whose first start on a GPU node takes minutes")
    with recorder.phase("start_engines"):
        if engines.share_device:
            # Engines size their caches by free memory: all ranks must have offloaded their
            # optimizers first.
            broadcast_value(None)
            engines.start()
        engines.wait_until_ready()


def agree(
    config: TrainConfig,
    models: Models,
    rollouts: Rollouts,
    recorder: Recorder,
    resumed: Resumed | None,
) -> None:
    """Collective: ensure that engines have the actor's weights and compute the same; later engines
    get them too."""
    rollouts.engines.on_no_engine_left(
        partial(sync_weights, models, rollouts, recorder, again=True)
    )
    if resumed is not None:
        resumed.restore_generators(models.saved())
        rollouts.engine_weights.version = resumed.progress.weight_version - 1
        sync_weights(models, rollouts, recorder)
        # Times and metrics of loading belong to no step.
        recorder.discard_pending()
        recorder.console.note(f"resumes from {resumed.checkpoint}")
    elif config.rollout.load_format == "dummy" or config.rollout.external_urls:
        sync_weights(models, rollouts, recorder)
    else:
        if rollouts.engine_weights.finishes_old_groups:
            models.memory.enter("weight_sync")
            models.served = models.actor.weights_on_host()
        check_engines(models, rollouts, recorder)
    if rollouts.engines.failure is not None:
        raise rollouts.engines.failure
