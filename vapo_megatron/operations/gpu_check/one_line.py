"""What is wrong with how the check was called."""


class UsageError(Exception):
    """Told in one line, exit code 2."""
