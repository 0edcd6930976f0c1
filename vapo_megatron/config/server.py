"""An external server, for evaluation: anything with OpenAI's API."""

from typing import Literal

from pydantic import Field, JsonValue, field_validator

from vapo_megatron.config.base import Section, key_from_environment


class ServerConfig(Section):
    """An OpenAI-compatible server: SGLang, vLLM, or a hosted model."""

    url: str = Field(pattern=r"^https?://", description="base address, such as http://host:30000/v1")
    model: str = Field(min_length=1, description="the name that the server knows the model by")
    api: Literal["chat", "completions"] = Field(
        "chat", description="chat: the server applies the chat template; completions: plain text (base models)"
    )
    api_key_variable: str | None = Field(None, description="environment variable that holds the key; none: no key")
    concurrency: int = Field(64, ge=1, description="requests on their way at once")
    request_timeout_s: float = Field(3600.0, gt=0, description="seconds for one response")
    retry_timeout_s: float = Field(
        900.0, ge=0, description="seconds for which a request is tried again: the server may start, or be too busy"
    )
    extra: dict[str, JsonValue] = Field(
        default_factory=dict, description="further fields of every request, such as min_p; null takes a field out"
    )

    @field_validator("url")
    @classmethod
    def _no_password(cls, value: str) -> str:
        if "@" in value.partition("//")[2].partition("/")[0]:
            raise ValueError("holds a user or password, which would stand in files: use api_key_variable")
        return value

    def api_key(self) -> str | None:
        """The key.

        Raises:
            BadInput: the variable is not set.
        """
        remedy = "or leave the key out for a server that wants none"
        return key_from_environment(self.api_key_variable, "server.api_key_variable", remedy)
