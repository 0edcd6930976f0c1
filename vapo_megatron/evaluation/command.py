"""Evaluation of a checkpoint or of an external server, apart from any training: every set, one table."""

import json
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from vapo_megatron.checkpoint.lease import Lease
from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.config.data import EvalSet
from vapo_megatron.config.load import dump_config
from vapo_megatron.config.run_directory import make_run_dir
from vapo_megatron.config.train import EvaluateConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.evaluation.check import Evaluation, check_evaluation, facts, unanswered
from vapo_megatron.evaluation.generator import Generator, own_engines
from vapo_megatron.evaluation.metrics import PROBLEMS
from vapo_megatron.evaluation.openai_client import OpenAIClient
from vapo_megatron.evaluation.responses import Response, ResponseLog, in_order, read_outputs
from vapo_megatron.evaluation.sets import SetResult, problem_results, summarise, write_outputs
from vapo_megatron.experience.jsonl import write_rows
from vapo_megatron.experience.sample import Prompt
from vapo_megatron.mcore.platform import current_platform
from vapo_megatron.monitoring.console import RunConsole
from vapo_megatron.rewards.grading import TRUNCATED, case_of, grades_of
from vapo_megatron.rewards.pool import VerifierPool

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
        first = plan.prompts[settings.data.eval[0].name][0]
        verifier.try_out(first.problem, first.answer)
        run_dir = Path(settings.run.directory)
        stack.enter_context(Lease(run_dir)).take()
        _have_run_dir(settings, run_dir)
        console = RunConsole()
        console.header(f"vapo-megatron evaluate: {settings.run.name}", facts(plan, run_dir))
        work = _Work(plan, run_dir, verifier, console)
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
    verifier: VerifierPool
    console: RunConsole

    def finished(self, entry: EvalSet) -> SetResult | None:
        """The result of a set that an earlier start of this evaluation has finished."""
        report = self.run_dir / "evaluation.json"
        if not report.is_file():
            return None
        try:
            known = {one["name"]: one for one in json.loads(report.read_text(encoding="utf-8"))["sets"]}
            if entry.name not in known:
                return None
            origin, graded_by = known[entry.name]["origin"], known[entry.name]["graded_by"]
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
            return self._conclude(entry.name, prompts, responses, entry.samples)
        return summarise(entry.name, problem_results(prompts, responses), entry.samples)

    def answer(self, entry: EvalSet, generator: Generator) -> SetResult:
        """Answer what is not answered yet, grade all of it, write it down."""
        name, k, prompts = entry.name, entry.samples, self.plan.prompts[entry.name]
        with ResponseLog(self._file(name, _PARTIAL), self.plan.origin(name)) as log:
            groups = log.complete_groups(k)

            def keep(responses: list[Response]) -> None:
                log.append(responses)
                groups[responses[0].id] = responses

            missing = unanswered(prompts, set(groups))
            with self.console.phase(f"{name}: responses", total=len(prompts) * k) as advance:
                advance((len(prompts) - len(missing)) * k)
                if missing:
                    generator.collect(missing, k, keep, advance)
        return self._conclude(name, prompts, in_order(groups, prompts), k)

    def _conclude(self, name: str, prompts: Sequence[Prompt], responses: Sequence[Response], k: int) -> SetResult:
        """Grade all responses to a set and write them down."""
        self._grade(name, prompts, responses)
        write_outputs(self._file(name, ".jsonl"), prompts, responses)
        problems = problem_results(prompts, responses)
        write_rows(self._file(name, PROBLEMS), map(asdict, problems))
        return summarise(name, problems, k)

    def forget_partial(self, name: str) -> None:
        """The set is in evaluation.json: what was kept on the way is no longer needed."""
        self._file(name, _PARTIAL).unlink(missing_ok=True)

    def _grade(self, name: str, prompts: Sequence[Prompt], responses: Sequence[Response]) -> None:
        by_id = {prompt.id: prompt for prompt in prompts}
        cases = [case_of(by_id[one.id], one.text, one.truncated, self.plan.settings.reward) for one in responses]
        with self.console.phase(f"{name}: grades", total=len(cases)) as advance:
            grades = grades_of(cases, self.verifier, advance)
        for response, grade in zip(responses, grades, strict=True):
            if grade is None:
                response.correct, response.grade_reason, response.extracted = False, TRUNCATED, ""
            else:
                response.correct, response.grade_reason = grade.correct, grade.reason
                response.extracted = grade.extracted

    def _file(self, name: str, ending: str) -> Path:
        return self.run_dir / "evaluation" / f"{name}{ending}"


def _have_run_dir(settings: EvaluateConfig, run_dir: Path) -> None:
    if settings.run.resume == "never" or not (run_dir / "config.yaml").is_file():
        make_run_dir(settings, settings.run)


def _generator(plan: Evaluation, run_dir: Path, console: RunConsole, stack: ExitStack) -> Generator:
    settings = plan.settings
    if plan.checkpoint is not None:
        return stack.enter_context(own_engines(plan, plan.checkpoint, run_dir / "logs", current_platform(), console))
    assert settings.server is not None
    return OpenAIClient(settings.server, settings.data.prompt, settings.sampling, settings.run.seed)


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
