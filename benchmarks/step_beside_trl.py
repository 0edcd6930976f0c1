"""A whole GRPO step beside TRL's: the same model, prompts, sampling and numbers of tokens, on all
cores of a machine, or on one GPU.

    make bench ONLY=step_beside_trl        # installs TRL beside the packages of .venv, in .venv-trl
    python -m benchmarks.step_beside_trl [--model 1m] [--longest 64] [--steps 10] [--rounds 2]
                                         [--dtype float32] [--json FILE]

A random Qwen3 of 0.85 M parameters (4 layers, hidden 128, 256 words; --model 30m: 29 M, 9 layers,
hidden 512; --model 1.5b: the shape of Qwen2.5-1.5B), 16 prompts x 16 responses of at most 64 tokens
at temperature 1, one optimizer step, no reference, no critic. A response ends by chance, after as
many tokens on average as the model has words: --longest 400 makes lengths unequal with 256 words.
Ours is `vapo-megatron train` with the preset grpo on two ranks and two engines, on a GPU on one
rank and one engine; TRL's is its GRPOTrainer on two threads, on a GPU with its continuous batching.
They take turns; the first steps of each do not count. A figure is their seconds over ours for the
same number of response tokens; medians over steps, quartiles in brackets. TRL 1.16 no longer has
PPO, so a step with a critic has nothing to be compared with.

    generation    from the requests until all responses have arrived
    update        forward, backward and optimizer, including the scoring of old log-probs, if any
    rest          everything else: grading, batch, weight sync, logging. TRL generates with the
                  weights it trains
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import parser, publish, ratio_figure
from benchmarks.training_runs import MODELS, ROOT, SKIPPED, make_inputs, phases_of, run, train
from vapo_megatron.megatron.platform import current_platform

PARTS = ("generation", "update", "rest", "step")
Steps = list[dict[str, Any]]


def ours(folder: Path, given: argparse.Namespace, number: int) -> Steps:
    """Seconds by part of each step of a run of ours."""
    on_gpu = current_platform().is_cuda
    settings = {
        "run.steps": given.steps,
        "cluster.ranks": 1 if on_gpu else 2,
        "model.dtype": given.dtype,
        "data.max_prompt_tokens": given.prompt,
        "batch.prompts_per_step": given.prompts,
        "batch.samples_per_prompt": given.group,
        "sampling.max_new_tokens": given.longest,
        "algorithm.update.minibatch_size": given.prompts * given.group,
        "algorithm.kl.placement": "none",
        "algorithm.kl.coef": 0,
        "algorithm.kl.replace_reference_every": "null",
        "rollout.context_length": given.prompt + given.longest + 96,
        **({} if on_gpu else {"rollout.num_engines": given.engines}),
        **dict(setting.split("=", 1) for setting in given.set),
    }
    steps = []
    for row in train(folder, f"ours{number}", "grpo", settings):
        times = phases_of(row)
        update = sum(
            value for name, value in times.items() if name in ("update_policy", "score_policy")
        )
        steps.append(
            told(row["rollout/tokens"], times["rollout"], update, times["step"]) | {"phases": times}
        )
    return steps


def theirs(folder: Path, given: argparse.Namespace) -> Steps:
    """Seconds by part of each step of TRL."""
    out = folder / "trl.json"
    sizes = {name: getattr(given, name) for name in ("prompts", "group", "longest", "dtype")}
    sizes |= {"steps": given.steps + SKIPPED, "cuda": current_platform().is_cuda}
    command = [str(given.trl), "-W", "ignore", str(Path(__file__).with_name("trl_steps.py"))]
    run([*command, str(folder), str(out), json.dumps(sizes)], OMP_NUM_THREADS=str(os.cpu_count()))
    rows = json.loads(out.read_text())
    return [told(row["tokens"], row["generation"], row["update"], row["step"]) for row in rows][
        SKIPPED:
    ]


def told(tokens: float, generation: float, update: float, step: float) -> dict[str, Any]:
    """A step as the table has it."""
    return {
        "tokens": tokens,
        "generation": generation,
        "update": update,
        "rest": step - generation - update,
        "step": step,
    }


def main() -> None:
    """A row for each side and part, and the ratios."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--trl", type=Path, default=ROOT / ".venv-trl" / "bin" / "python", help="its Python"
    )
    arguments.add_argument("--model", choices=MODELS, default="1m", help="parameters")
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments.add_argument("--prompts", type=int, default=16)
    arguments.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    arguments.add_argument("--group", type=int, default=16)
    arguments.add_argument("--longest", type=int, default=64)
    arguments.add_argument("--engines", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=10)
    arguments.add_argument("--rounds", type=int, default=2, help="turns of each side")
    arguments.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of our run"
    )
    given = arguments.parse_args()
    found: dict[str, Steps] = {"ours": [], "TRL": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, given.prompts, given.prompt, given.model, given.dtype)
        for number in range(given.rounds):
            found["ours"] += ours(folder, given, number)
            found["TRL"] += theirs(folder, given)
    rows = []
    for part in PARTS:
        for side, steps in found.items():
            low, middle, high = np.percentile([step[part] for step in steps], [25, 50, 75])
            whole = np.median([step["step"] for step in steps])
            tokens = float(np.median([step["tokens"] for step in steps]))
            rows.append(
                {
                    "part": part,
                    "of": side,
                    "seconds": float(middle),
                    "from": float(low),
                    "to": float(high),
                    "of the step": float(middle / whole),
                    "response tokens/s": tokens / float(middle),
                }
            )
    per_token = {
        side: {part: [s[part] / s["tokens"] for s in steps] for part in PARTS}
        for side, steps in found.items()
    }
    figures = [
        ratio_figure(f"{part}, TRL over ours", per_token["TRL"][part], per_token["ours"][part])
        for part in ("generation", "update", "step")
    ]
    responses = f"{given.prompts} x {given.group} responses of at most {given.longest} tokens"
    title = f"{given.model} parameters, {responses}, {given.engines} engines"
    publish(title, rows, given.json, figures)
    phases = [step["phases"] for step in found["ours"]]
    print(
        "our phases: "
        + ", ".join(
            f"{name} {np.median([p.get(name, 0.0) for p in phases]):.3f}" for name in phases[0]
        )
    )


if __name__ == "__main__":
    main()
