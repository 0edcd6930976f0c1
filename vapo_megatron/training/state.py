"""The progress of a run: its step, its value pretraining, and when its state is saved."""

import gzip
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.profiler import profile, supported_activities

from vapo_megatron.checkpoint.checkpointer import Checkpointer
from vapo_megatron.checkpoint.manifest import GROUPS_FILE, PretrainingProgress, Progress
from vapo_megatron.checkpoint.recorded_rollouts import RecordedRollouts
from vapo_megatron.checkpoint.resume import Resumed
from vapo_megatron.checkpoint.state_saver import Snapshot
from vapo_megatron.collectives import gather_values, on_rank_zero
from vapo_megatron.config.regression import RegressionConfig
from vapo_megatron.config.run import CheckpointConfig, ProfileConfig, RunConfig
from vapo_megatron.config.run_directory import PROFILE
from vapo_megatron.data.sample import Sample
from vapo_megatron.engines.pool import EnginesFailed
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.probe import PROBE_FILE, Probe
from vapo_megatron.rollout.packed_groups import pack_groups
from vapo_megatron.rollout.stream import StopAsked
from vapo_megatron.signals import first_signal, stop_requested
from vapo_megatron.training.return_history import TRACKER_FILE, ReturnHistory
from vapo_megatron.training.rollouts import Rollouts
from vapo_megatron.training.skipped_updates import SkippedUpdates

_logger = logging.getLogger(__name__)


class RunState:
    """Progress of a run, the same on every rank.

    Attributes:
        step: the current step, or the last one that was done; 0 before the first.
        recorded: the rollouts recorded for value pretraining; empty once it is over.
        metrics: of the last step, by name; only rank 0's count.
        returns: of past steps, for advantage.calibration, advantage.tracker and critic.regression.
    """

    def __init__(
        self,
        run: RunConfig,
        checkpoint: CheckpointConfig,
        run_dir: Path,
        checkpointer: Checkpointer,
        updates: SkippedUpdates,
        resumed: Resumed | None = None,
        probe: Probe | None = None,
        regression: RegressionConfig | None = None,
    ) -> None:
        """resumed: the checkpoint that the run resumes from; probe: a critic without a model;
        regression: the features that values are regressed on, if they are."""
        self.updates = updates
        self._probe = probe
        self._run = run
        self._config = checkpoint
        self._checkpointer = checkpointer
        self.run_seed = run.seed
        self.run_dir = run_dir
        self.is_new = resumed is None
        self.step = resumed.progress.step if resumed is not None else 0
        self.pretraining = (
            resumed.progress.pretraining if resumed is not None else PretrainingProgress()
        )
        self.recorded = RecordedRollouts(
            run_dir, resumed.manifest.record if resumed is not None else {}
        )
        self.returns = ReturnHistory(regression=regression)
        if resumed is not None:
            self.returns = ReturnHistory(
                resumed.progress.returns,
                on_rank_zero(partial(resumed.read, TRACKER_FILE)),
                regression,
            )
        self.metrics: Mapping[str, float] = resumed.manifest.metrics if resumed is not None else {}
        self._whole: Snapshot | None = None
        self._waiting: Mapping[int, Sequence[Sample]] = {}  # groups of that snapshot
        self.started = time.perf_counter()

    @property
    def last_step(self) -> int:
        """The step that the run ends with."""
        return self._run.steps

    @property
    def seed(self) -> str:
        """The seed of this step."""
        return f"{self._run.seed}/{self.step}"

    @property
    def needs_value_pretraining(self) -> bool:
        """Whether value pretraining has not finished."""
        return self.step == 0 and not self.pretraining.finished

    def steps(self, rollouts: Rollouts) -> Iterator[int]:
        """Yields step numbers, from 1 or from the resume point."""
        self._whole = self._snapshot(rollouts)  # a stop in the first of them saves it
        for step in range(self.step + 1, self.last_step + 1):
            self.step = step
            self.started = time.perf_counter()
            with profiled(step, self._run.profile, self.run_dir):
                yield step

    def is_due(self, every: int | None) -> bool:
        """Whether this step is one of every `every`, or the last one."""
        return self.step == self.last_step or self._is_multiple_of(every)

    def end_pretraining(self, rollouts: Rollouts | None) -> None:
        """Collective: end value pretraining and drop its recorded rollouts; a safe point."""
        self.recorded = RecordedRollouts(self.run_dir)
        self.pretraining = self.pretraining.model_copy(update={"finished": True})
        self.safe_point(rollouts, milestone=True)

    def safe_point(self, rollouts: Rollouts | None, milestone: bool = False) -> None:
        """Collective: the state of the run is whole here. It may be saved, and the run may stop.

        rollouts: None where a critic is pretrained alone; milestone: work that is dear was just
            done.

        Raises:
            TryAgain: the run is saved and was asked to stop, or its time is short, or its engines
                fail (EnginesFailed).
            RunFailed: an alarm stops the run, or too many updates in a row were skipped.
            BadInput: a save failed.
        """
        if self.updates.exhausted:
            self._checkpointer.wait()
            self.updates.end(self.run_dir, self.step)
        last = self.step == self.last_step
        every = self._config.every
        periodic = every is not None and (
            milestone or (self.step > 0 and self._is_multiple_of(every))
        )
        if rollouts is None:
            whole = self._snapshot(rollouts)
            last = self.pretraining.finished
            self._checkpointer.safe_point(
                whole, due=periodic or (last and self._config.saves), last=last
            )
            return
        self._whole = self._snapshot(rollouts)
        failure = rollouts.engines.failure
        self._checkpointer.safe_point(
            self._whole,
            due=periodic or (last and self._config.saves) or failure is not None,
            last=last or failure is not None,
            making_room=rollouts.engines.kv_cache_offloaded,
        )
        if failure is not None:
            raise failure

    @contextmanager
    def saved_if_stopped(self, rollouts: Rollouts) -> Iterator[Callable[[], None]]:
        """Collective: if all engines fail or a signal to stop arrives in this block, the state of
        the last safe point is saved. After a signal, it includes the groups graded since then,
        taken ones as well.

        Models and generators must still be as they were then. Yields a collective to call between
        phases, which heeds a signal that has come to any rank.
        """
        rollouts.is_interruptible = self._whole is not None
        try:
            yield self._heed_signals
        except EnginesFailed:
            if self._whole is not None:
                self._checkpointer.safe_point(self._whole, due=True, last=True)
            raise
        except StopAsked:
            assert self._whole is not None
            ledger, graded = rollouts.state()
            progress = self._whole.progress.model_copy(update={"groups": ledger})
            rollouts.end()  # engines that are idle can give memory
            self._checkpointer.safe_point(
                replace(
                    self._whole,
                    progress=progress,
                    contents={**self._whole.contents, GROUPS_FILE: partial(pack_groups, graded)},
                ),
                due=True,
                last=False,
                making_room=rollouts.engines.kv_cache_offloaded,
                replaces=_tokens(graded) > _tokens(self._waiting),
            )
            raise

    def _heed_signals(self) -> None:
        if (reason := first_signal(gather_values(stop_requested()))) and self._whole is not None:
            raise StopAsked(reason, shared=True)

    def _snapshot(self, rollouts: Rollouts | None) -> Snapshot:
        progress = Progress(
            step=self.step,
            pretraining=self.pretraining,
            updates=self.updates.state(),
            returns=self.returns.state(),
        )
        if rollouts is None:
            return Snapshot(progress, self.metrics, self.recorded.files)
        groups, self._waiting = rollouts.state()
        drawn = {
            "prompts": rollouts.prompts.state() if rollouts.prompts is not None else {},
            "groups": groups,
            "weight_version": rollouts.engine_weights.version,
            "probe": rollouts.probe,
        }
        contents: dict[str, bytes | Callable[[], bytes]] = {
            GROUPS_FILE: partial(pack_groups, self._waiting),
            PROBE_FILE: self._probe.state() if self._probe is not None else b"",
            TRACKER_FILE: self.returns.tracked_state(),
        }
        return Snapshot(
            progress.model_copy(update=drawn), self.metrics, self.recorded.files, contents
        )

    def _is_multiple_of(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0


def _tokens(groups: Mapping[int, Sequence[Sample]]) -> int:
    return sum(len(sample.response_ids) for group in groups.values() for sample in group)


@contextmanager
def profiled(step: int, config: ProfileConfig, run_dir: Path) -> Iterator[None]:
    """Trace what this rank does inside, where the config names both the step and the rank.

    Writes profile/step_00003_rank0.json.gz in the run directory, for https://ui.perfetto.dev, and
    on CUDA step_00003_rank0.memory.pickle, for https://pytorch.org/memory_viz. A step that fails
    leaves no trace. A trace that cannot be written is a warning: no run ends for it. torch's own
    compression is by line and takes ten times as long.
    """
    if dist.is_initialized():
        rank = dist.get_rank()
    else:
        rank = 0
    if step not in config.steps or rank not in config.ranks:
        yield
        return
    path = run_dir / PROFILE / f"step_{step:05d}_rank{rank}"
    platform = current_platform()
    with platform.allocations_recorded() as write_allocations:
        with profile(
            activities=supported_activities(), record_shapes=True, profile_memory=True
        ) as trace:
            yield
            platform.synchronize()
        try:
            path.parent.mkdir(exist_ok=True)
            plain, partial = (
                path.with_name(f"partial_{path.name}.{kind}") for kind in ("json", "json.gz")
            )
            trace.export_chrome_trace(str(plain))
            partial.write_bytes(gzip.compress(plain.read_bytes(), 6))
            plain.unlink()
            partial.rename(path.with_name(f"{path.name}.json.gz"))
            write_allocations(f"{path}.memory.pickle")
        except (OSError, RuntimeError) as error:
            _logger.warning("%s.json.gz: the trace was not written (%s)", path, error)
