"""Training and evaluation problems, and their prompts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)
from typing_extensions import TypedDict

from vapo_megatron.config.base import Section, key_from_environment
from vapo_megatron.config.explain import explain
from vapo_megatron.config.reward import RewardConfig

Weight = Annotated[float, Field(gt=0, strict=True)]


class FieldNames(Section):
    """Names of the fields in a file's rows."""

    id: str = Field("id", description="row id; optional: file name and line replace it")
    problem: str = Field("problem", description="text given to the model")
    answer: str = Field("answer", description="reference answer for the verifier: text or number")
    extra: tuple[str, ...] = Field(
        (),
        description="row fields passed to reward.function as `extra`, such as data_source or "
        "extra_info",
    )
    verifier: str | None = Field(
        None,
        description="row field that overrides reward.verifier, in training and evaluation; "
        "optional in a row",
    )


def check_fields(names: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns the names. Raises ValueError for keys that FieldNames does not have."""
    try:
        FieldNames.model_validate(names)
    except ValidationError as error:
        raise ValueError(explain(error, FieldNames, names, place)) from None
    return names


class TrainFile(TypedDict, total=False):
    """Settings of one file of data.train: its weight (1), names of fields, and keys of section
    reward."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    weight: Weight
    fields: dict[str, JsonValue]
    reward: dict[str, JsonValue]


# Arguments of apply_chat_template that the program gives itself.
_OURS_IN_TEMPLATES = {"tools", "tokenize", "add_generation_prompt", "messages", "conversation"}


class PromptTemplate(Section):
    """Turns a problem into the prompt."""

    chat_template: bool = Field(
        True, description="apply the tokenizer's chat template; false: plain text (base models)"
    )
    system_prompt: str | None = Field(None, description="system message; needs chat_template")
    user_template: str = Field(
        "{problem}", description="text around {problem}; other braces are not special"
    )
    chat_template_kwargs: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="arguments of the chat template, such as {enable_thinking: false}",
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_the_templates(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := sorted(value.keys() & _OURS_IN_TEMPLATES):
            raise ValueError(f"{taken[0]} is given by the run: leave it out")
        return value

    def messages(self, problem: str, before: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        """The conversation that puts a problem after a row's own messages, whose system message
        takes the place of system_prompt."""
        messages = [dict(message) for message in before]
        messages.append(
            {"role": "user", "content": self.user_template.replace("{problem}", problem)}
        )
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    @field_validator("user_template")
    @classmethod
    def _holds_problem(cls, value: str) -> str:
        if value.count("{problem}") != 1:
            raise ValueError(
                f"has {{problem}} {value.count('{problem}')} times: write it exactly once"
            )
        return value

    @model_validator(mode="after")
    def _system_needs_chat(self) -> "PromptTemplate":
        if self.system_prompt is not None and not self.chat_template:
            raise ValueError(
                "system_prompt needs chat_template=true; put its text into user_template instead"
            )
        if self.chat_template_kwargs and not self.chat_template:
            raise ValueError("chat_template_kwargs needs chat_template=true: leave it out")
        return self


class EvalSet(Section):
    """A set of problems for evaluation only."""

    name: str = Field(
        max_length=100,
        pattern=r"^[A-Za-z0-9_.-]+$",
        description="part of metric names: evaluation/<name>_avg@<samples>",
    )
    path: Path = Field(description="file of problems, or hub:OWNER/NAME@REVISION:PART")
    samples: int = Field(8, ge=1, description="responses a problem (the k of avg@k)")
    limit: int | None = Field(None, ge=1, description="evaluate only the first rows")
    fields: Annotated[
        dict[str, JsonValue], AfterValidator(lambda names: check_fields(names, "as data.fields"))
    ] = Field(
        default_factory=dict,
        description="overrides of data.fields for this set",
    )

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics that an evaluation of this set reports."""
        kinds = ("avg", "pass", "maj")
        counted = [f"evaluation/{self.name}_{kind}@{self.samples}" for kind in kinds]
        return [
            *counted,
            *(f"evaluation/{self.name}_{kind}" for kind in ("response_length", "truncated")),
        ]

    @field_validator("name")
    @classmethod
    def _is_not_reserved(cls, value: str) -> str:
        if value.endswith(("_problems", ".partial")):
            raise ValueError(f"name={value}: files of evaluations end like that, choose another")
        return value


class ProblemsConfig(Section):
    """Problems and their prompts; files are .jsonl, .jsonl.gz or .parquet with a problem and an
    answer a row."""

    eval: tuple[EvalSet, ...] = Field((), description="evaluation sets")
    fields: FieldNames = FieldNames()
    prompt: PromptTemplate = PromptTemplate()
    max_prompt_tokens: int = Field(
        2048, ge=1, description="maximum prompt length in tokens; a longer prompt is an error"
    )

    @field_validator("eval")
    @classmethod
    def _names_differ(cls, value: tuple[EvalSet, ...]) -> tuple[EvalSet, ...]:
        names = [entry.name for entry in value]
        if len(set(names)) < len(names):
            raise ValueError(
                f"names {', '.join(names)} are not all different: give each set its own"
            )
        return value

    def check_rewards(self, reward: RewardConfig) -> None:
        """Raises ValueError for a judge that no row uses."""
        if reward.judge is not None and reward.verifier != "judge" and self.fields.verifier is None:
            raise ValueError(
                f"reward.judge with reward.verifier={reward.verifier}: nothing uses it, set "
                "reward.verifier=judge, or data.fields.verifier to the field that names the "
                "verifier of a row"
            )


class DataConfig(ProblemsConfig):
    """The data of a training run; files are .jsonl, .jsonl.gz or .parquet with a problem and an
    answer a row."""

    train: Annotated[dict[Path, TrainFile], Field(min_length=1)] | Path = Field(
        description="problems to train on: a file, hub:OWNER/NAME@REVISION:PART, or several "
        "files with weights, {FILE: WEIGHT, ...}, which say how often problems of each are "
        "drawn ([FILE, ...]: equally often). Instead of a weight, {weight: W, fields: {...}, "
        "reward: {...}} overrides data.fields and reward for that file"
    )
    drop_long_prompts: bool = Field(
        False, description="skip rows with longer prompts instead of failing"
    )
    shuffle: bool = Field(
        True, description="reshuffle every epoch; false: keep the order of the file"
    )

    @property
    def train_files(self) -> list[Path]:
        """Training files."""
        if isinstance(self.train, dict):
            return list(self.train)
        return [self.train]

    @property
    def weights(self) -> dict[str, float]:
        """Weights of several files, by path; empty for a single file."""
        return {str(path): entry.get("weight", 1.0) for path, entry in self._entries.items()}

    @field_validator("train", mode="before")
    @classmethod
    def _weights_alone(cls, value: Any) -> Any:
        if isinstance(value, list | tuple) and all(isinstance(path, str | Path) for path in value):
            value = dict.fromkeys(value, 1)
        if not isinstance(value, dict):
            return value
        places: dict[Path, Any] = {}
        for path in value:
            if not isinstance(path, str | Path):
                raise ValueError(f"{path} is no text; expected the path of a file: quote it")
            if (same := places.setdefault(Path(path).resolve(), path)) is not path:
                raise ValueError(f"{same} and {path} are one file: name it once")
        entries = {
            path: entry if isinstance(entry, dict) else {"weight": entry}
            for path, entry in value.items()
        }
        for path, entry in entries.items():
            if strange := entry.keys() - TrainFile.__annotations__:
                raise ValueError(
                    f"{path}: unknown key {min(strange)}; known keys: "
                    f"{', '.join(TrainFile.__annotations__)}"
                )
        return entries

    @property
    def _entries(self) -> dict[Path, TrainFile]:
        if isinstance(self.train, dict):
            return self.train
        return {}

    def fields_of(self, path: Path) -> FieldNames:
        """Field names of a training file's rows."""
        return FieldNames.model_validate(
            self.fields.model_dump() | self._entries.get(path, {}).get("fields", {})
        )

    def reward_of(self, path: Path) -> dict[str, JsonValue]:
        """Keys of section reward that a training file overrides."""
        return self._entries.get(path, {}).get("reward", {})

    def check_rewards(self, reward: RewardConfig) -> None:
        """Raises ValueError for a judge that no row uses, and for invalid `fields` or `reward` keys
        of a file."""
        if "judge" not in (self.reward_of(path).get("verifier") for path in self._entries):
            super().check_rewards(reward)
        self.rewards(reward)
        for path, entry in self._entries.items():
            check_fields(entry.get("fields", {}), f"data.train: {path}: fields")

    def rewards(self, reward: RewardConfig) -> list[RewardConfig]:
        """Returns section reward, then the merged section of each training file with overrides.

        Raises ValueError for invalid keys.
        """
        sections = [reward]
        for path in self._entries:
            keys = self.reward_of(path)
            if not keys:
                continue
            try:
                sections.append(reward.changed(json.dumps(keys)))
            except ValidationError as error:
                values = reward.model_dump() | keys
                raise ValueError(
                    explain(error, RewardConfig, values, f"data.train: {path}: reward")
                ) from None
        return sections


class EvaluationDataConfig(ProblemsConfig):
    """The data of an evaluation; files are .jsonl, .jsonl.gz or .parquet with a problem and an
    answer a row."""

    eval: tuple[EvalSet, ...] = Field(min_length=1, description="evaluation sets")


class ServerConfig(Section):
    """An OpenAI-compatible server: SGLang, vLLM, or a hosted model."""

    url: str = Field(
        pattern=r"^https?://", description="base address, such as http://host:30000/v1"
    )
    model: str = Field(min_length=1, description="name of the model on the server")
    api: Literal["chat", "completions"] = Field(
        "chat",
        description="chat: the server applies the chat template; completions: plain text (base "
        "models)",
    )
    api_key_variable: str | None = Field(
        None, description="environment variable that holds the API key; none: no key"
    )
    concurrency: int = Field(64, ge=1, description="concurrent requests")
    request_timeout_s: float = Field(
        3600.0, gt=0, description="time limit of one response, in seconds"
    )
    retry_timeout_s: float = Field(
        900.0,
        ge=0,
        description="seconds for which a request is retried while the server starts or is busy",
    )
    extra: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="further fields of every request, such as min_p; null removes a field",
    )

    @field_validator("url")
    @classmethod
    def _no_password(cls, value: str) -> str:
        if "@" in value.partition("//")[2].partition("/")[0]:
            raise ValueError(
                "has a user or password, which would be written to files: use api_key_variable"
            )
        return value

    def api_key(self) -> str | None:
        """Returns the API key. Raises BadInput if the variable is not set."""
        remedy = "or leave the key out for a server that needs none"
        return key_from_environment(self.api_key_variable, "server.api_key_variable", remedy)
