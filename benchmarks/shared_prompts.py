"""What computing the prompt of a group once is worth: scoring and updates of groups whose samples
share their prompt, without actor.share_prompts over with it.

    python -m benchmarks.shared_prompts [--shape 135m] [--groups 8] [--responses 8] [--prompt 55]
        [--response 16] [--json FILE]

Both train the same random model on the same samples with the same budget of a micro-batch, round by
round in turns. Lengths of responses lie evenly between half of --response and one and a half.
"scoring" is the forward pass alone, "gradients" with the backward pass, and "update" with AdamW.
For machines without Transformer Engine, whose attention knows no shared prompts.
"""

from typing import Any

import numpy as np

from benchmarks.common import (
    SHAPES,
    Figure,
    in_turns,
    one_rank,
    parser,
    publish,
    random_model,
    ratio_figure,
    sft_loss,
)
from vapo_megatron.config.model import ActorConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample


def groups_of(
    groups: int, responses: int, prompt: int, response: int, vocab: int
) -> ExperienceBatch:
    """Groups of random tokens; the lengths of a group's responses differ."""
    random = np.random.default_rng(0)
    lengths = np.linspace(response / 2, 1.5 * response, responses).round().astype(int).clip(min=1)
    samples = []
    for group in range(groups):
        shared = Prompt(str(group), "", "", tuple(random.integers(0, vocab, prompt).tolist()))
        for index, length in enumerate(lengths.tolist()):
            sample = Sample(
                prompt=shared,
                group=group,
                index=index,
                seed=0,
                response_ids=random.integers(0, vocab, length, dtype=np.int32),
                rollout_logprobs=np.full(length, -1.0, dtype=np.float32),
                finish_reason="stop",
                weight_version=0,
                weight_version_oldest=0,
                reward=1.0,
                correct=True,
            )
            samples.append(sample)
    return from_samples(samples)


def main() -> None:
    """Two rows for each part of a step."""
    arguments = parser(__doc__)
    arguments.add_argument("--shape", choices=SHAPES, default="135m")
    arguments.add_argument("--groups", type=int, default=8)
    arguments.add_argument("--responses", type=int, default=8, help="of a group")
    arguments.add_argument("--prompt", type=int, default=55, help="tokens")
    arguments.add_argument("--response", type=int, default=16, help="tokens on average")
    arguments.add_argument("--budget", type=int, default=2048, help="tokens of a micro-batch")
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments.add_argument("--repeats", type=int, default=5)
    given = arguments.parse_args()
    shape = SHAPES[given.shape]
    batch = groups_of(
        given.groups, given.responses, given.prompt, given.response, vocab=shape.vocab
    )
    loss = sft_loss(batch)
    everything = range(batch.samples)
    rows: list[dict[str, Any]] = []
    figures: list[Figure] = []
    with one_rank():
        models = [
            random_model(
                shape,
                ActorConfig(max_tokens_per_microbatch=given.budget, share_prompts=shares),
                given.dtype,
            )
            for shares in (False, True)
        ]
        positions = [
            sum(len(microbatch.ids) for microbatch in model.microbatches(batch, everything))
            for model in models
        ]
        parts = {
            "scoring": [lambda model=model: model.score(batch) for model in models],
            "gradients": [
                lambda model=model: model.gradients(batch, everything, loss) for model in models
            ],
            "update": [
                lambda model=model: model.train_step(batch, everything, loss) for model in models
            ],
        }
        for part, steps in parts.items():
            seconds = in_turns(steps, given.repeats)
            for prompts, computed, took in zip(("each", "shared"), positions, seconds, strict=True):
                low, middle, high = np.percentile(took, [25, 50, 75])
                rows.append(
                    {
                        "part": part,
                        "prompts": prompts,
                        "positions": computed,
                        "seconds": float(middle),
                        "quartiles": f"{low:.3g} to {high:.3g}",
                    }
                )
            figures.append(ratio_figure(f"{part}, prompts of each over shared", *seconds))
    title = (
        f"{given.shape}, {given.groups} groups of {given.responses}, prompts of {given.prompt} and "
        f"responses of {given.response} tokens, {given.dtype}"
    )
    publish(title, rows, given.json, figures)


if __name__ == "__main__":
    main()
