"""Asks SGLang whether it accepts a server's arguments, without starting a server.

    python -m vapo_megatron.engines.inside.check_arguments ARGS

Ends with 0 where SGLang takes them, else with another code and the reason as the last line of standard error.
"""

import argparse
import sys
from collections.abc import Sequence

from vapo_megatron.engines.inside import cpu_shim


def other_name(parser: argparse.ArgumentParser, given: Sequence[str]) -> str | None:
    """What is to be written instead of the first argument that is another name of one, or the beginning of a name.

    argparse takes both, and under neither would it be seen that the trainer sets an argument itself.
    """
    first: dict[str, str] = {}
    for action in parser._actions:
        switch = isinstance(action, argparse.BooleanOptionalAction)
        first |= {flag: flag if switch else action.option_strings[0] for flag in action.option_strings}
    for flag in given:
        meant = {first[flag]} if flag in first else {name for full, name in first.items() if full.startswith(flag)}
        if flag.startswith("--") and meant and flag not in meant:
            name, *others = (option.removeprefix("--").replace("-", "_") for option in (flag, *sorted(meant)))
            return f"{name}: write {' or '.join(others)}"
    return None


if __name__ == "__main__":
    cpu_shim.install()
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    knows = argparse.ArgumentParser()
    ServerArgs.add_cli_args(knows)
    if (told := other_name(knows, sys.argv[1:])) is not None:
        sys.exit(told)
    prepare_server_args(sys.argv[1:])
