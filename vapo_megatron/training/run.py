"""A run as one rank holds it: its models, engines, data and records, and the steps of its attempt."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch.distributed as dist

from vapo_megatron.checkpoint.progress import PretrainingProgress, Progress
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.experience.prompts import PromptSource, eval_prompts, train_prompts
from vapo_megatron.experience.tokenizer import TextTokenizer
from vapo_megatron.mcore.memory_plan import MemoryPlan
from vapo_megatron.mcore.mesh import Mesh, make_mesh
from vapo_megatron.mcore.platform import current_platform
from vapo_megatron.mcore.trainable import Trainable
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.metrics import read_metrics
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.rollout.gpu_kernels import rope_note
from vapo_megatron.training.broadcast import broadcast_value, on_rank_zero
from vapo_megatron.training.checkpoint import Checkpointer, SavedModel, Snapshot
from vapo_megatron.training.engines import Engines
from vapo_megatron.training.evaluation import evaluate_sets
from vapo_megatron.training.final_model import FINAL, HF_FOLDER, begin_final, end_final, final_dir, final_step
from vapo_megatron.training.recorded_rollouts import RecordedRollouts
from vapo_megatron.training.resume import Resumed
from vapo_megatron.weight_sync.probe import random_sequences, sequences_of
from vapo_megatron.weights.load import load_hf
from vapo_megatron.weights.save import save_hf
from vapo_megatron.weights.spec import Head, read_spec


class Run:
    """Everything the loop works with. source and verifier are rank 0's."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        recorder: Recorder,
        engines: Engines,
        tokenizer: TextTokenizer,
        verifier: VerifierPool | None,
        resumed: Resumed | None = None,
    ) -> None:
        """Collective: load the models while the engines start, and see that both compute the same.

        resumed: the checkpoint that the run goes on from.
        """
        self.config, self.run_dir, self.recorder = config, run_dir, recorder
        self.engines, self.tokenizer, self.verifier = engines, tokenizer, verifier
        self._resumed, self._step_metrics = resumed, dict[str, float]()
        self.step = resumed.progress.step if resumed is not None else 0
        self.pretraining = resumed.progress.pretraining if resumed is not None else PretrainingProgress()
        # What value pretraining has recorded so far, empty once it is over.
        self.recorded = RecordedRollouts(run_dir, resumed.manifest.record if resumed is not None else {})
        self._step_started = time.perf_counter()
        self.model_dir = Path(config.model.path)
        self.spec = read_spec(self.model_dir)
        if not engines.share_device:
            engines.start()  # while the models load
        with recorder.phase("load_models"):
            meshes: dict[str, Mesh] = {}
            self.actor = self._load("actor", meshes)
            self.critic = self._load("critic", meshes) if config.algorithm.uses_critic else None
            self.reference = self._load("reference", meshes) if config.algorithm.uses_reference else None
        self.source, self.evaluation_prompts = None, []
        if dist.get_rank() == 0:
            self.evaluation_prompts = [eval_prompts(entry, config.data, tokenizer) for entry in config.data.eval]
            self.source = PromptSource(train_prompts(config.data, tokenizer), config.run.seed, config.data.shuffle)
        if resumed is not None:
            on_rank_zero(lambda: self.source.restore(resumed.progress.prompts) if self.source else None)
        with recorder.phase("start_engines"):
            if engines.share_device:
                # They size their caches by what is free: not before all ranks have put their optimizers to sleep.
                broadcast_value(None)
                engines.start()
            engines.wait_until_ready()
        self.memory = MemoryPlan(self._by_name(), shares_device=not config.rollout.external_urls)
        self._header()
        sync = config.rollout.sync
        self._probe = random_sequences(sync.probe_sequences, sync.probe_length, self.spec.vocab_size, config.run.seed)
        if resumed is not None:
            self._go_on(resumed)
        elif config.rollout.load_format == "dummy" or config.rollout.external_urls:
            self.sync_weights()
        else:
            self._check_engines()
        self._checkpointer = Checkpointer(
            config.checkpoint, config, "train", run_dir, self._saved_models(), recorder, resumed
        )

    @property
    def is_new(self) -> bool:
        """Whether this is the first attempt of the run."""
        return self._resumed is None

    @property
    def needs_value_pretraining(self) -> bool:
        """Whether the critic is still to learn the returns of the policy that the run starts from."""
        wanted = self.critic is not None and self.config.value_pretraining.enabled
        return wanted and self.step == 0 and not self.pretraining.finished

    def safe_point(self, milestone: bool = False) -> None:
        """Collective: the state of the run is whole here. It may be saved, and the run may stop.

        milestone: work that is dear was just done.

        Raises:
            TryAgain: the run is saved and was asked to stop, or its time is short.
            BadInput: a save failed.
        """
        config = self.config.checkpoint
        last = self.step == self.config.run.steps
        periodic = config.every is not None and (milestone or (self.step > 0 and self._every(config.every)))
        progress = Progress(
            step=self.step,
            pretraining=self.pretraining,
            prompts=self.source.state() if self.source is not None else {},
            weight_version=self.engines.version,
            probe=self._probe,
        )
        self._checkpointer.safe_point(
            Snapshot(progress, self._step_metrics, self.recorded.files),
            due=periodic or (last and config.at_end),
            last=last,
            making_room=self.engines.kv_cache_offloaded,
        )

    def steps(self) -> Iterator[int]:
        """The numbers of the iterations, from 1, or from where the run goes on."""
        for step in range(self.step + 1, self.config.run.steps + 1):
            self.step, self._step_started = step, time.perf_counter()
            yield step

    def remember_probe(self, batch: ExperienceBatch) -> None:
        """Compare engines and trainer on what the policy really writes from now on."""
        sync = self.config.rollout.sync
        self._probe = sequences_of(batch, sync.probe_sequences, sync.probe_length)

    def offload_engines(self) -> None:
        """Collective: the engines give their memory to the trainer, whose phases wake what they need."""
        self.engines.offload()

    def sync_weights(self) -> None:
        """Collective: the engines get the actor's weights; engine and trainer must then agree on the probe."""
        self.engines.offload_kv_cache()
        self.memory.enter("weight_sync")
        with self.recorder.timer("weight_sync"):
            self.engines.onload("weights")
            self.engines.sync_weights(self.actor)
            parts = self.engines.sync_seconds
            self.recorder.add({f"weight_sync/{part}_seconds": seconds for part, seconds in parts.items()})
        self._check_engines()

    def evaluate(self) -> None:
        """Collective: answer the evaluation sets, where this step is one to do so."""
        config = self.config.evaluation
        due = config.before_training if self.step == 0 else self._due(config.every)
        if not due or not self.config.data.eval:
            return
        if dist.get_rank() == 0:
            with self.recorder.phase("evaluation"):
                for result in evaluate_sets(self):
                    self.recorder.add(result.metrics())
                    self.recorder.console.note(result.line(f"step {self.step}"))
        broadcast_value(None)  # the others wait, on the CPU
        if self.step == 0:
            self.recorder.write(0)

    def export(self) -> None:
        """Collective: write the models as Hugging Face directories, where this step is one to do so."""
        if not self._due(self.config.export.every):
            return
        with self.recorder.phase("export"):
            if self.step == self.config.run.steps:
                self._save_final()
            else:
                self.save(f"step_{self.step:06d}")

    def _save_final(self) -> None:
        on_rank_zero(partial(begin_final, self.run_dir))
        self.save(FINAL)
        on_rank_zero(partial(end_final, self.run_dir, self.step))

    def _due(self, every: int | None) -> bool:
        return self.step == self.config.run.steps or self._every(every)

    def _every(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def save(self, name: str, critic_only: bool = False) -> None:
        """Collective: hf/<name>/actor and critic."""
        with self.engines.kv_cache_offloaded():
            for model in self.models():
                skipped = critic_only if model.name == "actor" else not self.config.export.critic
                if skipped:
                    continue
                self.memory.enter("export_policy" if model.name == "actor" else "export_critic")
                folder = self.run_dir / HF_FOLDER / name / model.name
                save_hf(model.chunks, model.spec, model.mesh, model.head, self.source_dir(model.name), folder)
            self.memory.enter("rollout")

    def source_dir(self, name: str) -> Path:
        """The Hugging Face directory that a model started from."""
        return Path(self.config.critic.init_path or self.model_dir) if name == "critic" else self.model_dir

    def models(self) -> list[Trainable]:
        """Actor, and critic where there is one."""
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    def _by_name(self) -> dict[str, Trainable]:
        reference = [] if self.reference is None else [self.reference]
        return {model.name: model for model in (*self.models(), *reference)}

    def record(self, batch: ExperienceBatch) -> None:
        """End the step: its row goes into the files, its line onto the console."""
        timer = self.recorder.timer
        seconds = time.perf_counter() - self._step_started
        # What is not part of every step would make the steps' times incomparable.
        seconds -= timer.seconds("evaluation") + timer.seconds("export")
        self.recorder.add(
            {
                names.STEP_TIME: seconds,
                names.TOKENS_PER_SECOND: float(batch.lengths.sum()) / seconds,
                "memory/rank_gib": current_platform().memory_bytes() / 2**30,
            }
            | self.memory.metrics()
        )
        if self.step == 1:
            self.recorder.console.table(*self.memory.table())
        self._step_metrics = self.recorder.write(self.step)
        self.recorder.step_line(self.step, self.config.run.steps, self._step_metrics)

    def finish(self) -> None:
        """Collective: have the final model and say where everything is."""
        if on_rank_zero(partial(final_step, self.run_dir)) != self.step:
            # No step was left to do: it was saved by a attempt that ended before the export, or run.steps is lower now.
            with self.recorder.phase("export"):
                self._save_final()
        rows = read_metrics(self.run_dir) if self.recorder.is_main_rank else []
        reached: dict[str, object] = {
            name: f"{found[0]:.3f} -> {found[-1]:.3f}"
            for name in sorted({name for row in rows for name in row if "/avg@" in name})
            if (found := [row[name] for row in rows if name in row])
        }
        places = {
            "metrics": self.run_dir / "metrics.jsonl",
            "samples": self.run_dir / "samples",
            "model": final_dir(self.run_dir) / "actor",
        }
        self.recorder.console.closing(f"{self.config.run.name} finished", reached | places)

    def _header(self) -> None:
        config, world = self.config, dist.get_world_size()
        facts = {
            "model": f"{self.model_dir} ({self.spec.family}, {self.spec.parameter_count():,} parameters)",
            "preset": config.preset or "none",
            "actor": config.actor.layout.describe(world),
            "critic": config.critic.layout.describe(world) if self.critic is not None else "none",
            "kernels": current_platform().capabilities(),
            "engines": f"{self.engines.count} x TP{config.rollout.tp}",
            "step": f"{config.batch.prompts_per_step} prompts x {config.batch.samples_per_prompt} responses",
            "seed": config.run.seed,
            "run": self.run_dir,
        }
        self.recorder.console.header(f"vapo-megatron train: {config.run.name}", facts)
        on_gpus = current_platform().is_cuda
        if (note := rope_note(self.spec, config.rollout.computes_in(config.model.dtype), on_gpus)) is not None:
            self.recorder.console.note(note)

    def _saved_models(self) -> dict[str, SavedModel]:
        """What a checkpoint holds: actor, critic, and a reference policy that is not the model the run started from."""
        saved = {model.name: SavedModel(model, self.source_dir(model.name)) for model in self.models()}
        if self.reference is not None and self.config.algorithm.kl.replace_reference_every is not None:
            saved["reference"] = SavedModel(self.reference, self.model_dir)
        return saved

    def _go_on(self, resumed: Resumed) -> None:
        """Collective: engines and metrics as they were when the checkpoint was saved."""
        resumed.restore_generators(self._saved_models())
        self._probe = [list(ids) for ids in resumed.progress.probe]
        self.engines.version = resumed.progress.weight_version - 1
        self.sync_weights()
        # What loading took and found belongs to no step.
        self.recorder.discard_pending()
        self.recorder.console.note(f"goes on from {resumed.checkpoint}")

    def _check_engines(self) -> None:
        """The actor's weights and the engines' caches are never on the device together: both may not have room."""
        self.engines.offload_kv_cache()
        self.memory.enter("weight_sync")
        with self.recorder.timer("sync_check"):
            found = self.engines.check(self.actor, self._probe, before_asking=self._make_room_for_engines)
        name = "rollout/train_infer_logprob_diff"
        self.recorder.add({name: found.largest, f"{name}_quantile": found.quantile, f"{name}_mean": found.mean})

    def _make_room_for_engines(self) -> None:
        self.memory.enter("rollout")
        self.engines.onload("kv_cache")

    def _load(self, name: str, meshes: dict[str, Mesh]) -> Trainable:
        config = self.config
        section = config.trainable(name)
        source = self.source_dir(name)
        spec = read_spec(source, value_outputs=config.algorithm.value_loss.outputs)
        key = section.layout.model_dump_json()
        if key not in meshes:
            meshes[key] = make_mesh(section.layout, name)
        head: Head = "value" if name == "critic" else "lm"
        mesh, seed = meshes[key], config.run.seed
        model = Trainable(
            spec, config.model, section, mesh, head, name=name, seed=seed, temperature=config.sampling.temperature
        )
        resumes = self._resumed is not None and name in self._resumed.manifest.models
        if not resumes:
            load_hf(
                model.chunks,
                spec,
                source,
                mesh,
                head,
                value_head="saved" if name == "critic" and config.critic.init != "policy" else "new",
                head_init_std=config.critic.head_init_std,
                seed=seed,
            )
        if name == "reference":
            model.freeze()
        else:
            freezes = name == "critic" and config.critic.freeze_attention
            model.prepare(frozen=(".self_attention.",) if freezes else ())
        if self._resumed is not None and resumes:
            self._resumed.load(model, name)
        model.offload()
        return model
