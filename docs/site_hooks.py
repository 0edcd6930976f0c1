"""What the site needs beyond Markdown: pages outside docs/, and links that work on the site as in
the repository."""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# [text](path), [text](path#anchor) and ![text](path), no addresses.
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add examples/NAME/README.md as the page examples/NAME.md, and results/NAME.md under its own
    path."""
    pages = {f"examples/{path.parent.name}.md": path for path in ROOT.glob("examples/*/README.md")}
    pages |= {f"results/{path.name}": path for path in ROOT.glob("results/*.md")}
    for name, path in sorted(pages.items()):
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links between pages for the site; a link to a file that is no page becomes its
    path."""
    here = page.file.src_uri
    if here.startswith("examples/"):
        folder = here.removesuffix(".md")
    elif here.startswith("results/"):
        folder = "results"
    else:
        folder = "docs"

    def on_site(link: re.Match[str]) -> str:
        picture, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        path = normpath(join(folder, target))
        example = re.fullmatch(r"examples/([\w.]+)(?:/README\.md)?", path)
        if path.startswith("docs/"):
            name = path.removeprefix("docs/")
        elif re.fullmatch(r"results/\w+\.md", path):
            name = path
        elif example and (ROOT / "examples" / example[1] / "README.md").is_file():
            name = f"examples/{example[1]}.md"
        elif (ROOT / path).exists():
            return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"
        else:
            return link[0]
        return f"{picture}[{text}]({relpath(name, dirname(here) or '.')}{anchor})"

    return _LINK.sub(on_site, markdown)
