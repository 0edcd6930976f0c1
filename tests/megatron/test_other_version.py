"""Checkpoints go from one Megatron-Core to another: those of .venv and .venv-mcore019 (make
test-mcore019).

Entry: python test_other_version.py save|resume MODEL FOLDER RESULT, in a process that has the other
    version.
"""

import json
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import version as version_of
from pathlib import Path

import pytest
from hf_models import write_model
from ranks import run_ranks
from test_dist_saver import Steps, resume, save

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.errors import BadInput

ROOT = Path(__file__).parents[2]
CASE = (LayoutConfig(tp=2), "lm", "float32")


def saved(model: Path, folder: Path) -> Steps:
    """Two steps, a checkpoint, and what the two steps after it gave."""
    return run_ranks(2, save, model, *CASE, folder, 2)[0]


def resumed(model: Path, folder: Path) -> Steps:
    return run_ranks(2, resume, model, *CASE, folder)[0]


def other_packages() -> tuple[Path, str] | None:
    """A folder of packages with another Megatron-Core than this process has, and its version."""
    here = Path(sysconfig.get_path("purelib"))
    folders = [Path(line) for file in here.glob("*.pth") for line in file.read_text().splitlines()]
    folders += ROOT.glob(".venv-mcore019/lib/python*/site-packages")
    for folder in folders:
        for metadata in folder.glob("megatron_core-*.dist-info"):
            version = metadata.name.removeprefix("megatron_core-").removesuffix(".dist-info")
            if version != version_of("megatron-core"):
                return folder, version
    return None


def with_other_version(action: str, model: Path, folder: Path, result: Path) -> Steps:
    """saved() or resumed() of a process with the other version. Skips the test where there is
    none."""
    other = other_packages()
    if other is None:
        pytest.skip("one Megatron-Core is installed: make test-mcore019 installs another")
    packages, version = other
    paths = [packages, ROOT, ROOT / "tests", ROOT / "tests/megatron"]
    subprocess.run(
        [sys.executable, __file__, action, str(model), str(folder), str(result)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        check=True,
        timeout=240,
    )
    content = json.loads(result.read_text())
    assert content["version"] == version
    steps, score = content["steps"]
    return [(norm, rate) for norm, rate in steps], score


def assert_alike(steps: Steps, expected: Steps) -> None:
    for pair, expected_pair in zip(steps[0], expected[0], strict=True):
        assert pair == pytest.approx(expected_pair, rel=1e-5)
    assert steps[1] == pytest.approx(expected[1], rel=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


def test_the_other_version_resumes_a_checkpoint(model: Path, tmp_path: Path) -> None:
    expected = saved(model, tmp_path / "checkpoint")
    steps = with_other_version("resume", model, tmp_path / "checkpoint", tmp_path / "result")
    assert_alike(steps, expected)


def test_a_checkpoint_of_the_other_version_is_resumed(model: Path, tmp_path: Path) -> None:
    expected = with_other_version("save", model, tmp_path / "checkpoint", tmp_path / "result")
    assert_alike(resumed(model, tmp_path / "checkpoint"), expected)


def test_a_checkpoint_without_common_pt_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    """As Megatron-Core 0.19 writes them: 0.16 cannot read those."""
    saved(model, tmp_path / "checkpoint")
    (tmp_path / "checkpoint/common.pt").unlink()
    with pytest.raises(AssertionError, match=rf"{BadInput.__name__}: .*common\.pt: no such file"):
        resumed(model, tmp_path / "checkpoint")


if __name__ == "__main__":
    action, *paths = sys.argv[1:]
    model_dir, checkpoint, result_file = map(Path, paths)
    steps = saved(model_dir, checkpoint) if action == "save" else resumed(model_dir, checkpoint)
    result_file.write_text(json.dumps({"version": version_of("megatron-core"), "steps": steps}))
