"""Prints how large the package is and what its tests replace: `python tests/count_house.py`.

tests/test_structure.py bounds some of the figures.
"""

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


TESTS = ROOT / "tests"
# Methods of monkeypatch and unittest.mock that replace an attribute or an entry of something.
REPLACES = {"setattr", "delattr", "setitem", "delitem", "object", "multiple"}
# What a user can do as well: variables, working directory, import path.
ENVIRONMENT = {"setenv", "delenv", "chdir", "syspath_prepend"}
OF_NAMED_TUPLES = {"_replace", "_fields", "_asdict"}


def imported_names(tree: ast.Module) -> dict[str, str]:
    """The module, with its attribute if there is one, that a name of a test file was imported from."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
    return names


def root_of(node: ast.expr) -> str:
    """The name that an expression like a.b[0].c() begins with; empty without one."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def owner_of(target: ast.expr, names: dict[str, str]) -> str:
    """Whose attribute it is: "package" (also that of a local object), "library", or "test" for a helper of tests."""
    text = ast.unparse(target).strip("f'\"")
    module = text if isinstance(target, (ast.Constant, ast.JoinedStr)) else names.get(root_of(target), "vapo_megatron")
    top = module.split(".")[0]
    if top == "vapo_megatron":
        return "package"
    return "test" if top in helpers_of_tests() else "library"


@functools.cache
def helpers_of_tests() -> set[str]:
    """Names of the modules under tests/."""
    return {path.stem for path in TESTS.rglob("*.py")}


def pins(tree: ast.Module) -> Counter[str]:
    """What a test file replaces and which private names it uses, by figure."""
    names, counts = imported_names(tree), Counter[str]()
    for node in ast.walk(tree):
        method = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        if isinstance(node, ast.Call) and method in REPLACES and node.args and root_of(node.func) not in ("re", "np"):
            counts[f"replaced in tests: {owner_of(node.args[0], names)}"] += 1
            texts = [ast.unparse(argument).strip("f'\"") for argument in node.args[:2]]
            counts["private names in tests"] += any(text.rpartition(".")[2].startswith("_") for text in texts)
        counts["set in a user's environment in tests"] += method in ENVIRONMENT
        targets = node.targets if isinstance(node, ast.Assign) else ()
        for target in (inner for outer in targets for inner in ast.walk(outer)):
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store) and root_of(target) in names:
                counts[f"replaced in tests: {owner_of(target, names)}"] += 1
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            is_own = root_of(node.value) in ("self", "cls", "super") or node.attr in OF_NAMED_TUPLES
            counts["private names in tests"] += not is_own and owner_of(node, names) == "package"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vapo_megatron"):
            counts["private names in tests"] += sum(alias.name.startswith("_") for alias in node.names)
    return counts


@functools.cache
def house() -> dict[str, float]:
    """Size of the package and of a training config."""
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
    }


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    tests = [ast.parse(path.read_text(encoding="utf-8")) for path in TESTS.rglob("*.py")]
    for figure, value in (house() | sum(map(pins, tests), Counter[str]())).items():
        print(f"{value:>8g}  {figure}")
