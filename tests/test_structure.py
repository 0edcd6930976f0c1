"""The structure of the package: who imports whom, who asks for the device, what nobody calls."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from vapo_megatron.config.base import known_keys
from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vapo_megatron"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PROGRAMS = [
    path
    for folder in ("tools", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Every package of the project may import these modules at the top of it.
BASE = {
    "errors",
    "files",
    "logs",
    "signals",
    "command_line",
    "collectives",
    "deadlines",
    "loop_thread",
    "__version__",
}
_LOWEST = {"config", "algorithms"}
_DATA = _LOWEST | {"data", "models", "weights"}
_TOOLS = _DATA | {"checkpoint", "engines", "megatron", "monitoring", "rewards", "rollout"}
# What the modules of a package may import of the others. `operations` is imported by the command
# line and tools alone.
MAY_IMPORT: dict[str, set[str]] = {
    "algorithms": set(),
    "config": {"algorithms"},
    "data": _LOWEST,
    "models": _LOWEST,
    "weights": _LOWEST | {"data", "models"},
    "rewards": _LOWEST | {"agents", "data"},
    "monitoring": _LOWEST | {"data"},
    "megatron": _DATA,
    "checkpoint": _DATA | {"megatron", "monitoring"},
    "engines": _DATA | {"megatron"},
    "rollout": _DATA | {"engines"},
    "agents": _DATA | {"engines", "rollout"},
    "evaluation": _TOOLS | {"agents"},
    "training": _TOOLS | {"agents", "evaluation"},
    "checks": _TOOLS | {"agents", "evaluation", "training"},
    "run": _TOOLS | {"agents", "evaluation", "training", "checks"},
    "operations": _TOOLS | {"agents", "evaluation", "training", "checks", "run"},
}
# Methods that a library calls on objects of ours.
CALLED_BY_LIBRARIES = {"get_replay_topk"}
# Their owners are about to remove them.
UNUSED_YET: set[str] = set()
LIBRARIES = {
    "megatron": ("megatron/", "weights/", "models/", "checkpoint/dist_saver.py"),
    "sglang": ("engines/inside/",),
}

# megatron/platform.py answers what a device is. These use CUDA streams, events and generators
# themselves, are given a tensor whose device is what counts, or run in an engine, where there is no
# platform.
ASK_FOR_THE_DEVICE = {
    "engines/inside/cpu_shim.py",
    "megatron/cpu_torch.py",
    "megatron/logprob_torch.py",
    "megatron/logprobs.py",
    "megatron/offload.py",
    "megatron/training_state.py",
    "operations/doctor/allreduce.py",
    "operations/doctor/checks.py",
    "engines/inside/broadcast_group.py",
    "engines/weight_sync/transports.py",
    "engines/inside/strict_loading.py",
    "engines/inside/strict_updates.py",
    "weights/export.py",
    "weights/gather.py",
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def named(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a module imports, also within functions and for types alone."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_a_package_imports_only_those_below_it() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == MAY_IMPORT.keys(), (
        "add a new room's imports to MAY_IMPORT; remove stale ones"
    )
    wrong = []
    for path in SOURCES:
        package = named(path).partition("/")[0]
        if package not in packages:  # the command line may import all
            continue
        for name in imports(path):
            if name.startswith("vapo_megatron."):
                other = name.split(".")[1]
                if other not in MAY_IMPORT[package] | BASE | {package}:
                    wrong.append(f"{named(path)} imports {name}")
    assert not wrong, (
        "imports go down only (docs/architecture.md): move the code into a room that both may "
        "import, or pass it as an argument"
    )
    # A CycleError names the folders that import each other in a circle
    TopologicalSorter(folders_below()).prepare()


def folders_below() -> dict[str, set[str]]:
    """The folders that the modules of each folder import from; the modules at the top of the
    package are left out."""
    folders = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for path in PACKAGE.glob("*/**/__init__.py")
    }
    below: dict[str, set[str]] = {folder: set() for folder in folders}
    for path in PACKAGE.glob("*/**/*.py"):
        folder = str(path.parent.relative_to(ROOT)).replace("/", ".")
        for name in imports(path):
            holders = (name.rsplit(".", count)[0] for count in range(name.count(".") + 1))
            below[folder] |= {next((holder for holder in holders if holder in folders), folder)} - {
                folder
            }
    return below


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_is_imported_where_it_belongs(library: str) -> None:
    users = {
        named(path)
        for path in SOURCES
        if any(name.partition(".")[0] == library for name in imports(path))
    }
    assert users, "nobody imports it: has it another name?"
    strangers = {user for user in users if not user.startswith(LIBRARIES[library])}
    assert not strangers, (
        f"call it through {LIBRARIES[library]}, which hide {library} from the other rooms"
    )


def asks_for_the_device(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            inner = node.value
            asked = ast.unparse(inner).removeprefix("self._")
            if node.attr == "is_cuda" and asked not in ("platform", "current_platform()"):
                return True
            if isinstance(inner, ast.Name) and (inner.id, node.attr) == ("torch", "cuda"):
                return True
            if node.attr == "type" and "device" in (
                getattr(inner, "attr", ""),
                getattr(inner, "id", ""),
            ):
                return True
    return False


def test_the_platform_answers_what_the_device_is() -> None:
    assert asks_for_the_device(parsed(PACKAGE / "megatron/platform.py"))
    assert asks_for_the_device(ast.parse("tensor.is_cuda")) and not asks_for_the_device(
        ast.parse("platform.is_cuda")
    )
    askers = {named(path) for path in SOURCES if asks_for_the_device(parsed(path))} - {
        "megatron/platform.py"
    }
    assert askers == ASK_FOR_THE_DEVICE, (
        "ask current_platform() of megatron/platform.py instead, or add a property to it; take off "
        "the list what no longer asks"
    )


def is_hook(function: ast.AST) -> bool:
    """Whether something registers it (a decorator that is called, such as app.command) or a base
    class demands it."""
    return any(
        isinstance(decorator, ast.Call) for decorator in getattr(function, "decorator_list", ())
    )


def definitions(tree: ast.Module) -> Iterator[str]:
    """Public functions and classes of a module, and public methods of classes without a base of
    another library."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, kinds) and not node.name.startswith("_") and not is_hook(node):
            yield node.name
        if isinstance(node, ast.ClassDef) and not node.bases:
            for method in node.body:
                if (
                    isinstance(method, kinds)
                    and not method.name.startswith("_")
                    and not is_hook(method)
                ):
                    yield method.name


def used_names(path: Path) -> Iterator[str]:
    """Names that a module reads, and texts that are names (getattr, entry points, forward
    references)."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200
        ):
            yield from re.findall(r"[A-Za-z_]\w*", node.value) if " " not in node.value else ()


def test_everything_public_is_used_outside_tests() -> None:
    uses = Counter(
        name for path in [*SOURCES, *PROGRAMS, ROOT / "setup.py"] for name in used_names(path)
    )
    known = CALLED_BY_LIBRARIES | UNUSED_YET
    unused = [
        f"{named(path)}: {name}"
        for path in SOURCES
        for name in definitions(parsed(path))
        if not uses[name] and name not in known
    ]
    assert not unused, (
        "nothing but tests uses them: delete them, call them, or let their names begin with _ if "
        "only their own module does; what a library calls belongs in CALLED_BY_LIBRARIES"
    )


def test_every_config_key_is_read() -> None:
    readers = [
        path for path in SOURCES if not named(path).startswith(("config/", "operations/", "cli.py"))
    ]
    reads = {name for path in readers for name in used_names(path)}
    # A section's own properties and methods read for others what they make of a key; its validators
    # do not count.
    reads |= {
        node.attr
        for path in SOURCES
        if named(path).startswith("config/")
        for section in parsed(path).body
        if isinstance(section, ast.ClassDef)
        for function in section.body
        if isinstance(function, ast.FunctionDef)
        and not function.name.startswith("_")
        and function.name != "check"
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
    }
    unread = {
        key for model in (TrainConfig, SftConfig, EvaluateConfig) for key in known_keys(model)
    }
    unread = {key for key in unread if key.rpartition(".")[2] not in reads}
    assert not unread, (
        "nothing outside operations/ reads these config keys: read them, or delete them from "
        "config/"
    )
    of_plan = {
        key for key in known_keys(PlanConfig) if key.partition(".")[0] in ("hardware", "plan")
    }
    reads_of_plan = {
        name
        for path in SOURCES
        if named(path).startswith("operations/")
        for name in used_names(path)
    }
    unread = {key for key in of_plan if key.rpartition(".")[2] not in reads_of_plan}
    assert not unread, (
        "nothing in operations/ reads these config keys: read them, or delete them from "
        "config/plan.py"
    )


# Where the walks of docs/architecture.md begin and end.
WALKS = {
    "One sample": ("GroupStream._run", "PolicyLoss"),
    "One config key": ("load_config", "PolicyLoss"),
    "One weight": ("load_hf", "StrictLoader.take"),
}
# Under which other name a function is called.
CALLED_AS = {"_grade": "grade"}


@dataclass(frozen=True)
class Hop:
    """A step of a walk: the file, the function, the hop that it says it comes from, and the names
    between them."""

    file: str
    name: str
    origin: str
    between: tuple[str, ...]


def hops(title: str) -> list[Hop]:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {title}")[2].partition("\n## ")[0]
    walk = []
    for file, name, rest in re.findall(
        r"^\d+\. `([\w/]+\.py)`: `([\w.]+)`(.*(?:\n +.*)*)", section, re.M
    ):
        origin = re.search(r"\(from `([\w.]+)`([^()]*)\)", " ".join(rest.split()))
        between = re.findall(r"`([\w.]+)`", origin[2]) if origin else []
        walk.append(Hop(file, name, origin[1] if origin else "", tuple(between)))
    return walk


@cache
def functions(path: Path) -> dict[str, ast.AST]:
    """Functions, classes and methods of a module by name; methods as Class.method as well."""
    found: dict[str, ast.AST] = {}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{method.name}": method
                for method in node.body
                if isinstance(method, FUNCTIONS)
            }
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            found.setdefault(node.name, node)
    return found


@cache
def mentioned(node: ast.AST) -> set[str]:
    """Names in a piece of code; texts that are one word may be names of what is called over
    HTTP."""
    found = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    found |= {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
    texts = (inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant))
    return found | {
        text for text in texts if isinstance(text, str) and text.startswith("update_weights_from_")
    }


@cache
def mentions_of(name: str) -> tuple[frozenset[str], ...]:
    """What each function of this name mentions."""
    nodes = [node for path in SOURCES for key, node in functions(path).items() if key == name]
    return tuple(frozenset(mentioned(node)) for node in nodes)


@cache
def calls(one: str, other: str) -> bool:
    """Whether one mentions the other, or the other way round; a name that is no function is data
    that both mention."""
    short = {
        name: {name.split(".")[-1], CALLED_AS.get(name.split(".")[-1], "")} - {""}
        for name in (one, other)
    }
    forward = any(short[other] & names for names in mentions_of(one))
    return forward or any(short[one] & names for names in mentions_of(other))


def faults_of(title: str, walk: Sequence[Hop]) -> list[str]:
    """What is wrong with a walk, one line each."""
    ends = (walk[0].name, walk[-1].name)
    faults = (
        []
        if ends == WALKS[title]
        else [f"it goes from {ends[0]} to {ends[1]}, expected {WALKS[title]}"]
    )
    faults += [
        f"{h.file} has no {h.name}" for h in walk if h.name not in functions(PACKAGE / h.file)
    ]
    for before, hop in pairwise(walk):
        if hop.origin != before.name:
            faults.append(
                f"{hop.name} comes from {hop.origin or 'nowhere'}, the hop before it is "
                f"{before.name}"
            )
        for one, other in pairwise((before.name, *hop.between, hop.name)):
            if not calls(one, other):
                faults.append(f"{hop.name}: neither {one} nor {other} calls the other")
    return faults


@pytest.mark.parametrize("title", WALKS)
def test_walks_follow_the_code(title: str) -> None:
    assert not faults_of(title, hops(title)), (
        f"write the walk '{title}' of docs/architecture.md as the code is now: the file and name "
        "of a function that moved, one more hop for one that came between"
    )


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_that_leaves_a_hop_out_is_noticed(title: str) -> None:
    walk = hops(title)
    missed = [
        hop.name
        for place, hop in enumerate(walk)
        if not faults_of(title, walk[:place] + walk[place + 1 :])
    ]
    assert not missed, f"'{title}' of docs/architecture.md no longer has these hops: remove them"
