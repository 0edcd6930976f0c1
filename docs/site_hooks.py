"""What the documentation's site needs beyond Markdown: links that leave docs/ become the paths they name."""

import re
from typing import Any

# [text](../path): on the site there is nothing behind it; in the repository, where pages are read as well, there is.
_OUTSIDE = re.compile(r"(?<!!)\[([^\]]*)\]\(\.\./([^)#\s]*)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to files outside docs/ by their text and path."""

    def plain(found: re.Match[str]) -> str:
        text, path = found[1], found[2]
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    return _OUTSIDE.sub(plain, markdown)
