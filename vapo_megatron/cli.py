"""The command line: vapo-megatron train | sft | engine | evaluate | critic | pretrain-critic |
compare | plan | ..."""

import json
import os
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer

from vapo_megatron import __version__, logs
from vapo_megatron.checks.config import look_first
from vapo_megatron.command_line import refuse_another_copy, run_app
from vapo_megatron.config.base import Section, known_keys
from vapo_megatron.config.critic_probes import CriticPretrainingConfig, ProbedRunConfig
from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.load import load_config
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.run.launch_env import place_from_environment

PRESETS = Path(__file__).parent / "config" / "presets"

# Libraries read these when they are imported, so they are set first.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Train reasoning models by value-based reinforcement learning (VAPO, arXiv 2504.05118) on "
    "Megatron-Core.",
)

ConfigArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG", help="YAML config; see docs/configuration.md", show_default=False
    ),
]


def _keys_like(incomplete: str) -> list[str]:
    """For the completion of shells: keys of a training config that begin like this."""
    keys = (f"{key}=" for key in known_keys(PlanConfig))
    return [key for key in keys if key.startswith(incomplete)]


OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION.KEY=VALUE",
        help="values that take precedence over the file",
        autocompletion=_keys_like,
    ),
]

JsonOption = Annotated[
    bool, typer.Option("--json", help="print one JSON object instead of tables, for programs")
]

SectionT = TypeVar("SectionT", bound=Section)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vapo-megatron {__version__}")
        raise typer.Exit


@app.callback()
def common(
    log_level: Annotated[
        logs.LogLevel, typer.Option(help="what goes to standard error")
    ] = logs.LogLevel.INFO,
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="show it")
    ] = False,
) -> None:
    """Options of all commands."""
    logs.configure(log_level)
    refuse_another_copy(Path(__file__).parent, Path.cwd())


@app.command()
def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="do not train: say in seconds, without GPUs, whether the run could start",
        ),
    ] = False,
) -> None:
    """Train a policy (and a critic, where the algorithm has one) by reinforcement learning."""
    settings = _load(TrainConfig, config, overrides)
    if check:
        from vapo_megatron.operations.doctor import command

        raise typer.Exit(command.check_run(settings, _load(PlanConfig, config, overrides)))
    _look_first(settings)
    _import_megatron()
    from vapo_megatron.checks import preflight
    from vapo_megatron.operations.plan.residency import planned_residency
    from vapo_megatron.run import launch
    from vapo_megatron.run.rank import train_rank

    body = partial(train_rank, settings, residency=planned_residency)
    if launch.launch(settings, body, preflight.check_train):
        from vapo_megatron.operations.report.report import write_report
        from vapo_megatron.signals import ignore_stop_signals

        ignore_stop_signals()
        typer.echo(f"report  {write_report([Path(settings.run.directory)])}")


@app.command()
def sft(config: ConfigArgument, overrides: OverridesArgument = None) -> None:
    """Fine-tune a policy on demonstrations: the cold start before reinforcement learning."""
    settings = _load(SftConfig, config, overrides)
    _look_first(settings)
    _import_megatron()
    from vapo_megatron.checks import preflight
    from vapo_megatron.run import launch
    from vapo_megatron.training.sft import sft_rank

    launch.launch(settings, partial(sft_rank, settings), preflight.check_sft)


@app.command()
def engine(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="to listen on; 0: a free one")
    ] = 30000,
    host: Annotated[str, typer.Option(help="address of this machine to listen on")] = "127.0.0.1",
    node: Annotated[
        int, typer.Option(min=0, help="which of rollout.nodes this machine is, from 0")
    ] = 0,
    meet: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of the first of rollout.nodes, where their commands meet"),
    ] = None,
) -> None:
    """Serve the rollouts of a training config from GPUs that the trainer does not use; see
    rollout.external_urls."""
    settings = _load(TrainConfig, config, overrides)
    _read_model(settings.model.path)
    from vapo_megatron.engines.remote_engines import serve_engine

    serve_engine(settings, host, port, node, meet)


@app.command()
def evaluate(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    checkpoint: Annotated[
        str,
        typer.Option(
            help="CONFIG belongs to a training run: evaluate its hf/<this>, such as final or "
            "step_000040"
        ),
    ] = "",
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="do not evaluate: say whether problems and model can be read, without GPUs",
        ),
    ] = False,
) -> None:
    """Answer the evaluation sets with a checkpoint: avg@k, pass@k, maj@k."""

    if checkpoint:
        from vapo_megatron.evaluation.check import at_its_place, evaluation_of

        run = at_its_place(_load(TrainConfig, config, overrides), config, overrides or ())
        settings = evaluation_of(run, checkpoint)
    else:
        settings = _load(EvaluateConfig, config, overrides)
    if check:
        from vapo_megatron.evaluation.check import read_inputs

        typer.echo(read_inputs(settings))
        return
    _look_first(settings)
    from vapo_megatron.evaluation.command import evaluate_checkpoint

    logs.outlive_output()
    evaluate_checkpoint(settings)


@app.command()
def critic(config: ConfigArgument, overrides: OverridesArgument = None) -> None:
    """Probe the critic of a run: continue held-out responses, and compare its values with what
    follows."""
    settings = _load(ProbedRunConfig, config, overrides)
    _read_model(settings.model.path)
    if settings.critic.kind == "regression":
        from vapo_megatron.operations.critic_lab.regression_lab import measure_regression

        measure_regression(settings)
        return
    from vapo_megatron.operations.critic_lab.command import probe_critic

    probe_critic(settings)


@app.command("pretrain-critic")
def pretrain_critic(config: ConfigArgument, overrides: OverridesArgument = None) -> None:
    """Pretrain the critic of a training config on recorded responses (value_pretraining.from): no
    actor, no engines."""
    settings = _load(CriticPretrainingConfig, config, overrides)
    _look_first(settings)
    _import_megatron()
    from vapo_megatron.checks import preflight
    from vapo_megatron.run import launch
    from vapo_megatron.run.rank import pretrain_critic_rank

    launch.launch(settings, partial(pretrain_critic_rank, settings), preflight.check_train)


@app.command()
def compare(
    first: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="directory of an evaluation or a training run", show_default=False
        ),
    ],
    second: Annotated[
        Path, typer.Argument(metavar="RUN", help="another run's directory", show_default=False)
    ],
    as_json: JsonOption = False,
) -> None:
    """Compare two evaluations of the same problems: difference of avg@k, its interval, a paired
    test."""
    from vapo_megatron.operations.report import compare as comparing

    comparisons = comparing.compare_runs(first, second)
    if as_json:
        content = comparing.comparison_as_json(first, second, comparisons)
        typer.echo(json.dumps(content, indent=2))
    else:
        comparing.comparison_table(first, second, comparisons)


@app.command()
def chat(
    place: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="a run's directory, or a model's", show_default=False),
    ],
    overrides: OverridesArgument = None,
    checkpoint: Annotated[
        str, typer.Option(help="of a run: its hf/<this>; default: final, or else the newest")
    ] = "",
    once: Annotated[str | None, typer.Option(help="answer this message alone, for scripts")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="do not load the critic, whose values colour tokens")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="with --once: one JSON object, with tokens and values")
    ] = False,
) -> None:
    """Talk to a checkpoint, through the prompts and sampling that its run evaluates it with."""
    from vapo_megatron.operations.chat.subject import find_subject

    if as_json and once is None:
        raise BadInput("--json: a conversation is for people, give --once TEXT")
    subject = find_subject(place, checkpoint, overrides or (), PRESETS)
    _read_model(subject.settings.model.path)
    from vapo_megatron.operations.chat import command

    command.chat(subject, once, plain, as_json)


@app.command()
def plan(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of the run; default: the config's")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="likewise, in nodes of hardware.gpus_per_node")
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="simulate its scheduling: which rollout mode suits it"),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Estimate what a run needs before it holds any GPU: memory and time by phase, layouts that
    fit."""
    settings = _load(PlanConfig, config, overrides)
    from vapo_megatron.operations.plan.inputs import model_directory

    _read_model(str(model_directory(settings.model.path)))
    from vapo_megatron.operations.plan.command import plan_run

    plan_run(settings, gpus, nodes, simulate, as_json)


@app.command()
def doctor(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    quick: Annotated[bool, typer.Option(help="leave out engines and bandwidth")] = False,
    wait: Annotated[float, typer.Option(min=1, help="seconds to wait for other nodes")] = 120,
    broken_nodes: Annotated[
        Path | None, typer.Option(help="a file to write the names of broken nodes to")
    ] = None,
    node_names: Annotated[
        str, typer.Option(help="nodes in the order of their ranks, to name who is absent: a,b")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Check whether the machines are fit for a run: start one process per node, or one on this
    machine."""
    settings = _load(PlanConfig, config, overrides)
    from vapo_megatron.operations.doctor import command
    from vapo_megatron.run.ranks import leave

    names = [name for name in node_names.split(",") if name]
    # Checks that hang are not waited for.
    leave(command.doctor(settings, quick, wait, broken_nodes, names, as_json))


@app.command()
def report(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="run directories", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="where the page goes; default: report.html in the run's directory, of several "
            "runs here"
        ),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="follow running runs in a browser on this machine")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="of --serve; 0: a free one")] = 8765,
) -> None:
    """Write report.html for a run or an evaluation; for several runs, one page that overlays
    them."""
    from vapo_megatron.operations.report import report as pages

    if serve:
        pages.serve(run_dirs, port)
    else:
        typer.echo(pages.write_report(run_dirs, out))


@app.command("prepare-model")
def prepare_model(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="a GGUF file, or the name of a Python package that holds one (NAME==VERSION)",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="directory to make; it must not exist")],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="of the written weights")
    ] = "float32",
) -> None:
    """Turn a GGUF file, or a package with one, into a Hugging Face directory that can be
    trained."""
    from vapo_megatron.operations.prepare_model import prepare

    typer.echo(f"{out}: {prepare(source, out, dtype, typer.echo)}")


@app.command()
def config(
    path: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="YAML config", show_default=False)
    ] = None,
    overrides: OverridesArgument = None,
    kind: Annotated[
        Literal["train", "sft", "evaluate", "plan", "critic"],
        typer.Option("--command", help="whose config it is"),
    ] = "train",
    schema: Annotated[
        bool, typer.Option("--schema", help="print a JSON schema for editors instead")
    ] = False,
) -> None:
    """Print a config with everything that it leaves to presets and defaults."""
    kinds: dict[str, type[Section]] = {
        "train": TrainConfig,
        "sft": SftConfig,
        "evaluate": EvaluateConfig,
        "plan": PlanConfig,
        "critic": ProbedRunConfig,
    }
    if schema:
        from vapo_megatron.config.schema import editor_schema

        presets = sorted(file.stem for file in PRESETS.glob("*.yaml"))
        typer.echo(json.dumps(editor_schema(kinds[kind], presets), indent=1))
        return
    if path is None:
        raise BadInput("CONFIG: give a YAML config, or --schema for the schema of one")
    from vapo_megatron.config.load import shown_config

    typer.echo(shown_config(_load(kinds[kind], path, overrides)), nl=False)


@app.command()
def push(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="a run's directory", show_default=False)
    ],
    target: Annotated[
        str, typer.Argument(metavar="hub:OWNER/NAME", help="the repository", show_default=False)
    ],
    checkpoint: Annotated[
        str, typer.Option(help="its hf/<this>; default: final, or else the newest")
    ] = "",
    model: Annotated[
        Literal["actor", "critic", "actor_adapter"], typer.Option(help="which model of the export")
    ] = "actor",
    private: Annotated[bool, typer.Option("--private", help="of a new repository")] = False,
    update: Annotated[
        bool, typer.Option("--update", help="add a commit to a repository that holds files")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check and write the card, send nothing")
    ] = False,
) -> None:
    """Send an exported model with its card to the Hugging Face Hub."""
    from vapo_megatron.operations.push import push_model

    pushed = push_model(
        run,
        target,
        checkpoint,
        model,
        PRESETS,
        private=private,
        update=update,
        dry_run=dry_run,
        note=typer.echo,
    )
    typer.echo(f"{pushed.folder}: {pushed.url}")


# Scripts of tools/ that are commands too; a wheel has them inside the package (setup.py).
SCRIPTS = {
    "prepare-data": "Turn published sets of problems into the rows that training and evaluation "
    "read.",
    "convert-hf-to-megatron": "Convert a Hugging Face directory to a Megatron checkpoint that "
    "loads at any layout.",
    "convert-megatron-to-hf": "Convert a Megatron checkpoint, saved at any layout, to a Hugging "
    "Face directory.",
    "export-fp8": "Quantise a Hugging Face directory to FP8 for serving.",
    "grade": "Grade responses against reference answers.",
    "make-tiny-model": "Make a small random model of any supported family.",
}


def _run_script(context: typer.Context) -> None:
    here = Path(__file__).parent
    folder = here / "tools" if (here / "tools").is_dir() else here.parent / "tools"
    sys.argv = [f"vapo-megatron {context.info_name}", *context.args]
    runpy.run_path(
        str(folder / f"{(context.info_name or '').replace('-', '_')}.py"), run_name="__main__"
    )


for _name, _help in SCRIPTS.items():
    _settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(_name, help=_help, add_help_option=False, context_settings=_settings)(_run_script)


def _load(kind: type[SectionT], config: Path, overrides: list[str] | None) -> SectionT:
    return load_config(kind, config, overrides or [], PRESETS)


def _look_first(settings: TrainConfig | SftConfig | EvaluateConfig) -> None:
    """Refuse bad input within a second, before libraries are imported; in a job, only the starter
    does so."""
    if place_from_environment() is None:
        look_first(settings)


def _import_megatron() -> None:
    from vapo_megatron.megatron.cpu_torch import import_megatron

    import_megatron()


def _read_model(path: str) -> None:
    """Refuse a model that cannot be used, and first of all one that is missing, before libraries
    are imported."""
    from vapo_megatron.models.model_files import read_config

    read_config(Path(path))
    from vapo_megatron.models.registry import read_spec

    read_spec(Path(path))


def main() -> None:
    """Run the command line; a failure is one line on standard error and its exit code."""
    run_app(app, "vapo-megatron")


if __name__ == "__main__":
    main()
