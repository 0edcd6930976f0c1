"""What the documentation's site needs beyond Markdown: the examples' pages, and paths in place of other links."""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# [text](path) and [text](path#anchor), no addresses and no pictures.
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add examples/NAME/README.md as the page examples/NAME.md."""
    for page in sorted(ROOT.glob("examples/*/README.md")):
        files.append(File.generated(config, f"examples/{page.parent.name}.md", abs_src_path=str(page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between pages lead to each other on the site as in the repository; what is no page becomes its path."""
    here = page.file.src_uri
    folder = here.removesuffix(".md") if here.startswith("examples/") else "docs"

    def on_site(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = normpath(join(folder, target))
        example = re.fullmatch(r"examples/([\w.]+)(?:/README\.md)?", path)
        if path.startswith("docs/"):
            name = path.removeprefix("docs/")
        elif example and (ROOT / "examples" / example[1] / "README.md").is_file():
            name = f"examples/{example[1]}.md"
        elif (ROOT / path).exists():
            return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"
        else:
            return link[0]
        return f"[{text}]({relpath(name, dirname(here) or '.')}{anchor})"

    return _LINK.sub(on_site, markdown)
