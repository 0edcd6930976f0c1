"""`vapo-megatron evaluate`: every set answered by a checkpoint or an external server, and one
table."""

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from vapo_megatron.agents.leftovers import leftovers_end
from vapo_megatron.agents.processes import open_agents
from vapo_megatron.checkpoint.checkpoints import exported_step
from vapo_megatron.checkpoint.lease import Lease
from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.load import dump_config
from vapo_megatron.config.model import ModelConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.config.run_directory import make_run_dir
from vapo_megatron.data.jsonl import write_rows
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.evaluation.check import (
    Evaluation,
    check_evaluation,
    facts,
    responses_path,
)
from vapo_megatron.evaluation.evaluator import Collect, Evaluator, Generate, generate_with
from vapo_megatron.evaluation.metrics import PROBLEMS
from vapo_megatron.evaluation.model_card import MODEL_STEP
from vapo_megatron.evaluation.openai_client import OpenAIClient
from vapo_megatron.evaluation.responses import ResponseLog
from vapo_megatron.evaluation.sets import SetResult, intervals_of
from vapo_megatron.files import atomic_write
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.monitoring.console import RunConsole
from vapo_megatron.monitoring.names import WRITTEN_AT
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.rollout.dispatcher import Dispatcher

WEIGHT_VERSION = 0  # of engines that read a checkpoint and never get others


@contextmanager
def engines_of(
    model: ModelConfig,
    rollout: RolloutConfig,
    devices: Sequence[range | None],
    stop_tokens: Sequence[int],
    log_dir: Path,
    console: RunConsole,
) -> Iterator[Dispatcher]:
    """Engines on the given devices (None: the CPU), with the weights of model.path; they end with
    the block.

    Raises:
        RunFailed, TryAgain: one does not start.
    """
    servers = [
        EngineServer(
            model.path, rollout, model.dtype, log_dir / f"engine_{index}.log", place, WEIGHT_VERSION
        )
        for index, place in enumerate(devices)
    ]
    with ExitStack() as stack:
        with console.phase("starting engines", total=len(servers)) as advance:
            for server in servers:
                stack.callback(server.stop)
                server.start()
            for server in servers:
                server.wait_until_ready()
                advance(1)
        yield stack.enter_context(
            Dispatcher([server.address for server in servers], rollout, stop_tokens)
        )


def evaluate_checkpoint(settings: EvaluateConfig) -> None:
    """Answer every set of data.eval and print the results.

    The run directory gets evaluation.json (rewritten after each set), evaluation/<set>.jsonl with
    every response, evaluation/<set>_problems.jsonl with the metrics of every problem, and the
    engines' logs. Responses are kept as they
    come: with run.resume=auto the same command continues where it stopped, and grades all responses
        again.

    Raises:
        BadInput: something in the config cannot work, or another process works in the run
            directory; nothing was written.
        RunFailed, TryAgain: an engine or server did not start, refused, or went away.
    """
    plan = check_evaluation(settings, current_platform())
    with ExitStack() as stack:
        # A cancelled job must unwind this stack too.
        previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        stack.callback(signal.signal, signal.SIGTERM, previous)
        stack.enter_context(leftovers_end(settings.rollout.agent))
        verifier = stack.enter_context(VerifierPool(settings.reward))
        verifier.check(prompt for prompts in plan.prompts.values() for prompt in prompts)
        run_dir = Path(settings.run.directory)
        stack.enter_context(Lease(run_dir)).take()
        if settings.run.resume == "never" or not (run_dir / "config.yaml").is_file():
            make_run_dir(settings, settings.run)
        console = RunConsole()
        console.header(f"vapo-megatron evaluate: {settings.run.name}", facts(plan, run_dir))
        logs: dict[str, ResponseLog] = {}
        for entry in settings.data.eval:
            name = entry.name
            path = responses_path(settings, name)
            logs[name] = ResponseLog(path, plan.prompts[name], entry.samples, plan.origin(name))
        # Sets or limits may have changed since an earlier start
        dump_config(settings, run_dir / "config.yaml")
        answered = [
            name for name, log in logs.items() if len(log.groups) == len(plan.prompts[name])
        ]
        if answered:
            console.note(f"answered before, graded again: {', '.join(answered)}")
        if len(answered) < len(logs):
            generate = _start(plan, run_dir, console, stack)
        else:
            generate = None
        evaluator = Evaluator(verifier, settings.reward, console.phase)
        results = []
        for entry in settings.data.eval:
            name, k, prompts = entry.name, entry.samples, plan.prompts[entry.name]
            responses = evaluator.answer(name, prompts, k, generate, logs[name])
            result, problems = evaluator.conclude(name, prompts, responses, k, logs[name].path)
            write_rows(run_dir / "evaluation" / f"{name}{PROBLEMS}", map(asdict, problems))
            results.append(result)
            _write(plan, results, run_dir)
        console.table(*_table(results))
        console.picture(intervals_of([asdict(result) for result in results]))
        console.closing(
            f"{settings.run.name} finished",
            {
                "metrics": run_dir / "evaluation.json",
                "responses": run_dir / "evaluation",
                "logs": run_dir / "logs",
            },
        )


def _start(plan: Evaluation, run_dir: Path, console: RunConsole, stack: ExitStack) -> Generate:
    """Start the engines, which end with the stack, or the client of an external server."""
    settings = plan.settings
    if settings.server is not None:
        return OpenAIClient(
            settings.server, settings.data.prompt, settings.sampling, settings.run.seed
        ).generate
    assert plan.tokenizer is not None and settings.model is not None
    tokenizer = plan.tokenizer
    devices = plan.engine_devices
    logs = run_dir / "logs"
    started = engines_of(
        settings.model,
        settings.rollout,
        devices,
        tokenizer.stop_token_ids(settings.sampling.stop),
        logs,
        console,
    )
    dispatcher = stack.enter_context(started)
    collect: Collect = dispatcher.collect
    if settings.rollout.agent is not None:
        agents = open_agents(dispatcher, tokenizer, settings.rollout)
        stack.callback(agents.close)
        collect = partial(dispatcher.collect, generate=agents.generate)
    sampling = settings.sampling
    seed = settings.run.seed
    return generate_with(collect, tokenizer.decode, sampling, seed, WEIGHT_VERSION, settings.reward)


def _write(plan: Evaluation, results: Sequence[SetResult], run_dir: Path) -> None:
    model = plan.settings.model
    step = None if model is None else exported_step(Path(model.path).absolute().parent)
    with atomic_write(run_dir / "evaluation.json") as file:
        content = {
            "model": plan.model_name,
            **({} if step is None else {MODEL_STEP: step}),
            WRITTEN_AT: time.time(),
            "seed": plan.settings.run.seed,
            "sampling": plan.settings.sampling.model_dump(mode="json"),
            "sets": [asdict(result) for result in results],
        }
        json.dump(content, file, indent=2)


def _table(results: Sequence[SetResult]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows."""
    titles = [
        "set",
        "problems",
        "k",
        "avg@k",
        "95 % interval",
        "pass@k",
        "maj@k",
        "tokens",
        "truncated",
    ]
    rows = [
        [
            result.name,
            str(result.problems),
            str(result.samples),
            f"{result.avg_at_k:.3f}",
            f"[{result.low:.3f}, {result.high:.3f}]",
            f"{result.pass_at_k:.3f}",
            f"{result.maj_at_k:.3f}",
            f"{result.response_length:.1f}",
            f"{result.truncated:.1%}",
        ]
        for result in results
    ]
    return titles, rows
