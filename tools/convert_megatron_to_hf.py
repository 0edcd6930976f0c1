"""Convert a Megatron checkpoint, saved at any layout, to a Hugging Face directory.

The checkpoint is the output of tools/convert_hf_to_megatron.py, or one of a run
(runs/NAME/checkpoints/step_N).
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from vapo_megatron.checkpoint.manifest import check_model
from vapo_megatron.command_line import run_app
from vapo_megatron.config.tiny_model import DtypeOption, ShardSizeOption
from vapo_megatron.errors import BadInput, told_in_one_line
from vapo_megatron.models.model_files import CARD_FILE, check_absent

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def saved_model(checkpoint: Path, model: str) -> Path:
    """The folder with the model: checkpoint itself, or its actor or critic. Raises BadInput where
    there is none."""
    if not checkpoint.is_dir():
        raise BadInput(
            f"{checkpoint}: no such directory; give a model saved by training or "
            "tools/convert_hf_to_megatron.py"
        )
    if (checkpoint / CARD_FILE).is_file():
        from vapo_megatron.weights.torch_dist import read_model_card

        if model == "critic" and read_model_card(checkpoint).head == "lm":
            raise BadInput(
                f"--model critic: {checkpoint} is a policy, not the state of a run; leave --model "
                "out"
            )
        return checkpoint
    if not (checkpoint / model / CARD_FILE).is_file():
        raise BadInput(
            f"{checkpoint}: neither {CARD_FILE} nor {model}/{CARD_FILE} is there; give the output "
            "of tools/convert_hf_to_megatron.py or a run's checkpoints/step_N"
        )
    return checkpoint / model


@app.command()
def main(
    checkpoint: Annotated[
        Path, typer.Option(help="A converted model, or a run's checkpoints/step_N.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to make; it must not exist.")],
    model: Annotated[
        Literal["actor", "critic"], typer.Option(help="Which model of a run's state.")
    ] = "actor",
    base: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Of adapters: Hugging Face directory to merge them into; without it PEFT's format "
                "comes out."
            )
        ),
    ] = None,
    dtype: DtypeOption = None,
    shard_gib: ShardSizeOption = 2.0,
) -> None:
    """Write the whole directory, or nothing: of a policy ...ForCausalLM, of a critic
    ...ForTokenClassification."""
    with told_in_one_line("error"):
        check_absent(out)
        echo_conversion(saved_model(checkpoint, model), out, base, dtype, shard_gib)


def echo_conversion(
    source: Path, out: Path, base: Path | None, dtype: str | None, gib: float
) -> None:
    """Convert, and say what came of it."""
    import torch

    from vapo_megatron.monitoring.console import stage_bars
    from vapo_megatron.weights.convert import megatron_to_hf

    check_model(source)
    with stage_bars() as progress:
        made = megatron_to_hf(
            source,
            out,
            progress,
            base=base,
            dtype=getattr(torch, dtype) if dtype else None,
            shard_bytes=int(gib * 2**30),
        )
    typer.echo(f"{out}: {made.described}")


if __name__ == "__main__":
    run_app(app, "error")
