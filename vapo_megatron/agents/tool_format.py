"""Whether the tool parser reads the calls that the chat template writes."""

from typing import Any

from vapo_megatron.agents.recording import Message, as_templates_read
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.server.tool_parsers import Calls, parsed_by_each
from vapo_megatron.errors import BadInput
from vapo_megatron.files import parse_json

_NAME = "look_up"
_ARGUMENTS = {"word": "heron"}
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "Looks a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "description": "The word."}},
                "required": ["word"],
            },
        },
    }
]
_QUESTION: Message = {"role": "user", "content": "What is a heron?"}
# Mistral's templates raise on ids that are not of nine letters and digits
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": _NAME, "arguments": _ARGUMENTS},
}
_ANSWER: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_CHARACTERS_SHOWN = 200


def check_tool_parser(config: RolloutConfig, tokenizer: TextTokenizer) -> str | None:
    """A caution where nothing reads the calls that the chat template writes, or it writes none.
    None where all is well, and where SGLang is not there to be asked.

    Raises:
        BadInput: rollout.episode.tool_parser does not read them and another parser does: agents
            would get every call as text.
        RunFailed: SGLang did not answer within rollout.start_timeout_s.
    """
    parser = config.episode.tool_parser
    if config.agent is None or parser is None:
        return None
    key = f"rollout.episode.tool_parser={parser}"
    template = f"the chat template of {tokenizer.directory}"
    try:
        written = _written(tokenizer)
    except ValueError as error:
        return (
            f"{key} cannot be tried: {template} raises on a message with a tool call ({error}); "
            "look up the model's format, and mend the template if it should repeat calls"
        )
    shown = repr(written[:_CHARACTERS_SHOWN])
    if _NAME not in written and _ARGUMENTS["word"] not in written:
        return (
            f"{key} cannot be tried: {template} leaves tool calls out of an assistant's message "
            f"(it writes {shown}); look up the model's format, and mend the template if it should "
            "repeat calls"
        )
    parsed = parsed_by_each(written, _TOOLS, tokenizer.directory, config.start_timeout_s)
    if parsed is None:
        return None
    able = [name for name, calls in parsed.items() if _is_read(calls)]
    if parser in able:
        return None
    wrong = f"{key} does not read the tool call that {template} writes ({shown})"
    if able:
        raise BadInput(
            f"{wrong}, so the agent would get it as text: set one that does, "
            f"{' or '.join(filter(None, (', '.join(able[:-1]), able[-1])))}"
        )
    return (
        f"{wrong}, nor does any other parser of SGLang: if the policy writes calls so, the agent "
        "gets them as text; use a template in a format that SGLang reads, or leave tool_parser out "
        "and have the agent read the text"
    )


def _written(tokenizer: TextTokenizer) -> str:
    """The call as the template writes it. Raises ValueError where it cannot."""
    try:
        return tokenizer.answer_text([_QUESTION], _ANSWER, _TOOLS)
    except ValueError:
        answer = as_templates_read(_ANSWER, as_json=True)
        return tokenizer.answer_text([_QUESTION], answer, _TOOLS)


def _is_read(calls: Calls) -> bool:
    try:
        ((name, arguments),) = calls
        return name == _NAME and parse_json(arguments) == _ARGUMENTS
    except ValueError:
        return False
