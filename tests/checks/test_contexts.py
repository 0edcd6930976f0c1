"""Engines have room for the longest prompt and response, in every example as well."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_runs import train_config

from vapo_megatron.checks import sizes
from vapo_megatron.checks.sizes import check_lengths
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.load import load_config
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.engines.engine_limits import check_context
from vapo_megatron.errors import BadInput

EXAMPLES = Path(__file__).parents[2] / "examples"
SPEC: Any = SimpleNamespace(max_position_embeddings=131072)
# Files of other programs, of other commands, and of models with a short context.
OTHERS = {"kubernetes", "skypilot", "ablation"}
KINDS = {"evaluate": EvaluateConfig, "vapo": TrainConfig, "own": TrainConfig, "rl": TrainConfig}
PATHS = [
    path
    for path in sorted(EXAMPLES.rglob("*.yaml"))
    if path.parent.name not in OTHERS and path.stem.split("_")[0] in KINDS
]
PARTIAL = {"partial_responses": {"oversampling": 1.5}}
WINDOWS = {"algorithm": {"shaping": {"truncated": "window"}}}
AGENT = {"agent": "module:run", "episode": {"max_tokens": 24}}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_engines_of_examples_have_room(path: Path) -> None:
    config = load_config(KINDS[path.stem.split("_")[0]], path, [], PRESETS)
    if isinstance(config, TrainConfig):
        check_lengths(config, SPEC)
    else:
        longest = config.data.max_prompt_tokens, "", config.sampling.max_new_tokens
        check_context(*longest, config.rollout, SPEC.max_position_embeddings)


@pytest.mark.parametrize(
    ("rollout", "algorithm", "needed", "fewest"),
    [
        ({}, {}, 26, None),
        # SGLang refuses a prompt of which fewer than seven tokens to its context are left.
        (PARTIAL, {"importance_sampling": {"kind": "tis"}}, 30, 1),
        ({"windows": 3}, WINDOWS["algorithm"], 29, 2),  # of 3, 3 and 2 tokens
        ({"windows": 2}, WINDOWS["algorithm"], 27, 4),
        (AGENT, {}, 30, None),  # a turn may have one token left
    ],
)
def test_room_is_that_of_the_last_request(
    tmp_path: Path, rollout: Any, algorithm: Any, needed: int, fewest: int | None
) -> None:
    settings = train_config(tmp_path, tmp_path)
    settings["algorithm"] |= algorithm
    for context in (needed, needed - 1):
        settings["rollout"] = rollout | {"context_length": context}
        config = TrainConfig.model_validate(settings)
        if context == needed:
            check_lengths(config, SPEC)
            continue
        with pytest.raises(BadInput, match=f"need {needed} tokens with the .* is {context}"):
            check_lengths(config, SPEC)
    assert sizes.fewest_continued(config) == fewest
