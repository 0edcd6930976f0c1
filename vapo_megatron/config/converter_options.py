"""Options of the command line that both converters of weights have."""

from typing import Annotated, Literal

import typer

DtypeOption = Annotated[
    Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Kept as it is if not given.")
]
ShardSizeOption = Annotated[
    float, typer.Option("--shard-size", min=1e-6, max=1024.0, help="GiB of tensors in a file; memory follows it.")
]
VerifyOption = Annotated[
    bool, typer.Option(help="Read everything back and compare it, and log-probs with transformers' where they fit.")
]
