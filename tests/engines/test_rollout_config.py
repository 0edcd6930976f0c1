import pytest
from pydantic import ValidationError

from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.engines.engine_limits import check_engine_size
from vapo_megatron.errors import BadInput


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
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


def test_engines_are_deterministic_by_default_where_it_is_cheap() -> None:
    auto = RolloutConfig()
    assert auto.is_deterministic("float32", on_gpus=False) and auto.is_deterministic(
        "bfloat16", on_gpus=False
    )
    assert not auto.is_deterministic("bfloat16", on_gpus=True)
    assert auto.is_deterministic("float32", on_gpus=True)
    for choice in (True, False):
        told = RolloutConfig(deterministic=choice)
        assert all(
            told.is_deterministic(d, g) is choice
            for d in ("float32", "bfloat16")
            for g in (True, False)
        )


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"external_urls": ["10.0.0.7:30000"]}, "not of the form http://host:port"),
        ({"external_urls": ["https://10.0.0.7:30000"]}, "not of the form http://host:port"),
        ({"external_urls": ["http://10.0.0.7"]}, "not of the form http://host:port"),
        ({"external_urls": ["http://10.0.0.7:30000/v1"]}, "not of the form http://host:port"),
        ({"external_urls": ["http://a:1", "http://a:1"]}, "given twice"),
        (
            {"external_urls": ["http://a:1"], "sync": {"transport": "ipc"}},
            "sync.transport=ipc with external_urls",
        ),
        ({"external_urls": ["http://a:1"], "num_engines": 2}, "num_engines=2 with external_urls"),
        ({"server_args": {"api_key": "1"}}, "rollout.api_key_variable"),
    ],
)
def test_engines_elsewhere_given_by_address_and_share_nothing(values: dict, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        RolloutConfig(**values)


def test_a_key_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RolloutConfig(external_urls=("http://[::1]:30000",), api_key_variable="VAPO_NO_KEY")
    monkeypatch.delenv("VAPO_NO_KEY", raising=False)
    with pytest.raises(BadInput) as refused:
        config.api_key()
    assert str(refused.value) == (
        "rollout.api_key_variable=VAPO_NO_KEY: the environment has no such variable: export it, "
        "with the same value for the engines and the trainer"
    )
    monkeypatch.setenv("VAPO_NO_KEY", "k")
    assert config.api_key() == "k"


@pytest.mark.parametrize(
    "name",
    [
        "nnodes",
        "node_rank",
        "dist_init_addr",
        "dp_size",
        "pp_size",
        "enable_eplb",
        "tensor_parallel_size",
    ],
)
def test_sizes_that_no_weight_sync_knows_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"server_args\.{name} is set by the trainer"):
        RolloutConfig(server_args={name: 2})


def test_a_size_that_the_trainer_reads_has_one_name() -> None:
    assert RolloutConfig(tp=2, server_args={"ep_size": 2}).experts_on == 2
    with pytest.raises(ValueError, match=r"server_args\.ep: write ep_size"):
        RolloutConfig(tp=2, server_args={"ep": 2})


@pytest.mark.parametrize(("tp", "fits"), [(1, True), (4, True), (3, False), (16, False)])
def test_an_engine_has_a_part_of_a_node(tp: int, fits: bool) -> None:
    if fits:
        return check_engine_size(RolloutConfig(tp=tp), 8)
    with pytest.raises(BadInput, match=rf"rollout\.tp={tp} does not divide the 8 GPUs of a node"):
        check_engine_size(RolloutConfig(tp=tp), 8)
