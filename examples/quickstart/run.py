"""The whole life of a reasoning model on a laptop: cold start, value pretraining, VAPO, evaluation,
export.

It runs the same commands as a person would, on the same program that trains on H100s.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from vapo_megatron.cli import PRESETS  # noqa: E402
from vapo_megatron.config.base import known_keys, nearest  # noqa: E402
from vapo_megatron.config.load import load_config  # noqa: E402
from vapo_megatron.config.run import RunPlace  # noqa: E402
from vapo_megatron.config.run_directory import check_place  # noqa: E402
from vapo_megatron.config.sft import SftConfig  # noqa: E402
from vapo_megatron.config.train import TrainConfig  # noqa: E402
from vapo_megatron.errors import BadInput, reason_of  # noqa: E402
from vapo_megatron.evaluation.metrics import LAST_STEPS, mean_of_last  # noqa: E402
from vapo_megatron.monitoring import names  # noqa: E402
from vapo_megatron.monitoring.metrics import read_metrics  # noqa: E402
from vapo_megatron.signals import end_with_parent, heeded_signals  # noqa: E402

SFT, VAPO = HERE / "sft.yaml", HERE / "vapo.yaml"
# One GPU instead of two CPU ranks, in the dtype that its kernels are made for. Trainer and engine
# share its memory.
ONE_GPU = (
    "cluster.ranks=1",
    "actor.layout.tp=1",
    "critic.layout.tp=1",
    "model.dtype=bfloat16",
    "rollout.mem_fraction_static=0.2",
)
# Another family: with experts, tensor parallelism cuts the sequence as well.
OTHER_FAMILY = (
    "actor.layout.sequence_parallel=auto",
    "critic.layout.sequence_parallel=auto",
)
# Files and names by which one stage finds what the one before has made.
_OURS = (
    "run.root",
    "run.name",
    "run.overwrite",
    "run.resume",
    "model.path",
    "data.path",
    "data.train",
    "data.eval",
)
# An empty file in a folder that was empty when a quickstart began: only in such a folder are files
# replaced.
MARKER = ".vapo_quickstart"

console = Console(highlight=False)


def divide(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides that the cold start's config has keys for, and those that VAPO's has.

    Raises:
        BadInput: neither has such a key, a value cannot be, or the quickstart itself sets the key.
    """
    known = {SftConfig: known_keys(SftConfig), TrainConfig: known_keys(TrainConfig)}
    shares: dict[type, list[str]] = {SftConfig: [], TrainConfig: []}
    for override in overrides:
        key, separator, _ = override.partition("=")
        if not separator:
            raise BadInput(f"--set {override!r}: expected SECTION.KEY=VALUE")
        if key in _OURS:
            raise BadInput(f"--set {override}: the quickstart sets {key} itself, leave it out")
        # The part behind a key that holds a mapping (rollout.server_args.NAME) is free.
        takers = [
            model
            for model, keys in known.items()
            if any(key == one or _entry(key, one) for one in keys)
        ]
        if not takers:
            guess = nearest(key, [*known[TrainConfig], *known[SftConfig]])
            hint = f"did you mean {guess}?" if guess else "see docs/configuration.md"
            raise BadInput(f"--set {override}: neither sft nor train has a key {key}; {hint}")
        for model in takers:
            shares[model].append(override)
    load_config(SftConfig, SFT, shares[SftConfig], PRESETS)
    load_config(TrainConfig, VAPO, shares[TrainConfig], PRESETS)
    return shares[SftConfig], shares[TrainConfig]


def _entry(key: str, mapping: str) -> bool:
    return mapping == "rollout.server_args" and key.startswith(f"{mapping}.")


def claim(out: Path) -> None:
    """Make and mark the folder, whose files of an earlier quickstart are replaced one by one;
    others stay.

    Raises:
        BadInput: it holds files and no quickstart began in it, or one of its runs' folders is no
            run's.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_file()):
        raise BadInput(
            f"--out {out}: is not empty and no quickstart's folder (it has no {MARKER}): give "
            "another one"
        )
    for name in ("sft", "vapo"):
        check_place(RunPlace(root=str(out), name=name, overwrite=True))
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / MARKER).touch()
    except OSError as error:
        raise BadInput(
            f"--out {out}: cannot be written ({reason_of(error)}): give another folder"
        ) from None


def command(*arguments: str) -> None:
    """Run a command, showing it first; its failure is ours, and a request to stop is passed on to
    it."""
    console.print(f"\n[bold]$ {escape(' '.join(arguments))}[/bold]", soft_wrap=True)
    line = [sys.executable, "-m", "vapo_megatron.cli", *arguments[1:]]
    child = subprocess.Popen(line, cwd=ROOT, preexec_fn=end_with_parent)
    for number in heeded_signals():
        signal.signal(number, lambda number, _: child.send_signal(number))
    try:
        code = child.wait()
    except KeyboardInterrupt:
        child.terminate()
        code = child.wait()
    if code:
        raise typer.Exit(code if code > 0 else 128 - code)


def what_the_critic_explains(rows: Sequence[Mapping[str, Any]]) -> str:
    """Explained variance of the returns on rollouts that the critic has not learnt from, beside
    what is free."""
    measured = [row for row in rows if names.EXPLAINED_VARIANCE in row]

    def means(steps: Sequence[Mapping[str, Any]]) -> str:
        critic, siblings, position = (
            mean_of_last([row[name] for row in steps])
            for name in (names.EXPLAINED_VARIANCE, names.BASELINE_LOO, names.BASELINE_POSITION)
        )
        return (
            f"{critic} (mean of the other responses to the prompt {siblings}, position alone "
            f"{position})"
        )

    last = measured[-LAST_STEPS:]
    return (
        "Of the variance of the result, at every token, the critic explains\n"
        f"  {means(measured[:1])} before the policy moves,\n"
        f"  {means(last)} over the last {len(last)} steps (mean and half of a 95 % interval)"
    )


def responses_used(config: TrainConfig, rows: Sequence[Mapping[str, Any]]) -> str:
    """Responses that were drawn to learn from, those that dynamic sampling dropped among them; not
    evaluations'."""
    size, pretraining = config.batch, config.value_pretraining
    trains_critic = config.has_critic_model and pretraining.enabled
    before = pretraining.rollouts(config.samples) * config.samples if trains_critic else 0
    steps = [row for row in rows if row["step"] > 0]
    prompts = sum(row.get("dynamic_sampling/prompts", size.prompts_per_step) for row in steps)
    drawn = round(prompts * size.samples_per_prompt)
    return (
        f"Responses used: {before + drawn:,} ({before:,} by value pretraining, {drawn:,} by "
        f"{len(steps)} steps)"
    )


def main(
    seed: Annotated[int, typer.Option(help="of the task, the models and the runs")] = 1,
    out: Annotated[Path, typer.Option(help="folder for data, model and run directories")] = Path(
        "runs/quickstart"
    ),
    steps: Annotated[int, typer.Option(help="VAPO iterations")] = 40,
    one_gpu: Annotated[
        bool, typer.Option("--one-gpu", help=f"short for --set {' --set '.join(ONE_GPU)}")
    ] = False,
    family: Annotated[
        str, typer.Option(help="of the random model: a model type of docs/weights.md")
    ] = "qwen3",
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            help="for sft and train, whichever has the key; repeatable",
        ),
    ] = None,
) -> None:
    """Train a tiny reasoning model end to end."""
    started, out = time.monotonic(), out.resolve()
    try:
        other = () if family == "qwen3" else OTHER_FAMILY
        for_sft, for_vapo = divide([*(ONE_GPU if one_gpu else ()), *other, *(overrides or [])])
        claim(out)
    except BadInput as error:
        console.print(escape(str(error)), soft_wrap=True)
        raise typer.Exit(2) from None
    task = out / "task"
    console.print(
        "[bold]1. A problem that has to be thought through, a tokenizer and a random model[/bold]"
    )
    subprocess.run(
        [
            sys.executable,
            str(HERE / "make_task.py"),
            "--out",
            str(task),
            "--seed",
            str(seed),
            "--family",
            family,
        ],
        cwd=ROOT,
        check=True,
    )
    shared = [f"run.seed={seed}", f"run.root={out}", "run.overwrite=true"]

    console.print("\n[bold]2. Cold start: imitate imperfect solutions[/bold]")
    command(
        "vapo-megatron",
        "sft",
        str(SFT),
        f"model.path={task / 'model'}",
        f"data.path={task / 'sft.jsonl'}",
        *shared,
        *for_sft,
    )

    console.print(
        "\n[bold]3. Value pretraining, VAPO, evaluation on problems never trained on[/bold]"
    )
    command(
        "vapo-megatron",
        "train",
        str(VAPO),
        f"model.path={out / 'sft' / 'hf' / 'final' / 'actor'}",
        f"data.train={task / 'train.jsonl'}",
        f"data.eval=[{{name: unseen, path: {task / 'eval.jsonl'}, samples: 4}}]",
        f"run.steps={steps}",
        *shared,
        *for_vapo,
    )

    run_dir = out / "vapo"
    rows = read_metrics(run_dir)
    config = load_config(TrainConfig, run_dir / "config.yaml", [], PRESETS)
    accuracy = [row["evaluation/unseen_avg@4"] for row in rows if "evaluation/unseen_avg@4" in row]
    minutes = (time.monotonic() - started) / 60
    console.print(
        f"\n[bold green]Accuracy on unseen problems: {accuracy[0]:.3f} after the cold start, "
        f"{accuracy[-1]:.3f} after VAPO[/bold green] (seed {seed}, {minutes:.1f} minutes)\n"
        f"{responses_used(config, rows)}\n"
        f"{what_the_critic_explains(rows)}\n"
        f"  report    {run_dir / 'report.html'}\n"
        f"  samples   {run_dir / 'samples'}\n"
        f"  model     {run_dir / 'hf' / 'final' / 'actor'}  (a Hugging Face directory)\n"
        f"  charts    .venv/bin/tensorboard --logdir {out}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    typer.run(main)
