"""Writes docs/tour.ipynb, the tour as a notebook, from docs/tour.md: `python
docs/make_notebook.py`."""

import json
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
NOTEBOOK = HERE / "tour.ipynb"
_BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.M | re.S)


def notebook() -> str:
    """The page's text and code as cells of nbformat 4, in order; links lead to the repository's
    pages."""
    cells = []
    for number, part in enumerate(_BLOCK.split((HERE / "tour.md").read_text(encoding="utf-8"))):
        source = part.strip().splitlines(keepends=True)
        if number % 2:
            cells.append({"cell_type": "code", "execution_count": None, "outputs": []})
        elif source:
            cells.append({"cell_type": "markdown"})
        else:
            continue
        cells[-1] |= {"id": f"cell-{number}", "metadata": {}, "source": source}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(), encoding="utf-8")
