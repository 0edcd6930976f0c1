"""Quantise a trained policy for serving: a Hugging Face directory in, an FP8 or NVFP4 directory that SGLang loads out.

python tools/export_fp8.py --hf runs/NAME/hf/final/actor --out actor-fp8 --calibration prompts.jsonl
"""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vapo_megatron.command_line import run_app
from vapo_megatron.data.jsonl import read_rows
from vapo_megatron.errors import BadInput, told_in_one_line

if TYPE_CHECKING:
    from vapo_megatron.operations.quantized_export import Report

_WORST_LAYERS = 10


class Format(StrEnum):
    """What weights become."""

    fp8 = "fp8"
    fp8_block = "fp8_block"
    nvfp4 = "nvfp4"


def read_sequences(path: Path, field: str, hf_dir: Path, rows: int, tokens: int) -> list[list[int]]:
    """Token ids of the texts of the first rows of a jsonl file, each cut to some tokens.

    Raises BadInput, naming file and line, where a row has no text, and where no text has two tokens.
    """
    from vapo_megatron.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(hf_dir)
    sequences: list[list[int]] = []
    for number, row in read_rows(path):
        if len(sequences) == rows:
            break
        text = row.get(field)
        if not isinstance(text, str):
            found = "no field" if field not in row else f"a {type(text).__name__} as field"
            raise BadInput(f"{path}:{number}: {found} {field!r}, expected a text; name the field with --field")
        ids = tokenizer.encode(text)[:tokens]
        if len(ids) >= 2:
            sequences.append(ids)
    if not sequences:
        raise BadInput(f"{path}: holds no text of two tokens or more; give prompts, or better prompts with responses")
    return sequences


def print_report(report: "Report", out: Path) -> None:
    """The drift, and the layers that lost most."""
    from rich.console import Console
    from rich.table import Table

    from vapo_megatron.operations.quantized_export import REPORT_FILE

    console = Console(width=120)
    drift = report.drift
    console.print(
        f"{out}: {report.format}, {report.bytes_after / report.bytes_before:.2f} of the bytes; log-probs of "
        f"{drift.tokens} tokens moved by {drift.mean_absolute:.4f} on average, {drift.largest:.4f} at most "
        f"({drift.of} quantised)",
        soft_wrap=True,
    )
    table = Table(title=f"the {_WORST_LAYERS} weights that lost most (all of them: {REPORT_FILE})")
    for heading in ("weight", "relative error", "largest error", "input scale"):
        table.add_column(heading, justify="left" if heading == "weight" else "right")
    for layer in sorted(report.layers, key=lambda layer: -layer.relative)[:_WORST_LAYERS]:
        scale = "-" if layer.input_scale is None else f"{layer.input_scale:.3g}"
        table.add_row(layer.name, f"{layer.relative:.2%}", f"{layer.largest:.3g}", scale)
    console.print(table)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    hf: Annotated[Path, typer.Option(help="Directory of the trained policy, as training exports it.")],
    out: Annotated[Path, typer.Option(help="Directory to write; must not exist.")],
    calibration: Annotated[Path, typer.Option(help="JSONL of texts such as the model will see.")],
    format: Annotated[
        Format, typer.Option(help="fp8: a scale a tensor; fp8_block: one for 128 x 128; nvfp4: 4 bits (Blackwell).")
    ] = Format.fp8,
    field: Annotated[str, typer.Option(help="Field of a row that holds its text.")] = "prompt",
    rows: Annotated[int, typer.Option(min=1, help="Rows of the calibration that are used.")] = 512,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each that are used.")] = 2048,
) -> None:
    """Quantise, write, and report what it costs; or write nothing."""
    with told_in_one_line("error"):
        if out.exists():
            raise BadInput(f"{out}: exists already; name another place")
        if not hf.is_dir():
            raise BadInput(f"--hf {hf}: no such directory; give a Hugging Face model directory")
        import torch

        from vapo_megatron.operations.quantized_export import check_source, export_quantized

        spec = check_source(hf, format.value)
        tokens = min(tokens, spec.max_position_embeddings)
        sequences = read_sequences(calibration, field, hf, rows, tokens)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        report = export_quantized(hf, out, format.value, sequences, device)
    print_report(report, out)


if __name__ == "__main__":
    run_app(app, "error")
