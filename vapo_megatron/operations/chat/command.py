"""`vapo-megatron chat`: a conversation with a checkpoint in the terminal."""

import json
import shutil
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rich.console import Console

from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.engine_limits import engine_devices
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.errors import BadInput
from vapo_megatron.evaluation.command import engines_of
from vapo_megatron.megatron.platform import Platform, current_platform
from vapo_megatron.models.registry import read_spec
from vapo_megatron.monitoring.console import RunConsole
from vapo_megatron.monitoring.samples import token_texts
from vapo_megatron.operations.chat.conversation import Answer, Conversation
from vapo_megatron.operations.chat.subject import Subject
from vapo_megatron.operations.chat.values import ValueReader, coloured, key_of_colours, scale_of
from vapo_megatron.weights.load import check_weights

_SHOWN = "\N{REPLACEMENT CHARACTER}"  # in place of a control character
HELP = "/new begins again, /quit or Ctrl-D ends, Ctrl-C stops an answer"


def chat(subject: Subject, once: str | None, plain: bool, as_json: bool) -> None:
    """Talk to a checkpoint until the user ends it.

    Args:
        once: answer this message alone, with nothing else on standard output.
        plain: leave the critic out.
        as_json: with once: an object with the text, and tokens with their values.

    Raises:
        BadInput: the model cannot be used; no engine was started.
        RunFailed, TryAgain: the engine did not start, or failed.
    """
    platform = current_platform()
    settings = subject.settings
    directory = Path(settings.model.path)
    spec = read_spec(directory)
    check_weights(directory, spec, "lm")
    tokenizer = TextTokenizer(directory, settings.data.prompt)
    tokenizer.check_vocabulary(spec.vocab_size)
    stop_tokens = tokenizer.stop_token_ids(settings.sampling.stop)
    (device, *_) = engine_devices(settings.rollout, platform)
    EngineServer(
        directory, settings.rollout, settings.model.dtype, Path("chat.log"), device
    ).check_arguments()
    context = settings.rollout.context_length or spec.max_position_embeddings
    context = min(context, settings.rollout.max_total_tokens or context)
    console = RunConsole(sys.stderr)
    # Answers alone are on standard output
    console.header(f"vapo-megatron chat: {directory}", _facts(subject))
    with ExitStack() as stack:
        is_coloured = as_json or sys.stdout.isatty()
        critic = None
        if is_coloured and not plain:
            critic = _critic(subject, platform, console)
        logs = stack.enter_context(_log_folder())
        started = engines_of(settings.model, settings.rollout, [device], stop_tokens, logs, console)
        engine = stack.enter_context(started)
        screen = Screen(subject, tokenizer, critic)
        conversation = Conversation(settings, tokenizer, engine, context)
        if once is None:
            _talk(conversation, screen, console)
            return
        answer = conversation.ask(once)
        if as_json:
            print(json.dumps(screen.as_json(answer)))
        else:
            screen.show(answer)


class Screen:
    """Shows answers on standard output: in colours where there is a critic and a terminal."""

    def __init__(
        self, subject: Subject, tokenizer: TextTokenizer, critic: ValueReader | None
    ) -> None:
        self._subject = subject
        self._tokenizer = tokenizer
        self._critic = critic
        self._console = Console(highlight=False)

    @property
    def shows_pieces(self) -> bool:
        """Whether an answer is shown while it is written: it is coloured once it is whole."""
        return self._critic is None

    def show_piece(self, text: str) -> None:
        """A piece of an answer."""
        print(self._printed(text), end="", flush=True)

    def show(self, answer: Answer) -> None:
        """A whole answer, and below a coloured one the key of its colours."""
        if self.shows_pieces:
            print(self._printed(answer.text))
            return
        texts, values = self._valued(answer)
        scale = scale_of(values, self._subject.value_range)
        line = coloured(list(map(self._printed, texts)), values, scale)
        self._console.print(line, soft_wrap=True)
        self._console.print(key_of_colours(scale), soft_wrap=True)

    def as_json(self, answer: Answer) -> dict[str, object]:
        """For programs; values: null without a critic."""
        texts, values = self._valued(answer)
        return {
            "text": answer.text,
            "finish_reason": "length" if answer.is_cut else "stop",
            "tokens": texts,
            "values": values if self._critic is not None else None,
        }

    def _printed(self, text: str) -> str:
        """Nothing that a model writes steers the terminal; what goes elsewhere is left as it is."""
        if not self._console.is_terminal:
            return text
        return "".join(_SHOWN if is_control(mark) else mark for mark in text)

    def _valued(self, answer: Answer) -> tuple[list[str], list[float]]:
        texts = token_texts(answer.tokens, self._tokenizer.decode)
        if self._critic is None:
            return texts, []
        return texts, self._critic.values(answer.prompt, answer.tokens)


def is_control(mark: str) -> bool:
    """Whether a terminal would act on a character; not on line ends and tabs."""
    return unicodedata.category(mark) == "Cc" and mark not in "\n\t"


def _talk(conversation: Conversation, screen: Screen, console: RunConsole) -> None:
    console.note(HELP)
    with suppress(ImportError):
        import readline  # noqa: F401 lines can be edited, and called back
    while (message := _read()) is not None:
        if message in ("/quit", "/exit"):
            return
        if message == "/new":
            conversation.start_again()
            console.note("a new conversation")
            continue
        if message.startswith("/"):
            console.note(HELP)
            continue
        if not message:
            continue
        try:
            _answer(conversation, screen, console, message)
        except KeyboardInterrupt:
            console.note("\nstopped; the message and its answer are forgotten")
        except BadInput as error:
            console.alarm(str(error))


def _answer(conversation: Conversation, screen: Screen, console: RunConsole, message: str) -> None:
    if screen.shows_pieces:
        answer = conversation.ask(message, screen.show_piece)
        print(flush=True)
    else:
        answer = conversation.ask(message)
        screen.show(answer)
    if answer.is_cut:
        console.note(f"cut off at {len(answer.tokens)} tokens (sampling.max_new_tokens or context)")


def _read() -> str | None:
    """The user's next message; None at the end of the input."""
    prompt = "> " if sys.stdin.isatty() else ""
    try:
        return input(prompt).strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return None


def _critic(subject: Subject, platform: Platform, console: RunConsole) -> ValueReader | None:
    """The critic to colour tokens by; None, with a line that says why, where there is none."""
    if subject.critic is None:
        if subject.without_values:
            console.note(f"no values: {subject.without_values}")
        return None
    settings = subject.settings
    try:
        return ValueReader(
            subject.critic,
            subject.value_loss,
            settings.model.dtype,
            platform,
            settings.rollout.tp,
        )
    except BadInput as error:
        console.note(f"no values: {error}")
        return None


def _facts(subject: Subject) -> dict[str, object]:
    settings = subject.settings
    sampling = settings.sampling
    prompt = settings.data.prompt
    return {
        "prompt": "chat template" if prompt.chat_template else "plain text: no message remembers",
        **({"system": prompt.system_prompt} if prompt.system_prompt else {}),
        **({"message": prompt.user_template} if prompt.user_template != "{problem}" else {}),
        "sampling": f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, at most "
        f"{sampling.max_new_tokens} tokens",
        "critic": subject.critic or "none",
    }


@contextmanager
def _log_folder() -> Iterator[Path]:
    """A folder for the engine's log, which stays where the conversation ended with an error."""
    folder = Path(tempfile.mkdtemp(prefix="vapo-chat-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
