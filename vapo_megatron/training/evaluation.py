"""Evaluation inside a run: the sets of data.eval on the engines and weights of training."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.config.data import EvalSet
from vapo_megatron.config.run import EVALUATION_SEED, EvaluationConfig
from vapo_megatron.engines.engines import EnginesFailed
from vapo_megatron.evaluation.evaluator import EngineGenerator, Evaluator
from vapo_megatron.evaluation.sets import SetResult, numbered
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.rollouts import Rollouts
from vapo_megatron.training.state import RunState


def evaluate(
    rollouts: Rollouts, sets: Sequence[EvalSet], config: EvaluationConfig, state: RunState, recorder: Recorder
) -> None:
    """Collective: answer the evaluation sets, where this step is one to do so."""
    due = config.before_training if state.step == 0 else state.is_due(config.every)
    if not due or not sets or rollouts.engines.failure is not None:
        return
    with suppress(EnginesFailed), rollouts.engines.attended():  # the next safe point saves, and ends the run for it
        if dist.get_rank() == 0:
            with recorder.phase("evaluation"):
                for result in evaluate_sets(rollouts, sets, config, state.run_dir, state.step):
                    recorder.add(result.metrics())
                    recorder.console.note(result.line(f"step {state.step}"))
    if state.step == 0:
        recorder.write(0)


def evaluate_sets(
    rollouts: Rollouts, sets: Sequence[EvalSet], config: EvaluationConfig, run_dir: Path, step: int
) -> list[SetResult]:
    """On rank 0: the result of every set; raw outputs and evaluation.json go into the run directory."""
    verifier, engines = rollouts.verifier, rollouts.engines
    assert verifier is not None, "responses are graded on rank 0"
    sampling = config.sampling_beside(rollouts.sampling)
    seed, decode = rollouts.seed + EVALUATION_SEED, rollouts.tokenizer.decode
    generator = EngineGenerator(engines.dispatcher.collect, decode, sampling, seed, engines.version)
    evaluator, results = Evaluator(verifier, rollouts.reward), []
    for entry, prompts in zip(sets, rollouts.evaluation_prompts, strict=True):
        problems = numbered(entry.name, prompts)
        responses = evaluator.answer(entry.name, problems, entry.samples, generator)
        outputs = run_dir / "evaluation" / f"step_{step:06d}_{entry.name}.jsonl"
        results.append(evaluator.conclude(entry.name, problems, responses, entry.samples, outputs)[0])
    with atomic_write(run_dir / "evaluation.json") as file:
        json.dump({"step": step, "sets": [result.as_dict() for result in results]}, file, indent=2)
    return results
