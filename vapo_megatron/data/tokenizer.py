"""Converts text to tokens and back, with the tokenizer of a Hugging Face directory."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vapo_megatron.config.data import PromptTemplate
from vapo_megatron.errors import BadInput, reason_of
from vapo_megatron.files import parse_json

# One of them holds the vocabulary. Where none does, transformers makes an empty tokenizer of the
# model's kind.
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

_TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")

# A problem that no template has by itself.
_PROBE = "problem 7391"


class TextTokenizer:
    """Encodes problems as prompts and responses as targets, and decodes responses.

    Raises BadInput for a directory that is missing or holds no usable tokenizer, a tokenizer
    without an end token, and one without a chat template where the prompt template asks for it. No
    code from the directory is run.
    """

    def __init__(self, directory: Path, template: PromptTemplate) -> None:
        self._tokenizer = load_tokenizer(directory)
        self.directory = directory
        self._template = template
        if template.chat_template and not self._tokenizer.chat_template:
            raise BadInput(
                f"{directory}: its tokenizer has no chat template and "
                "data.prompt.chat_template=true; set data.prompt.chat_template=false, or use a "
                "tokenizer that has one"
            )
        if _PROBE not in self.prompt_text(_PROBE):
            raise BadInput(
                f"{directory}: its chat template leaves the problem out of the prompt: fix "
                "chat_template.jinja (or the one in tokenizer_config.json), or set "
                "data.prompt.chat_template=false"
            )
        self.eos_id: int = self._tokenizer.eos_token_id
        self._named_ends = _ends_of_generation(directory)
        self.eos_token_ids = tuple(sorted({self.eos_id, *self._named_ends}))
        pad = self._tokenizer.pad_token_id
        self.pad_id: int = pad if pad is not None else self.eos_id
        self.size = len(self._tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, and one between two tokens: a text of n tokens is not
        longer than n times this."""
        return 1 + max(map(len, self._tokenizer.get_vocab()))

    def check_vocabulary(self, rows: int) -> None:
        """Raise BadInput if a token has no row in the model's embedding."""
        if self.size > rows:
            raise BadInput(
                f"{self.directory}: its tokenizer has {self.size} tokens and the model of "
                f"config.json a vocabulary of {rows}: the two do not belong together, fetch the "
                "model's own tokenizer"
            )
        if strange := [end for end in self.eos_token_ids if not 0 <= end < rows]:
            raise BadInput(
                f"{self.directory}/generation_config.json: eos_token_id {strange[0]} is outside "
                f"the model's vocabulary of {rows}: no response could end with it, give the "
                "model's own"
            )

    def caution(self) -> str | None:
        """A warning about template arguments without effect, or unusual but valid end tokens; None
        if there is none."""
        if kwargs := self._template.chat_template_kwargs:
            plain = self._template.model_copy(update={"chat_template_kwargs": {}})
            if TextTokenizer(self.directory, plain).prompt_text(_PROBE) == self.prompt_text(_PROBE):
                return (
                    f"{self.directory}: data.prompt.chat_template_kwargs={kwargs} changes nothing "
                    "in a prompt: its chat template does not read them"
                )
        if not self._named_ends or self.eos_id in self._named_ends:
            return None
        return (
            f"{self.directory}: generation_config.json ends responses with token "
            f"{', '.join(map(str, self._named_ends))} and the tokenizer with {self.eos_id}: either "
            f"ends one here, and demonstrations end with {self.eos_id}"
        )

    def stop_token_ids(self, stop: Sequence[str]) -> tuple[int, ...]:
        """The tokens that end a response: the end tokens, and the tokens in sampling.stop.

        Raises:
            BadInput: one of `stop` is not one token; engines read and write token ids alone.
        """
        ids = set(self.eos_token_ids)
        for text in stop:
            tokens = self.encode_response(text)
            if len(tokens) != 1:
                raise BadInput(
                    f"sampling.stop: {text!r} is {len(tokens)} tokens for the tokenizer of "
                    f"{self.directory}, expected one: engines end a response at a token"
                )
            ids.add(tokens[0])
        return tuple(sorted(ids))

    def check_same(self, other: Path, key: str) -> None:
        """Raises BadInput, with the config's key, where the tokenizer of another model's directory
        gives tokens other ids; one without a tokenizer is taken to be made for this one."""
        if not any((other / name).is_file() for name in _VOCABULARY_FILES):
            return
        mine = self._tokenizer.get_vocab()
        theirs = load_tokenizer(other).get_vocab()
        if mine != theirs:
            differ = sum(theirs.get(token) != number for token, number in mine.items())
            raise BadInput(
                f"{key}={other}: its tokenizer has {len(theirs)} tokens and gives {differ} of the "
                f"{len(mine)} of {self.directory} another id, or none: give a model with the "
                "policy's tokenizer"
            )

    def prompt_text(self, problem: str, before: Sequence[Mapping[str, str]] = ()) -> str:
        """The prompt that the model reads, as text; with a chat template it ends where the
        assistant begins.

        Raises:
            ValueError: there are messages before the problem, and no chat template for them.
        """
        messages = self.messages(problem, before)
        if not self._template.chat_template and before:
            raise ValueError(
                "has messages before the problem, which need data.prompt.chat_template=true"
            )
        if not self._template.chat_template:
            return str(messages[-1]["content"])
        try:
            return self.messages_text(messages)
        except ValueError as error:
            raise BadInput(
                f"{self.directory}: its chat template cannot be applied ({error}); mend "
                "chat_template.jinja (or the one in tokenizer_config.json), or set "
                "data.prompt.chat_template=false"
            ) from None

    def messages(
        self, problem: str, before: Sequence[Mapping[str, str]] = ()
    ) -> list[dict[str, Any]]:
        """The conversation that puts a problem, for a chat template. before: a row's own messages
        before it, whose system message takes the place of data.prompt.system_prompt."""
        return self._template.messages(problem, before)

    def messages_text(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> str:
        """A conversation as the model reads it, up to where the assistant begins.

        Raises:
            ValueError: the chat template cannot be applied, or ignores the tools.
        """
        if tools and not self.reads_tools:
            raise ValueError(
                "it ignores tools: use a model whose template shows them, or put them into the "
                "messages"
            )
        return self._render(messages, tools)

    def answer_text(
        self, messages: list[dict[str, Any]], answer: dict[str, Any], tools: list[dict[str, Any]]
    ) -> str:
        """What the model writes for the assistant's message `answer` after these, special tokens
        included, up to its end token.

        Raises:
            ValueError: the chat template cannot be applied.
        """
        text = self._render([*messages, answer], tools, goes_on=False)
        prompt = self._render(messages, tools)
        if not text.startswith(prompt):
            # It begins differently, as where reasoning of earlier turns is left out
            before = self._render(messages, tools, goes_on=False)
            prompt = commonprefix([text, before])  # noqa: RUF071  (of characters)
        ids = self.encode_response(text.removeprefix(prompt))
        ends = [place for place, token in enumerate(ids) if token in self.eos_token_ids]
        return self.decode_all(ids[: min(ends, default=len(ids))])

    @cached_property
    def reads_tools(self) -> bool:
        """Whether the chat template shows the model the tools of a request."""
        function = {
            "name": "probe",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        }
        messages = self.messages(_PROBE)
        try:
            return self._render(
                messages, [{"type": "function", "function": function}]
            ) != self._render(messages, None)
        except ValueError:
            return False

    @property
    def chat_template(self) -> str:
        """The sources of the chat templates, without tools and with them."""
        given: tuple[list[dict[str, Any]] | None, ...] = (None, [{}])
        sources = [str(self._tokenizer.get_chat_template(tools=tools)) for tools in given]
        return "".join(dict.fromkeys(sources))

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        goes_on: bool = True,
    ) -> str:
        """goes_on: up to where the assistant begins; or only the messages."""
        more: dict[str, Any] = {
            "tools": tools or None,
            "tokenize": False,
            "add_generation_prompt": goes_on,
        } | self._template.chat_template_kwargs
        try:
            text = self._tokenizer.apply_chat_template(messages, **more)
        except Exception as error:  # a template is a program: it may be wrong, or raise anything
            raise ValueError(reason_of(error)) from None
        assert isinstance(text, str)
        return text

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        assert isinstance(text, str)
        return text

    def encode_prompt(self, problem: str, before: Sequence[Mapping[str, str]] = ()) -> list[int]:
        """Token ids of the prompt. A plain prompt gets what the tokenizer puts before texts (a BOS,
        for Llama)."""
        text = self.prompt_text(problem, before)
        return self._tokenizer.encode(text, add_special_tokens=not self._template.chat_template)

    def encode_prompts(self, texts: list[str]) -> list[tuple[int, ...]]:
        """encode_prompt() of problems whose prompt_text() there is already, all at once."""
        special = not self._template.chat_template
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if fast is None:
            return [
                tuple(self._tokenizer.encode(text, add_special_tokens=special)) for text in texts
            ]
        # A tokenizer.json may ask for both; the library's own call, which would compute offsets as
        # well and takes twice as long, switches them off too.
        fast.no_truncation()
        fast.no_padding()
        encoded = fast.encode_batch_fast(texts, add_special_tokens=special)
        return [tuple(one.ids) for one in encoded]

    @property
    def renders_alike(self) -> bool:
        """Whether a prompt is the same on every day: chat templates can read the date."""
        if not self._template.chat_template:
            return True
        return "strftime_now" not in str(self._tokenizer.chat_template)

    def digest(self) -> str:
        """Of all files of the tokenizer's directory that it may be made of, and of the template."""
        digest = hashlib.sha256(self._template.model_dump_json().encode())
        for path in sorted(self.directory.iterdir()):
            if path.is_file() and path.suffix in _TOKENIZER_SUFFIXES:
                digest.update(f"\n{path.name}\n".encode())
                digest.update(path.read_bytes())
        return digest.hexdigest()

    def encode_privileged(self, text: str) -> tuple[int, ...]:
        """Token ids of what the critic alone reads, and of an empty line that parts it from the
        prompt; none of ''."""
        return tuple(self._tokenizer.encode(f"{text}\n\n")) if text else ()

    def encode_response(self, response: str) -> list[int]:
        """Token ids of a response, without the end token (eos_id)."""
        return self._tokenizer.encode(response, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens. A fast tokenizer lets other threads run
        meanwhile: its decode() holds the GIL, so batch decoding, which releases it, is used."""
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if fast is None or self._tokenizer.clean_up_tokenization_spaces:
            text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        else:
            (text,) = fast.decode_batch([list(token_ids)], skip_special_tokens=True)
        assert isinstance(text, str)
        return text


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in directory, from local files alone and without running code from them.

    Raises BadInput if there is none, or one without an end token.
    """
    if not directory.is_dir():
        raise BadInput(
            f"{directory}: no such directory; give a Hugging Face model directory with its "
            "tokenizer"
        )
    if not any((directory / name).is_file() for name in _VOCABULARY_FILES):
        raise BadInput(
            f"{directory}: holds no tokenizer ({', '.join(_VOCABULARY_FILES)}); put the model's "
            "there"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (
        Exception
    ) as error:  # transformers raises many kinds on malformed files, none of them documented
        raise BadInput(
            f"{directory}: its tokenizer cannot be loaded ({reason_of(error)}); "
            "put a tokenizer.json and a tokenizer_config.json there"
        ) from error
    if tokenizer.eos_token_id is None:
        raise BadInput(
            f"{directory}: its tokenizer has no end token; set eos_token in its "
            "tokenizer_config.json"
        )
    return tokenizer


def _ends_of_generation(directory: Path) -> list[int]:
    """The end tokens of generation_config.json; empty if it names none.

    Raises BadInput for a file that is not of the expected form.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return []
    try:
        entry = parse_json(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        raise BadInput(f"{path}: not a JSON object; fix or remove it") from None
    entries = entry if isinstance(entry, list) else [] if entry is None else [entry]
    if not all(isinstance(item, int) for item in entries):
        raise BadInput(f"{path}: eos_token_id {entry!r}; expected a token id or a list of them")
    return entries
