"""Configs and model shapes that plans are made of in tests."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.plan import PlanConfig

ROOT = Path(__file__).parents[2]
HF_CONFIGS = ROOT.parent / "shared" / "data" / "hf_configs"


def hf_config(name: str) -> dict[str, Any]:
    """A real model's config.json; skips where the shared data are not there."""
    path = HF_CONFIGS / name
    if not path.is_file():
        pytest.skip(f"{path} is not there: it lies beside the checkout, not in it")
    return json.loads(path.read_text())


def model_dir(folder: Path, name: str) -> Path:
    """A model directory with nothing but config.json, as one has it before any weights are
    fetched."""
    hf_config(name)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(HF_CONFIGS / name, folder / "config.json")
    return folder


def planned_config(model: Path, *overrides: str) -> PlanConfig:
    """The GSM8K example with this model."""
    example = ROOT / "examples" / "gsm8k" / "vapo.yaml"
    return load_config(PlanConfig, example, [f"model.path={model}", *overrides], PRESETS)
