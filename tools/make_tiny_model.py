"""Make a small random model directory of any supported family, with a tokenizer of one's own or a
copied one."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from vapo_megatron.command_line import run_app
from vapo_megatron.config.explain import explain
from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.errors import BadInput, told_in_one_line
from vapo_megatron.models.model_files import family_names

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Directory to make.")],
    family: Annotated[
        str, typer.Option(help="Model type, as docs/weights.md lists them.")
    ] = "qwen3",
    tokenizer_from_dir: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer-from",
            help="Directory to copy the tokenizer from; else one of 100 number words.",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Rows of the embedding; the tokenizer's size if not given.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Transformer layers.")] = 2,
    hidden_size: Annotated[int, typer.Option(help="Width of the residual stream.")] = 128,
    intermediate_size: Annotated[int, typer.Option(help="Width of the feed-forward layer.")] = 256,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads.")] = 2,
    experts: Annotated[int, typer.Option(help="Experts of a layer, in families with experts.")] = 8,
    experts_per_token: Annotated[int, typer.Option(help="Experts that a token goes through.")] = 2,
    head_dim: Annotated[
        int | None, typer.Option(help="Width of a head; hidden size / heads if not given.")
    ] = None,
    max_positions: Annotated[int, typer.Option(help="Longest sequence, in tokens.")] = 512,
    tied: Annotated[bool, typer.Option(help="Share the embedding with the output layer.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    """Write a model directory that transformers, SGLang and this project load."""
    with told_in_one_line("error"):
        if out.is_file() or (out.is_dir() and any(out.iterdir())):
            raise BadInput(f"{out}: exists already; name another place, or remove it")
        sizes = {
            "family": family,
            **({} if vocab_size is None else {"vocab_size": vocab_size}),
            "layers": layers,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "heads": heads,
            "kv_heads": kv_heads,
            "experts": experts,
            "experts_per_token": experts_per_token,
            "head_dim": head_dim if head_dim is not None else hidden_size // max(heads, 1),
            "max_positions": max_positions,
            "tied": tied,
            "seed": seed,
        }
        try:
            shape = TinyModel.model_validate(sizes)
        except ValidationError as error:
            raise BadInput(explain(error, TinyModel, sizes, "options")) from None
        if family not in (names := family_names()):
            raise BadInput(f"family {family!r}: expected one of {', '.join(names)}")
        from vapo_megatron.weights.tiny import (
            CHATML_TEMPLATE,
            save_tiny_model,
            tokenizer_from,
            word_tokenizer,
        )

        tokenizer = (
            tokenizer_from(tokenizer_from_dir)
            if tokenizer_from_dir is not None
            else word_tokenizer(
                [str(number) for number in range(100)], max_positions, CHATML_TEMPLATE
            )
        )
        if vocab_size is None:
            shape = shape.model_copy(update={"vocab_size": len(tokenizer)})
        parameters = save_tiny_model(shape, tokenizer, out)
    typer.echo(f"{out}: {family}, {parameters:,} parameters, {len(tokenizer):,} tokens")


if __name__ == "__main__":
    run_app(app, "error")
