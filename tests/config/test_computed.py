"""What sections compute from their keys: sizes, names, models and where they start from."""

from pathlib import Path
from typing import Any

import pytest

from vapo_megatron.algorithms.registry import EstimatorTraits, LossTraits
from vapo_megatron.config.algorithm import AlgorithmConfig, ShapingConfig, UpdateConfig
from vapo_megatron.config.critic_probes import CriticPretrainingConfig
from vapo_megatron.config.data import EvalSet, PromptTemplate
from vapo_megatron.config.model import LayoutConfig, TrainableConfig, logits_rows
from vapo_megatron.config.policy import PolicyLossConfig
from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.config.run import CheckpointConfig, EvaluationConfig, HangsConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.config.value import ValueLossConfig, ValuePretrainingConfig

REQUIRED: dict[str, Any] = {
    "model": {"path": "policy"},
    "data": {"train": "t"},
    "sampling": {"max_new_tokens": 16},
}
KL = {"placement": "loss", "coef": 0.1, "estimator": "k2"}
GRPO = {"advantage": {"estimator": "grpo"}}
OFF = {"enabled": False}


def train(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate(REQUIRED | sections)


@pytest.mark.parametrize(
    ("update", "size", "updates"),
    [
        ({}, 512, 1),
        ({"minibatch_size": 30}, 30, 4),
        ({"minibatch_size": 25}, 25, 4),
        ({"minibatch_size": 24}, 24, 5),
        ({"minibatches": 3}, 34, 3),
        ({"minibatches": 3, "epochs": 2}, 34, 6),
        ({"minibatches": 3, "minibatch_unit": "groups"}, 4, 3),
        ({"minibatch_size": 4, "minibatch_unit": "groups"}, 4, 3),
        ({"minibatch_size": 5, "minibatch_unit": "groups", "epochs": 3}, 5, 6),
    ],
)
def test_a_rollout_is_split_into_minibatches(
    update: dict[str, Any], size: int, updates: int
) -> None:
    """100 samples in 10 groups."""
    config = UpdateConfig.model_validate(update)
    assert (config.size(100, 10), config.updates(100, 10)) == (size, updates)


@pytest.mark.parametrize(
    ("within", "samples", "ranks", "one_of"),
    [(None, 100, 1, 1), (0.1, 100, 1, 16), (0.1, 100, 8, 12), (0.1, 1, 1, 1), (0.1, 3, 8, 1)],
)
def test_every_rank_scores_a_sixteenth_and_at_least_one(
    within: float | None, samples: int, ranks: int, one_of: int
) -> None:
    assert UpdateConfig(rollout_logprobs_within=within).scored_of(samples, ranks) == one_of


@pytest.mark.parametrize(
    ("algorithm", "gives"),
    [
        ({}, True),
        ({"update": {"minibatch_size": 100}}, True),
        ({"update": {"minibatch_size": 99}}, False),
        ({"update": {"minibatch_size": 9, "minibatch_unit": "groups"}}, False),
        ({"update": {"minibatch_size": 10, "minibatch_unit": "groups"}}, True),
        ({"update": {"epochs": 2}}, False),
        ({"kl": KL}, True),
        ({"kl": KL | {"placement": "reward", "estimator": "k1"}}, False),
        ({"kl": KL | {"placement": "advantage", "estimator": "k1"}}, False),
        ({"importance_sampling": {"kind": "tis"}}, False),
        ({"advantage": {"function": "a:b"}}, False),
        ({"advantage": {"off_policy": "vtrace"}}, False),
        ({"filter_function": "a:b"}, False),
        ({"metrics_function": "a:b"}, False),
    ],
)
def test_one_update_gives_logprobs_unless_they_are_needed_before(
    algorithm: dict[str, Any], gives: bool
) -> None:
    config = AlgorithmConfig.model_validate(algorithm)
    assert config.update_gives_logprobs(100, 10) is gives


def test_a_function_of_the_user_has_no_traits() -> None:
    settings = {"estimator": "function", "function": "a:b"}
    config = AlgorithmConfig.model_validate({"advantage": settings})
    assert config.advantage.traits == EstimatorTraits() and not config.uses_critic
    loss = PolicyLossConfig.model_validate({"kind": "function", "function": "a:b"})
    assert loss.traits == LossTraits()
    assert PolicyLossConfig(kind="sao").traits.rollout_ratio
    assert not PolicyLossConfig().traits.rollout_ratio
    assert AlgorithmConfig().advantage.traits.critic


def test_a_reference_is_saved_only_if_it_changes() -> None:
    fixed = AlgorithmConfig.model_validate({"kl": KL})
    replaced = AlgorithmConfig.model_validate({"kl": KL | {"replace_reference_every": 5}})
    none = AlgorithmConfig()
    assert (none.uses_reference, none.saves_reference) == (False, False)
    assert (fixed.uses_reference, fixed.saves_reference) == (True, False)
    assert (replaced.uses_reference, replaced.saves_reference) == (True, True)


def test_only_some_ways_of_truncation_bootstrap() -> None:
    ways = ("terminal", "bootstrap", "window", "mask")
    assert [ShapingConfig(truncated=way).bootstraps for way in ways] == [False, True, True, False]


@pytest.mark.parametrize(
    ("settings", "world", "name"),
    [
        ({}, 1, "TP1 PP1 CP1 DP1"),
        ({"tp": 2, "pp": 2, "cp": 2, "ep": 1}, 24, "TP2 PP2 CP2 DP3"),
        (
            {"tp": 2, "pp": 2, "vpp": 3, "ep": 2, "sequence_parallel": True},
            8,
            "TP2 PP2 VPP3 CP1 DP2 EP2 SP",
        ),
    ],
)
def test_a_layout_is_described(settings: dict[str, Any], world: int, name: str) -> None:
    assert LayoutConfig.model_validate(settings).describe(world) == name


@pytest.mark.parametrize(
    ("layout", "fp8", "alignment", "total", "longest"),
    [
        ({}, "none", 1, 1, 1000),
        ({"cp": 3}, "none", 6, 6, 3000),
        ({"tp": 4}, "none", 1, 1, 1000),
        ({"tp": 3, "cp": 2, "sequence_parallel": True}, "none", 4, 12, 1992),
        ({"tp": 4, "sequence_parallel": True}, "tensorwise", 1, 64, 960),
        ({"cp": 3}, "tensorwise", 6, 48, 2976),
        ({}, "blockwise", 1, 128, 896),
    ],
)
def test_sequences_are_padded_to_what_a_layout_splits(
    layout: dict[str, Any], fp8: str, alignment: int, total: int, longest: int
) -> None:
    config = TrainableConfig.model_validate(
        {"layout": layout, "precision": {"fp8": fp8}, "max_tokens_per_microbatch": 1000}
    )
    assert config.layout.alignment == alignment
    assert (config.total_alignment, config.longest_sample) == (total, longest)
    if fp8 == "none":
        assert config.layout.total_alignment == total
        assert config.layout.longest_sample(1000) == longest
    assert LayoutConfig().longest_sample(999) == 999


@pytest.mark.parametrize(
    ("words", "rows"), [(1, 1 << 27), (1 << 20, 128), ((1 << 20) + 1, 127), (1 << 28, 1)]
)
def test_logits_of_a_few_rows_fit_512_mib(words: int, rows: int) -> None:
    assert logits_rows(words) == rows


def test_a_set_names_its_metrics() -> None:
    names = EvalSet(name="aime24", path=Path("p"), samples=32).metric_names
    assert names == [
        "evaluation/aime24_avg@32",
        "evaluation/aime24_pass@32",
        "evaluation/aime24_maj@32",
        "evaluation/aime24_response_length",
        "evaluation/aime24_truncated",
    ]


def test_a_problem_is_put_after_the_messages_of_its_row() -> None:
    plain = PromptTemplate(user_template="Q: {problem}?")
    asked = {"role": "user", "content": "Q: 1+1?"}
    assert plain.messages("1+1", []) == [asked]
    before = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert plain.messages("1+1", before) == [*before, asked]
    told = PromptTemplate(system_prompt="Think.", user_template="Q: {problem}?")
    system = {"role": "system", "content": "Think."}
    assert told.messages("1+1", []) == [system, asked]
    assert told.messages("1+1", before) == [system, *before, asked]
    own = [{"role": "system", "content": "Do not."}]
    assert told.messages("1+1", own) == [*own, asked]


@pytest.mark.parametrize(
    ("settings", "outputs", "bounded"),
    [
        ({}, 1, False),
        ({"kind": "clipped"}, 1, False),
        ({"kind": "hl_gauss"}, 51, True),
        ({"squash": "tanh"}, 1, True),
    ],
)
def test_only_bins_and_squashes_bound_values(
    settings: dict[str, Any], outputs: int, bounded: bool
) -> None:
    config = ValueLossConfig.model_validate(settings)
    assert (config.outputs, config.has_bounds) == (outputs, bounded)


def test_bins_reach_three_widths_beyond_the_returns() -> None:
    assert ValueLossConfig(kind="hl_gauss", bins=26, low=-1.0, high=3.0).support == (-1.6, 3.6)
    assert ValueLossConfig(kind="hl_gauss", bins=7, low=0.0, high=1.0).support == (-3.0, 4.0)


@pytest.mark.parametrize(
    ("settings", "most", "rollouts", "updates"),
    [
        ({}, 50, 58, 50),  # 50 x 512 of 7/8 x 512, rounded up
        ({"steps": 7}, 7, 8, 7),
        ({"iterations": 1}, None, 1, 1),
        ({"iterations": 8, "minibatch_size": 448}, None, 8, 8),
        ({"iterations": 8, "steps": 3}, 3, 8, 3),
        ({"from": ["old"]}, None, 0, 1),
        ({"from": ["old"], "steps": 9}, 9, 0, 9),
        ({"replay_epochs": 2, "minibatch_size": 448}, 50, 25, 50),
    ],
)
def test_value_pretraining_records_what_its_steps_need(
    settings: dict[str, Any], most: int | None, rollouts: int, updates: int
) -> None:
    """Rollouts of 512 samples, an eighth of which is held out."""
    config = ValuePretrainingConfig.model_validate(settings)
    assert config.most_steps == most
    assert (config.rollouts(512), config.updates(512)) == (rollouts, updates)


def test_heartbeats_are_twelve_a_minute_or_sixty_a_limit() -> None:
    beats = [HangsConfig(floor_s=seconds).heartbeat_s for seconds in (1800, 300, 240, 6)]
    assert beats == [5.0, 5.0, 4.0, 0.1]


def test_no_schedule_of_checkpoints_means_none() -> None:
    kinds = [(10, 30.0), (None, 30.0), (10, None), (None, None)]
    saves = [CheckpointConfig(every=every, every_minutes=m).saves for every, m in kinds]
    assert saves == [True, True, True, False]


def test_evaluations_sample_their_own_way() -> None:
    training = SamplingConfig(stop=("</answer>",), max_new_tokens=64)
    own = EvaluationConfig(temperature=0.6, top_p=0.9, top_k=20, max_new_tokens=32)
    assert own.sampling_beside(training) == SamplingConfig(
        temperature=0.6, top_p=0.9, top_k=20, stop=("</answer>",), max_new_tokens=32
    )
    assert EvaluationConfig().sampling_beside(training) == SamplingConfig(
        temperature=1.0, top_p=0.7, stop=("</answer>",), max_new_tokens=64
    )


def test_engines_for_a_checkpoint_read_it_and_keep_the_rest() -> None:
    quantized = RolloutConfig(
        load_format="dummy", quantization="fp8", router_replay=True, tp=2, context_length=99
    )
    assert quantized.reading_checkpoints() == RolloutConfig(tp=2, context_length=99)
    elsewhere = RolloutConfig(external_urls=("http://a:1",))
    assert elsewhere.reading_checkpoints() == RolloutConfig()


@pytest.mark.parametrize(
    ("argument", "parts"), [(None, 1), (1, 1), (2, 2), (4, 4), (3, 1), (0, 1), (-2, 1), ("2", 1)]
)
def test_a_server_is_split_by_what_divides_its_gpus(argument: Any, parts: int) -> None:
    def config(name: str) -> RolloutConfig:
        given = {} if argument is None else {name: argument}
        return RolloutConfig(tp=4, server_args=given)

    experts, attention = config("ep_size"), config("attn_dp_size")
    assert (experts.experts_on, experts.attention_parts) == (parts, 1)
    assert (attention.experts_on, attention.attention_parts) == (1, parts)


POLICY = ("model.path", Path("policy"))


@pytest.mark.parametrize(
    ("sections", "sources"),
    [
        ({}, {"actor": POLICY, "critic": POLICY}),
        ({"algorithm": GRPO, "value_pretraining": OFF}, {"actor": POLICY}),
        ({"critic": {"kind": "probe"}, "value_pretraining": OFF}, {"actor": POLICY}),
        (
            {"critic": {"model_path": "small"}},
            {"actor": POLICY, "critic": ("critic.model_path", Path("small"))},
        ),
        (
            {"critic": {"init": "reward_model", "init_path": "rm", "kind": "adapter"}},
            {"actor": POLICY, "critic": ("critic.init_path", Path("rm"))},
        ),
        ({"algorithm": {"kl": KL}}, {"actor": POLICY, "critic": POLICY, "reference": POLICY}),
        (
            {"algorithm": {"kl": KL}, "actor": {"kind": "adapter"}},
            {"actor": POLICY, "critic": POLICY},
        ),
        (
            {
                "algorithm": {"kl": KL | {"reference_path": "teacher"}},
                "actor": {"kind": "adapter"},
            },
            {
                "actor": POLICY,
                "critic": POLICY,
                "reference": ("algorithm.kl.reference_path", Path("teacher")),
            },
        ),
    ],
)
def test_each_model_starts_from_its_own_directory(
    sections: dict[str, Any], sources: dict[str, tuple[str, Path]]
) -> None:
    config = train(**sections)
    assert config.sources == sources
    assert config.has_reference_model == ("reference" in sources)


def test_models_have_sizes_and_layouts_of_their_own() -> None:
    config = train(
        actor={
            "layout": {"tp": 2, "pp": 2},
            "kind": "adapter",
            "recompute": {"granularity": "full"},
        },
        critic={"layout": {"cp": 3}},
        reference={"layout": {"pp": 4, "tp": 2}},
        algorithm={"kl": KL | {"reference_path": "teacher"}},
    )
    assert config.model_sizes == {"actor": 4, "critic": 3, "reference": 8}
    assert config.trainable("actor") == config.actor
    assert config.trainable("critic") == config.critic
    reference = config.trainable("reference")
    assert (reference.kind, reference.recompute.granularity) == ("model", "none")
    assert reference.layout == LayoutConfig(pp=4, tp=2)
    assert reference.optimizer == config.actor.optimizer
    beside = train(actor={"layout": {"tp": 2}}, algorithm={"kl": KL})
    assert beside.trainable("reference").layout == LayoutConfig(tp=2)


ADAPTER = {"kind": "adapter"}


@pytest.mark.parametrize(
    ("actor", "critic", "shared"),
    [
        (ADAPTER, ADAPTER, True),
        (ADAPTER, {}, False),
        ({}, ADAPTER, False),
        ({}, {}, False),
        (ADAPTER | {"layout": {"tp": 2}}, ADAPTER, False),
        (ADAPTER | {"precision": {"fp8": "blockwise"}}, ADAPTER, False),
        (ADAPTER, ADAPTER | {"model_path": "other"}, False),
        (ADAPTER, ADAPTER | {"model_path": "policy"}, True),
    ],
)
def test_adapters_on_the_same_shards_share_their_base(
    actor: dict[str, Any], critic: dict[str, Any], shared: bool
) -> None:
    assert train(actor=actor, critic=critic).shares_base is shared


@pytest.mark.parametrize(
    ("sections", "model", "probe", "reads"),
    [
        ({}, True, False, False),
        ({"critic": ADAPTER}, True, False, False),
        ({"critic": {"kind": "probe"}, "value_pretraining": OFF}, False, True, True),
        ({"critic": {"kind": "regression"}, "value_pretraining": OFF}, False, False, False),
        ({"algorithm": GRPO, "value_pretraining": OFF}, False, False, False),
    ],
)
def test_only_gae_has_a_critic_of_the_kind_that_is_chosen(
    sections: dict[str, Any], model: bool, probe: bool, reads: bool
) -> None:
    config = train(**sections)
    assert (config.has_critic_model, config.has_probe) == (model, probe)
    assert config.reads_policy_outputs is reads


@pytest.mark.parametrize(
    ("sections", "returns"),
    [
        ({}, (-1.0, 1.0)),
        ({"reward": {"correct": 2.0, "incorrect": 0.5}}, (0.5, 2.0)),
        ({"reward": {"correct": -2.0, "incorrect": 0.0}}, (-2.0, 0.0)),
        (
            {
                "reward": {"correct": 2.0, "incorrect": 0.5},
                "algorithm": {"advantage": {"gamma": 0.9}},
            },
            (0.0, 2.0),
        ),
        (
            {
                "reward": {"correct": -0.5, "incorrect": -2.0},
                "algorithm": {"advantage": {"gamma": 0.9}},
            },
            (-2.0, 0.0),
        ),
        (
            {"algorithm": {"shaping": {"soft_overlong": {"max_length": 4, "cache_length": 4}}}},
            (-2.0, 1.0),
        ),
        ({"data": {"train": {"a": {"reward": {"correct": 5}}, "b": 1}}}, (-1.0, 5.0)),
        ({"data": {"train": {"b": 1, "a": {"reward": {"incorrect": -5}}}}}, (-5.0, 1.0)),
        (
            {
                "reward": {"verifier": "function", "function": "a:b", "correct_above": 0},
            },
            None,
        ),
        (
            {"data": {"train": {"a": {"reward": {"verifier": "function", "function": "a:b"}}}}},
            None,
        ),
    ],
)
def test_returns_lie_between_the_rewards_of_all_files(
    sections: dict[str, Any], returns: tuple[float, float] | None
) -> None:
    assert train(**sections).return_range == returns


def test_windows_are_whole_responses_in_value_pretraining() -> None:
    whole = train()
    assert whole.pretraining_algorithm == whole.algorithm
    windows = train(rollout={"windows": 2}, algorithm={"shaping": {"truncated": "window"}})
    assert windows.pretraining_algorithm == AlgorithmConfig()
    assert windows.algorithm.shaping.truncated == "window"


def test_a_critic_may_be_updated_more_often() -> None:
    config = train(
        batch={"prompts_per_step": 32, "samples_per_prompt": 4},
        algorithm={
            "update": {
                "minibatch_size": 16,
                "minibatch_unit": "groups",
                "critic_updates_per_policy_update": 3,
                "epochs": 2,
            }
        },
    )
    assert config.samples == 128
    assert [config.updates_per_rollout(name) for name in ("actor", "critic")] == [4, 12]


def test_critic_pretraining_has_no_actor() -> None:
    config = CriticPretrainingConfig.model_validate(
        REQUIRED
        | {"critic": {"layout": {"tp": 2, "cp": 2}}, "value_pretraining": {"from": ["old"]}}
    )
    assert config.model_sizes == {"critic": 4}
