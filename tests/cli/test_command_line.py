"""How programs end that are given a wrong command line, as processes of their own: one line, soon, code 2."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = sorted(path.name for path in (ROOT / "tools").glob("*.py") if "run_app" in path.read_text())


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT)


def _assert_one_line(ended: subprocess.CompletedProcess[str], *named: str) -> None:
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.count("\n") == 1, ended.stderr
    for text in named:
        assert text in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trin"], ["No such command 'trin'"]),
        (["train"], ["Missing argument 'config'"]),
        (["train", "a.yaml", "--foo"], ["No such option: --foo"]),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], named: list[str]) -> None:
    _assert_one_line(_run("-m", "vapo_megatron.cli", *arguments), "vapo-megatron: ", *named)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_refuses_an_option_before_it_imports_torch(tool: str) -> None:
    script = f"import runpy, sys; sys.argv = ['{tool}', '--nonsense']\n"
    script += f"try: runpy.run_path('tools/{tool}', run_name='__main__')\n"
    script += "finally: print('torch' in sys.modules or 'transformers' in sys.modules)"
    ended = _run("-c", script)
    assert (ended.returncode, ended.stdout) == (2, "False\n"), ended.stderr
    assert ended.stderr.count("\n") == 1 and "--nonsense" in ended.stderr


def test_a_missing_model_is_refused_before_transformers_and_megatron_are_imported(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("model: {path: absent}\ndata: {train: t.jsonl}\nsampling: {max_new_tokens: 8}\n")
    script = f"import sys; sys.argv = ['vapo-megatron', 'train', '{config}']\n"
    script += "from vapo_megatron import cli\ntry: cli.main()\n"
    script += "finally: print('transformers' in sys.modules or 'megatron' in sys.modules)"
    ended = _run("-c", script)
    assert (ended.returncode, ended.stdout) == (2, "False\n"), ended.stderr
    assert "absent: no such directory" in ended.stderr
