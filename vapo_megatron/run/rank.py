"""The body of a training rank: builds its parts, runs the loop, and closes them."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch.distributed as dist

from vapo_megatron.checkpoint.checkpointer import Checkpointer
from vapo_megatron.checkpoint.checkpoints import HF_FOLDER
from vapo_megatron.checkpoint.resume import Resumed, SavedModel, Start, open_resumed, restore_run_files
from vapo_megatron.checkpoint.state_saver import SavedRun, run_id_of
from vapo_megatron.collectives import broadcast_value
from vapo_megatron.config.atomic import refusals_interrupt
from vapo_megatron.config.critic_probes import CriticPretrainingConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.records import Records
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.engine_limits import engine_fp8
from vapo_megatron.engines.engines import Engines
from vapo_megatron.megatron.offload import MemoryPlan
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.monitoring.console import RunConsole
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.monitoring.timers import MemoryGauge, PhaseTimer, host_gauge
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.run.ranks import end_from_thread
from vapo_megatron.run.watchdog import Watchdog
from vapo_megatron.training.loop import train
from vapo_megatron.training.models import Models, load_model, load_models
from vapo_megatron.training.outputs import show_header
from vapo_megatron.training.rollouts import Rollouts, make_rollouts
from vapo_megatron.training.skipped_updates import SkippedUpdates
from vapo_megatron.training.state import RunState
from vapo_megatron.training.sync import check_engines, sync_weights
from vapo_megatron.training.value_pretraining import pretrain_value
from vapo_megatron.weights.export import save_hf
from vapo_megatron.weights.spec import read_spec


def train_rank(config: TrainConfig, run_dir: Path, start: Start) -> None:
    """Collective: the whole training of one rank. What it owns (verifiers, engines) ends with it, however it ends."""
    is_main_rank, model_dir, platform = dist.get_rank() == 0, Path(config.model.path), current_platform()
    tokenizer, spec = TextTokenizer(model_dir, config.data.prompt), read_spec(model_dir)
    gauges = {name: MemoryGauge(*calls) for name, calls in platform.memory_gauges().items()}
    timer = PhaseTimer({"memory": host_gauge()} | gauges, platform.synchronize)
    resumed = open_resumed(start.checkpoint, start.copy) if start.checkpoint is not None else None
    with ExitStack() as stack:
        stack.callback(watch(config, run_dir).close)
        engines = stack.enter_context(
            Engines(
                config.rollout,
                model_dir,
                config.model.dtype,
                run_dir / "logs",
                tokenizer.eos_token_ids,
                fp8=engine_fp8(config.rollout, config.actor.precision, spec),
            )
        )
        verifier = stack.enter_context(VerifierPool(config.reward)) if is_main_rank else None
        if not engines.share_device:
            engines.start()  # while the models load
        console = RunConsole(enabled=is_main_rank)
        console.note("loading the models")
        with timer("load_models"), console.phase("load models"):
            models = load_models(config, resumed)
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
            )
        )
        updates = SkippedUpdates(resumed.progress.updates if resumed is not None else None)
        models.judge_updates(updates)
        rollouts = make_rollouts(config, spec, engines, tokenizer, verifier, resumed)
        stack.callback(rollouts.close_agents)
        stack.callback(rollouts.end)
        start_engines(engines, recorder)
        show_header(config, models, engines.count, recorder)
        agree(config, models, rollouts, recorder, resumed)
        saved = SavedRun(config, "train", run_dir, models.saved(), run_id_of(resumed))
        checkpointer = Checkpointer(config.checkpoint, saved, recorder, resumed, start.memory)
        stack.enter_context(refusals_interrupt())
        state = RunState(config.run, config.checkpoint, run_dir, checkpointer, updates, resumed, models.probe)
        if state.step == state.last_step:
            state.safe_point(rollouts)  # it goes on from a copy that no disk has
        train(config, models, rollouts, state, recorder)


def pretrain_critic_rank(config: CriticPretrainingConfig, run_dir: Path, start: Start) -> None:
    """Collective: value pretraining on recorded responses, with neither actor nor engines; ends with a value checkpoint
    where a run has its own."""
    is_main_rank, source = dist.get_rank() == 0, config.critic_source[1]
    tokenizer, policy = TextTokenizer(Path(config.model.path), config.data.prompt), read_spec(Path(config.model.path))
    resumed = open_resumed(start.checkpoint, start.copy) if start.checkpoint is not None else None
    with ExitStack() as stack:
        stack.callback(watch(config, run_dir).close)
        with (timer := PhaseTimer())("load_models"):
            critic = load_model("critic", config, resumed, {})
        if resumed is not None and is_main_rank:
            restore_run_files(run_dir, resumed, config)
        start_step = int(resumed is not None)
        recorder = stack.enter_context(Recorder(run_dir, config.monitoring, is_main_rank, start_step, timer=timer))
        updates = SkippedUpdates(resumed.progress.updates if resumed is not None else None)
        critic.accepts = updates.accepts
        saved = {"critic": SavedModel(critic, source)}
        if resumed is not None:
            resumed.restore_generators(saved)
            recorder.console.note(f"goes on from {resumed.checkpoint}")
        whole = SavedRun(config, "pretrain-critic", run_dir, saved, run_id_of(resumed))
        checkpointer = Checkpointer(config.checkpoint, whole, recorder, resumed, start.memory)
        stack.enter_context(refusals_interrupt())
        state = RunState(config.run, config.checkpoint, run_dir, checkpointer, updates, resumed)
        memory, records = MemoryPlan({"critic": critic.offloader}), Records(config, tokenizer, policy.vocab_size)
        pretraining, algorithm = config.value_pretraining, config.pretraining_algorithm
        pretrain_value(critic, memory, None, pretraining, algorithm, config.batch, state, recorder, records)
        memory.enter("export_critic")
        folder = run_dir / HF_FOLDER / "value_pretrained" / "critic"
        with recorder.timer("export"):
            save_hf(critic.chunks, critic.spec, critic.mesh, critic.head, source, folder)
        state.end_pretraining(None)
        recorder.console.note(f"a run starts from it: critic.init=value_checkpoint critic.init_path={folder}")


def watch(config: TrainConfig, run_dir: Path) -> Watchdog:
    """A watchdog beside this rank."""
    rank, count, longest = dist.get_rank(), dist.get_world_size(), config.cluster.collective_timeout_s
    return Watchdog(config.robustness.hangs, run_dir / "logs", rank, count, longest, end_from_thread)


def start_engines(engines: Engines, recorder: Recorder) -> None:
    """Collective: the engines answer when this returns."""
    recorder.console.note("waiting for the engines, whose first start on a GPU node takes minutes")
    with recorder.phase("start_engines"):
        if engines.share_device:
            # They size their caches by what is free: not before all ranks have offloaded their optimizers.
            broadcast_value(None)
            engines.start()
        engines.wait_until_ready()


def agree(config: TrainConfig, models: Models, rollouts: Rollouts, recorder: Recorder, resumed: Resumed | None) -> None:
    """Collective: ensure that engines have the actor's weights and compute the same; later engines get them too."""
    rollouts.engines.when_stranded(partial(sync_weights, models, rollouts, recorder, again=True))
    if resumed is not None:
        resumed.restore_generators(models.saved())
        rollouts.engines.version = resumed.progress.weight_version - 1
        sync_weights(models, rollouts, recorder)
        # Times and metrics of loading belong to no step.
        recorder.discard_pending()
        recorder.console.note(f"goes on from {resumed.checkpoint}")
    elif config.rollout.load_format == "dummy" or config.rollout.external_urls:
        sync_weights(models, rollouts, recorder)
    else:
        if rollouts.engines.write_old_groups:
            models.memory.enter("weight_sync")
            models.served = models.actor.weights_on_host()
        check_engines(models, rollouts, recorder)
    if rollouts.engines.failure is not None:
        raise rollouts.engines.failure
