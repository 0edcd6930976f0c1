"""The quickstart's path on a tiny model of each of several families: a few steps of each stage, to
see that they run from cold start to export, critic included. Nothing is learnt.

make quickstart-families
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import transformers
import typer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from vapo_megatron.models.registry import read_spec  # noqa: E402
from vapo_megatron.monitoring.metrics import read_metrics  # noqa: E402

FAMILIES = ("glm4_moe", "deepseek_v3", "gpt_oss", "qwen3_5_text")
STEPS = 2
SMALL = (
    "data.steps=10",
    "data.batch_size=16",
    "batch.prompts_per_step=4",
    "batch.samples_per_prompt=4",
    "sampling.max_new_tokens=24",
    "algorithm.update.minibatch_size=8",
    "value_pretraining.minibatch_size=8",
    "value_pretraining.iterations=2",
    "value_pretraining.replay_epochs=1",
    "value_pretraining.stop_explained_variance=null",
    "value_pretraining.stop_bias=null",
)


def run(family: str, out: Path) -> str:
    """Run the quickstart with a family; a line on what it gave.

    Raises:
        typer.Exit: a stage failed, with its code.
    """
    started = time.monotonic()
    settings = [part for override in SMALL for part in ("--set", override)]
    code = subprocess.run(
        [
            sys.executable,
            str(HERE / "run.py"),
            "--family",
            family,
            "--steps",
            str(STEPS),
            "--out",
            str(out),
            *settings,
        ],
        cwd=ROOT,
    ).returncode
    if code:
        print(f"{family}: the quickstart failed with code {code}", file=sys.stderr)
        raise typer.Exit(code)
    final = out / "vapo" / "hf" / "final"
    actor, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        final / "actor", output_loading_info=True
    )
    assert not any(loaded.values()), f"{final / 'actor'}: {loaded}"
    critic = read_spec(final / "critic").parameter_count("value")
    rows = [row for row in read_metrics(out / "vapo") if row["step"] > 0]
    assert len(rows) == STEPS
    difference = max(row["rollout/train_infer_logprob_diff"] for row in rows)
    minutes = (time.monotonic() - started) / 60
    return (
        f"{family}: {STEPS} steps, actor {actor.num_parameters():,} and critic {critic:,} "
        f"parameters exported, log-probs of engine and trainer at most {difference:.1e} apart "
        f"({minutes:.1f} minutes)"
    )


def main(
    families: Annotated[list[str] | None, typer.Argument(help="all of them by default")] = None,
    out: Annotated[Path, typer.Option(help="folder for a run of each")] = Path(
        "runs/quickstart-families"
    ),
) -> None:
    """Run the quickstart's path on tiny models of several families."""
    lines = [run(family, out.resolve() / family) for family in families or FAMILIES]
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    typer.run(main)
