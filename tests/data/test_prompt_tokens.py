"""Token ids of prompts that are kept from one start to the next."""

import logging
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from vapo_megatron.config.data import DataConfig, PromptTemplate
from vapo_megatron.data import prompt_tokens
from vapo_megatron.data.jsonl import write_rows
from vapo_megatron.data.prompts import train_prompts
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.weights.tiny import CHATML_TEMPLATE, word_tokenizer

WORDS = [*map(str, range(30)), "plus", "<|im_start|>user", "<|im_start|>assistant", "by", "him"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    word_tokenizer(WORDS, 64, CHATML_TEMPLATE).save_pretrained(tmp_path / "tokenizer")
    rows = [{"id": f"p{n}", "problem": f"{n} plus {n}", "answer": n} for n in range(25)]
    write_rows(tmp_path / "t.jsonl", rows)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(prompt_tokens, "KEPT_FROM", 20)
    monkeypatch.setattr(prompt_tokens, "_AT_ONCE", 7)
    return tmp_path


def ids_of(folder: Path, template: PromptTemplate | None = None) -> list[tuple[int, ...]]:
    tokenizer = TextTokenizer(folder / "tokenizer", template or PromptTemplate())
    prompts = train_prompts(DataConfig(train=folder / "t.jsonl"), tokenizer)
    expected = [tuple(tokenizer.encode_prompt(prompt.problem)) for prompt in prompts]
    assert [prompt.token_ids for prompt in prompts] == expected
    return expected


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "vapo-megatron" / "prompts").glob("*"))


def test_kept_ids_are_read_and_not_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ids_of(folder)
    (file,) = kept(folder)
    monkeypatch.setattr(TextTokenizer, "encode_prompts", None)
    assert ids_of(folder) == made and kept(folder) == [file]


def test_whatever_changes_ids_changes_the_file(folder: Path) -> None:
    ids_of(folder)
    ids_of(folder, PromptTemplate(chat_template=False))
    ids_of(folder, PromptTemplate(user_template="by {problem}"))
    assert len(kept(folder)) == 3
    text = (folder / "t.jsonl").read_text()
    (folder / "t.jsonl").write_text(text.replace("7 plus 7", "8 plus 7"))
    ids_of(folder)
    assert len(kept(folder)) == 4
    word_tokenizer(WORDS[::-1], 64, CHATML_TEMPLATE).save_pretrained(folder / "tokenizer")
    before = set(kept(folder))
    ids_of(folder)
    assert len(kept(folder)) == 4 and set(kept(folder)) != before, "the oldest is gone"


def test_a_broken_or_foreign_file_is_made_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids_of(folder)
    (file,) = kept(folder)
    whole = file.read_bytes()
    for content in (b"", whole[:-30], whole[:200] + b"x" * 40 + whole[240:], b"no archive"):
        file.write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            ids_of(folder)
        assert "written again" in caplog.text and file.read_bytes() == whole


def test_a_template_that_reads_the_date_is_applied_at_every_start(folder: Path) -> None:
    dated = CHATML_TEMPLATE + "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% endif %}"
    shutil.rmtree(folder / "tokenizer")
    word_tokenizer(WORDS, 64, dated).save_pretrained(folder / "tokenizer")
    ids_of(folder)
    assert not kept(folder)


def test_where_nothing_can_be_kept_prompts_are_made_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "cache").write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert ids_of(folder)
    assert "are not kept" in caplog.text


def test_a_tokenizer_file_that_cuts_and_pads_texts_does_not_here(folder: Path) -> None:
    expected = ids_of(folder)
    path = folder / "tokenizer" / "tokenizer.json"
    asked = Tokenizer.from_file(str(path))
    asked.enable_truncation(3)
    asked.enable_padding(length=40)
    asked.save(str(path))
    assert ids_of(folder) == expected
