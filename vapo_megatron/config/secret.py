"""Keys that configs name and never hold."""

import os

from vapo_megatron.errors import BadInput


def key_from_environment(variable: str | None, name: str, remedy: str) -> str | None:
    """The key in an environment variable; None where no variable is named.

    Args:
        variable: its name, the value of the config key `name`.
        name: of the config key, for the message.
        remedy: what to do where it is not set, after "export it, ".

    Raises:
        BadInput: the variable is not set, or empty.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise BadInput(f"{name}={variable}: the environment has no such variable: export it, {remedy}")
    return key
