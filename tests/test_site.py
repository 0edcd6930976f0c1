"""The documentation builds as a site without a warning; the Dockerfiles pass their linter and name
what is there."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Beside this Python or, where that has packages of .venv in front of it, there.
PROGRAMS = os.pathsep.join(map(str, (Path(sys.executable).parent, ROOT / ".venv" / "bin")))
HADOLINT = shutil.which("hadolint", path=PROGRAMS) or "hadolint"
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=source, capture_output=True, text=True, timeout=120, env=environment
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    found = build(ROOT, folder)
    assert found.returncode == 0, found.stderr
    return folder


def test_every_page_is_on_the_site_and_in_its_menu(site: Path) -> None:
    start = (site / "index.html").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        name = page.with_suffix(".html").name
        assert (site / name).is_file(), name
        assert f'href="{name}"' in start, f"{name}: no menu leads to it"


def test_the_examples_are_pages_whose_links_lead_to_pages(site: Path) -> None:
    for readme in (ROOT / "examples").glob("*/README.md"):
        name = f"examples/{readme.parent.name}.html"
        assert f'href="{name}"' in (site / "index.html").read_text(encoding="utf-8"), (
            f"{name}: no menu leads to it"
        )
    gsm8k = (site / "examples" / "gsm8k.html").read_text(encoding="utf-8")
    assert re.search(r'<p>[^\0]*href="\.\./verifier\.html', gsm8k.partition("<article")[2]), (
        "a page of docs/"
    )
    start = (site / "index.html").read_text(encoding="utf-8").partition("<article")[2]
    assert 'href="examples/custom_functions.html"' in start, "a page of docs/ leads to an example"
    functions = (site / "examples" / "custom_functions.html").read_text(encoding="utf-8")
    assert "<code>examples/custom_functions/functions.py</code>" in functions, "no page: its path"


def test_results_are_pages_with_their_pictures(site: Path) -> None:
    for page in (ROOT / "results").glob("*.md"):
        name = f"results/{page.stem}.html"
        assert f'href="{name}"' in (site / "index.html").read_text(encoding="utf-8"), name
    ablation = (site / "results" / "ablation.html").read_text(encoding="utf-8")
    assert 'src="../images/ablation.png"' in ablation
    assert (site / "images" / "ablation.png").is_file()


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)\b[^>]*\bsrc="(https?:)?//', text)
        loaded += re.findall(
            r'<link\b[^>]*\brel="(?:stylesheet|preload)"[^>]*\bhref="(https?:)?//', text
        )
        assert not loaded, page.name


def test_search_finds_pages_that_are_opened_from_a_file(
    site: Path, browse: Callable[[str], str]
) -> None:
    found = browse(f"{(site / 'results' / 'critic.html').as_uri()}?q=Landlock")
    assert re.search(r"md-search-result__meta\">\s*\d+ matching document", found)


def test_broken_link_or_page_outside_the_menu_stops_the_build(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "docs" / "stray.md").write_text("# Stray\n[text](nowhere.md)\n")
    found = build(tmp_path, tmp_path / "site")
    assert found.returncode != 0
    assert "nowhere.md" in found.stderr
    assert 'not included in the "nav"' in found.stderr


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_dockerfiles_are_clean(file: Path) -> None:
    found = subprocess.run([HADOLINT, str(file)], capture_output=True, text=True, timeout=240)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_dockerfiles_name_existing_files_and_make_targets(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace("\\\n", " ")
    copied = [name for line in re.findall(r"^COPY (.*)$", text, re.M) for name in line.split()[:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    for target in re.findall(r"\bmake ([a-z][\w-]*)", re.sub(r"^RUN apt.*$", "", text, flags=re.M)):
        assert target in targets, target
