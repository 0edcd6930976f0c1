"""Seconds of each phase of a VAPO step, with models that may stay on the GPU against models that
always stay.

    python -m benchmarks.step_phases [--model 1.5b] [--prompts 32] [--longest 510] [--steps 3]
                                     [--offload auto never] [--json FILE]

Actor and critic are random and trained whole by `vapo-megatron train` with the preset vapo; the
engine and both models share the GPU, of which the engine gets --engine-share. `auto` moves to host
memory what has no room beside the engine, `always` everything, `never` nothing; on a CPU nothing is
moved either way, so that the rows only show that the program works. A run follows the other; the
first steps of each do not count; medians over steps.

    offload       moving models to host memory and back, wherever in the step

Phases are as metrics.jsonl has them (time/*); some lie within others, so they do not add up to the
step.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import parser, publish, ratio_figure
from benchmarks.training_runs import MODELS, make_inputs, phases_of, train
from vapo_megatron.megatron.platform import current_platform


def measure(folder: Path, offload: str, given: Any) -> list[dict[str, float]]:
    """The phases of each step of a run."""
    samples = given.prompts * given.group
    on_gpu = current_platform().is_cuda
    settings = {
        "run.steps": given.steps,
        "cluster.ranks": 1,
        "model.dtype": given.dtype,
        "data.max_prompt_tokens": given.prompt,
        "batch.prompts_per_step": given.prompts,
        "batch.samples_per_prompt": given.group,
        "sampling.max_new_tokens": given.longest,
        "algorithm.update.minibatch_size": samples // given.updates,
        "value_pretraining.enabled": "false",
        "rollout.context_length": given.prompt + given.longest + 96,
        "actor.offload": offload,
        "critic.offload": offload,
        **(
            {"rollout.mem_fraction_static": given.engine_share}
            if on_gpu
            else {"rollout.num_engines": 1}
        ),
    }
    rows = train(folder, f"offload_{offload}", "vapo", settings)
    return [phases_of(row) for row in rows]


def main() -> None:
    """A row for each phase."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", choices=MODELS, default="1m")
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments.add_argument("--prompts", type=int, default=8)
    arguments.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    arguments.add_argument("--group", type=int, default=8)
    arguments.add_argument("--longest", type=int, default=64)
    arguments.add_argument("--updates", type=int, default=4, help="of each model in a step")
    arguments.add_argument("--steps", type=int, default=3)
    arguments.add_argument("--engine-share", type=float, default=0.3, help="of the GPU")
    arguments.add_argument(
        "--offload", nargs="+", choices=("auto", "always", "never"), default=["auto", "never"]
    )
    given = arguments.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, given.prompts, given.prompt, given.model, given.dtype)
        for offload in given.offload:
            found[offload] = measure(folder, offload, given)
    phases = dict.fromkeys(phase for steps in found.values() for step in steps for phase in step)
    rows = [
        {"phase": phase}
        | {
            f"{offload}, s": float(np.median([step.get(phase, 0.0) for step in steps]))
            for offload, steps in found.items()
        }
        for phase in sorted(phases, key=lambda phase: phase == "step")
    ]
    figures = []
    if {"auto", "never"} <= found.keys():
        seconds = ([step["step"] for step in found[which]] for which in ("never", "auto"))
        figures = [ratio_figure("step, never over auto", *seconds)]
    responses = f"{given.prompts} x {given.group} responses of at most {given.longest} tokens"
    publish(f"{given.model}, {given.dtype}, {responses}", rows, given.json, figures)


if __name__ == "__main__":
    main()
