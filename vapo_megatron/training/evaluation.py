"""Evaluation inside a run: the sets of data.eval on the engines and weights of training."""

import json
from typing import TYPE_CHECKING

from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.config.rollout import SamplingConfig
from vapo_megatron.evaluation.sets import SetResult, answer_set
from vapo_megatron.rewards.grading import grade_samples
from vapo_megatron.rollout.request import GenerationRequest

if TYPE_CHECKING:
    from vapo_megatron.training.run import Run

# Apart from the seeds of training, and the same at every step, so that evaluations differ by the weights alone.
_SEED_OFFSET = 1_000_003


def evaluate_sets(run: "Run") -> list[SetResult]:
    """On rank 0: the result of every set; raw outputs and evaluation.json go into the run directory."""
    config, verifier = run.config, run.verifier
    assert verifier is not None
    sampling = SamplingConfig(
        temperature=config.evaluation.temperature,
        top_p=config.evaluation.top_p,
        max_new_tokens=config.evaluation.max_new_tokens or config.sampling.max_new_tokens,
    )
    seed, folder = config.run.seed + _SEED_OFFSET, run.run_dir / "evaluation"
    results = [
        answer_set(
            entry.name,
            prompts,
            entry.samples,
            collect=lambda prompts, k: run.engines.collect(
                GenerationRequest(prompts, k, sampling, seed, run.engines.version)
            ),
            grade=lambda samples: grade_samples(samples, verifier, run.tokenizer.decode, config.reward),
            outputs=folder / f"step_{run.step:06d}_{entry.name}.jsonl",
        )
        for entry, prompts in zip(config.data.eval, run.evaluation_prompts, strict=True)
    ]
    with atomic_write(run.run_dir / "evaluation.json") as file:
        json.dump({"step": run.step, "sets": [result.as_dict() for result in results]}, file, indent=2)
    return results
