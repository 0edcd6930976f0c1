"""Evaluation of a checkpoint or of an external server, apart from any training: every set, one table."""

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from vapo_megatron.agents.episodes import Agents
from vapo_megatron.checkpoint.lease import Lease
from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.config.data import EvalSet
from vapo_megatron.config.load import dump_config
from vapo_megatron.config.model import ModelConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.config.run_directory import make_run_dir
from vapo_megatron.config.train import EvaluateConfig
from vapo_megatron.data.jsonl import write_rows
from vapo_megatron.engines.dispatcher import Dispatcher
from vapo_megatron.engines.server import EngineServer
from vapo_megatron.errors import BadInput
from vapo_megatron.evaluation.check import Evaluation, check_evaluation, facts
from vapo_megatron.evaluation.evaluator import Collect, EngineGenerator, Evaluator, Generator
from vapo_megatron.evaluation.metrics import PROBLEMS
from vapo_megatron.evaluation.openai_client import OpenAIClient
from vapo_megatron.evaluation.responses import Response, ResponseLog, read_outputs
from vapo_megatron.evaluation.sets import SetResult, problem_results, summarise
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.monitoring.console import RunConsole
from vapo_megatron.rewards.pool import VerifierPool

# Engines that read a checkpoint and are never handed weights stay at the version they start with.
WEIGHT_VERSION = 0


@contextmanager
def engines_of(
    model: ModelConfig,
    rollout: RolloutConfig,
    devices: Sequence[range | None],
    stop_tokens: Sequence[int],
    log_dir: Path,
    console: RunConsole,
) -> Iterator[Dispatcher]:
    """A server on each of some devices (None: the CPU) that has read model.path; all of them end with the block.

    Raises:
        RunFailed, TryAgain: one does not start.
    """
    servers = [
        EngineServer(model.path, rollout, model.dtype, log_dir / f"engine_{index}.log", place, WEIGHT_VERSION)
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
        yield stack.enter_context(Dispatcher([server.address for server in servers], rollout, stop_tokens))


_PARTIAL = ".partial.jsonl"


def evaluate_checkpoint(settings: EvaluateConfig) -> None:
    """Answer every set of data.eval and print what was reached.

    The run directory gets evaluation.json (rewritten after each set), evaluation/<set>.jsonl with every response,
    evaluation/<set>_problems.jsonl with the metrics of every problem, and the engines' logs. Responses are kept as they
    come: with run.resume=auto the same command goes on where it stopped.

    Raises:
        BadInput: something in the config cannot work, or another process works in the run directory; nothing was
            written.
        RunFailed, TryAgain: an engine or server did not start, refused, or went away.
    """
    plan = check_evaluation(settings, current_platform())
    with ExitStack() as stack:
        # A cancelled job must unwind this stack too.
        previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        stack.callback(signal.signal, signal.SIGTERM, previous)
        verifier = stack.enter_context(VerifierPool(settings.reward))
        verifier.check(prompt for prompts in plan.prompts.values() for prompt in prompts)
        run_dir = Path(settings.run.directory)
        stack.enter_context(Lease(run_dir)).take()
        _have_run_dir(settings, run_dir)
        console = RunConsole()
        console.header(f"vapo-megatron evaluate: {settings.run.name}", facts(plan, run_dir))
        work = _Work(plan, run_dir, Evaluator(verifier, settings.reward, console.phase), console)
        done = {entry.name: result for entry in settings.data.eval if (result := work.finished(entry)) is not None}
        if done:
            console.note(f"answered before: {', '.join(done)}")
            _write(plan, list(done.values()), run_dir)
        dump_config(settings, run_dir / "config.yaml")  # of an earlier start, sets or limits may have been others
        if len(done) < len(settings.data.eval):
            generator = _generator(plan, run_dir, console, stack)
            for entry in settings.data.eval:
                if entry.name not in done:
                    done[entry.name] = work.answer(entry, generator)
                    _write(plan, [done[e.name] for e in settings.data.eval if e.name in done], run_dir)
                    work.forget_partial(entry.name)
        results = [done[entry.name] for entry in settings.data.eval]
        console.table(*_table(results))
        console.closing(
            f"{settings.run.name} finished",
            {"metrics": run_dir / "evaluation.json", "responses": run_dir / "evaluation", "logs": run_dir / "logs"},
        )


@dataclass(frozen=True)
class _Work:
    """Answering one set after the other into a run directory."""

    plan: Evaluation
    run_dir: Path
    evaluator: Evaluator
    console: RunConsole

    def finished(self, entry: EvalSet) -> SetResult | None:
        """The result of a set that an earlier start of this evaluation has finished."""
        report = self.run_dir / "evaluation.json"
        if not report.is_file():
            return None
        try:
            sets = json.loads(report.read_text(encoding="utf-8"))["sets"]
            reports = {reported["name"]: reported for reported in sets}
            if entry.name not in reports:
                return None
            origin, graded_by = reports[entry.name]["origin"], reports[entry.name]["graded_by"]
        except (ValueError, KeyError, TypeError):
            raise BadInput(f"{report}: not an evaluation report: remove it to evaluate again") from None
        if origin != self.plan.origin(entry.name):
            raise BadInput(
                f"{report}: set {entry.name} was answered by another model, with other problems or other sampling: "
                "give the config it was made with, another run.name, or run.overwrite=true"
            )
        prompts = self.plan.prompts[entry.name]
        responses = read_outputs(self._file(entry.name, ".jsonl"))
        if len(responses) != len(prompts) * entry.samples:
            return None
        if graded_by != self.plan.graded_by(entry.name):
            self.console.note(f"{entry.name}: ground_truth answers or reward changed, its responses are graded again")
            return self._conclude(entry, responses)
        return summarise(entry.name, problem_results(prompts, responses), entry.samples)

    def answer(self, entry: EvalSet, generator: Generator) -> SetResult:
        """Answer what is not answered yet, grade all of it, write it down."""
        prompts = self.plan.prompts[entry.name]
        with ResponseLog(self._file(entry.name, _PARTIAL), self.plan.origin(entry.name)) as log:
            responses = self.evaluator.answer(entry.name, prompts, entry.samples, generator, log)
        return self._conclude(entry, responses)

    def _conclude(self, entry: EvalSet, responses: Sequence[Response]) -> SetResult:
        """Grade all responses to a set and write them down."""
        name, outputs = entry.name, self._file(entry.name, ".jsonl")
        result, problems = self.evaluator.conclude(name, self.plan.prompts[name], responses, entry.samples, outputs)
        write_rows(self._file(name, PROBLEMS), map(asdict, problems))
        return result

    def forget_partial(self, name: str) -> None:
        """The set is in evaluation.json: what was kept on the way is no longer needed."""
        self._file(name, _PARTIAL).unlink(missing_ok=True)

    def _file(self, name: str, ending: str) -> Path:
        return self.run_dir / "evaluation" / f"{name}{ending}"


def _have_run_dir(settings: EvaluateConfig, run_dir: Path) -> None:
    if settings.run.resume == "never" or not (run_dir / "config.yaml").is_file():
        make_run_dir(settings, settings.run)


def _generator(plan: Evaluation, run_dir: Path, console: RunConsole, stack: ExitStack) -> Generator:
    settings = plan.settings
    if settings.server is not None:
        return OpenAIClient(settings.server, settings.data.prompt, settings.sampling, settings.run.seed)
    assert plan.model is not None and settings.model is not None
    tokenizer, devices, logs = plan.model.tokenizer, plan.model.engine_devices, run_dir / "logs"
    started = engines_of(settings.model, settings.rollout, devices, tokenizer.eos_token_ids, logs, console)
    dispatcher = stack.enter_context(started)
    collect: Collect = dispatcher.collect
    if settings.rollout.agent is not None:
        agents = Agents(dispatcher, tokenizer, settings.rollout)
        stack.callback(agents.close)
        collect = agents.collect
    sampling, seed = settings.sampling, settings.run.seed
    return EngineGenerator(collect, tokenizer.decode, sampling, seed, WEIGHT_VERSION, settings.reward)


def _write(plan: Evaluation, results: Sequence[SetResult], run_dir: Path) -> None:
    with atomic_write(run_dir / "evaluation.json") as file:
        content = {
            "model": plan.model_name,
            "seed": plan.settings.run.seed,
            "sampling": plan.settings.sampling.model_dump(mode="json"),
            "sets": [
                result.as_dict() | {"origin": plan.origin(result.name), "graded_by": plan.graded_by(result.name)}
                for result in results
            ],
        }
        json.dump(content, file, indent=2)


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
