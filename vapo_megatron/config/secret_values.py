"""Secrets that a config must not hold: it is saved in run directories, which others may read, and
sent to trackers."""

import re
from typing import Any

from vapo_megatron.errors import BadInput

# Of a URL: what stands before a user, password or token, and that.
_IN_URL = re.compile(r"(://)[^/\s@]+@")
_IN_QUERY = re.compile(
    r"([?&][\w.-]*(?:token|key|secret|password|signature|sig|credential)=)[^&\s]+", re.IGNORECASE
)
# Keys of Hugging Face, OpenAI and kin, AWS, GitHub, GitLab, Slack, Google; and what stands behind
# "Bearer".
_KNOWN = re.compile(
    r"\b(hf_|sk-|AKIA|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AIza)[A-Za-z0-9_-]{16,}"
    r"|(\bBearer )[A-Za-z0-9._~+/-]{8,}"
)
_NAME = re.compile(
    r"(?:^|[_-])(?:(?:api|access)[_-]?key|secret|password|passwd|credentials?|authorization|"
    r"(?:auth|access|api|hf)[_-]?token)$",
    re.IGNORECASE,
)


def refuse_secrets(values: Any, source: str, key: str = "") -> None:
    """Refuse a config that holds a secret.

    Args:
        values: the config's values, nested.
        source: where they come from, for the message.
        key: their dotted key.

    Raises:
        BadInput: a text holds a password or a key, or stands under a key that is named as one; the
            message does not show it.
    """
    if isinstance(values, dict):
        for name, value in values.items():
            refuse_secrets(value, source, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list):
        for number, value in enumerate(values):
            refuse_secrets(value, source, f"{key}.{number}")
    elif isinstance(values, str) and (hidden := _hidden(key, values)) != values:
        raise BadInput(
            f"{source}: {key}={hidden[:200]} holds a password or key, which would be written to "
            "files: take it out, and give it by an environment variable (api_key_variable; "
            "JUDGE_API_KEY; HF_TOKEN; for MLflow MLFLOW_TRACKING_USERNAME, "
            "MLFLOW_TRACKING_PASSWORD or MLFLOW_TRACKING_TOKEN)"
        )


def _hidden(key: str, text: str) -> str:
    """The text with asterisks in place of its secrets."""
    if text and _NAME.search(key.rpartition(".")[2]):
        return "***"
    text = _IN_URL.sub(r"\1***@", text)
    text = _IN_QUERY.sub(r"\1***", text)
    return _KNOWN.sub(lambda match: f"{match[1] or match[2]}***", text)
