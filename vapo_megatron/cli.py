"""The command line: vapo-megatron train | sft | engine | evaluate | critic | pretrain-critic | compare | plan | ..."""

import os
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from vapo_megatron import __version__, logs
from vapo_megatron.command_line import refuse_another_copy, run_app
from vapo_megatron.config.base import Section
from vapo_megatron.config.critic_probes import CriticPretrainingConfig, ProbedRunConfig
from vapo_megatron.config.load import load_config
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.train import EvaluateConfig, SftConfig, TrainConfig
from vapo_megatron.run.first_look import look_first
from vapo_megatron.run.place import place_from_environment

PRESETS = Path(__file__).parent / "config" / "presets"

# Libraries read these when they are imported, so they are set first.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train reasoning models by value-based reinforcement learning (VAPO, arXiv 2504.05118) on Megatron-Core.",
)

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML config; see docs/configuration.md", show_default=False)
]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="values that take precedence over the file")
]

SectionT = TypeVar("SectionT", bound=Section)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vapo-megatron {__version__}")
        raise typer.Exit


@app.callback()
def common(
    log_level: Annotated[logs.LogLevel, typer.Option(help="what goes to standard error")] = logs.LogLevel.INFO,
    _: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="show it")] = False,
) -> None:
    """Options of all commands."""
    logs.configure(log_level)
    refuse_another_copy(Path(__file__).parent, Path.cwd())


@app.command()
def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    check: Annotated[
        bool, typer.Option("--check", help="do not train: say in seconds, without GPUs, whether the run could start")
    ] = False,
) -> None:
    """Train a policy (and a critic, where the algorithm has one) by reinforcement learning."""
    settings = _load(TrainConfig, config, overrides)
    if check:
        from vapo_megatron.operations.doctor import command

        raise typer.Exit(command.check_run(settings, _load(PlanConfig, config, overrides)))
    _look_first(settings)
    from vapo_megatron.run import launch, preflight
    from vapo_megatron.run.rank import train_rank

    if launch.launch(settings, partial(train_rank, settings), preflight.check_train):
        from vapo_megatron.operations.report.report import write_report
        from vapo_megatron.signals import ignore_stop_signals

        ignore_stop_signals()
        typer.echo(f"report  {write_report([Path(settings.run.directory)])}")


@app.command()
def sft(config: ConfigArgument, overrides: OverridesArgument = None) -> None:
    """Fine-tune a policy on demonstrations: the cold start before reinforcement learning."""
    settings = _load(SftConfig, config, overrides)
    _look_first(settings)
    from vapo_megatron.run import launch, preflight
    from vapo_megatron.training.sft import sft_rank

    launch.launch(settings, partial(sft_rank, settings), preflight.check_sft)


@app.command()
def engine(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="to listen on; 0: a free one")] = 30000,
    host: Annotated[str, typer.Option(help="address of this machine to listen on")] = "127.0.0.1",
) -> None:
    """Serve the rollouts of a training config from GPUs that the trainer does not use; see rollout.external_urls."""
    settings = _load(TrainConfig, config, overrides)
    _read_model(settings.model.path)
    from vapo_megatron.engines.remote_engines import serve_engine

    serve_engine(settings, host, port)


@app.command()
def evaluate(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    checkpoint: Annotated[
        str, typer.Option(help="CONFIG is that of a training run: evaluate its hf/<this>, such as final or step_000040")
    ] = "",
    check: Annotated[
        bool, typer.Option("--check", help="do not evaluate: say whether problems and model can be read, without GPUs")
    ] = False,
) -> None:
    """Answer the evaluation sets with a checkpoint: avg@k, pass@k, maj@k."""

    if checkpoint:
        from vapo_megatron.evaluation.check import evaluation_of

        settings = evaluation_of(_load(TrainConfig, config, overrides), checkpoint)
    else:
        settings = _load(EvaluateConfig, config, overrides)
    if check:
        from vapo_megatron.evaluation.check import read_inputs

        typer.echo(read_inputs(settings))
        return
    _look_first(settings)
    from vapo_megatron.evaluation.command import evaluate_checkpoint

    evaluate_checkpoint(settings)


@app.command()
def critic(config: ConfigArgument, overrides: OverridesArgument = None) -> None:
    """Probe the critic of a run: continue held-out responses, and compare its values with what follows."""
    settings = _load(ProbedRunConfig, config, overrides)
    _read_model(settings.model.path)
    from vapo_megatron.operations.critic_lab.command import probe_critic

    probe_critic(settings)


@app.command("pretrain-critic")
def pretrain_critic(config: ConfigArgument, overrides: OverridesArgument = None) -> None:
    """Pretrain the critic of a training config on recorded responses (value_pretraining.from): no actor, no engines."""
    settings = _load(CriticPretrainingConfig, config, overrides)
    _look_first(settings)
    from vapo_megatron.run import launch, preflight
    from vapo_megatron.run.rank import pretrain_critic_rank

    launch.launch(settings, partial(pretrain_critic_rank, settings), preflight.check_train)


@app.command()
def compare(
    first: Annotated[
        Path, typer.Argument(metavar="RUN", help="directory of an evaluation or a training run", show_default=False)
    ],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="that of another one", show_default=False)],
) -> None:
    """Compare two evaluations of the same problems: difference of avg@k, its interval, a paired test."""
    from vapo_megatron.operations.report.compare import compare_runs, comparison_table

    comparison_table(first, second, compare_runs(first, second))


@app.command()
def plan(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of the run; default: the config's")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="likewise, in nodes of hardware.gpus_per_node")] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="simulate its scheduling: which rollout mode suits it")
    ] = False,
) -> None:
    """Estimate what a run needs before it holds any GPU: memory and time by phase, layouts that fit."""
    settings = _load(PlanConfig, config, overrides)
    from vapo_megatron.operations.plan.inputs import model_directory

    _read_model(str(model_directory(settings.model.path)))
    from vapo_megatron.operations.plan.command import plan_run

    plan_run(settings, gpus, nodes, simulate)


@app.command()
def doctor(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    quick: Annotated[bool, typer.Option(help="leave out engines and bandwidth")] = False,
    wait: Annotated[float, typer.Option(min=1, help="seconds to wait for other nodes")] = 120,
    broken_nodes: Annotated[Path | None, typer.Option(help="a file to write the names of broken nodes to")] = None,
    node_names: Annotated[str, typer.Option(help="nodes in the order of their ranks, to name who is absent: a,b")] = "",
) -> None:
    """Check whether the machines are fit for a run: start one process per node, or one on this machine."""
    settings = _load(PlanConfig, config, overrides)
    from vapo_megatron.operations.doctor import command
    from vapo_megatron.run.ranks import leave

    names = [name for name in node_names.split(",") if name]
    leave(command.doctor(settings, quick, wait, broken_nodes, names))  # checks that hang are not waited for


@app.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN", help="run directories", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(help="where the page goes; default: report.html in the run's directory, of several runs here"),
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="follow running runs in a browser on this machine")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="of --serve; 0: a free one")] = 8765,
) -> None:
    """Write report.html for a run or an evaluation; for several runs, one page that overlays them."""
    from vapo_megatron.operations.report import report as pages

    if serve:
        pages.serve(run_dirs, port)
    else:
        typer.echo(pages.write_report(run_dirs, out))


# Scripts of tools/ that are commands too; a wheel has them inside the package (setup.py).
SCRIPTS = {
    "prepare-data": "Turn published sets of problems into the rows that training and evaluation read.",
    "convert-hf-to-megatron": "Convert a Hugging Face directory to a Megatron checkpoint that loads at any layout.",
    "convert-megatron-to-hf": "Convert a Megatron checkpoint, saved at any layout, to a Hugging Face directory.",
    "export-fp8": "Quantise a Hugging Face directory to FP8 for serving.",
    "grade": "Grade responses against reference answers.",
    "make-tiny-model": "Make a small random model of any supported family.",
}


def _run_script(context: typer.Context) -> None:
    here = Path(__file__).parent
    folder = here / "tools" if (here / "tools").is_dir() else here.parent / "tools"
    sys.argv = [f"vapo-megatron {context.info_name}", *context.args]
    runpy.run_path(str(folder / f"{(context.info_name or '').replace('-', '_')}.py"), run_name="__main__")


for _name, _help in SCRIPTS.items():
    _settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(_name, help=_help, add_help_option=False, context_settings=_settings)(_run_script)


def _load(kind: type[SectionT], config: Path, overrides: list[str] | None) -> SectionT:
    return load_config(kind, config, overrides or [], PRESETS)


def _look_first(settings: TrainConfig | SftConfig | EvaluateConfig) -> None:
    """Refuse bad input within a second, before libraries are imported; in a job, only the starter does so."""
    if place_from_environment() is None:
        look_first(settings)


def _read_model(path: str) -> None:
    """Refuse a model that cannot be used, and first of all one that is missing, before libraries are imported."""
    from vapo_megatron.weights.model_files import read_config

    read_config(Path(path))
    from vapo_megatron.weights.spec import read_spec

    read_spec(Path(path))


def main() -> None:
    """Run the command line; a failure is one line on standard error and its exit code."""
    run_app(app, "vapo-megatron")


if __name__ == "__main__":
    main()
