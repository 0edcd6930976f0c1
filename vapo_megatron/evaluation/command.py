"""Evaluation of a checkpoint, apart from any training: engines of its own, every set, one table."""

import json
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.config.run_directory import check_room, make_run_dir
from vapo_megatron.config.train import EvaluateConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.evaluation.sets import SetResult, answer_set
from vapo_megatron.experience.prompts import eval_prompts
from vapo_megatron.experience.sample import Prompt, Sample
from vapo_megatron.experience.tokenizer import TextTokenizer
from vapo_megatron.mcore.platform import Platform, current_platform
from vapo_megatron.monitoring.console import RunConsole
from vapo_megatron.rewards.grading import grade_samples
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.rollout.context import check_context
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.server import EngineServer
from vapo_megatron.weights.load import check_weights
from vapo_megatron.weights.spec import ModelSpec, read_spec

# Engines that read a checkpoint and are never handed weights stay at the version they start with.
_WEIGHT_VERSION = 0


@dataclass(frozen=True)
class Evaluation:
    """What a checked config comes to. prompts: of every set, by its name; engines: servers to start."""

    settings: EvaluateConfig
    spec: ModelSpec
    tokenizer: TextTokenizer
    prompts: dict[str, list[Prompt]]
    engines: int


def evaluate_checkpoint(settings: EvaluateConfig) -> None:
    """Answer every set of data.eval with the checkpoint and print what it reached.

    The run directory gets evaluation.json (rewritten after each set), evaluation/<set>.jsonl with every response, and
    the engines' logs.

    Raises:
        BadInput: something in the config cannot work; nothing was written.
        RunFailed, TryAgain: an engine did not start, refused, or went away.
    """
    plan = check_evaluation(settings, current_platform())
    with ExitStack() as stack:
        # A cancelled job must unwind this stack too.
        previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        stack.callback(signal.signal, signal.SIGTERM, previous)
        verifier = stack.enter_context(VerifierPool(settings.reward))
        run_dir = make_run_dir(settings, settings.run)
        console = RunConsole()
        console.header(f"vapo-megatron evaluate: {settings.run.name}", _facts(plan, run_dir))
        servers = _servers(plan, run_dir / "logs", current_platform())
        with console.phase("starting engines", total=len(servers)) as advance:
            for server in servers:
                stack.callback(server.stop)
                server.start()
            for server in servers:
                server.wait_until_ready()
                advance(1)
        addresses = [server.address for server in servers]
        dispatcher = stack.enter_context(Dispatcher(addresses, settings.rollout, plan.tokenizer.eos_token_ids))
        results: list[SetResult] = []
        for entry in settings.data.eval:
            results.append(_answer(plan, entry.name, entry.samples, dispatcher, verifier, console, run_dir))
            _write(results, settings, run_dir)
        console.table(*_table(results))
        console.closing(
            f"{settings.run.name} finished",
            {"figures": run_dir / "evaluation.json", "responses": run_dir / "evaluation", "logs": run_dir / "logs"},
        )


def check_evaluation(settings: EvaluateConfig, platform: Platform) -> Evaluation:
    """Read everything but the weights, and plan.

    Raises:
        BadInput: for anything that cannot work.
    """
    model_dir, data = Path(settings.model.path), settings.data
    spec = read_spec(model_dir)
    check_weights(model_dir, spec, "lm")
    new_tokens = settings.sampling.max_new_tokens
    check_context(
        data.max_prompt_tokens, "sampling.max_new_tokens", new_tokens, settings.rollout, spec.max_position_embeddings
    )
    engines = engine_count(settings.rollout, platform)
    tokenizer = TextTokenizer(model_dir, data.prompt)
    tokenizer.check_vocabulary(spec.vocab_size)
    prompts = {entry.name: eval_prompts(entry, data, tokenizer) for entry in data.eval}
    check_room(Path(settings.run.directory))
    return Evaluation(settings, spec, tokenizer, prompts, engines)


def engine_count(config: RolloutConfig, platform: Platform) -> int:
    """Servers to start: with GPUs as many as tp lets share this machine, else config.engines.

    Raises:
        BadInput: tp does not divide this machine's GPUs.
    """
    if not platform.is_cuda:
        return config.engines
    devices = platform.device_count()
    if devices % config.tp:
        raise BadInput(f"rollout.tp={config.tp} does not divide the {devices} GPUs of this machine: choose a divisor")
    return devices // config.tp


def _servers(plan: Evaluation, log_dir: Path, platform: Platform) -> list[EngineServer]:
    # There is no trainer to give memory to.
    config, model = plan.settings.rollout.model_copy(update={"memory_saver": False}), plan.settings.model
    return [
        EngineServer(
            model.path,
            config,
            model.dtype,
            log_dir / f"engine_{index}.log",
            range(index * config.tp, (index + 1) * config.tp) if platform.is_cuda else None,
            _WEIGHT_VERSION,
        )
        for index in range(plan.engines)
    ]


def _answer(
    plan: Evaluation,
    name: str,
    k: int,
    dispatcher: Dispatcher,
    verifier: VerifierPool,
    console: RunConsole,
    run_dir: Path,
) -> SetResult:
    settings, prompts = plan.settings, plan.prompts[name]

    def collect(numbered: Sequence[Prompt], k: int) -> list[Sample]:
        with console.phase(f"{name}: responses", total=len(numbered) * k) as advance:
            on_done = _difference(advance)
            return dispatcher.collect(numbered, k, settings.sampling, settings.run.seed, _WEIGHT_VERSION, on_done)

    def grade(samples: Sequence[Sample]) -> None:
        with console.phase(f"{name}: verdicts", total=len(samples)) as advance:
            grade_samples(samples, verifier, plan.tokenizer.decode, settings.reward.incorrect, advance)

    return answer_set(name, prompts, k, collect, grade, run_dir / "evaluation" / f"{name}.jsonl")


def _difference(advance: Callable[[int], None]) -> Callable[[int], None]:
    """From what is done so far, as a dispatcher tells it, to what is newly done."""
    seen = 0

    def on_done(finished: int) -> None:
        nonlocal seen
        advance(finished - seen)
        seen = finished

    return on_done


def _write(results: Sequence[SetResult], settings: EvaluateConfig, run_dir: Path) -> None:
    with atomic_write(run_dir / "evaluation.json") as file:
        content = {
            "model": settings.model.path,
            "seed": settings.run.seed,
            "sampling": settings.sampling.model_dump(mode="json"),
            "sets": [result.as_dict() for result in results],
        }
        json.dump(content, file, indent=2)


def _facts(plan: Evaluation, run_dir: Path) -> dict[str, object]:
    settings, sampling = plan.settings, plan.settings.sampling
    return {
        "model": f"{settings.model.path} ({plan.spec.family}, {plan.spec.parameter_count():,} parameters)",
        "sets": ", ".join(
            f"{entry.name} ({len(plan.prompts[entry.name])} problems x {entry.samples})" for entry in settings.data.eval
        ),
        "sampling": f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, at most "
        f"{sampling.max_new_tokens} tokens",
        "engines": f"{plan.engines} x TP{settings.rollout.tp}",
        "seed": settings.run.seed,
        "run": run_dir,
    }


def _table(results: Sequence[SetResult]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows."""
    titles = ["set", "problems", "k", "avg@k", "95 % interval", "pass@k", "maj@k", "tokens", "truncated"]
    rows = [
        [
            *(result.name, str(result.problems), str(result.samples), f"{result.avg_at_k:.3f}"),
            f"[{result.low:.3f}, {result.high:.3f}]",
            *(f"{result.pass_at_k:.3f}", f"{result.maj_at_k:.3f}"),
            *(f"{result.response_length:.1f}", f"{result.truncated:.1%}"),
        ]
        for result in results
    ]
    return titles, rows
