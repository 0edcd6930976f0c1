"""Prints how large the package is: `python tests/count_house.py`. tests/test_structure.py bounds four figures."""

import ast
import functools
import sys
from collections import Counter
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


def imported_modules(tree: ast.Module) -> set[str]:
    """Modules of the package that a module imports, or imports names from."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return modules


@functools.cache
def house() -> dict[str, float]:
    """Size of the package and of a training config, and pins of internals in the tests."""
    from vapo_megatron.config.base import known_keys
    from vapo_megatron.config.train import TrainConfig

    paths = sorted(PACKAGE.rglob("*.py"))
    sources = [path.read_text(encoding="utf-8") for path in paths]
    trees = [ast.parse(source) for source in sources]
    names = [name for tree in trees for name in assigned_names(tree)]
    keys = set(known_keys(TrainConfig))
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if path.name != "__init__.py"}
    importers = Counter(module for tree in trees for module in imported_modules(tree) & modules)
    imports = (node for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
    import_lines = sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in imports)
    lines = sum(source.count("\n") for source in sources)
    tests = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py"))]
    return {
        "lines": lines,
        "files": len(sources),
        "files above 400 lines": sum(source.count("\n") > 400 for source in sources),
        "files below 60 lines": sum(
            source.count("\n") < 60 for path, source in zip(paths, sources, strict=True) if path.name != "__init__.py"
        ),
        "modules with one importer": sum(count == 1 for count in importers.values()),
        "import lines of 100": round(100 * import_lines / lines, 1),
        "keys": sum(not any(other.startswith(f"{key}.") for other in keys) for key in keys),
        "vague names of 1,000": round(1000 * sum(name in VAGUE for name in names) / len(names), 1),
        "monkeypatches in tests": sum(test.count("monkeypatch.") for test in tests),
    }


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for figure, value in house().items():
        print(f"{value:>8g}  {figure}")
