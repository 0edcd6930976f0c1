"""Messages to a checkpoint and its answers, through the prompts that it was trained with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vapo_megatron.config.chat import ChatConfig
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import BadInput
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GenerationRequest, GroupRequest

WEIGHT_VERSION = 0  # of an engine that reads a checkpoint
# Tokens that an engine writes before they are shown.
PIECE = 32
# An engine ends a response two tokens short of its context, and refuses a shorter one than five.
_KEPT_FREE = 2
_LEAST_RESPONSE = 5


@dataclass(frozen=True)
class Answer:
    """prompt and tokens: ids as the model read and wrote them. is_cut: it ended at the limit."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    text: str
    is_cut: bool


class Conversation:
    """One conversation with the engine of a dispatcher.

    Without a chat template each message is a whole prompt.
    """

    def __init__(
        self, settings: ChatConfig, tokenizer: TextTokenizer, engine: Dispatcher, context: int
    ) -> None:
        """context: most tokens of a prompt and its response."""
        self._settings = settings
        self._tokenizer = tokenizer
        self._engine = engine
        self._context = context
        self._asked = 0
        self._messages: list[dict[str, Any]] = []

    def start_again(self) -> None:
        """Forget the conversation."""
        self._messages = []

    def ask(self, message: str, on_text: Callable[[str], None] = lambda text: None) -> Answer:
        """The answer to a message; the first one of a conversation stands in the template of the
        run's problems, those after it as they are.

        on_text: called with each further piece of the answer.

        Raises:
            BadInput: conversation and answer do not fit the model's context.
            RunFailed, TryAgain: the engine failed.
        """
        messages, prompt = self._prompt(message)
        room = self._context - _KEPT_FREE - len(prompt)
        if room < _LEAST_RESPONSE:
            raise BadInput(
                f"the conversation has {len(prompt)} tokens and the context {self._context}: no "
                "answer fits, begin again with /new"
            )
        sample = self._write(prompt, min(room, self._settings.sampling.max_new_tokens), on_text)
        tokens = sample.response_ids.tolist()
        text = self._tokenizer.decode(tokens)
        self._messages = [*messages, {"role": "assistant", "content": text}]
        return Answer(prompt, tokens, text, sample.finish_reason == "length")

    def _prompt(self, message: str) -> tuple[list[dict[str, Any]], list[int]]:
        tokenizer = self._tokenizer
        if not self._settings.data.prompt.chat_template:
            return [], tokenizer.encode_prompt(message)
        if self._messages:
            messages = [*self._messages, {"role": "user", "content": message}]
        else:
            messages = tokenizer.messages(message)
        try:
            text = tokenizer.messages_text(messages)
        except ValueError as error:
            raise BadInput(
                f"{tokenizer.directory}: its chat template cannot take this message ({error}): "
                "begin again with /new"
            ) from None
        return messages, tokenizer.encode_response(text)

    def _write(self, prompt: list[int], most: int, on_text: Callable[[str], None]) -> Sample:
        """The engine's response, shown in pieces."""
        self._asked += 1
        request = GenerationRequest(
            [Prompt("chat", "", "", tuple(prompt), self._asked)],
            samples_per_prompt=1,
            sampling=self._settings.sampling,
            seed=self._settings.seed,
            weight_version=WEIGHT_VERSION,
            max_new_tokens=[most],
        )
        shown = ""

        async def in_pieces(group: GroupRequest) -> list[Sample]:
            nonlocal shown
            samples: Sequence[Sample] = ()
            while not samples or samples[0].finish_reason == "abort":
                piece = replace(group, window=PIECE, begun=samples)
                samples = await self._engine.generate(piece)
                text = self._tokenizer.decode(samples[0].response_ids.tolist())
                # A character cut over two pieces belongs to the later one
                whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
                on_text(whole[len(shown) :])
                shown = whole
            return list(samples)

        (sample,) = self._engine.collect(request, generate=in_pieces)
        assert isinstance(sample.response_ids, np.ndarray)
        return sample
