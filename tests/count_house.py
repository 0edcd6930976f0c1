"""Prints size, style and words of this checkout, or of another project's: `python
tests/count_house.py [DIR]`.
 It prints figures for people to compare; no test bounds them. Without DIR it also prints what the
tests replace.
"""

import ast
import functools
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vapo_megatron"
# Local names that say nothing of what they hold.
VAGUE = {
    "found",
    "one",
    "told",
    "said",
    "own",
    "known",
    "what",
    "where",
    "given",
    "wanted",
    "got",
    "other",
    "both",
}


def assigned_names(tree: ast.Module) -> list[str]:
    """Names that functions of a module assign to."""
    functions = (
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    stores = (
        node for function in functions for node in ast.walk(function) if isinstance(node, ast.Name)
    )
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
    """The module, with its attribute if there is one, that a name of a test file was imported
    from."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
        elif isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
    return names


def root_of(node: ast.expr) -> str:
    """The name that an expression like a.b[0].c() begins with; empty without one."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def owner_of(target: ast.expr, names: dict[str, str]) -> str:
    """Whose attribute it is: "package" (also that of a local object), "library", or "test" for a
    helper of tests."""
    text = ast.unparse(target).strip("f'\"")
    module = (
        text
        if isinstance(target, (ast.Constant, ast.JoinedStr))
        else names.get(root_of(target), "vapo_megatron")
    )
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
    names = imported_names(tree)
    counts = Counter[str]()
    for node in ast.walk(tree):
        method = (
            node.func.attr
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            else ""
        )
        if (
            isinstance(node, ast.Call)
            and method in REPLACES
            and node.args
            and root_of(node.func) not in ("re", "np")
        ):
            counts[f"replaced in tests: {owner_of(node.args[0], names)}"] += 1
            texts = [ast.unparse(argument).strip("f'\"") for argument in node.args[:2]]
            counts["private names in tests"] += any(
                text.rpartition(".")[2].startswith("_") for text in texts
            )
        counts["set in a user's environment in tests"] += method in ENVIRONMENT
        targets = node.targets if isinstance(node, ast.Assign) else ()
        for target in (inner for outer in targets for inner in ast.walk(outer)):
            if (
                isinstance(target, ast.Attribute)
                and isinstance(target.ctx, ast.Store)
                and root_of(target) in names
            ):
                counts[f"replaced in tests: {owner_of(target, names)}"] += 1
        if (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.endswith("__")
        ):
            is_own = root_of(node.value) in ("self", "cls", "super") or node.attr in OF_NAMED_TUPLES
            counts["private names in tests"] += not is_own and owner_of(node, names) == "package"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vapo_megatron"):
            counts["private names in tests"] += sum(
                alias.name.startswith("_") for alias in node.names
            )
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
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in paths
        if path.name != "__init__.py"
    }
    importers = Counter(module for tree in trees for module in imported_modules(tree) & modules)
    imports = (
        node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    )
    import_lines = sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in imports)
    lines = sum(source.count("\n") for source in sources)
    return {
        "lines": lines,
        "files": len(sources),
        "files above 400 lines": sum(source.count("\n") > 400 for source in sources),
        "files below 60 lines": sum(
            source.count("\n") < 60
            for path, source in zip(paths, sources, strict=True)
            if path.name != "__init__.py"
        ),
        "modules with one importer": sum(count == 1 for count in importers.values()),
        "import lines of 100": round(100 * import_lines / lines, 1),
        "keys": sum(not any(other.startswith(f"{key}.") for other in keys) for key in keys),
        "vague names of 1,000": round(1000 * sum(name in VAGUE for name in names) / len(names), 1),
    }


# Turns of phrase that a native speaker would not use. A smell, not a law: rewrite the sentence, do
# not swap the word.
FOREIGN = re.compile(
    r"goes on|\bgo on\b|that of\b|those of\b|what (?:it|they|is|was)\b|of its own|of their own"
    r"|of one's own|for good\b|anew\b|but for\b|as far as|want of|asked for\b|so far\b"
    r"|stands? still|is there\b|are there\b"
)
# The first lines of a page that a program writes.
GENERATED = "<!-- Written by"
LONG_LINE = 100


def code_of(checkout: Path) -> list[Path]:
    """The Python files of a project's program: its package here, elsewhere everything but tests."""
    package = checkout / PACKAGE.name
    files = (package if package.is_dir() else checkout).rglob("*.py")
    inside = ((path, path.relative_to(checkout).parts) for path in files if path.is_file())
    return sorted(
        path
        for path, parts in inside
        if "tests" not in parts and not any(part.startswith(".") for part in parts)
    )


def pages_of(checkout: Path) -> list[Path]:
    """README.md and the Markdown below docs/ and examples/; results/ holds measured tables."""
    folders = (checkout / name for name in ("docs", "examples"))
    pages = [path for folder in folders for path in sorted(folder.rglob("*.md"))]
    return [path for path in (checkout / "README.md", *pages) if path.is_file()]


def style(sources: list[str]) -> dict[str, float]:
    """Habits of style in Python sources, those in 1,000 lines or a share of the lines."""
    counts = Counter[str]()
    lines = [line for source in sources for line in source.splitlines()]
    for source in sources:
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                pair = (node.targets[0], node.value)
                counts["tuple assignments"] += all(isinstance(part, ast.Tuple) for part in pair)
            counts["conditional expressions"] += isinstance(node, ast.IfExp)
            if isinstance(node, ast.Starred):
                counts["star tuples"] += isinstance(node.value, (ast.Tuple, ast.List))
    thousands = max(len(lines), 1) / 1000
    turns = sum(len(FOREIGN.findall(source)) for source in sources)
    long = sum(len(line) >= LONG_LINE for line in lines)
    return {
        "lines of code": len(lines),
        "tuple assignments in 1,000 lines": round(counts["tuple assignments"] / thousands, 1),
        "conditional expressions in 1,000 lines": round(
            counts["conditional expressions"] / thousands, 1
        ),
        "star tuples": counts["star tuples"],
        f"lines of {LONG_LINE} characters or more, %": round(long / thousands / 10, 1),
        "foreign turns in 1,000 lines": round(turns / thousands, 2),
    }


def words(texts: list[str]) -> dict[str, float]:
    """Words and foreign turns of pages; pages that a program writes count apart."""
    by_hand = [text for text in texts if GENERATED not in text[:400]]
    total = sum(len(text.split()) for text in texts)
    turns = sum(len(FOREIGN.findall(text)) for text in texts)
    return {
        "pages": len(texts),
        "words of pages": total,
        "words of pages written by hand": sum(len(text.split()) for text in by_hand),
        "foreign turns in 10,000 words": round(10_000 * turns / max(total, 1), 1),
    }


def style_and_words(checkout: Path) -> dict[str, float]:
    """Figures of a checkout that can be compared with another project's."""
    sources, pages = (
        [path.read_text(encoding="utf-8", errors="replace") for path in paths]
        for paths in (code_of(checkout), pages_of(checkout))
    )
    return style(sources) | words(pages)


def main() -> None:
    """Print the figures of the checkout named on the command line, or of this one."""
    sys.path.insert(0, str(ROOT))
    if len(sys.argv) > 1:
        figures = style_and_words(Path(sys.argv[1]))
    else:
        tests = [ast.parse(path.read_text(encoding="utf-8")) for path in TESTS.rglob("*.py")]
        figures = house() | sum(map(pins, tests), Counter[str]()) | style_and_words(ROOT)
    for figure, value in figures.items():
        print(f"{value:>8g}  {figure}")


if __name__ == "__main__":
    main()
