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
from vapo_megatron.training.run import Run


def train_rank(config: TrainConfig, run_dir: Path) -> None:
    """Collective: the whole training of one rank. Engines and verifiers end with it, however it ends."""
    speaks, model_dir, platform = dist.get_rank() == 0, Path(config.model.path), current_platform()
    tokenizer = TextTokenizer(model_dir, config.data.prompt)
    with ExitStack() as stack:
        recorder = stack.enter_context(
            Recorder(
                run_dir,
                config.monitoring,
                speaks,
                device_gauges=platform.memory_gauges(),
                synchronize=platform.synchronize,
            )
        )
        engines = stack.enter_context(
            Engines(config.rollout, model_dir, config.model.dtype, run_dir / "logs", tokenizer.eos_token_ids)
        )
        verifier = stack.enter_context(VerifierPool(config.reward)) if speaks else None
        train(Run(config, run_dir, recorder, engines, tokenizer, verifier))
