"""Measures what values by regression explain at fixed weights, feature by feature, with
coefficients of past steps
alone: what training would have had."""

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.algorithms.baselines import positions
from vapo_megatron.algorithms.segments import to_tokens
from vapo_megatron.checkpoint.checkpoints import HF_FOLDER
from vapo_megatron.config.critic_probes import ProbedRunConfig
from vapo_megatron.config.regression import RegressionConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.errors import BadInput
from vapo_megatron.files import atomic_write
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.console import RunConsole
from vapo_megatron.operations.critic_lab.probe_rollouts import choose_steps, draw_steps
from vapo_megatron.operations.critic_lab.start import checked_start, verifier_and_engines
from vapo_megatron.run.ranks import start_ranks
from vapo_megatron.training.models import load_frozen
from vapo_megatron.training.regression import regressed_values
from vapo_megatron.training.return_history import ReturnHistory
from vapo_megatron.training.shards import scatter
from vapo_megatron.training.token_rewards import returns_known

_FEATURES = ("siblings", "prefix", "surprise", "entropy", "history")
_QUARTERS = 4


class Explained(NamedTuple):
    """Explained variance of some features' values: mean over the steps that have a past, half of
    its 95 % interval, and the mean by quarter of the response."""

    mean: float
    margin: float
    quarters: tuple[float, ...]


class RegressionReport(NamedTuple):
    """Explained variance by the features' name, and the mean share of states that a sibling passed
    (None: no tree)."""

    rows: dict[str, Explained]
    shared: float | None


def feature_sets(config: RegressionConfig) -> dict[str, RegressionConfig]:
    """The features of a config one by one and together, by name; each by position."""
    chosen = [name for name in _FEATURES if getattr(config, name)]
    sets = {"position": (), **{name: (name,) for name in chosen}}
    if len(chosen) > 1:
        sets[" + ".join(chosen)] = tuple(chosen)
    return {
        name: RegressionConfig.model_validate({f: f in features for f in _FEATURES})
        for name, features in sets.items()
    }


def measure(config: ProbedRunConfig, steps: Sequence[ExperienceBatch]) -> RegressionReport:
    """What each set of features explains of steps that follow each other at fixed weights.

    steps: with shaped rewards, and entropies where critic.regression reads them.
    """
    regression = config.critic.regression
    assert regression is not None, "the config has values by regression"
    shared: list[float] = []
    rows = {}
    for name, features in feature_sets(regression).items():
        history = ReturnHistory(regression=features)
        assert history.regression is not None
        explained = []
        for number, step in enumerate(steps):
            batch = scatter(step.select(range(step.samples)))
            batch.fill(shaped_rewards=step.rewards)
            known = returns_known(step.truncated, config.algorithm.shaping)
            tracked, _ = history.regressor(batch, known)
            values, _, metrics = regressed_values(batch, known, history.regression, tracked, None)
            if number:
                explained.append(_by_quarter(values, step, known))
            if name == "prefix":
                shared.append(metrics[names.SHARED_PREFIX])
        whole, *quarters = zip(*explained, strict=True)
        if len(whole) > 1:
            margin = 1.96 * stdev(whole) / math.sqrt(len(whole))
        else:
            margin = math.nan
        rows[name] = Explained(fmean(whole), margin, tuple(map(fmean, quarters)))
    return RegressionReport(rows, fmean(shared) if shared else None)


def _by_quarter(values: Tensor, batch: ExperienceBatch, known: Tensor) -> list[float]:
    """Explained variance over all states, and in each quarter of the response."""
    bounds = batch.response_cu_seqlens
    returns = to_tokens(batch.rewards, bounds).double()
    counted = to_tokens(known, bounds)
    quarter = _QUARTERS * positions(bounds) // to_tokens(batch.response_lengths, bounds)
    parts = [counted, *(counted & (quarter == q) for q in range(_QUARTERS))]
    return [_explained(values[part].double(), returns[part]) for part in parts]


def _explained(values: Tensor, returns: Tensor) -> float:
    variance = returns.var(unbiased=False)
    errors = (returns - values).var(unbiased=False)
    if variance > 0:
        return float(1 - errors / variance)
    return 0.0


def measure_regression(settings: ProbedRunConfig) -> None:
    """Measure the values by regression of a config; the run directory gets
    critic_probes/regression.md, and regression.json beside it.

    The policy is hf/<critic_probes.checkpoint>/actor of the run, or model.path where that is null
    or holds none.

    Raises:
        BadInput: something in the config cannot work; nothing was written.
        RunFailed, TryAgain: an engine or a rank failed.
    """
    config = _with_policy(settings)
    console = RunConsole()
    start = checked_start(config, config.actor.layout.model_size)
    tokenizer = start.tokenizer
    prompts = choose_steps(config, tokenizer)
    size = f"{config.batch.prompts_per_step} x {config.batch.samples_per_prompt}"
    facts: dict[str, object] = {
        "policy": config.model.path,
        "steps": f"{len(prompts)} of {size} responses, weights fixed",
        "seed": config.critic_probes.seed,
    }
    console.header(f"vapo-megatron critic: {config.run.name}", facts)
    every = [prompt for step in prompts for prompt in step]
    stop_tokens = tokenizer.stop_token_ids(config.sampling.stop)
    with verifier_and_engines(config, start, every, stop_tokens, console) as (
        verifier,
        engines,
    ):
        steps = draw_steps(config, prompts, engines, tokenizer, verifier, console.phase)
    regression = config.critic.regression
    if regression is not None and regression.entropy:
        with_entropies(config, steps, start.ranks)
    report = measure(config, steps)
    rewards = torch.cat([step.rewards for step in steps])
    tokens = torch.cat([step.response_lengths for step in steps]).double()
    facts["mean reward"] = f"{float(rewards.mean()):.3f}"
    facts["mean tokens of a response"] = f"{float(tokens.mean()):.1f}"
    page = start.folder / "regression.md"
    with atomic_write(page) as file:
        file.write("\n".join(page_lines(report, facts, config)) + "\n")
    with atomic_write(start.folder / "regression.json") as file:
        json.dump(as_json(report, facts), file, indent=1)
    for name, row in report.rows.items():
        console.note(f"{name}: {row.mean:.3f} ± {row.margin:.3f}")
    console.closing(f"{config.run.name}: values by regression measured", {"page": page})


def _with_policy(settings: ProbedRunConfig) -> ProbedRunConfig:
    """The config with the policy in model.path and engines that read it. Raises BadInput for
    episodes."""
    if settings.rollout.agent is not None:
        raise BadInput(
            "rollout.agent with critic.kind=regression: episodes are not measured apart from "
            "training, where critic/explained_variance says the same: leave the agent out"
        )
    model = settings.model
    name = settings.critic_probes.checkpoint
    if name is not None:
        saved = Path(settings.run.directory) / HF_FOLDER / name / "actor"
        if (saved / "config.json").is_file():
            model = model.model_copy(update={"path": str(saved)})
    rollout = settings.rollout.reading_checkpoints()
    return settings.model_copy(update={"model": model, "rollout": rollout})


def with_entropies(config: ProbedRunConfig, steps: Sequence[ExperienceBatch], ranks: int) -> None:
    """Fill the entropies of each step, of the policy on ranks started for it."""
    with tempfile.TemporaryDirectory(prefix="vapo-entropies-") as folder:
        file = Path(folder) / "entropies.pt"
        work = partial(_score, config, steps, file)
        start_ranks(ranks, work, config.cluster.collective_timeout_s)
        scored: list[Tensor] = torch.load(file, weights_only=True)
    for batch, entropies in zip(steps, scored, strict=True):
        batch.entropies = entropies


def _score(config: ProbedRunConfig, steps: Sequence[ExperienceBatch], file: Path) -> None:
    """Collective: the body of a rank."""
    is_main_rank = dist.get_rank() == 0
    policy = load_frozen("actor", config)
    total = sum(batch.samples for batch in steps)
    with RunConsole(enabled=is_main_rank).phase("entropies", total=total) as advance:
        scored = [policy.score(batch, on_done=advance)[:, 1].contiguous() for batch in steps]
    if is_main_rank:
        torch.save(scored, file)


def as_json(report: RegressionReport, facts: Mapping[str, object]) -> dict[str, Any]:
    """The report for programs: facts, the share of states that a sibling passed, and by features
    their explained variance, half of its 95 % interval (None of a single step), and explained
    variance by quarter."""
    rows = {}
    for name, row in report.rows.items():
        margin = None if math.isnan(row.margin) else row.margin
        rows[name] = {"mean": row.mean, "margin": margin, "quarters": row.quarters}
    return {"facts": dict(facts), "shared": report.shared, "rows": rows}


def page_lines(
    report: RegressionReport, facts: Mapping[str, object], config: ProbedRunConfig
) -> Iterator[str]:
    """The report as a page."""
    yield f"# Values by regression: {config.run.name}\n"
    yield (
        "Explained variance of the result over all states, with coefficients of past steps alone; "
        "± is half of a 95 %"
    )
    yield "interval over steps. Then the same by quarter of the response.\n"
    yield from (f"- {name}: {fact}" for name, fact in facts.items())
    if report.shared is not None:
        yield f"- states behind the first that a sibling passed: {report.shared:.1%}"
    yield ""
    yield "| values | explained | by quarter |"
    yield "|---|---|---|"
    for name, row in report.rows.items():
        quarters = " ".join(f"{share:.2f}" for share in row.quarters)
        yield f"| {name} | {row.mean:.3f} ± {row.margin:.3f} | {quarters} |"
    yield ""
