"""The Pythons that the package runs on: the Makefile names them, everything else agrees, and others
are refused."""

import re
import shutil
import subprocess
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from vapo_megatron.operations.doctor.node import PYTHON

ROOT = Path(__file__).parents[1]
TOOLS = ("bash", "sh", "cat", "chmod", "dirname", "grep", "mkdir", "nproc", "sed", "touch")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def versions() -> list[str]:
    """PYTHONS of the Makefile, lowest first."""
    line = re.search(r"^PYTHONS := (.*)$", read("Makefile"), re.MULTILINE)
    assert line
    return line[1].split()


def said() -> str:
    *first, last = versions()
    return f"{', '.join(first)} or {last}"


@pytest.mark.parametrize("origin", ["setup.py", "doctor"])
def test_ranges_admit_the_versions_of_make_and_no_other(origin: str) -> None:
    range_of_setup = re.search(r'python_requires="(.*)"', read("setup.py"))
    assert range_of_setup
    admits = SpecifierSet(range_of_setup[1] if origin == "setup.py" else PYTHON)
    minors = [f"3.{minor}" for minor in range(8, 20) if f"3.{minor}.5" in admits]
    assert minors == versions()


@pytest.mark.parametrize("patch", [0, 2])
def test_every_pinned_package_takes_the_first_releases_of_each_version(patch: int) -> None:
    """Debian 12 has Python 3.11.2, Ubuntu 24.04 3.12.3: a package that asks for 3.11.5 is not
    found there."""
    pins = re.findall(r"^([\w.-]+)==(\S+)", read("requirements/cpu.lock"), re.MULTILINE)
    # `make test-mcore019` and `make test-next` stand other versions before these.
    pinned = [name for name, version in pins if distribution(name).version == version]
    assert len(pinned) > 100
    asked = {name: distribution(name).metadata["Requires-Python"] or "" for name in pinned}
    refused = {
        f"{name}: {asked[name]}"
        for name in pinned
        for version in versions()
        if f"{version}.{patch}" not in SpecifierSet(asked[name])
    }
    assert not refused


def test_classifiers_are_the_versions_of_make() -> None:
    classifiers = re.findall(r"Programming Language :: Python :: (3\.\d+)", read("setup.py"))
    assert classifiers == versions()


def test_linters_take_the_lowest_version() -> None:
    tools = tomllib.loads(read("pyproject.toml"))["tool"]
    lowest = versions()[0]
    assert tools["mypy"]["python_version"] == lowest
    assert tools["ruff"]["target-version"] == "py" + lowest.replace(".", "")


@pytest.mark.parametrize("path", ["docker/cpu.Dockerfile", "docker/h100.Dockerfile"])
def test_images_use_a_version_of_make(path: str) -> None:
    used = re.findall(r"(?:python|PYTHON=|python:)(3\.\d+)", read(path))
    assert used and set(used) <= set(versions())


@pytest.mark.parametrize(
    "path",
    [
        "README.md",
        "CONTRIBUTING.md",
        "Makefile",
        "docs/doctor.md",
        "docs/installation.md",
        "requirements/cpu.lock",
    ],
)
def test_pages_say_the_versions_of_make(path: str) -> None:
    text = read(path)
    assert said() in text
    if path == "README.md":
        lowest, *_, highest = versions()
        assert f"Python-{lowest}%20to%20{highest}" in text


def test_the_public_workflow_tests_the_versions_of_make() -> None:
    jobs = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]
    runs = jobs["tests"]["strategy"]["matrix"]["include"]
    assert [run["python"] for run in runs] == versions()
    slices = re.search(r"TESTS_SLICE=\$slice/(\d+)", read(".ci/run"))
    assert slices is not None
    assert [run["slice"] for run in runs] == list(range(1, int(slices[1]) + 1)), "all long tests"
    assert any(".ci/run" in step.get("run", "") for step in jobs["tests"]["steps"])


def test_the_second_stack_differs_in_megatron_core_alone() -> None:
    def pins(name: str) -> set[str]:
        lines = read(f"requirements/{name}").splitlines()
        return {line for line in lines if line and not line.startswith("#")}

    (second,) = pins("mcore019.txt")
    (first,) = (pin for pin in pins("cpu.lock") if pin.startswith("megatron-core=="))
    assert pins("h100.txt") ^ pins("h100-mcore019.txt") == {first, second}


class Machine:
    """A clone with the real Makefile on a machine whose only programs are TOOLS and the Pythons
    given to it."""

    def __init__(self, clone: Path) -> None:
        self.clone = clone
        self.programs = clone / "programs"
        self.calls = clone / "calls"
        (clone / "requirements").mkdir(parents=True)
        self.programs.mkdir()
        shutil.copy(ROOT / "Makefile", clone)
        (clone / "requirements/cpu.lock").write_text("torch==1.0\ntyper==1.0\n")
        (clone / "setup.py").touch()
        for name in TOOLS:
            program = shutil.which(name)
            assert program
            (self.programs / name).symlink_to(program)

    def add_python(self, path: Path, version: str, has_venv: bool = True) -> None:
        """A stand-in: says its version, makes a .venv with itself in it, and notes how it was
        called."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"""#!/bin/sh
            echo "{path.name} {version} $*" >> {self.calls}
            case "$*" in
              *sys.version_info*) echo {version} ;;
              *ensurepip*) exit {0 if has_venv else 1} ;;
              "-m venv"*)
                mkdir -p .venv/bin .venv/lib
                cat "$0" > .venv/bin/python
                chmod +x .venv/bin/python ;;
            esac
            """
        )
        path.chmod(0o755)

    def python(self, name: str, version: str, has_venv: bool = True) -> None:
        self.add_python(self.programs / name, version, has_venv)

    def install(self, *settings: str) -> subprocess.CompletedProcess[str]:
        make = shutil.which("make")
        assert make
        return subprocess.run(
            [make, "install", *settings],
            cwd=self.clone,
            env={"PATH": str(self.programs)},
            capture_output=True,
            text=True,
            timeout=240,
        )

    def made_with(self) -> str | None:
        """The Python that made .venv, None if none did."""
        calls = self.calls.read_text().splitlines()
        made = [call for call in calls if " -m venv" in call]
        return " ".join(made[0].split()[:2]) if made else None


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "clone")


@pytest.mark.parametrize("version", versions())
def test_install_takes_python3_of_any_fitting_version(machine: Machine, version: str) -> None:
    machine.python("python3", version)
    machine.python("python3.12", "3.12")
    done = machine.install()
    assert done.returncode == 0, done.stderr
    assert machine.made_with() == f"python3 {version}"
    assert " -m pip" in machine.calls.read_text()


@pytest.mark.parametrize("version", ["3.10", "3.14", "3.1", "2.7"])
def test_install_passes_over_an_unfit_python3(machine: Machine, version: str) -> None:
    machine.python("python3", version)
    machine.python("python3.13", "3.13")
    assert machine.install().returncode == 0
    assert machine.made_with() == "python3.13 3.13"


@pytest.mark.parametrize("version", ["3.10", "3.14", "3.1", "2.7"])
def test_install_refuses_other_versions_in_one_line(machine: Machine, version: str) -> None:
    machine.python("python3", version)
    done = machine.install()
    line = done.stderr.splitlines()[0]
    assert done.returncode == 2
    assert line.startswith(f"make: needs Python {said()}, python3 is {version}, so install one")
    assert machine.made_with() is None and not (machine.clone / ".venv").exists()


def test_install_without_any_python_says_what_to_install(machine: Machine) -> None:
    done = machine.install()
    assert done.returncode == 2
    assert "none of" in done.stderr and "python3-venv" in done.stderr.splitlines()[0]


def test_install_names_the_missing_venv_package(machine: Machine) -> None:
    machine.python("python3", "3.13", has_venv=False)
    done = machine.install()
    assert done.returncode == 2
    assert "apt-get install python3.13-venv" in done.stderr.splitlines()[0]


@pytest.mark.parametrize("version", versions())
def test_install_keeps_a_fitting_venv(machine: Machine, version: str) -> None:
    machine.python("python3", "3.14")
    machine.add_python(machine.clone / ".venv/bin/python", version)
    (machine.clone / ".venv/lib").mkdir()
    done = machine.install()
    assert done.returncode == 0, done.stderr
    assert machine.made_with() is None
    assert f"python {version} -m pip" in machine.calls.read_text()


def test_install_replaces_an_unfit_venv(machine: Machine) -> None:
    machine.python("python3", "3.12")
    machine.add_python(machine.clone / ".venv/bin/python", "3.10")
    assert machine.install().returncode == 0
    assert machine.made_with() == "python3 3.12"


def test_install_takes_the_named_python(machine: Machine) -> None:
    machine.python("python3", "3.11")
    machine.python("mine", "3.13")
    assert machine.install("PYTHON=mine").returncode == 0
    assert machine.made_with() == "mine 3.13"
