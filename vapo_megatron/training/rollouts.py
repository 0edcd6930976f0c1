"""The rollout side of a run: prompts go to the engines, responses come back and are graded."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch.distributed as dist

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import SamplingConfig, SyncConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.experience.prompts import PromptSource, eval_prompts, train_prompts
from vapo_megatron.experience.sample import Prompt, Sample
from vapo_megatron.experience.tokenizer import TextTokenizer
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.console import Advance
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.rewards.grading import grade_samples
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.rollout.routed_experts import ExpertChoices
from vapo_megatron.training.broadcast import on_rank_zero
from vapo_megatron.training.engines import Engines
from vapo_megatron.training.resume import Resumed
from vapo_megatron.training.sick_updates import first_prompt
from vapo_megatron.weight_sync.probe import random_sequences, sequences_of
from vapo_megatron.weights.spec import ModelSpec


@dataclass
class Rollouts:
    """Where graded samples come from. prompts, evaluation_prompts and verifier are rank 0's.

    Attributes:
        engines: of the run.
        tokenizer: decodes responses for the verifier.
        sampling: of training's responses.
        reward: of an incorrect response, among others.
        sync: how engines and trainer are compared.
        seed: of the run; that of a response follows from it.
        routed_experts: what engines tell of the experts that they chose; None where they are not asked.
        verifier: grades responses.
        prompts: of training, in the order in which they are drawn.
        evaluation_prompts: of each evaluation set.
        probe: sequences of token ids on which engines and trainer are compared after a weight sync.
    """

    engines: Engines
    tokenizer: TextTokenizer
    sampling: SamplingConfig
    reward: RewardConfig
    sync: SyncConfig
    seed: int
    routed_experts: ExpertChoices | None = None
    verifier: VerifierPool | None = None
    prompts: PromptSource | None = None
    evaluation_prompts: Sequence[Sequence[Prompt]] = ()
    probe: list[list[int]] = field(default_factory=list)

    def generate(
        self, prompts: Sequence[Prompt], samples_per_prompt: int, recorder: Recorder, with_experts: bool
    ) -> list[Sample]:
        """On rank 0: graded responses to prompts, in the order of group and index.

        with_experts: samples hold the experts that their tokens went through (rollout.router_replay).
        """
        experts = self.routed_experts if with_experts else None
        request = self._request(prompts, samples_per_prompt, self.sampling, experts)
        start = time.perf_counter()
        with recorder.phase("rollout", total=request.num_samples) as advance:
            samples = self.engines.collect(request, advance)
        tokens = sum(len(sample.response_ids) for sample in samples)
        recorder.add({names.ROLLOUT_SPEED: tokens / (time.perf_counter() - start)})
        with recorder.phase("verify", total=len(samples)) as advance:
            recorder.add({names.FAILED_GRADES: self._grade(samples, advance)})
        return samples

    def generate_greedy(self, prompts: Sequence[Prompt], recorder: Recorder) -> list[Sample]:
        """On rank 0: the graded greedy response to each prompt."""
        greedy = self.sampling.model_copy(update={"temperature": 0.0})
        with recorder.phase("rollout_greedy", total=len(prompts)) as advance:
            samples = self.engines.collect(self._request(prompts, 1, greedy), advance)
        self._grade(samples)
        return samples

    def remember_probe(self, batch: ExperienceBatch) -> None:
        """Compare engines and trainer on what the policy really writes from now on."""
        self.probe = sequences_of(batch, self.sync.probe_sequences, self.sync.probe_length)

    def _request(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingConfig, experts: ExpertChoices | None = None
    ) -> GenerationRequest:
        return GenerationRequest(prompts, n, sampling, self.seed, self.engines.version, experts)

    def _grade(self, samples: Sequence[Sample], advance: Advance = lambda amount: None) -> float:
        """Returns the share whose verification failed."""
        assert self.verifier is not None, "responses are graded on rank 0"
        return grade_samples(samples, self.verifier, self.tokenizer.decode, self.reward, advance)


def make_rollouts(
    config: TrainConfig,
    spec: ModelSpec,
    engines: Engines,
    tokenizer: TextTokenizer,
    verifier: VerifierPool | None,
    resumed: Resumed | None,
) -> Rollouts:
    """Collective: read the prompts, and go on where the checkpoint stopped to draw them.

    Raises:
        BadInput: a file of prompts cannot be used, or is not the one that the run was started with.
    """
    prompts, evaluation = None, []
    if dist.get_rank() == 0:
        evaluation = [eval_prompts(entry, config.data, tokenizer) for entry in config.data.eval]
        prompts = PromptSource(train_prompts(config.data, tokenizer), config.run.seed, config.data.shuffle)
    sync, seed = config.rollout.sync, config.run.seed
    if resumed is None:
        probe = random_sequences(sync.probe_sequences, sync.probe_length, spec.vocab_size, seed)
    else:
        probe = [list(ids) for ids in resumed.progress.probe]
        on_rank_zero(partial(_go_on, prompts, resumed, Path(config.run.directory)))
    return Rollouts(
        engines,
        tokenizer,
        config.sampling,
        config.reward,
        sync,
        seed,
        ExpertChoices.of(spec) if config.rollout.router_replay else None,
        verifier,
        prompts,
        evaluation,
        probe,
    )


def _go_on(prompts: PromptSource | None, resumed: Resumed, run_dir: Path) -> None:
    if prompts is not None:
        prompts.restore(resumed.progress.prompts)
        prompts.cursor = first_prompt(run_dir, resumed.name, prompts.cursor)
