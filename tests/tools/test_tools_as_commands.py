"""What tools/ does is a command of the package too, in a checkout and in a wheel."""

import json
import subprocess
import sys
from pathlib import Path

from vapo_megatron.cli import PRESETS, SCRIPTS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.sft import SftConfig

ROOT = Path(__file__).parents[2]
LAUNCH = "import sys; from vapo_megatron.cli import main; sys.argv[0] = 'vapo-megatron'; main()"


def _grade(folder: Path, package: Path) -> subprocess.CompletedProcess[str]:
    (folder / "in.jsonl").write_text(json.dumps({"answer": "4", "response": "#### 4"}) + "\n")
    command = [
        sys.executable,
        "-c",
        LAUNCH,
        "grade",
        "--cases",
        "in.jsonl",
        "--out",
        "out.jsonl",
        "--workers",
        "1",
    ]
    environment = {"PYTHONPATH": str(package), "PATH": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_script_is_a_command_with_the_same_options(tmp_path: Path) -> None:
    assert all((ROOT / "tools" / f"{name.replace('-', '_')}.py").is_file() for name in SCRIPTS)
    ended = _grade(tmp_path, ROOT)
    assert (ended.returncode, ended.stdout) == (0, "out.jsonl: 1 of 1 correct\n"), ended.stderr
    command = [sys.executable, "-m", "vapo_megatron.cli", "prepare-data", "--nonsense"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and "--nonsense" in ended.stderr


def test_a_wheel_has_them(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    command += ["build_py", "--build-lib", str(tmp_path / "site")]  # what a wheel holds
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    tools = {path.stem for path in (tmp_path / "site" / "vapo_megatron" / "tools").glob("*.py")}
    assert tools == {name.replace("-", "_") for name in SCRIPTS}
    examples = tmp_path / "site" / "vapo_megatron" / "examples"
    config = load_config(SftConfig, examples / "quickstart" / "sft.yaml", [], PRESETS)
    assert config.model.path and (examples / "gsm8k" / "vapo.yaml").is_file()
    ended = _grade(tmp_path, tmp_path / "site")
    assert (ended.returncode, ended.stdout) == (0, "out.jsonl: 1 of 1 correct\n"), ended.stderr
