"""What of a secret is shown where it is refused: its key, and what stands around it."""

import pytest

from vapo_megatron.config.secret_values import refuse_secrets
from vapo_megatron.errors import BadInput

TOKEN = "ABCDEFGHIJKLMNOP"  # the least length that is taken for one


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see https://me:word@host/x now", "see https://***@host/x now"),
        ("http://a:b@c http://d@e", "http://***@c http://***@e"),
        ("https://h/?a=1&api_key=word&b=2", "https://h/?a=1&api_key=***&b=2"),
        ("https://h/?X-Amz-Signature=word", "https://h/?X-Amz-Signature=***"),
        (f"hf_{TOKEN}", "hf_***"),
        (f"the key sk-{TOKEN}-x, kept", "the key sk-***, kept"),
        (f"ghp_{TOKEN}", "ghp_***"),
        (f"AKIA{TOKEN}", "AKIA***"),
        ("Authorization: Bearer abcdefgh", "Authorization: Bearer ***"),
        (f"Bearer abcdefgh and hf_{TOKEN}", "Bearer *** and hf_***"),
    ],
)
def test_a_secret_is_hidden_and_its_place_shown(text: str, shown: str) -> None:
    for values, key in (({"a": {"b": text}}, "a.b"), ({"a": [1, text]}, "a.1"), ({7: text}, "7")):
        with pytest.raises(BadInput) as refused:
            refuse_secrets(values, "run.yaml")
        assert str(refused.value).startswith(
            f"run.yaml: {key}={shown} holds a password or key, which would be written to files: "
        )


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "APIKEY",
        "x-api-key",
        "access-token",
        "secret",
        "password",
        "hf_token",
        "client_secret",
    ],
)
def test_what_is_named_as_a_secret_is_one(name: str) -> None:
    for values, key in (({name: "word"}, name), ({"a": [{name: "word"}]}, f"a.0.{name}")):
        with pytest.raises(BadInput, match=rf"^config: {key}=\*\*\* holds"):
            refuse_secrets(values, "config")
    refuse_secrets({name: ""}, "config")
    refuse_secrets({name: {"inner": "word"}, f"{name}_variable": "WORD"}, "config")
    refuse_secrets({name: None, f"a{name}b": 3}, "config")


@pytest.mark.parametrize(
    "text",
    [
        "a@b.c",
        "https://host/a@b",
        f"hf_{TOKEN[1:]}",
        f"xhf_{TOKEN}",
        "Bearer abcdefg",
        "?keys=1&token_count=2",
        "",
    ],
)
def test_what_is_shorter_or_elsewhere_is_taken(text: str) -> None:
    refuse_secrets({"a": [text], "b": {"c": text}}, "config")


def test_a_long_text_is_cut() -> None:
    with pytest.raises(BadInput) as refused:
        refuse_secrets({"a": "x" * 300 + f" hf_{TOKEN}"}, "config")
    assert str(refused.value).startswith(f"config: a={'x' * 200} holds a password")
