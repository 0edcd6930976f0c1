"""Convert a Hugging Face directory to a Megatron checkpoint (torch_dist) that loads at any
layout."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from vapo_megatron.command_line import run_app
from vapo_megatron.config.tiny_model import DtypeOption, ShardSizeOption
from vapo_megatron.errors import BadInput, told_in_one_line
from vapo_megatron.models.model_files import check_absent, read_config

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    hf: Annotated[Path, typer.Option(help="Model directory with config.json and safetensors.")],
    out: Annotated[Path, typer.Option(help="Directory to make; it must not exist.")],
    head: Annotated[
        Literal["lm", "value"],
        typer.Option(
            help=(
                "lm: a policy. value: a critic; its head is that of a reward model, or new and "
                "zero."
            )
        ),
    ] = "lm",
    value_outputs: Annotated[
        int,
        typer.Option(
            min=1, help="Numbers that a value head gives: 1, or the bins of algorithm.value_loss."
        ),
    ] = 1,
    adapter: Annotated[
        Path | None,
        typer.Option(help="PEFT directory: of adapters on --hf, which are converted in its place."),
    ] = None,
    dtype: DtypeOption = None,
    shard_gib: ShardSizeOption = 2.0,
) -> None:
    """Write the whole checkpoint, or nothing."""
    with told_in_one_line("error"):
        if head == "lm" and value_outputs != 1:
            raise BadInput(
                f"--value-outputs {value_outputs} with --head lm: a policy has no value head; give "
                "--head value"
            )
        if head == "value" and adapter is not None:
            raise BadInput(
                "--adapter with --head value: a policy's adapters alone are read; leave --head out"
            )
        check_absent(out)
        read_config(hf)
        echo_conversion(hf, out, head, value_outputs, adapter, dtype, shard_gib)


def echo_conversion(
    hf: Path,
    out: Path,
    head: Literal["lm", "value"],
    value_outputs: int,
    adapter: Path | None,
    dtype: str | None,
    gib: float,
) -> None:
    """Convert, and say what came of it."""
    import torch

    from vapo_megatron.monitoring.console import stage_bars
    from vapo_megatron.weights.convert import hf_to_megatron

    with stage_bars() as progress:
        made = hf_to_megatron(
            hf,
            out,
            progress,
            head=head,
            value_outputs=value_outputs,
            adapter_dir=adapter,
            dtype=getattr(torch, dtype) if dtype else None,
            shard_bytes=int(gib * 2**30),
        )
    typer.echo(f"{out}: {made.described}")


if __name__ == "__main__":
    run_app(app, "error")
