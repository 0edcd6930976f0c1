"""Traces of chosen steps: torch.profiler's, and on a GPU the history of its allocations."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.profiler import profile, supported_activities

from vapo_megatron.config.run import ProfileConfig
from vapo_megatron.config.run_directory import PROFILE
from vapo_megatron.megatron.platform import current_platform

_logger = logging.getLogger(__name__)


@contextmanager
def profiled(step: int, config: ProfileConfig, run_dir: Path) -> Iterator[None]:
    """Trace what this rank does inside, where it is rank 0 and the config names the step.

    Writes profile/step_00003_rank0.json.gz in the run directory, for https://ui.perfetto.dev, and on CUDA
    step_00003_rank0.memory.pickle, for https://pytorch.org/memory_viz. A step that fails leaves no trace. A trace that
    cannot be written is a warning: no run ends for it.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if step not in config.steps or rank:
        yield
        return
    path, platform = run_dir / PROFILE / f"step_{step:05d}_rank{rank}", current_platform()
    with (
        platform.allocations_recorded() as write_allocations,
        profile(activities=supported_activities(), record_shapes=True, profile_memory=True) as trace,
    ):
        yield
        platform.synchronize()
        trace.stop()
        try:
            path.parent.mkdir(exist_ok=True)
            partial = path.with_name(f"partial_{path.name}.json.gz")
            trace.export_chrome_trace(str(partial))
            partial.rename(path.with_name(f"{path.name}.json.gz"))
            write_allocations(f"{path}.memory.pickle")
        except (OSError, RuntimeError) as error:
            _logger.warning("%s.json.gz: the trace was not written (%s)", path, error)
