"""Links, commands, files, config keys and values that the pages name exist."""

import re
from collections.abc import Callable, Collection, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import typer

from vapo_megatron.cli import PRESETS, SCRIPTS, app
from vapo_megatron.config.base import Section, known_keys
from vapo_megatron.config.critic_probes import ProbedRunConfig
from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.load import load_config
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.operations.plan.inputs import SHIPPED
from vapo_megatron.operations.plan.plan import default_world, make_plan

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "results").glob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
]
# Configs that a value named in a document is tried over.
BASES: dict[type[Section], Path] = {
    TrainConfig: ROOT / "examples" / "gsm8k" / "vapo.yaml",
    SftConfig: ROOT / "examples" / "quickstart" / "sft.yaml",
    EvaluateConfig: ROOT / "examples" / "gsm8k" / "evaluate.yaml",
    PlanConfig: ROOT / "examples" / "aime_qwen2.5_32b" / "plan.yaml",
    ProbedRunConfig: ROOT / "examples" / "gsm8k" / "vapo.yaml",
}
KEYS = {key for model in BASES for key in known_keys(model)}
# Mappings with keys of other programs.
FREE = {"rollout.server_args"}
SECTIONS = {key for key in KEYS if any(other.startswith(f"{key}.") for other in KEYS)}
SETTING = re.compile(
    r"(?<![\w./$-])(?P<key>[a-z_]+(?:\.[a-z0-9_]+)+)=(?P<value>\"[^\"]*\"|'[^']*'|\{[^}]*\}|\[[^\]]*\]|[^\s`|)]+)"
)
# Stands for a value of the reader's own.
PLACEHOLDER = re.compile(r"\$|^\.\.\.$|^[A-Z]+$")
FOLDERS = (
    "benchmarks",
    "docs",
    "examples",
    "requirements",
    "results",
    "slurm",
    "tests",
    "tools",
    "vapo_megatron",
)
NAMED_FILE = re.compile(
    rf"(?<![\w/.$-])(?:{'|'.join(FOLDERS)})/[\w./-]*\.(?:py|sh|sbatch|yaml|md|txt|lock|jsonl?)\b"
)
# A program of the project and its arguments.
WITH_ARGUMENTS = re.compile(
    r"((?:vapo-megatron|(?<!from )vapo_megatron\.cli) [a-z][a-z0-9-]*|"
    r"(?<![\w/])(?:tools|benchmarks|examples)/[\w/]+\.py|benchmarks\.\w+)([^|;&#]*)"
)
TRAINING = re.compile(
    r"(?:vapo-megatron|vapo_megatron\.cli) train (examples/\S+\.yaml)([^|;&#\n]*)"
)
every_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)


def code_in(text: str) -> Iterator[str]:
    """Fenced blocks and code spans."""
    fence = re.compile(r"^ *```\w*\n(.*?)^ *```", re.M | re.S)
    yield from fence.findall(text)
    # A span may continue in the next line.
    yield from (span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", fence.sub("", text)))


def anchors(page: Path) -> set[str]:
    """The places of a page that can be linked to, as GitHub names them."""
    text = page.read_text(encoding="utf-8")
    titles = re.findall(r"^#+ +(.*)$", text, re.M)
    named = {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
    return named | set(re.findall(r'<a id="(\w+)">', text))


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), (
            f"{page.name} links to {link}, which is not there: write where it is now"
        )
        assert target.resolve().is_relative_to(ROOT), f"{link}: outside the project"
        if anchor:
            assert anchor in anchors(target), (
                f"{page.name} links to {link}: the page has no such heading"
            )


@every_page
def test_commands_are_there(page: Path) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for code in code_in(page.read_text(encoding="utf-8")):
        for name in re.findall(r"(?:vapo-megatron|-m vapo_megatron\.cli) ([a-z][a-z0-9-]*)", code):
            assert name in commands, f"{page.name}: there is no command {name}, in: {code}"


@every_page
def test_options_of_commands_are_there(page: Path) -> None:
    for code in code_in(page.read_text(encoding="utf-8")):
        for line in code.replace("\\\n", " ").splitlines():
            for command, arguments in WITH_ARGUMENTS.findall(line):
                used = set(re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", arguments))
                assert used <= options_of(command), f"{command}: {used - options_of(command)}"


@every_page
def test_files_of_the_project_are_there(page: Path) -> None:
    for code in code_in(page.read_text(encoding="utf-8")):
        for name in NAMED_FILE.findall(code):
            assert (ROOT / name).exists() or "NAME." in name, (
                f"{page.name} names {name}, which is not there"
            )


@every_page
def test_settings_load(page: Path) -> None:
    for code in code_in(page.read_text(encoding="utf-8")):
        for command in code.replace("\\\n", " ").splitlines():
            settings: dict[str, str] = {}
            for found in SETTING.finditer(command):
                key = found["key"]
                value = found["value"].rstrip(":;,").strip("\"'")
                if key == "section.key" or belongs_to_the_example(page, key):
                    continue
                assert is_known(key), f"{key}: unknown; give it from its section on"
                if not PLACEHOLDER.search(value):
                    settings[key] = value
            if settings:
                assert_loads(settings)


def test_runs_of_the_pages_fit_the_gpus_that_they_take() -> None:
    """Eight of 80 GB where they name no number; for models whose sizes are shipped."""
    fitting = set()
    for page in PAGES:
        commands = "\n".join(code_in(page.read_text(encoding="utf-8"))).replace("\\\n", " ")
        for config, given in TRAINING.findall(commands):
            settings = [
                found[0]
                for found in SETTING.finditer(given)
                if not PLACEHOLDER.search(found["value"])
            ]
            run = load_config(PlanConfig, ROOT / config, settings, PRESETS)
            sizes = SHIPPED / Path(run.model.path).name.removesuffix("-Instruct")
            if sizes.is_dir():
                run = run.model_copy(
                    update={"model": run.model.model_copy(update={"path": str(sizes)})}
                )
                assert make_plan(run, default_world(run)).fits, (
                    f"{page.name}: train {config} {given}"
                )
                fitting.add(page.name)
    assert {"README.md", "aime.md", "configuration.md", "gpu.md"} <= fitting


@every_page
def test_keys_are_known(page: Path) -> None:
    for code in code_in(page.read_text(encoding="utf-8")):
        if re.fullmatch(r"[a-z_]+(\.[a-z0-9_]+)+", code) and code.partition(".")[0] in SECTIONS:
            is_file = code.rpartition(".")[2] in ("py", "md", "yaml", "json", "jsonl", "txt")
            assert is_file or is_known(code), (
                f"{page.name} names the config key {code}, which is not there"
            )


@cache
def options_of(command: str) -> frozenset[str]:
    """Of a command of the program, of a tool, or of a benchmark or example, these as their source
    has them."""
    name = re.split(r"[ /.]", command.removesuffix(".py"))[-1]
    script = name.replace("-", "_") if name in SCRIPTS else name
    if "vapo" in command and name not in SCRIPTS:
        made = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    elif command.startswith("tools/") or name in SCRIPTS:
        module = import_module(f"tools.{script}")
        made = typer.main.get_command(getattr(module, "app", None) or typer_of(module.main))
    else:
        source = (ROOT / f"{command.removesuffix('.py').replace('.', '/')}.py").read_text(
            encoding="utf-8"
        )
        parameters = re.findall(r"^    (\w+): Annotated\[", source, re.M)
        shared = {"--json"} if command.startswith("benchmarks") else set()
        return frozenset(
            {
                *re.findall(r'"(--[a-z0-9-]+)"', source),
                *(f"--{name}" for name in parameters),
                *shared,
            }
        )
    return frozenset(
        option for given in made.params for option in (*given.opts, *given.secondary_opts)
    )


def typer_of(function: Callable[..., None]) -> typer.Typer:
    """What typer.run(function) makes."""
    made = typer.Typer()
    made.command()(function)
    return made


def belongs_to_the_example(page: Path, key: str) -> bool:
    """Whether an example has its own config with such a section."""
    sections = {
        name
        for path in page.parent.glob("*.yaml")
        for name in re.findall(r"^(\w+):", path.read_text(), re.M)
    }
    return (
        page.parent.parent.name == "examples"
        and key not in KEYS
        and key.partition(".")[0] in sections
    )


def test_the_map_of_the_code_has_every_room_and_existing_files() -> None:
    package = ROOT / "vapo_megatron"
    rows = re.findall(
        r"^\| `([\w/]+)/` \|(.*)\|$",
        (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"),
        re.M,
    )
    rooms = {path.parent.relative_to(package).as_posix() for path in package.glob("**/__init__.py")}
    within_one_room = {"engines/inside/served_models", "."}
    within_one_room |= {room for room in rooms if room.startswith("operations/")}
    assert {room for room, _ in rows} == rooms - within_one_room, (
        "the table of docs/architecture.md has a row a room"
    )
    for room, row in rows:
        for name in re.findall(r"`(\w+\.py)`", row):
            assert (package / room / name).is_file(), (
                f"docs/architecture.md names {room}/{name}: write where it is now"
            )


def test_contributing_names_what_is_there_to_change() -> None:
    table = re.findall(r"^\| .*\|$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M)
    named = r"`((?:vapo_megatron|tests)/[\w/]+\.py)`(?: \(([^()]*)\))?"
    checked = 0
    for row in table:
        example = re.findall(r"\| `(\w+)` \|$", row)
        files = re.findall(named, row)
        for path, names in files:
            text = (ROOT / path).read_text(encoding="utf-8")
            for name in re.findall(r"`(\w+)`", names):
                assert re.search(rf"\b{name}\b", text), (
                    f"{path} has no {name}: mend the table of CONTRIBUTING.md"
                )
                checked += 1
        texts = [
            (ROOT / path).read_text(encoding="utf-8")
            for path, _ in files
            if path.startswith("vapo_megatron")
        ]
        for name in example:
            has_it = any(re.search(rf"\b{name}\b", text) for text in texts)
            assert has_it, (
                f"no file of its row has {name}: name another to follow in the table of "
                "CONTRIBUTING.md"
            )
            checked += 1
    assert len(table) >= 11 and checked >= 12


def is_known(key: str, keys: Collection[str] = KEYS) -> bool:
    """Entries of lists are numbered; in FREE, names are not the config's."""
    return re.sub(r"\.\d+\b", "", key) in keys or key.rpartition(".")[0] in FREE


def assert_loads(settings: dict[str, str]) -> None:
    """By one of the commands that have all of these keys."""
    refusals = []
    for model, base in BASES.items():
        if all(is_known(key, known_keys(model)) for key in settings):
            try:
                load_config(
                    model, base, [f"{key}={value}" for key, value in settings.items()], PRESETS
                )
                return
            except BadInput as error:
                refusals.append(str(error))
    raise AssertionError(f"{settings}: {refusals}")
