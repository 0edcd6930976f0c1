import json
import shutil
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from vapo_megatron.config.data import PromptTemplate
from vapo_megatron.data.tokenizer import TextTokenizer, load_tokenizer
from vapo_megatron.errors import BadInput
from vapo_megatron.weights.tiny import CHATML_TEMPLATE, word_tokenizer

ROLES = ("system", "user", "assistant")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    words = ["hello", "be", "brief", "say", "<|im_end|>", "hello<|im_end|>", "brief<|im_end|>"]
    words += [f"<|im_start|>{role}" for role in ROLES]
    word_tokenizer(words, 64, CHATML_TEMPLATE).save_pretrained(tmp_path)
    return tmp_path


def _edit_config(directory: Path, **changes: object) -> None:
    path = directory / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_the_chat_template_ends_where_the_assistant_begins(directory: Path) -> None:
    template = PromptTemplate(system_prompt="be brief", user_template="say {problem}")
    tokenizer = TextTokenizer(directory, template)
    expected = (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nsay "
        "hello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.prompt_text("hello") == expected
    assert tokenizer.decode(tokenizer.encode_prompt("hello")) == " ".join(expected.split())


def test_a_plain_prompt_is_the_users_text(directory: Path) -> None:
    tokenizer = TextTokenizer(
        directory, PromptTemplate(chat_template=False, user_template="say {problem}")
    )
    assert tokenizer.decode(tokenizer.encode_prompt("hello")) == "say hello"


def test_braces_in_a_problem_are_kept(directory: Path) -> None:
    tokenizer = TextTokenizer(
        directory, PromptTemplate(chat_template=False, user_template="{x} {problem}")
    )
    assert tokenizer.prompt_text(r"\frac{1}{2} {problem}") == r"{x} \frac{1}{2} {problem}"


def test_special_tokens_are_left_out_of_decoded_text(directory: Path) -> None:
    tokenizer = TextTokenizer(directory, PromptTemplate())
    ids = tokenizer.encode_response("say hello")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode([*ids, tokenizer.eos_id, tokenizer.pad_id]) == "say hello"


def test_tokenizer_prefix_stands_before_plain_prompts_alone(directory: Path) -> None:
    tokenizer = word_tokenizer(["hello", "say", "<|im_end|>"], 64, CHATML_TEMPLATE)
    bos = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[("<|im_end|>", bos)]
    )
    tokenizer.save_pretrained(directory)
    plain = TextTokenizer(directory, PromptTemplate(chat_template=False))
    assert (
        plain.encode_prompt("hello")[0] == bos
        and plain.encode_response("hello") == plain.encode_prompt("hello")[1:]
    )
    assert TextTokenizer(directory, PromptTemplate()).encode_prompt("hello")[0] != bos


def test_a_vocabulary_that_does_not_fit_is_refused(directory: Path, tmp_path: Path) -> None:
    tokenizer = TextTokenizer(directory, PromptTemplate())
    tokenizer.check_vocabulary(tokenizer.size)
    tokenizer.eos_token_ids = (0, tokenizer.size - 1)
    tokenizer.check_vocabulary(tokenizer.size)
    with pytest.raises(
        BadInput,
        match=f"has {tokenizer.size} tokens and the model of config.json a vocabulary of 3",
    ):
        tokenizer.check_vocabulary(3)
    for other, words in (("none", []), ("same", None), ("other", ["say", "hello"])):
        (tmp_path / other).mkdir()
        if words is None:
            shutil.copy(directory / "tokenizer.json", tmp_path / other)
            shutil.copy(directory / "tokenizer_config.json", tmp_path / other)
        elif words:
            word_tokenizer([*words, "<|im_end|>"], 64, CHATML_TEMPLATE).save_pretrained(
                tmp_path / other
            )
    tokenizer.check_same(tmp_path / "none", "critic.model")
    tokenizer.check_same(tmp_path / "same", "critic.model")
    mine = load_tokenizer(directory).get_vocab()
    theirs = load_tokenizer(tmp_path / "other").get_vocab()
    differ = sum(word not in theirs or theirs[word] != number for word, number in mine.items())
    assert 0 < differ < len(mine)
    said = (
        rf"^critic.model=.*other: its tokenizer has {len(theirs)} tokens and gives {differ} of the "
        rf"{len(mine)} of"
    )
    with pytest.raises(BadInput, match=said):
        tokenizer.check_same(tmp_path / "other", "critic.model")


@pytest.mark.parametrize("clean_up", [False, True])
def test_text_is_what_the_tokenizer_itself_makes_of_it(directory: Path, clean_up: bool) -> None:
    _edit_config(directory, clean_up_tokenization_spaces=clean_up)
    tokenizer = TextTokenizer(directory, PromptTemplate())
    own = load_tokenizer(directory)
    ids = list(range(tokenizer.size + 3))
    assert tokenizer.decode(ids) == own.decode(ids, skip_special_tokens=True) != ""
    assert tokenizer.decode([]) == ""


def test_end_tokens_are_those_of_tokenizer_and_generation_config(directory: Path) -> None:
    tokenizer = TextTokenizer(directory, PromptTemplate())
    eos = tokenizer.eos_id
    rows = tokenizer.size
    assert tokenizer.eos_token_ids == (eos,) and tokenizer.caution() is None
    for entry, ids in (([9, eos], (9, eos)), (9, (9, eos)), (None, (eos,)), ([], (eos,))):
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": entry}))
        tokenizer = TextTokenizer(directory, PromptTemplate())
        assert tokenizer.eos_token_ids == tuple(sorted(ids))
        tokenizer.check_vocabulary(rows)
        caution = tokenizer.caution()
        assert (
            caution is None
            if entry != 9
            else f"with token 9 and the tokenizer with {eos}" in str(caution)
        )
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, rows]}))
    with pytest.raises(
        BadInput, match=rf"eos_token_id {rows} is outside the model's vocabulary of {rows}"
    ):
        TextTokenizer(directory, PromptTemplate()).check_vocabulary(rows)
    (directory / "generation_config.json").write_text("[]")
    with pytest.raises(BadInput, match="not a JSON object"):
        TextTokenizer(directory, PromptTemplate())
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": "end"}))
    with pytest.raises(BadInput, match=r"generation_config\.json: eos_token_id 'end'"):
        TextTokenizer(directory, PromptTemplate())


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nowhere: no such directory"):
        TextTokenizer(tmp_path / "nowhere", PromptTemplate())


def test_a_directory_without_tokenizer_is_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no tokenizer") as caught:
        TextTokenizer(tmp_path, PromptTemplate())
    assert "\n" not in str(caught.value)


def test_padding_is_the_tokenizers_own_or_the_end(directory: Path) -> None:
    tokenizer = TextTokenizer(directory, PromptTemplate())
    assert tokenizer.pad_id not in (None, tokenizer.eos_id)
    _edit_config(directory, pad_token=None)
    tokenizer = TextTokenizer(directory, PromptTemplate())
    assert tokenizer.pad_id == tokenizer.eos_id


def test_what_is_wrong_with_a_template_or_a_tokenizer_is_said(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ raise_exception('no\n  system') }}")
    with pytest.raises(
        BadInput, match=r"chat template cannot be applied \(TemplateError: no system\); mend"
    ):
        TextTokenizer(directory, PromptTemplate()).prompt_text("hello")
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(
        BadInput, match=r"its tokenizer cannot be loaded \(\w+: .+\); put a tokenizer.json"
    ):
        TextTokenizer(directory, PromptTemplate())


def test_no_code_of_the_directory_is_run(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a person would write it who wants code of theirs to run where a model is loaded. Nobody is
    asked either."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    ran = directory / "ran"
    (directory / "theirs.py").write_text(
        f"open({str(ran)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast\n"
        "class Theirs(PreTrainedTokenizerFast):\n    pass\n"
    )
    _edit_config(
        directory, auto_map={"AutoTokenizer": [None, "theirs.Theirs"]}, tokenizer_class="Theirs"
    )
    try:
        load_tokenizer(directory)
    except BadInput as error:
        assert "cannot be loaded" in str(error)
    assert not ran.exists()


def test_a_tokenizer_without_end_token_is_refused(directory: Path) -> None:
    _edit_config(directory, eos_token=None)
    with pytest.raises(BadInput, match="no end token"):
        TextTokenizer(directory, PromptTemplate())


def test_missing_chat_template_is_refused_only_where_needed(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(BadInput, match=r"no chat template and data\.prompt\.chat_template=true"):
        TextTokenizer(directory, PromptTemplate())
    assert TextTokenizer(directory, PromptTemplate(chat_template=False)).encode_prompt("hello")


def test_whether_a_template_shows_tools_is_seen_by_one(directory: Path) -> None:
    shown = (
        "{% for t in tools or [] %}{{ t['function']['name'] }}{{ "
        "t['function']['parameters']['type'] }}{% endfor %}"
    )
    fails = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
    message = {"role": "user", "content": "say"}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    for prefix, reads in ((shown, True), ("", False), (fails, False)):
        word_tokenizer(
            ["hello", "say", "<|im_end|>"], 64, prefix + CHATML_TEMPLATE
        ).save_pretrained(directory)
        tokenizer = TextTokenizer(directory, PromptTemplate())
        assert tokenizer.reads_tools is reads
        if reads:
            assert tokenizer.messages_text(
                [message], [tool]
            ) == "addobject" + tokenizer.messages_text([message])
        else:
            with pytest.raises(ValueError, match="it ignores tools"):
                tokenizer.messages_text([message], [tool])


def test_a_template_without_its_problem_is_refused() -> None:
    with pytest.raises(ValueError, match="exactly once"):
        PromptTemplate(user_template="say it")
    with pytest.raises(ValueError, match="needs chat_template"):
        PromptTemplate(chat_template=False, system_prompt="x")
