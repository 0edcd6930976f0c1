"""The quickstart with the settings for one GPU, bfloat16 on one rank, which a CPU can run as
well."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, "examples/quickstart/run.py"]


def test_one_rank_in_bfloat16_goes_through_every_stage(tmp_path: Path) -> None:
    shorter = ("data.steps=20", "batch.prompts_per_step=8", "value_pretraining.iterations=1")
    given = [part for override in shorter for part in ("--set", override)]
    command = [*RUN, "--one-gpu", "--steps", "1", "--out", str(tmp_path / "q"), *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    said = (
        "loading the models.*waiting for the engines.*== vapo-megatron train: vapo.*Accuracy on "
        "unseen problems"
    )
    assert re.search(said, done.stdout, re.DOTALL), "a log is not silent while a run starts"
    for stage in ("sft", "vapo"):
        settings = yaml.safe_load((tmp_path / "q" / stage / "config.yaml").read_text())
        assert settings["model"]["dtype"] == "bfloat16" and settings["actor"]["layout"]["tp"] == 1
        assert settings["cluster"]["ranks"] == 1
    rows = [
        json.loads(line)
        for line in (tmp_path / "q" / "vapo" / "metrics.jsonl").read_text().splitlines()
    ]
    name = "rollout/train_infer_logprob_diff"
    compared = [
        (row[f"{name}_mean"], row[f"{name}_quantile"], row[name]) for row in rows if name in row
    ]
    assert len(compared) >= 2
    for mean, quantile, largest in compared:
        # Far below the limits of 0.1 and 0.5, far above what float32 would give: it is bfloat16
        # that was compared.
        assert 1e-5 < mean < 0.05 and mean <= quantile <= largest and quantile < 0.2


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "model.dtyp=bfloat16",
            "neither sft nor train has a key model.dtyp; did you mean model.dtype?",
        ),
        ("model.dtype=float12", "model.dtype is 'float12'; expected"),
        ("critic.layout.tp=0", "critic.layout.tp is 0; expected"),
        ("run.root=elsewhere", "the quickstart sets run.root itself"),
        ("model.dtype", "expected SECTION.KEY=VALUE"),
    ],
)
def test_invalid_override_is_refused_before_anything_is_made(
    override: str, told: str, tmp_path: Path
) -> None:
    command = [*RUN, "--out", str(tmp_path / "q"), "--set", override]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and told in done.stdout and done.stdout.count("\n") == 1
    assert not (tmp_path / "q").exists()
