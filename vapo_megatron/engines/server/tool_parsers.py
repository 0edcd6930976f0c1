"""Asks SGLang's tool-call parsers which calls they read in a text, without a server."""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vapo_megatron.errors import RunFailed

SLOW_IMPORT = (
    "`python -c 'import sglang.srt.server_args'` shows where it waits (a slow file system, most "
    "often); raise the limit where it is slow but well"
)

Calls = list[tuple[str, str]]  # name and arguments, as JSON


def parsed_by_each(
    text: str, tools: Sequence[dict[str, Any]], tokenizer: Path, wait_s: float
) -> dict[str, Calls] | None:
    """The tool calls that each of SGLang's parsers reads in a response, by the parser's name; None
    where SGLang is not installed or cannot be imported.

    It takes seconds: SGLang is imported in another process.

    Raises:
        RunFailed: that process has not answered within wait_s seconds.
    """
    if find_spec("sglang") is None:
        return None
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "vapo_megatron.engines.inside.tool_calls"],
            input=json.dumps({"text": text, "tools": list(tools), "tokenizer": str(tokenizer)}),
            capture_output=True,
            text=True,
            timeout=wait_s,
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(
            "rollout.episode.tool_parser: SGLang was not imported, or did not read a call, within "
            f"rollout.start_timeout_s={wait_s:g} s: {SLOW_IMPORT}"
        ) from None
    if ended.returncode or not ended.stdout.strip():
        return None
    calls: dict[str, Calls] = json.loads(ended.stdout.splitlines()[-1])
    return {name: [(call, arguments) for call, arguments in read] for name, read in calls.items()}
