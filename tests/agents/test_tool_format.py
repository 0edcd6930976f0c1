"""A tool parser that does not read what the chat template writes is named before a run starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stand_ins import Python
from tiny_runs import evaluate_config, train_config
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from vapo_megatron.agents import tool_format
from vapo_megatron.agents.tool_format import check_tool_parser
from vapo_megatron.checks.preflight import check_train
from vapo_megatron.config.data import PromptTemplate
from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.rollout import EpisodeConfig, RolloutConfig
from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.engines.server.tool_parsers import parsed_by_each
from vapo_megatron.errors import BadInput, RunFailed
from vapo_megatron.evaluation.check import check_evaluation
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.weights.tiny import save_tiny_model

COMMANDS = {"train": train_config, "evaluate": evaluate_config}
_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
_CHATML = (
    _TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = (
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>"
)
FORMATS = {
    "hermes": _CHATML.replace("CALL", HERMES),
    # Arguments as text: it raises on objects
    "of text": _CHATML.replace(
        "CALL", HERMES.replace("c.function.arguments | tojson", "'' + c.function.arguments")
    ),
    "odd": _CHATML.replace("CALL", "please use {{ c.function.name }} on heron"),
    "without": _CHATML.replace("CALL", ""),
    "raises": _CHATML.replace("CALL", "{{ raise_exception('no calls') }}"),
    # GLM's: the prompt ends before reasoning, and the next message ends the answer
    "glm": (
        _TOOLS + "{% for m in messages %}{% if m.role == 'user' %}<|im_end|>\n{{ m.content }}"
        "{% else %}<|im_start|>\n<think></think>{% for c in m.tool_calls %}\n"
        "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>"
        "{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>\n<think>{% endif %}"
    ),
}


def byte_tokenizer(template: str) -> PreTrainedTokenizerBase:
    """Of bytes, so that any text is read as it was written."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: id for id, byte in enumerate(bytes_)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ("<|im_end|>", "<|im_start|>")
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=special[0],
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


@pytest.fixture(scope="module")
def parsed_once() -> Callable[..., Any]:
    """parsed_by_each(), which imports SGLang, once a text."""
    known: dict[str, Any] = {}

    def parsed(text: str, *rest: Any) -> Any:
        if text not in known:
            known[text] = parsed_by_each(text, *rest)
        return known[text]

    return parsed


@pytest.fixture
def said_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parsed_once: Callable[..., Any]
) -> Callable[[str, str], str | None]:
    """The caution or refusal on a format and a parser."""
    monkeypatch.setattr(tool_format, "parsed_by_each", parsed_once)

    def said(name: str, parser: str) -> str | None:
        byte_tokenizer(FORMATS[name]).save_pretrained(tmp_path)
        tokenizer = TextTokenizer(tmp_path, PromptTemplate(chat_template=True))
        config = RolloutConfig(agent="mod:run", episode=EpisodeConfig(tool_parser=parser))
        try:
            return check_tool_parser(config, tokenizer)
        except BadInput as error:
            return f"refused: {error}"

    return said


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("hermes", "qwen25", "llama3"),
        pytest.param("of text", "hermes", "glm45", marks=pytest.mark.full),
        pytest.param("glm", "glm45", "qwen25", marks=pytest.mark.full),
    ],
)
def test_a_parser_of_another_format_is_refused_with_those_that_fit(
    said_of: Callable[[str, str], str | None], tmp_path: Path, name: str, right: str, wrong: str
) -> None:
    assert said_of(name, right) is None
    refused = said_of(name, wrong)
    assert refused is not None and "\n" not in refused
    key, _, remedy = refused.partition(" does not read ")
    assert key == f"refused: rollout.episode.tool_parser={wrong}"
    assert str(tmp_path) in remedy and "<tool_call>" in remedy and "<|im_end|>" not in remedy
    assert "What is a heron" not in remedy, "the answer alone"
    able = remedy.partition(": set one that does, ")[2].replace(" or ", ", ").split(", ")
    assert right in able and wrong not in able


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param(
            "odd",
            "('please use look_up on heron'), nor does any other parser of SGLang",
            marks=pytest.mark.full,
        ),
        ("without", "leaves tool calls out of an assistant's message (it writes '')"),
        ("raises", "raises on a message with a tool call (TemplateError: no calls)"),
    ],
)
def test_a_format_that_no_parser_reads_is_a_caution(
    said_of: Callable[[str, str], str | None], name: str, words: str
) -> None:
    said = said_of(name, "qwen25")
    assert said is not None and said.startswith("rollout.episode.tool_parser=qwen25 ")
    assert words in said and "\n" not in said


def test_without_sglang_or_calls_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Python
) -> None:
    byte_tokenizer(FORMATS["hermes"]).save_pretrained(tmp_path)
    tokenizer = TextTokenizer(tmp_path, PromptTemplate(chat_template=True))
    parsed = EpisodeConfig(tool_parser="llama3")
    for config in (RolloutConfig(agent="mod:run"), RolloutConfig(episode=parsed)):
        assert check_tool_parser(config, tokenizer) is None
    assert not python.programs()
    config = RolloutConfig(agent="mod:run", episode=parsed)
    python.refuse("ImportError: libcuda.so")
    assert check_tool_parser(config, tokenizer) is None and len(python.programs()) == 1
    monkeypatch.setattr("vapo_megatron.engines.server.tool_parsers.find_spec", lambda _: None)
    assert check_tool_parser(config, tokenizer) is None and not python.programs()


def test_a_parser_that_never_answers_is_no_hang(tmp_path: Path, python: Python) -> None:
    byte_tokenizer(FORMATS["hermes"]).save_pretrained(tmp_path)
    tokenizer = TextTokenizer(tmp_path, PromptTemplate(chat_template=True))
    python.wait()
    episode = EpisodeConfig(tool_parser="llama3")
    config = RolloutConfig(agent="mod:run", episode=episode, start_timeout_s=0.2)
    with pytest.raises(RunFailed, match=r"rollout\.start_timeout_s=0\.2 s"):
        check_tool_parser(config, tokenizer)


NOT_READ = {
    "llama3": [("look_up", '{"word": "<|im_start|>heron"}')],
    "qwen25": [("look", '{"word": "heron"}')],
    "glm45": [("look_up", '{"word": "heron"')],
    "hermes": [],
}


async def plays(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    return 1.0


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_it_is_checked_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    # The engine's own arguments are another check
    monkeypatch.setattr(EngineServer, "check_arguments", lambda _: None)
    tokenizer = byte_tokenizer(FORMATS["hermes"])
    shape = TinyModel(
        vocab_size=len(tokenizer), hidden_size=64, head_dim=16, max_positions=512, seed=0
    )
    save_tiny_model(shape, tokenizer, tmp_path / "model")
    values = COMMANDS[command](tmp_path, tmp_path / "model")
    values["data"]["max_prompt_tokens"] = 64
    values["rollout"] = {
        "agent": f"{__name__}:plays",
        "episode": {"tool_parser": "qwen25", "max_tokens": 128},
    }

    def check(able: str) -> str:
        parsed = dict(NOT_READ)
        if able:
            parsed[able] = [("look_up", '{"word": "heron"}')]
        monkeypatch.setattr(tool_format, "parsed_by_each", lambda *_: parsed)
        if command == "train":
            check_train(TrainConfig.model_validate(values), 2, [])
        else:
            check_evaluation(EvaluateConfig.model_validate(values), current_platform())
        return capsys.readouterr().err

    assert "tool_parser" not in check("qwen25")
    assert "caution: rollout.episode.tool_parser=qwen25 does not read" in check("")
    with pytest.raises(BadInput, match=r"tool_parser=qwen25 does not read .*, llama3$"):
        check("llama3")
