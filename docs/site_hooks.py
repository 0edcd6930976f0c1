"""What the documentation's site needs beyond Markdown: links that leave docs/ become the paths they name."""

import re
from typing import Any

# [text](../path): on the site there is nothing behind it; in the repository, where pages are read as well, there is.
_OUTSIDE = re.compile(r"(?<!!)\[([^\]]*)\]\(\.\./([^)#\s]*)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to files outside docs/ by their text and path."""
    return _OUTSIDE.sub(lambda found: f"{found[1]} (`{found[2]}`)" if found[1].strip("`") != found[2] else f"`{found[2]}`", markdown)
