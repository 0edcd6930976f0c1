"""`vapo-megatron critic`: compares a critic's values with true values, which engines estimate by
continuing states."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.agents.agent import check_agent
from vapo_megatron.agents.processes import open_agents
from vapo_megatron.algorithms.critic_faults import value_faults
from vapo_megatron.algorithms.critic_metrics import Figures, figures_of
from vapo_megatron.algorithms.critic_probes import (
    Conclusion,
    Interval,
    Probes,
    conclusion_of,
    described,
    figures,
    with_intervals,
)
from vapo_megatron.algorithms.gae import monte_carlo_returns
from vapo_megatron.checkpoint.checkpoints import HF_FOLDER
from vapo_megatron.checks.sizes import check_privileged
from vapo_megatron.config.critic_probes import CriticProbesConfig, ProbedRunConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.errors import BadInput
from vapo_megatron.files import atomic_write
from vapo_megatron.monitoring.console import RunConsole
from vapo_megatron.monitoring.pictures import Scatter
from vapo_megatron.operations.critic_lab.points import POINTS, picture_of_values
from vapo_megatron.operations.critic_lab.probe_rollouts import Drawn, choose_prompts, draw
from vapo_megatron.operations.critic_lab.start import checked_start, verifier_and_engines
from vapo_megatron.run.ranks import start_ranks
from vapo_megatron.training.models import load_frozen
from vapo_megatron.training.score import values


def probe_critic(settings: ProbedRunConfig) -> None:
    """Probe the critic of a config; the run directory gets critic_probes/report.md.

    Engines draw and continue responses first, and have ended when the ranks of the critic start.

    Raises:
        BadInput: something in the config cannot work; nothing was written.
        RunFailed, TryAgain: an engine or a rank failed.
    """
    config = with_checkpoint(settings)
    console = RunConsole()
    start = checked_start(config, config.critic.layout.model_size)
    tokenizer = start.tokenizer
    tokenizer.check_same(config.critic_source[1], "critic.init_path")
    check_agent(config.rollout, tokenizer)
    source, prompts = choose_prompts(config, tokenizer)
    check_privileged(
        config, start.specs["critic"], {f"row {row.id}": len(row.privileged_ids) for row in prompts}
    )
    probes = config.critic_probes
    states = len(prompts) * probes.responses_per_prompt * len(probes.quantiles)
    facts: dict[str, object] = {
        "policy": config.model.path,
        "critic": config.critic_source[1],
        "prompts": f"{len(prompts)} of the {source}",
        "probes": f"{states} states, {probes.continuations} continuations each",
        "seed": probes.seed,
    }
    console.header(f"vapo-megatron critic: {config.run.name}", facts)
    stop_tokens = tokenizer.stop_token_ids(config.sampling.stop)
    with ExitStack() as stack:
        verifier, engines = stack.enter_context(
            verifier_and_engines(config, start, prompts, stop_tokens, console)
        )
        agents = None
        if config.rollout.agent is not None:
            agents = open_agents(engines, tokenizer, config.rollout)
            stack.callback(agents.close)
        drawn = draw(config, prompts, engines, tokenizer, verifier, console.phase, agents)
    report = probed(
        drawn, values_on_ranks(config, drawn, start.ranks), config.algorithm.advantage.gamma, probes
    )
    facts["states"] = f"{len(drawn.places)} continued"  # fewer than planned where episodes broke
    page = start.folder / "report.md"
    with atomic_write(page) as file:
        file.write("\n".join(page_lines(report, facts, config)) + "\n")
    with atomic_write(start.folder / POINTS) as file:
        json.dump({"points": report.points}, file)
    console.picture(report.picture)
    console.note(f"conclusion: {report.conclusion.text}")
    for fault in described(report.conclusion.faults):
        console.alarm(fault)
    console.closing(f"{config.run.name}: critic probed", {"page": page})


def with_checkpoint(settings: ProbedRunConfig) -> ProbedRunConfig:
    """The config with policy and critic in model.path and critic.init_path, and engines that read
    the policy.

    Raises:
        BadInput: there is no critic, it is not where it is looked for, or its returns cannot be had
            by continuing.
    """
    algorithm = settings.algorithm
    probes = settings.critic_probes
    if settings.critic.kind == "probe":
        raise BadInput(
            "critic.kind=probe: it reads the actor's hidden states, only critics with a model are "
            "probed"
        )
    if not algorithm.uses_critic:
        raise BadInput(
            f"algorithm.advantage.estimator={algorithm.advantage.estimator} has no critic to "
            "probe: use gae"
        )
    if algorithm.kl.placement == "reward":
        raise BadInput(
            "algorithm.kl.placement=reward: the return of a continuation lacks it, set it off to "
            "probe"
        )
    if algorithm.advantage.credit == "turn" and algorithm.advantage.gamma < 1:
        raise BadInput(
            "algorithm.advantage.gamma below 1 with credit=turn: probes discount by tokens, set it "
            "to 1"
        )
    if algorithm.mask_function is not None:
        raise BadInput(
            "algorithm.mask_function: probes read every token, leave it out to probe the critic "
            "without it"
        )
    model = settings.model
    critic = settings.critic
    if probes.checkpoint is not None:
        saved = Path(settings.run.directory) / HF_FOLDER / probes.checkpoint
        if not (saved / "critic" / "config.json").is_file():
            raise BadInput(
                f"critic_probes.checkpoint={probes.checkpoint}: {saved / 'critic'} holds no "
                "critic: name another export of the run, or set it to null and give model.path, "
                "critic.init=value_checkpoint and critic.init_path"
            )
        critic = critic.model_copy(
            update={
                "init": "value_checkpoint",
                "init_path": str(saved / "critic"),
                "model_path": None,
            }
        )
        if (saved / "actor" / "config.json").is_file():
            model = model.model_copy(update={"path": str(saved / "actor")})
    elif critic.init == "policy":
        raise BadInput(
            "critic_probes.checkpoint=null with critic.init=policy: a new head has learnt nothing, "
            "give critic.init=value_checkpoint and critic.init_path"
        )
    rollout = settings.rollout.reading_checkpoints()
    return settings.model_copy(update={"model": model, "critic": critic, "rollout": rollout})


def values_on_ranks(config: ProbedRunConfig, drawn: Drawn, ranks: int) -> Tensor:
    """The critic's value before every response token of drawn.batch, float32 [T]."""
    with tempfile.TemporaryDirectory(prefix="vapo-values-") as folder:
        file = Path(folder) / "values.pt"
        start_ranks(
            ranks, partial(_score, config, drawn.batch, file), config.cluster.collective_timeout_s
        )
        scored: Tensor = torch.load(file, weights_only=True)
        return scored


def _score(config: ProbedRunConfig, batch: ExperienceBatch, found: Path) -> None:
    """Collective: the body of a rank."""
    is_main_rank = dist.get_rank() == 0
    critic = load_frozen("critic", config)
    with RunConsole(enabled=is_main_rank).phase("values", total=batch.samples) as advance:
        scored = values(critic, batch, config.algorithm.value_loss, advance)
    if is_main_rank:
        torch.save(scored, found)


class ProbeReport(NamedTuple):
    """Result of the probes: algorithms.critic_probes.figures with their intervals, the conclusion,
    and figures of the
    responses: reward, tokens, share of continuations that were cut."""

    figures: dict[str, Interval]
    conclusion: Conclusion
    responses: dict[str, float]
    points: list[tuple[float, float]]

    @property
    def picture(self) -> Scatter:
        """Values against the means of continuations."""
        return picture_of_values(self.points)


def probed(drawn: Drawn, values: Tensor, gamma: float, config: CriticProbesConfig) -> ProbeReport:
    """Everything about a critic's values [T] of continuations."""
    batch = drawn.batch
    k = config.continuations
    bounds = batch.response_cu_seqlens
    starts = drawn.starts
    returns = monte_carlo_returns(batch.rewards, bounds, gamma, batch.turn_rewards)
    paid = monte_carlo_returns(batch.rewards, bounds, 1.0, batch.turn_rewards)
    earned = paid[bounds[:-1]] - paid[starts]  # by turns before the state
    probes = Probes(
        values[starts].double().view(-1, k).mean(1),
        returns[starts].double().view(-1, k),
        drawn.siblings - earned.double().view(-1, k).mean(1),
        drawn.prompts,
        drawn.positions,
        drawn.places,
    )

    estimates = with_intervals(
        lambda w: figures(probes, w), probes.prompts, config.bootstrap, config.seed
    )
    every = Figures.read(figures_of(values, returns, bounds))
    # Continuations of a state are not independent, as the tests of the other faults want their
    # responses.
    faults = [
        f
        for f in value_faults(every, batch.group_ids, every.tokens > 0)
        if f in ("constant", "shift")
    ]
    return ProbeReport(
        estimates,
        conclusion_of(estimates, faults),
        {
            "mean reward": float(drawn.responses.mean()),
            "mean tokens of a response": float(batch.response_lengths.float().mean()),
            "share of continuations cut at sampling.max_new_tokens": float(
                batch.truncated.float().mean()
            ),
        },
        list(zip(probes.values.tolist(), probes.returns.mean(1).tolist(), strict=True)),
    )


# Figures in the order of the page, with their meaning.
_ROWS = (
    ("correlation", "correlation of value and true value, the noise of the probes taken out"),
    (
        "calibration_slope",
        "slope of true value on value: 1 is right, below it values are too extreme",
    ),
    ("calibration_intercept", "true value where the critic says 0"),
    ("bias", "mean of value less true value"),
    ("value_error", "root mean square of value less true value"),
    (
        "knowable",
        "share of the variance of returns that these states decide: the most that explained "
        "variance can be",
    ),
    ("explained_critic", "of the variance of true values: the critic"),
    ("explained_group", "... the mean of the other responses to the prompt"),
    ("explained_position", "... a table by position"),
    ("gain", "the critic less the best of both (or of nothing)"),
)


def page_lines(
    report: ProbeReport, facts: Mapping[str, object], config: ProbedRunConfig
) -> Iterator[str]:
    yield f"# The critic of {config.run.name}, probed\n"
    yield f"**Conclusion: {report.conclusion.text}.**\n"
    yield from (f"- {reason}" for reason in report.conclusion.reasons)
    yield from (f"- FAULT {fault}" for fault in described(report.conclusion.faults))
    yield (
        "\nBrackets are 95 % bootstrap intervals over prompts. docs/critic.md says how to read "
        "this page.\n"
    )
    responses = {name: f"{value:.3g}" for name, value in report.responses.items()}
    yield from _table(
        ("", ""), [(name, str(fact)) for name, fact in (*facts.items(), *responses.items())]
    )
    lines = [(f"`{key}`", str(report.figures[key]), meaning) for key, meaning in _ROWS]
    yield from _table(("figure", "[95 %]", "meaning"), lines)
    yield "## Bias along the response\n"
    places = enumerate(config.critic_probes.quantiles)
    biases = [
        (f"{quantile:.0%}", str(report.figures[f"bias_{place}"])) for place, quantile in places
    ]
    if config.rollout.agent is None:
        before = "tokens"
    else:
        before = "turns"
    yield from _table((f"{before} before", "value less true value"), biases)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" * len(titles)
    yield from ("| " + " | ".join(row) + " |" for row in rows)
    yield ""
