"""The body of a training rank: what has to be closed again, and the loop in between."""

from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from vapo_megatron.config.train import TrainConfig
from vapo_megatron.experience.tokenizer import TextTokenizer
from vapo_megatron.mcore.platform import current_platform
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.training.engines import Engines
from vapo_megatron.training.loop import train
from vapo_megatron.training.resume import open_resumed, restore_run_files
from vapo_megatron.training.run import Run
from vapo_megatron.weight_sync.quantization import engine_fp8
from vapo_megatron.weights.spec import read_spec


def train_rank(config: TrainConfig, run_dir: Path, checkpoint: Path | None = None) -> None:
    """Collective: the whole training of one rank. Engines and verifiers end with it, however it ends.

    checkpoint: the saved state that it goes on from; None for a new run.
    """
    is_main_rank, model_dir, platform = dist.get_rank() == 0, Path(config.model.path), current_platform()
    tokenizer = TextTokenizer(model_dir, config.data.prompt)
    resumed = open_resumed(checkpoint) if checkpoint is not None else None
    if resumed is not None and is_main_rank:
        restore_run_files(run_dir, resumed, config)
    with ExitStack() as stack:
        recorder = stack.enter_context(
            Recorder(
                run_dir,
                config.monitoring,
                is_main_rank,
                start_step=resumed.progress.step + 1 if resumed is not None else 0,
                device_gauges=platform.memory_gauges(),
                synchronize=platform.synchronize,
            )
        )
        engines = stack.enter_context(
            Engines(
                config.rollout,
                model_dir,
                config.model.dtype,
                run_dir / "logs",
                tokenizer.eos_token_ids,
                fp8=engine_fp8(config.rollout, config.actor.precision, read_spec(model_dir)),
            )
        )
        verifier = stack.enter_context(VerifierPool(config.reward)) if is_main_rank else None
        train(Run(config, run_dir, recorder, engines, tokenizer, verifier, resumed))
