"""How programs end that are given a wrong command line, as separate processes: one line, soon,
code 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = sorted(path.name for path in (ROOT / "tools").glob("*.py") if "run_app" in path.read_text())


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=240, cwd=ROOT
    )


def _assert_one_line(ended: subprocess.CompletedProcess[str], *named: str) -> None:
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.count("\n") == 1, ended.stderr
    for text in named:
        assert text in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trin"], ["No such command 'trin'"]),
        (["train"], ["Missing argument 'CONFIG'"]),
        (["train", "a.yaml", "--foo"], ["No such option: --foo"]),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], named: list[str]) -> None:
    _assert_one_line(_run("-m", "vapo_megatron.cli", *arguments), "vapo-megatron: ", *named)


def test_program_copy_that_engines_would_import_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vapo_megatron").mkdir()
    (tmp_path / "vapo_megatron" / "__init__.py").touch()
    script = f"import sys; sys.path[0] = {str(ROOT)!r}; sys.argv[1:] = ['train', 'a.yaml']\n"
    script += "from vapo_megatron.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    _assert_one_line(ended, f"{tmp_path}/vapo_megatron is another copy", str(ROOT))


def test_a_working_directory_that_was_deleted_is_one_line(tmp_path: Path) -> None:
    folder = str(tmp_path)
    script = f"import os, sys; os.chdir({folder!r}); os.rmdir({folder!r})"
    script += f"; sys.path.insert(0, {str(ROOT)!r})"
    script += "; sys.argv[1:] = ['train', 'a.yaml']; from vapo_megatron.cli import main; main()"
    _assert_one_line(_run("-c", script), "vapo-megatron: the working directory was deleted")


@pytest.mark.parametrize(("asked", "shown"), [("", 0), ("default", 2)])
def test_library_warnings_are_hidden_in_spawned_ranks_by_default(
    asked: str, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs' ranks are spawned: libraries warn before any code of ours has run there."""
    monkeypatch.setenv("PYTHONWARNINGS", asked)
    script = """
import subprocess, sys, typer, warnings
from vapo_megatron.command_line import run_app
app = typer.Typer()
@app.command()
def main():
    warnings.warn("here")
    subprocess.run([sys.executable, "-c", "import warnings; warnings.warn('there')"], check=True)
sys.argv[1:] = []
run_app(app, "program")
"""
    ended = _run("-c", script)
    assert ended.returncode == 0
    assert ended.stderr.count("UserWarning") == shown, ended.stderr


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_refuses_an_option_before_it_imports_torch(tool: str) -> None:
    script = f"import runpy, sys; sys.argv = ['{tool}', '--nonsense']\n"
    script += f"try: runpy.run_path('tools/{tool}', run_name='__main__')\n"
    script += "finally: print('torch' in sys.modules or 'transformers' in sys.modules)"
    ended = _run("-c", script)
    assert (ended.returncode, ended.stdout) == (2, "False\n"), ended.stderr
    assert ended.stderr.count("\n") == 1 and "--nonsense" in ended.stderr


# Each in a fork of one process that has imported the command line: what it imports beside that is
# its own.
SCRIPT = """
import json, os, runpy, sys
sys.path.insert(0, '.')
from vapo_megatron import cli
for arguments in json.loads(sys.argv[1]):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        sys.argv, code = arguments, None
        try:
            if arguments[0].endswith('.py'):
                runpy.run_path(arguments[0], run_name='__main__')
            else:
                cli.main()
        except SystemExit as ended:
            code = ended.code
        libraries = ('torch', 'transformers', 'megatron', 'sglang', 'numpy')
        heavy = [name for name in libraries if name in sys.modules]
        print(json.dumps([code, heavy]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
RUN = (
    "model: {path: MODEL}\ndata: {train: TRAIN}\nsampling: {max_new_tokens: 8}\nrun: "
    "{name: none, root: ROOT}\n"
)


def test_common_mistakes_refused_before_libraries_are_imported(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    rows = tmp_path / "rows.jsonl"
    model.mkdir()
    (model / "config.json").write_text("{}")
    rows.write_text('{"problem": "1 + 1", "answer": "2"}\n')
    good = (
        RUN.replace("MODEL", str(model)).replace("TRAIN", str(rows)).replace("ROOT", str(tmp_path))
    )
    configs = {
        "unknown": good.replace("train:", "trian:"),
        "no_model": good.replace(str(model), "absent"),
        "no_data": good.replace(str(rows), "absent.jsonl"),
        "evaluate": "model: {path: absent}\ndata: {eval: [{name: a, path: a.jsonl}]}\nsampling: "
        "{max_new_tokens: 8}\n",
        "sft": f"model: {{path: {model}}}\ndata: {{path: absent.jsonl, batch_size: 1}}\nrun: "
        f"{{root: {tmp_path}}}\n",
    }
    for name, text in configs.items():
        (tmp_path / name).write_text(text)
    command = ["vapo-megatron"]
    cases = [
        [*command, one, str(tmp_path / "unknown")]
        for one in ("train", "engine", "plan", "doctor", "critic")
    ]
    cases += [[*command, one, str(tmp_path / "no_model")] for one in ("train", "engine", "plan")]
    cases += [[*command, "train", str(tmp_path / "no_data")], [*command, "train", "absent.yaml"]]
    cases += [
        [*command, "evaluate", str(tmp_path / "evaluate")],
        [*command, "sft", str(tmp_path / "sft")],
    ]
    out = ["--out", str(tmp_path / "out")]
    cases += [
        ["tools/convert_hf_to_megatron.py", "--hf", *wrong]
        for wrong in (["absent", *out], [str(model), "--out", "."])
    ]
    cases += [["tools/convert_megatron_to_hf.py", "--checkpoint", "absent", *out]]
    cases += [["tools/export_fp8.py", "--hf", "absent", "--calibration", str(rows), *out]]
    cases += [
        ["tools/make_tiny_model.py", "--family", "gpt", *out],
        ["tools/prepare_data.py", "--source", "a", *out],
    ]
    cases += [["tools/grade.py", "--cases", "absent.jsonl", *out]]
    ended = _run("-c", SCRIPT, json.dumps(cases))
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(found) == len(cases), ended.stderr
    assert {
        " ".join(case): one for case, one in zip(cases, found, strict=True) if one != [2, []]
    } == {}
    assert len(list(filter(None, ended.stderr.splitlines()))) == len(cases), ended.stderr
