"""Prints how large the package is: `python tests/count_house.py`. tests/test_structure.py holds the figures."""

import ast
import functools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vapo_megatron"
# Local names that say nothing of what they hold.
VAGUE = {"found", "one", "told", "said", "own", "known", "what", "where", "given", "wanted", "got", "other", "both"}


def assigned_names(tree: ast.Module) -> list[str]:
    """Names that functions of a module assign to."""
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    stores = (node for function in functions for node in ast.walk(function) if isinstance(node, ast.Name))
    return [node.id for node in stores if isinstance(node.ctx, ast.Store)]


@functools.cache
def house() -> dict[str, float]:
    """Lines and files of Python, long files, keys of a training config, vague names of a thousand that are assigned."""
    from vapo_megatron.config.base import known_keys
    from vapo_megatron.config.train import TrainConfig

    sources = [path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))]
    names = [name for source in sources for name in assigned_names(ast.parse(source))]
    keys = set(known_keys(TrainConfig))
    return {
        "lines": sum(source.count("\n") for source in sources),
        "files": len(sources),
        "files above 400 lines": sum(source.count("\n") > 400 for source in sources),
        "keys": sum(not any(other.startswith(f"{key}.") for other in keys) for key in keys),
        "vague names of 1,000": round(1000 * sum(name in VAGUE for name in names) / len(names), 1),
    }


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for figure, value in house().items():
        print(f"{value:>8g}  {figure}")
