import pytest
from pydantic import ValidationError

from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig, SyncConfig


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"top_k": -2},
        {"max_new_tokens": 0},
    ],
)
def test_sampling_out_of_range_is_refused(values: dict) -> None:
    with pytest.raises(ValidationError, match=next(iter(values))):
        SamplingConfig(**({"max_new_tokens": 8} | values))


@pytest.mark.parametrize("name", ["port", "skip_tokenizer_init", "dtype", "chunked-prefill-size"])
def test_server_args_that_are_not_the_users_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        RolloutConfig(server_args={name: 1})


def test_tolerance_follows_the_dtype_unless_given() -> None:
    assert SyncConfig().tolerance_for("float32") == 1e-4
    assert SyncConfig().tolerance_for("bfloat16") > 1e-2
    assert SyncConfig(tolerance=0.03).tolerance_for("float32") == 0.03
