import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batches import take
from pydantic import ValidationError

from vapo_megatron.config.data import DataConfig, EvalSet, FieldNames, PromptTemplate
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.data.jsonl import read_rows, write_rows
from vapo_megatron.data.prompts import PromptSource, eval_prompts, train_prompts
from vapo_megatron.data.rows import read_file
from vapo_megatron.data.sample import Prompt
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import BadInput
from vapo_megatron.weights.tiny import CHATML_TEMPLATE, word_tokenizer

ROWS = [{"id": f"p{n}", "problem": f"{n} plus {n}", "answer": 2 * n} for n in range(5)]


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    words = [
        *(str(n) for n in range(10)),
        "plus",
        "<|im_start|>user",
        "<|im_start|>assistant",
        "solve",
        "now",
    ]
    word_tokenizer(words, 64, CHATML_TEMPLATE).save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def plain(tokenizer_dir: Path) -> TextTokenizer:
    return TextTokenizer(tokenizer_dir, PromptTemplate(chat_template=False))


def _write(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(id=str(n), problem=str(n), answer=str(n), token_ids=(n,)) for n in range(count)]


def test_rows_become_prompts_in_order(tmp_path: Path, plain: TextTokenizer) -> None:
    prompts = train_prompts(DataConfig(train=_write(tmp_path / "t.jsonl", ROWS)), plain)
    assert [(p.id, p.answer, p.source) for p in prompts] == [
        (f"p{n}", str(2 * n), "t.jsonl") for n in range(5)
    ]
    assert plain.decode(prompts[3].token_ids) == "3 plus 3"


def test_gzip_and_other_field_names_read_the_same(tmp_path: Path, plain: TextTokenizer) -> None:
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wt") as out:
        out.writelines(
            json.dumps({"key": r["id"], "q": r["problem"], "a": r["answer"]}) + "\n" for r in ROWS
        )
    config = DataConfig.model_validate(
        {"train": path, "fields": {"id": "key", "problem": "q", "answer": "a"}}
    )
    reference = train_prompts(DataConfig(train=_write(tmp_path / "t.jsonl", ROWS)), plain)
    assert [p.token_ids for p in train_prompts(config, plain)] == [p.token_ids for p in reference]


def test_byte_order_mark_is_skipped_on_the_first_line_only(
    tmp_path: Path, plain: TextTokenizer
) -> None:
    path = tmp_path / "t.jsonl"
    rows = [json.dumps(row | {"problem": "é"}, ensure_ascii=False) for row in ROWS]
    path.write_text("\ufeff" + "\n".join(rows), encoding="utf-8")
    assert [p.problem for p in train_prompts(DataConfig(train=path), plain)] == ["é"] * len(ROWS)
    path.write_text(rows[0] + "\n\ufeff" + rows[1], encoding="utf-8")
    with pytest.raises(BadInput, match=r"t\.jsonl:2: not JSON"):
        train_prompts(DataConfig(train=path), plain)
    path.write_bytes(rows[0].encode() + b"\n\xff")
    with pytest.raises(BadInput, match=r"t\.jsonl:2: not UTF-8"):
        train_prompts(DataConfig(train=path), plain)


def test_rows_are_written_as_people_read_them(tmp_path: Path) -> None:
    rows = [{"a": "é"}, {"b": [1, None]}, {}]
    write_rows(tmp_path / "deep" / "r.jsonl", rows)
    assert (tmp_path / "deep" / "r.jsonl").read_text(
        encoding="utf-8"
    ) == '{"a": "é"}\n{"b": [1, null]}\n{}\n'
    assert list(read_rows(tmp_path / "deep" / "r.jsonl")) == [
        (1, rows[0]),
        (2, rows[1]),
        (3, rows[2]),
    ]


def test_parquet_text_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    text = pyarrow.array([b"\xff"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"problem": text}), tmp_path / "t.parquet")
    with pytest.raises(BadInput, match=r"t\.parquet: cannot be read \(UnicodeDecodeError"):
        list(read_file(tmp_path / "t.parquet"))


def test_parquet_rows_read_the_same(tmp_path: Path, plain: TextTokenizer) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an optional dependency")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert [p.id for p in train_prompts(DataConfig(train=path), plain)] == [
        row["id"] for row in ROWS
    ]
    parquet.write_table(
        pyarrow.Table.from_pylist([*ROWS, ROWS[0] | {"id": "x", "problem": ""}]), path
    )
    with pytest.raises(BadInput, match=rf"t\.parquet:{len(ROWS) + 1}: field problem is empty"):
        train_prompts(DataConfig(train=path), plain)
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(BadInput, match=r"t\.parquet: cannot be read \(\w.* .*\); give a valid"):
        train_prompts(DataConfig(train=path), plain)


def test_fields_for_a_function_of_ones_own_come_along(tmp_path: Path, plain: TextTokenizer) -> None:
    extra = {"data_source": "dapo", "extra_info": {"index": 3}}
    path = _write(
        tmp_path / "t.jsonl", [ROWS[0] | extra, ROWS[1] | extra | {"extra_info": {"index": 4}}]
    )
    fields = FieldNames(extra=("extra_info", "data_source"))
    first, second = prompts = train_prompts(DataConfig(train=path, fields=fields), plain)
    assert first.extra == extra and second.extra == extra | {"extra_info": {"index": 4}}
    assert train_prompts(DataConfig(train=path), plain)[0].extra == {}
    changed = [replace(first, extra=extra | {"data_source": "other"}), second]
    with pytest.raises(BadInput, match="fingerprint"):
        PromptSource(changed, 1).restore(PromptSource(prompts, 1).state())
    with pytest.raises(
        BadInput,
        match=r"t\.jsonl:1: no field 'level' among .*; name one of those in data\.fields\.extra ",
    ):
        train_prompts(DataConfig(train=path, fields=FieldNames(extra=("level",))), plain)
    path = _write(tmp_path / "u.jsonl", ['{"problem": "1", "answer": "1", "level": NaN}'])
    with pytest.raises(BadInput, match=r"u\.jsonl:1: field level cannot be written as JSON"):
        train_prompts(DataConfig(train=path, fields=FieldNames(extra=("level",))), plain)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROWS[0], {"id": "x", "problem": "1"}], r"t\.jsonl:2: no field 'answer'"),
        (
            [ROWS[0] | {"problem": [{"role": "user"}]}],
            r"t\.jsonl:1: field problem has a message whose content is NoneType; expected a text",
        ),
        (
            [ROWS[0] | {"problem": ["a", "b"]}],
            r"t\.jsonl:1: field problem is list.*vapo-megatron prepare-data",
        ),
        ([{"problem": " ", "answer": "1"}], r"t\.jsonl:1: field problem is empty"),
        ([{"problem": "1", "answer": None}], r"t\.jsonl:1: field answer is NoneType"),
        ([ROWS[0], "{nonsense"], r"t\.jsonl:2: not JSON \(Expecting property name"),
        (["[" * 100_000], r"t\.jsonl:1: not JSON \(RecursionError\)"),
        (["[1]"], r"t\.jsonl:1: a JSON list"),
        (
            [ROWS[0], '{"id": "x", "answer": 1, "problem": "1", "answer": 2}'],
            r"t\.jsonl:2: field answer comes twice",
        ),
        ([{"id": [1], "problem": "1", "answer": "1"}], r"t\.jsonl:1: field id is list"),
        (['{"problem": "1", "answer": NaN}'], r"t\.jsonl:1: field answer is nan"),
        ([ROWS[0], ROWS[1], ROWS[0]], r"t\.jsonl:3: field id=p0 is also the id of .*t\.jsonl:1"),
        ([], r"t\.jsonl: holds no rows"),
        (["", "  "], r"t\.jsonl: holds no rows"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(
    tmp_path: Path, plain: TextTokenizer, rows: list[Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        train_prompts(DataConfig(train=_write(tmp_path / "t.jsonl", rows)), plain)
    assert "\n" not in str(caught.value)


def test_the_files_of_a_data_set_are_read_as_one(
    tmp_path: Path, plain: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [
        _write(tmp_path / "a.jsonl", ROWS[:2]),
        _write(tmp_path / "b.jsonl", [*ROWS[2:], {"problem": "1"}]),
    ]
    asked = []
    monkeypatch.setattr("vapo_megatron.data.rows.hub_files", lambda *of: asked.append(of) or files)
    assert [row for _, row in read_file(Path("hub:some/sums"), "data.train")] == [
        *ROWS,
        {"problem": "1"},
    ]
    assert asked == [("hub:some/sums", "data.train")]
    with pytest.raises(BadInput, match=r"^hub:some/sums:6: no field 'answer'"):
        train_prompts(DataConfig(train=Path("hub:some/sums")), plain)


def test_a_missing_or_strange_file_is_named_with_its_key(
    tmp_path: Path, plain: TextTokenizer
) -> None:
    for ending in ("jsonl", "json", "parquet", "jsonl.gz"):
        config = DataConfig(train=tmp_path / f"no.{ending}")
        with pytest.raises(BadInput, match=rf"no\.{ending}: no such file, which data\.train names"):
            train_prompts(config, plain)
    with pytest.raises(
        BadInput, match=r"no\.jsonl\.gz: no such file, which data\.eval \(set aime\) names"
    ):
        eval_prompts(EvalSet(name="aime", path=config.train), config, plain)
    with pytest.raises(BadInput, match=r"no\.txt: unknown kind of file"):
        train_prompts(DataConfig(train=tmp_path / "no.txt"), plain)


def test_a_truncated_gzip_is_named(tmp_path: Path, plain: TextTokenizer) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(ROWS[0]).encode() * 100)[:-20])
    with pytest.raises(BadInput, match=r"t\.jsonl\.gz: cannot be read"):
        train_prompts(DataConfig(train=path), plain)


def test_a_long_prompt_is_named_or_left_out_as_configured(
    tmp_path: Path, plain: TextTokenizer
) -> None:
    path = _write(
        tmp_path / "t.jsonl", [*ROWS, {"id": "long", "problem": "1 plus 1 plus 1", "answer": 3}]
    )
    with pytest.raises(
        BadInput,
        match=(
            r"t\.jsonl:6: the prompt of row long has 5 tokens.*=3; raise it, or set data.drop_long"
        ),
    ):
        train_prompts(DataConfig(train=path, max_prompt_tokens=3), plain)
    kept = train_prompts(DataConfig(train=path, max_prompt_tokens=3, drop_long_prompts=True), plain)
    assert [p.id for p in kept] == [row["id"] for row in ROWS]
    with pytest.raises(BadInput, match="every prompt is longer"):
        train_prompts(DataConfig(train=path, max_prompt_tokens=2, drop_long_prompts=True), plain)


def test_evaluation_set_is_cut_to_limit_and_keeps_long_prompts(
    tmp_path: Path, plain: TextTokenizer
) -> None:
    path = _write(tmp_path / "e.jsonl", ROWS)
    config = DataConfig(train=path, max_prompt_tokens=2, drop_long_prompts=True)
    with pytest.raises(BadInput, match=r"row p0 has 3 tokens.*or remove the row$"):
        eval_prompts(EvalSet(name="e", path=path), config, plain)
    roomy = DataConfig(train=path)
    cut = eval_prompts(EvalSet(name="e", path=path, limit=2), roomy, plain)
    assert [(p.id, p.source) for p in cut] == [("p0", "e"), ("p1", "e")]
    untold = eval_prompts(EvalSet(name="e", path=path, limit=2), roomy, None)
    assert untold == [replace(prompt, token_ids=()) for prompt in cut], "a service reads texts"


def test_a_list_of_rows_reads_the_same_and_bad_ones_are_named(
    tmp_path: Path, plain: TextTokenizer
) -> None:
    path = tmp_path / "t.json"
    for mark in ("", "\ufeff"):
        path.write_text(mark + json.dumps(ROWS), encoding="utf-8")
        assert [p.id for p in train_prompts(DataConfig(train=path), plain)] == [
            row["id"] for row in ROWS
        ]
    for content, message in (
        ("[1]", "expected a list of objects"),
        ("{}", "expected a list of objects"),
        ("[", "cannot be read as JSON"),
        ('[{"id": "x", "id": "y"}]', r"t\.json: field id comes twice in one object"),
        (
            json.dumps([ROWS[0], ROWS[1] | {"answer": "\ud800"}]),
            r"t\.json:2: holds .ud800, half of a character",
        ),
        (
            json.dumps([ROWS[0], {"id": "x", "problem": "1"}]),
            r"t\.json:2: no field 'answer' among id, problem",
        ),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(BadInput, match=message):
            train_prompts(DataConfig(train=path), plain)
    lines = _write(tmp_path / "t.jsonl", [ROWS[0], ROWS[1] | {"answer": "\ud800"}])
    with pytest.raises(BadInput, match=r"t\.jsonl:2: holds .ud800, half of a character"):
        train_prompts(DataConfig(train=lines), plain)


def test_an_answer_may_be_a_number(tmp_path: Path, plain: TextTokenizer) -> None:
    rows = [{"problem": "1 plus 1", "answer": answer} for answer in (2, 2.5)]
    path = _write(tmp_path / "t.jsonl", rows)
    assert [p.answer for p in train_prompts(DataConfig(train=path), plain)] == ["2", "2.5"]


def test_what_the_critic_alone_reads_is_a_text_or_json(
    tmp_path: Path, plain: TextTokenizer
) -> None:
    rows = [{"solution": "1 plus 1"}, {"solution": 2}, {"solution": ["1", 7]}]
    path = _write(tmp_path / "t.jsonl", [row | new for row, new in zip(ROWS, rows, strict=False)])
    config = DataConfig(train=path)
    prompts = train_prompts(config, plain, "solution")
    texts = ["1 plus 1", "2", '["1", 7]']
    assert [prompt.privileged_ids for prompt in prompts] == [
        plain.encode_privileged(text) for text in texts
    ]
    assert prompts[0].privileged_ids == tuple(plain.encode_response("1 plus 1")), (
        "words know no empty line"
    )
    shown = train_prompts(config, plain)
    assert [replace(prompt, privileged_ids=()) for prompt in prompts] == shown
    state = PromptSource(prompts, seed=1).state()
    with pytest.raises(BadInput, match="fingerprint"):
        PromptSource(shown, seed=1).restore(state)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {},
            "t.jsonl:6: no field 'solution' among answer, id, problem; name one of those in "
            "critic.privileged_field",
        ),
        (
            {"solution": None},
            "t.jsonl:6: field solution of critic.privileged_field is empty; fill it or remove",
        ),
        ({"solution": " "}, "t.jsonl:6: field solution of critic.privileged_field is empty"),
        ({"solution": [float("nan")]}, "t.jsonl:6: field solution cannot be written as JSON"),
    ],
)
def test_a_row_without_it_is_named(
    tmp_path: Path, plain: TextTokenizer, row: dict[str, Any], said: str
) -> None:
    rows = [{**good, "solution": "1"} for good in ROWS] + [
        {"id": "x", "problem": "1", "answer": "1"} | row
    ]
    with pytest.raises(BadInput) as refused:
        train_prompts(DataConfig(train=_write(tmp_path / "t.jsonl", rows)), plain, "solution")
    assert said in str(refused.value)


def test_every_epoch_is_another_permutation() -> None:
    source = PromptSource(_prompts(20), seed=1)
    epochs = [[prompt.id for prompt in take(source, 20)] for _ in range(3)]
    assert all(Counter(epoch) == Counter(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_sequence_depends_on_seed_and_cursor_alone() -> None:
    in_one = take(PromptSource(_prompts(7), seed=1), 30)
    source = PromptSource(_prompts(7), seed=1)
    assert [*take(source, 1), *take(source, 12), *take(source, 0), *take(source, 17)] == in_one
    assert [prompt.cursor for prompt in in_one] == list(range(30))
    assert take(PromptSource(_prompts(7), seed=2), 30) != in_one


def test_without_shuffle_the_order_is_that_of_the_file() -> None:
    assert [p.id for p in take(PromptSource(_prompts(3), seed=1, shuffle=False), 5)] == [
        "0",
        "1",
        "2",
        "0",
        "1",
    ]


def test_a_restored_source_goes_on_where_the_other_stopped() -> None:
    source = PromptSource(_prompts(7), seed=1)
    take(source, 11)
    state = json.loads(json.dumps(source.state()))
    rest = take(source, 9)
    resumed = PromptSource(_prompts(7), seed=1)
    resumed.restore(state)
    assert take(resumed, 9) == rest


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (PromptSource(_prompts(7), seed=2), "seed"),
        (PromptSource(_prompts(8), seed=1), "prompts"),
        (PromptSource(_prompts(7), seed=1, shuffle=False), "shuffle"),
    ],
)
def test_a_state_of_another_sequence_is_refused(other: PromptSource, field: str) -> None:
    with pytest.raises(BadInput, match=f"data: {field} is"):
        other.restore(PromptSource(_prompts(7), seed=1).state())


def test_changed_data_of_the_same_size_is_refused() -> None:
    changed = [*_prompts(6), Prompt(id="6", problem="6", answer="other", token_ids=(6,))]
    with pytest.raises(BadInput, match="fingerprint"):
        PromptSource(changed, seed=1).restore(PromptSource(_prompts(7), seed=1).state())


def test_a_state_does_not_read_all_prompts_again() -> None:
    prompts = [Prompt(str(n), "", "", (n,)) for n in range(3)]
    source = PromptSource(prompts, 1)
    before = source.state()
    take(source, 2)
    for prompt in prompts:
        object.__delattr__(prompt, "answer")  # whoever reads it now fails
    assert source.state() == before | {"cursor": 2}


@pytest.mark.parametrize(
    "weights", [{"a": 3, "b": 1}, {"a": 1, "b": 10}, {"a": 1, "b": 1, "c": 10}]
)
def test_at_no_time_has_a_source_more_or_less_than_its_share(weights: dict[str, float]) -> None:
    prompts = [replace(prompt, source=source) for source in weights for prompt in _prompts(2)]
    drawn = take(PromptSource(prompts, 7, weights=weights), 60)
    whole = sum(weights.values())
    for count in range(1, 61):
        for source, weight in weights.items():
            share = count * weight / whole
            assert abs(sum(prompt.source == source for prompt in drawn[:count]) - share) < 1


def test_sources_of_one_size_are_shuffled_apart() -> None:
    weights = {"a": 1, "b": 1}
    prompts = [replace(prompt, source=source) for source in weights for prompt in _prompts(50)]
    drawn = take(PromptSource(prompts, 7, weights=weights), 100)
    orders = [[prompt.id for prompt in drawn if prompt.source == source] for source in weights]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_several_files_are_mixed_by_weight_and_resume_in_place(
    tmp_path: Path, plain: TextTokenizer
) -> None:
    few = _write(tmp_path / "few.jsonl", ROWS[:2])
    many = _write(tmp_path / "many.jsonl", ROWS)
    config = DataConfig.model_validate({"train": {str(few): 3, str(many): 1}})
    prompts = train_prompts(config, plain)
    source = PromptSource(prompts, 7, weights=config.weights)
    drawn = take(source, 40)
    for count in range(1, 41):
        assert abs(sum(prompt.source == str(few) for prompt in drawn[:count]) - 0.75 * count) <= 1
    assert Counter(prompt.id for prompt in drawn if prompt.source == str(many)) == Counter(
        {f"{many}:p{n}": 2 for n in range(5)}
    )
    resumed = PromptSource(prompts, 7, weights=config.weights)
    resumed.restore(json.loads(json.dumps(source.state())))
    assert take(resumed, 9) == take(source, 9) and resumed.at(3) == drawn[3]
    for weights in ({str(few): 2, str(many): 1}, {}):
        with pytest.raises(BadInput, match="fingerprint"):
            PromptSource(prompts, 7, weights=weights).restore(source.state())
    alone = PromptSource(
        train_prompts(DataConfig.model_validate({"train": {str(many): 1}}), plain), 7
    )
    single = PromptSource(train_prompts(DataConfig(train=many), plain), 7)
    assert [p.problem for p in take(alone, 12)] == [p.problem for p in take(single, 12)]


def test_file_and_row_have_their_own_fields_and_verifier(
    tmp_path: Path, plain: TextTokenizer
) -> None:
    rows = [
        {"q": "Add.", "tests": "assert f(1) == 2"},
        {"q": "Write.", "tests": "a poem", "kind": "judge"},
    ]
    code = _write(tmp_path / "code.jsonl", rows)
    math = _write(tmp_path / "math.jsonl", ROWS[:1])
    names = {"problem": "q", "answer": "tests"}
    own = {"weight": 2.0, "fields": names, "reward": {"verifier": "code", "memory_mib": 512}}
    config = DataConfig.model_validate(
        {"train": {str(code): own, str(math): 1}, "fields": {"verifier": "kind"}}
    )
    assert config.weights == {str(code): 2.0, str(math): 1.0}
    prompts = train_prompts(config, plain)
    assert [json.loads(prompt.reward or "{}") for prompt in prompts] == [
        {"verifier": "code", "memory_mib": 512},
        {"verifier": "judge", "memory_mib": 512},
        {},
    ]
    assert [prompt.answer for prompt in prompts[:2]] == ["assert f(1) == 2", "a poem"]
    reward = RewardConfig.model_validate(
        {"judge": {"url": "http://127.0.0.1:1/v1", "model": "m"}, "incorrect": -1}
    )
    config.check_rewards(reward)
    judge = reward.changed(prompts[1].reward)
    assert (judge.verifier, judge.memory_mib, judge.incorrect) == (
        "judge",
        512,
        -1,
    ) and reward.changed("") is reward
    others = [replace(prompts[0], reward=""), *prompts[1:]]
    with pytest.raises(BadInput, match="fingerprint"):
        PromptSource(others, 7).restore(PromptSource(prompts, 7).state())
    evaluation = EvalSet(
        name="e", path=_write(tmp_path / "eval.jsonl", [ROWS[0] | {"kind": "code"}, ROWS[1]])
    )
    assert [prompt.reward for prompt in eval_prompts(evaluation, config, plain)] == [
        '{"verifier": "code"}',
        "",
    ]
    foreign = [
        {"question": "b?", "answer": "4", "kind": "code"},
        {"question": "c?", "answer": "5", "kind": "judge"},
    ]
    named = EvalSet(
        name="e", path=_write(tmp_path / "named.jsonl", foreign), fields={"problem": "question"}
    )
    read = eval_prompts(named, config, plain)
    assert [(prompt.problem, prompt.answer) for prompt in read] == [("b?", "4"), ("c?", "5")]
    assert json.loads(read[1].reward) == {"verifier": "judge"}, "data.fields.verifier still holds"
    _write(code, [rows[0] | {"kind": "maths"}])
    with pytest.raises(
        BadInput, match=r"code\.jsonl:1: field kind='maths': expected one of math, code"
    ):
        train_prompts(config, plain)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {"fields": {"problm": "q"}},
            r"data\.train: a\.jsonl: fields: unknown key problm; did you mean problem\?",
        ),
        (
            {"reward": {"verifer": "code"}},
            r"data\.train: a\.jsonl: reward: unknown key verifer; did you mean verifier\?",
        ),
        (
            {"reward": {"verifier": "maths"}},
            r"a\.jsonl: reward: verifier is 'maths'; expected 'math', 'code'",
        ),
        ({"wieght": 1}, r"a\.jsonl: unknown key wieght; known keys: weight, fields, reward"),
        ({"reward": {"verifier": "judge"}}, "a.jsonl: reward: verifier=judge with judge=null"),
    ],
)
def test_what_a_file_cannot_have_is_refused_by_name(own: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate({"train": {"a.jsonl": own}}).check_rewards(RewardConfig())


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"a.jsonl": {"wieght": 1}},
        {"a.jsonl": 0},
        {"a.jsonl": -1.0},
        {"a.jsonl": True},
        {"a.jsonl": "many"},
        3,
    ],
)
def test_weights_that_mean_nothing_are_refused_by_name(train: Any) -> None:
    with pytest.raises(ValidationError, match=r"train"):
        DataConfig(train=train)
