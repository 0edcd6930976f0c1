"""`vapo-megatron critic` where values are by regression: what each feature explains at fixed
weights."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import make_model, train_config, write_config

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.critic_probes import ProbedRunConfig
from vapo_megatron.config.load import load_config
from vapo_megatron.config.regression import RegressionConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import BadInput
from vapo_megatron.operations.critic_lab import start
from vapo_megatron.operations.critic_lab.regression_lab import (
    feature_sets,
    measure,
    measure_regression,
    page_lines,
)
from vapo_megatron.rollout.request import GenerationRequest


def step_of(seed: int) -> ExperienceBatch:
    """Eight groups of eight: half of the responses slip at their middle, and fail then."""
    random = np.random.default_rng(seed)
    samples = []
    for group in range(8):
        for index in range(8):
            n = int(random.integers(8, 24))
            slips = bool(random.random() < 0.5)
            logprobs = np.full(n, -0.1, np.float32)
            logprobs[n // 2] -= 4 * slips
            sample = Sample(
                Prompt(str(group), "", "", (1,)),
                group,
                index,
                0,
                random.integers(0, 99, n, dtype=np.int32),
                logprobs,
                "stop",
                0,
                0,
                reward=-1.0 if slips else 1.0,
                correct=not slips,
            )  # type: ignore[arg-type]
            samples.append(sample)
    return from_samples(samples)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    policy = make_model(tmp_path / "policy")
    settings = train_config(tmp_path, policy)
    settings["reward"] = {"verifier": "function", "function": "parity_grade:verify", "workers": 1}
    settings["cluster"]["ranks"] = 1
    settings["actor"] = {}
    settings["critic"] = {"kind": "regression"}
    settings["value_pretraining"] = {"enabled": False}
    settings["batch"] = {"prompts_per_step": 4, "samples_per_prompt": 4}
    settings["critic_probes"] = {"checkpoint": None, "steps": 3}
    return write_config(tmp_path / "train.yaml", settings)


def load(config: Path, *overrides: str) -> ProbedRunConfig:
    return load_config(ProbedRunConfig, config, overrides, PRESETS)


def test_each_feature_alone_and_all_together() -> None:
    sets = feature_sets(RegressionConfig(siblings=False, history=True))
    assert list(sets) == [
        "position",
        "prefix",
        "surprise",
        "history",
        "prefix + surprise + history",
    ]
    assert not any(getattr(sets["position"], name) for name in ("prefix", "surprise", "entropy"))
    assert sets["prefix"] == RegressionConfig(siblings=False, surprise=False)
    assert list(feature_sets(RegressionConfig(siblings=False, prefix=False))) == [
        "position",
        "surprise",
    ]


def test_slips_are_seen_in_the_second_half_of_a_response(config: Path) -> None:
    settings = load(config)
    report = measure(settings, [step_of(seed) for seed in range(6)])
    surprise = report.rows["surprise"]
    position = report.rows["position"]
    assert surprise.quarters[3] > 0.9 > 0.2 > surprise.quarters[0]
    assert position.mean < 0.05 < 0.3 < surprise.mean
    assert surprise.margin < 0.1 and report.shared is not None and report.shared < 0.1
    page = "\n".join(page_lines(report, {"policy": "p"}, settings))
    assert f"| surprise | {surprise.mean:.3f} ± {surprise.margin:.3f} |" in page


class RandomEngines:
    """Stands where engines would be: responses of random words."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    def collect(self, request: GenerationRequest, on_done: Any) -> list[Sample]:
        self.requests.append(request)
        chance = torch.Generator().manual_seed(len(self.requests))
        samples = []
        for group, prompt in enumerate(request.prompts):
            for index in range(request.samples_per_prompt):
                ids = torch.randint(3, 12, (index + 2,), generator=chance).tolist()
                sample = Sample(prompt, group, index, 0, ids, [-1.0] * len(ids), "stop", 0, 0)  # type: ignore[arg-type]
                samples.append(sample)
            on_done(request.samples_per_prompt)
        return samples


@pytest.mark.parametrize("entropy", [False, True])
def test_the_command_writes_its_page(
    config: Path, monkeypatch: pytest.MonkeyPatch, entropy: bool
) -> None:
    engines = RandomEngines()
    stopped_by: list[int] = []

    @contextmanager
    def stand_in(*arguments: Any) -> Iterator[RandomEngines]:
        stopped_by.extend(arguments[3])
        yield engines

    monkeypatch.setattr(start, "engines_of", stand_in)
    override = f"critic.regression.entropy={str(entropy).lower()}"
    settings = load(config, override, "sampling.stop=[plus]")
    measure_regression(settings)
    tokenizer = TextTokenizer(Path(settings.model.path), settings.data.prompt)
    assert stopped_by == list(tokenizer.stop_token_ids(["plus"])) != list(tokenizer.eos_token_ids)
    assert [len(request.prompts) for request in engines.requests] == [4, 4, 4]
    page = (Path(settings.run.directory) / "critic_probes" / "regression.md").read_text()
    assert "| surprise |" in page and ("| entropy |" in page) == entropy
    assert "3 of 4 x 4 responses" in page
    found = json.loads(
        (Path(settings.run.directory) / "critic_probes" / "regression.json").read_text()
    )
    assert found["facts"]["steps"] == "3 of 4 x 4 responses, weights fixed"
    row = found["rows"]["surprise"]
    quarters = " ".join(f"{share:.2f}" for share in row["quarters"])
    assert f"| surprise | {row['mean']:.3f} ± {row['margin']:.3f} | {quarters} |" in page


def test_episodes_are_refused(config: Path) -> None:
    with pytest.raises(BadInput, match=r"rollout\.agent with critic"):
        measure_regression(load(config, "rollout.agent=a.b:c"))
