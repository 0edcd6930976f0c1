"""A run as one rank holds it: its models, engines, data and records, and the steps of its life."""

import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from vapo_megatron.config.train import TrainConfig
from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.experience.prompts import PromptSource, eval_prompts, train_prompts
from vapo_megatron.experience.tokenizer import TextTokenizer
from vapo_megatron.mcore.mesh import Mesh, make_mesh
from vapo_megatron.mcore.platform import current_platform
from vapo_megatron.mcore.trainable import Trainable
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.metrics import read_metrics
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.training.broadcast import broadcast_value
from vapo_megatron.training.engines import Engines
from vapo_megatron.training.evaluation import evaluate_sets
from vapo_megatron.training.probe import random_sequences, sequences_of
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
    ) -> None:
        """Collective: load the models while the engines start, and see that both compute the same."""
        self.config, self.run_dir, self.recorder = config, run_dir, recorder
        self.engines, self.tokenizer, self.verifier = engines, tokenizer, verifier
        self.step = 0
        self._step_started = time.perf_counter()
        self.model_dir = Path(config.model.path)
        self.spec = read_spec(self.model_dir)
        platform = current_platform()
        if not platform.engines_share_device:
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
        with recorder.phase("start_engines"):
            if platform.engines_share_device:
                # They size their caches by what is free: not before all ranks have put their optimizers to sleep.
                broadcast_value(None)
                engines.start()
            engines.wait_until_ready()
        self._header()
        sync = config.rollout.sync
        self._probe = random_sequences(sync.probe_sequences, sync.probe_length, self.spec.vocab_size, config.run.seed)
        if config.rollout.load_format == "dummy":
            self.hand_over()
        else:
            self._check_engines()

    def steps(self) -> Iterator[int]:
        """The numbers of the iterations, from 1."""
        for step in range(1, self.config.run.steps + 1):
            self.step, self._step_started = step, time.perf_counter()
            yield step

    def remember_probe(self, batch: ExperienceBatch) -> None:
        """Compare engines and trainer on what the policy really writes from now on."""
        sync = self.config.rollout.sync
        self._probe = sequences_of(batch, sync.probe_sequences, sync.probe_length)

    def sleep_engines(self) -> None:
        """Collective: the engines give their memory to the trainer, whose optimizers wake."""
        self.engines.sleep()
        for model in self.models():
            model.wake()

    def hand_over(self) -> None:
        """Collective: the engines get the actor's weights; engine and trainer must then agree on the probe."""
        for model in self.models():
            model.sleep()
        with self.recorder.timer("hand_over"):
            self.engines.wake("weights")
            self.engines.hand_over(self.actor)
            self.engines.wake("kv_cache")
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
                    self.recorder.add(result.figures())
                    self.recorder.console.note(result.line(f"step {self.step}"))
        broadcast_value(None)  # the others wait, on the CPU
        if self.step == 0:
            self.recorder.write(0)

    def export(self) -> None:
        """Collective: write the models as Hugging Face directories, where this step is one to do so."""
        if not self._due(self.config.export.every):
            return
        with self.recorder.phase("export"):
            self.save("final" if self.step == self.config.run.steps else f"step_{self.step:06d}")

    def _due(self, every: int | None) -> bool:
        return self.step == self.config.run.steps or (every is not None and self.step % every == 0)

    def save(self, name: str, critic_only: bool = False) -> None:
        """Collective: checkpoints/<name>/actor and critic."""
        for model in self.models():
            if (model.name == "actor" and critic_only) or (model.name == "critic" and not self.config.export.critic):
                continue
            folder = self.run_dir / "checkpoints" / name / model.name
            save_hf(model.chunks, model.spec, model.mesh, model.head, self.source_dir(model.name), folder)

    def source_dir(self, name: str) -> Path:
        """The Hugging Face directory that a model started from."""
        return Path(self.config.critic.init_path or self.model_dir) if name == "critic" else self.model_dir

    def models(self) -> list[Trainable]:
        """Actor, and critic where there is one."""
        return [self.actor] if self.critic is None else [self.actor, self.critic]

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
        )
        self.recorder.step_line(self.step, self.config.run.steps, self.recorder.write(self.step))

    def finish(self) -> None:
        """Draw the report and say where everything lies."""
        self.recorder.report()
        rows = read_metrics(self.run_dir) if self.recorder.speaks else []
        reached: dict[str, object] = {
            name: f"{found[0]:.3f} -> {found[-1]:.3f}"
            for name in sorted({name for row in rows for name in row if "/avg@" in name})
            if (found := [row[name] for row in rows if name in row])
        }
        places = {
            "picture": self.run_dir / "curves.png",
            "report": self.run_dir / "report.html",
            "metrics": self.run_dir / "metrics.jsonl",
            "samples": self.run_dir / "samples",
            "model": self.run_dir / "checkpoints" / "final" / "actor",
        }
        self.recorder.console.closing(f"{self.config.run.name} finished", reached | places)

    def _header(self) -> None:
        config, world = self.config, dist.get_world_size()
        facts = {
            "model": f"{self.model_dir} ({self.spec.family}, {self.spec.parameter_count():,} parameters)",
            "preset": config.preset or "none",
            "actor": config.actor.layout.describe(world),
            "critic": config.critic.layout.describe(world) if self.critic is not None else "none",
            "engines": f"{self.engines.count} x TP{config.rollout.tp}",
            "step": f"{config.batch.prompts_per_step} prompts x {config.batch.samples_per_prompt} responses",
            "seed": config.run.seed,
            "run": self.run_dir,
        }
        self.recorder.console.header(f"vapo-megatron train: {config.run.name}", facts)

    def _check_engines(self) -> None:
        with self.recorder.timer("sync_check"):
            largest = self.engines.check(self.actor, self._probe)
        self.recorder.add({"rollout/sync_logprob_difference": largest})

    def _load(self, name: str, meshes: dict[str, Mesh]) -> Trainable:
        config = self.config
        section = config.critic if name == "critic" else config.actor
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
        model.sleep()
        return model
