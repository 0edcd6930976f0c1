"""What a plan's seconds are made of: grading, drawn prompts, unequal engines, precision, measured
efficiencies."""

import json
from pathlib import Path

import pytest
from hf_models import write_model
from plans import ROOT
from safetensors import safe_open

from vapo_megatron.checkpoint.sizes import checkpoint_bytes
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.algorithm import DynamicSamplingConfig
from vapo_megatron.config.load import load_config
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.models.registry import read_spec
from vapo_megatron.operations.plan.inputs import GIB, SHIPPED, Lengths
from vapo_megatron.operations.plan.plan import Plan, _tensors, make_plan
from vapo_megatron.operations.plan.rollout import drawn_prompts, imbalance
from vapo_megatron.weights.mapping import entries


def plan(*overrides: str, example: str = "aime_qwen2.5_32b/vapo.yaml", world: int = 128) -> Plan:
    return make_plan(
        load_config(PlanConfig, ROOT / "examples" / example, [*overrides], PRESETS), world
    )


@pytest.mark.parametrize(
    ("share", "oversampling", "most", "drawn"),
    [(0.5, 3.0, 10, 300), (0.2, 3.0, 10, 500), (0.2, 1.0, 2, 200), (1.0, 1.0, 10, 100)],
)
def test_prompts_are_drawn_until_enough_groups_are_informative(
    share: float, oversampling: float, most: int, drawn: float
) -> None:
    settings = DynamicSamplingConfig(oversampling=oversampling, max_rounds=most)
    assert drawn_prompts(100, settings, share) == pytest.approx(drawn)
    assert drawn_prompts(100, DynamicSamplingConfig(), share) == 100


def test_dynamic_sampling_pays_for_what_it_drops() -> None:
    phases = plan(example="aime_qwen2.5_32b/dapo.yaml").time.phases
    without = plan(
        "algorithm.dynamic_sampling.max_rounds=null", example="aime_qwen2.5_32b/dapo.yaml"
    ).time.phases
    assert phases["rollout"] > 2 * without["rollout"]
    assert phases["verify"] == without["verify"], "of the last group"
    assert phases["update_policy"] == without["update_policy"]
    assert phases["rollout"] / sum(phases.values()) > 0.65


def test_every_update_of_the_critic_and_every_epoch_is_counted() -> None:
    once = plan().time.phases
    thrice = plan("algorithm.update.critic_updates_per_policy_update=3").time.phases
    twice = plan("algorithm.update.epochs=2").time.phases
    assert thrice["update_critic"] == pytest.approx(3 * once["update_critic"])
    assert thrice["update_policy"] == once["update_policy"]
    for phase in ("update_critic", "update_policy"):
        assert twice[phase] == pytest.approx(2 * once[phase])


def test_grading_costs_what_generation_does_not_hide() -> None:
    free, fast, slow = (plan(f"plan.grade_seconds={seconds}") for seconds in (0, 0.4, 400))
    assert fast.time.step - free.time.step == pytest.approx(16 * 0.4 / 32), "the last group"
    graded = 512 * 16 * 400 / 32
    assert slow.time.phases["rollout"] + slow.time.phases["verify"] == pytest.approx(graded), (
        "workers cannot keep up"
    )


def test_more_engines_differ_more() -> None:
    lengths = Lengths(prompt=100.0, mean=1000.0, longest=4000, longest_prompt=200)
    assert imbalance(1, 64, 1024, lengths) == 1
    assert 1 < imbalance(2, 64, 1024, lengths) < imbalance(16, 64, 1024, lengths)
    equal = Lengths(prompt=100.0, mean=4000.0, longest=4000, longest_prompt=200)
    assert imbalance(16, 64, 1024, equal) == pytest.approx(1)


def test_engines_hold_weights_in_their_own_precision() -> None:
    fp8 = ("rollout.quantization=fp8", "rollout.load_format=dummy")
    half = plan(*fp8).memory.engine.weights / plan().memory.engine.weights
    # 1.56e9 of 32.8e9 parameters are embedding and head, which stay in bf16.
    assert half == pytest.approx((31.2 * 1.0002 + 1.557 * 2) / (32.76 * 2), rel=1e-3)
    assert plan(*fp8).time.phases["rollout"] < plan().time.phases["rollout"]


def test_log_probs_of_engines_leave_a_sixteenth_of_the_pass() -> None:
    within = "algorithm.update.rollout_logprobs_within=0.001"
    scored, spared = plan().time.phases, plan(within).time.phases
    assert spared["score_policy"] < scored["score_policy"] / 10
    others = {name: seconds for name, seconds in scored.items() if name != "score_policy"}
    assert {name: spared[name] for name in others} == others


EXTERNAL = tuple(f"http://10.0.0.{number}:30000" for number in range(6))


def test_engines_elsewhere_work_ahead_of_the_trainer() -> None:
    urls = f"rollout.external_urls=[{','.join(EXTERNAL)}]"
    apart = plan(urls, world=80)
    corrected = ("rollout.asynchronous.max_staleness=1", "algorithm.importance_sampling.kind=tis")
    ahead = plan(urls, *corrected, world=80)
    assert (
        apart.engines == 6
        and apart.time.phases["update_policy"] == ahead.time.phases["update_policy"]
    )
    training = sum(seconds for name, seconds in ahead.time.phases.items() if name != "rollout")
    generated = apart.time.phases["rollout"] + apart.time.phases["verify"]
    assert ahead.time.step == pytest.approx(max(training, generated))
    assert all(
        "KV cache" not in phase.parts and "engine weights" not in phase.parts
        for phase in apart.memory.phases
    )
    assert apart.memory.engine.cache_tokens > plan(world=80).memory.engine.cache_tokens, (
        "all of their own GPUs"
    )
    assert apart.gpu_hours == pytest.approx(
        (80 + 6 * apart.config.rollout.tp) * apart.seconds / 3600
    )


def test_buckets_of_weights_cost_their_requests() -> None:
    few, many = (
        plan(f"rollout.sync.bucket_mib={size}").time.phases["weight_sync"] for size in (2048, 256)
    )
    buckets = 2 * 32.76e9 / 2**20
    assert many - few == pytest.approx(0.0065 * (buckets / 256 - buckets / 2048), rel=0.01)


def test_an_engine_of_the_trainers_tp_saves_the_gather_of_shares() -> None:
    """TP 8, one stage: nothing but the replicated rest of the model moves, and each GPU writes an
    eighth."""
    own, gathered = (plan(f"rollout.sync.gather={gather}") for gather in ("auto", "always"))
    assert own.config.rollout.tp == own.config.actor.layout.tp == 8
    size = 2 * 32.76e9
    hardware = own.hardware
    saved = size * 7 / 8 / hardware.link(8)
    saved += 2 * size * 7 / 8 / (hardware.memory_rate * hardware.efficiency.memory)
    less = gathered.time.phases["weight_sync"] - own.time.phases["weight_sync"]
    assert less == pytest.approx(saved, rel=0.01)


@pytest.mark.parametrize(
    ("example", "settings", "saves"),
    [
        ("qwen3.5_27b", (), True),
        ("deepseek_v3", ("rollout.nodes=1", "rollout.tp=8"), False),
    ],
)
def test_latent_attention_is_sent_whole_tensors(
    example: str, settings: tuple[str, ...], saves: bool
) -> None:
    own, gathered = (
        plan(
            f"rollout.sync.gather={gather}",
            *settings,
            example=f"{example}/vapo.yaml",
            world=2048,
        ).time.phases["weight_sync"]
        for gather in ("auto", "always")
    )
    assert (own < 0.5 * gathered) == saves
    assert (own == gathered) != saves


@pytest.mark.parametrize(
    "settings",
    [
        ("rollout.tp=4",),
        ("rollout.quantization=fp8", "rollout.load_format=dummy"),
        ("rollout.sync.transport=shared_memory",),
    ],
)
def test_other_engines_are_sent_whole_tensors(settings: tuple[str, ...]) -> None:
    seconds = {
        plan(*settings, f"rollout.sync.gather={gather}").time.phases["weight_sync"]
        for gather in ("auto", "always")
    }
    assert len(seconds) == 1


def test_every_tensor_of_a_weight_sync_costs_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    example = "glm_4.5_air/vapo.yaml"
    measured = plan(example=example, world=256)
    monkeypatch.setattr("vapo_megatron.operations.plan.plan._TENSOR_SECONDS", 3.3e-6 + 1.0)
    slower = plan(example=example, world=256)
    more = slower.time.phases["weight_sync"] - measured.time.phases["weight_sync"]
    spec = measured.models["actor"].spec
    assert spec.num_experts == 128
    assert more == pytest.approx(sum(len(entry.hf) for entry in entries(spec, "lm")))


@pytest.mark.parametrize("family", ["qwen2", "glm4_moe", "gpt_oss"])
def test_tensors_are_those_of_the_file(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path / "model", family)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert _tensors(read_spec(folder)) == len(names)


def test_buckets_of_weights_are_as_large_as_memory_allows() -> None:
    chosen = plan()
    sync = next(phase for phase in chosen.memory.phases if phase.phase == "weight_sync")
    assert chosen.memory.bucket == 4 << 30
    assert sync.parts["weight sync buffers"] == pytest.approx(2.125 * (4 << 30))
    full = plan("hardware.device_memory_gib=40")
    sync = next(phase for phase in full.memory.phases if phase.phase == "weight_sync")
    beside = sync.total - sync.parts["weight sync buffers"]
    free = full.hardware.usable_memory - beside
    assert full.memory.bucket < 4 << 30
    assert free / 8 - (64 << 20) < full.memory.bucket <= free / 8
    apart = plan("rollout.external_urls=[http://127.0.0.1:1]")
    assert apart.memory.bucket == 512 << 20


def test_an_engine_is_on_one_node() -> None:
    with pytest.raises(BadInput, match=r"rollout\.tp=16 does not divide the 8 GPUs of a node"):
        plan("rollout.tp=16")


def test_670b_in_fp8_leave_an_engine_of_one_node_no_cache(tmp_path: Path) -> None:
    """As many experts of as many layers as DeepSeek-V3 has, with the attention of Qwen3."""
    shape = json.loads((SHIPPED / "Qwen3-30B-A3B" / "config.json").read_text()) | {
        "hidden_size": 7168,
        "num_hidden_layers": 58,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "num_experts": 256,
        "moe_intermediate_size": 2048,
        "vocab_size": 129280,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    settings = (
        f"model.path={tmp_path}",
        "cluster.ranks=null",
        "actor.layout={tp: 8, pp: 2, ep: 64, cp: 2, sequence_parallel: true}",
        "actor.recompute.granularity=full",
        "rollout.quantization=fp8",
        "rollout.load_format=dummy",
    )
    made = plan(*settings, "rollout.tp=8", example="aime_qwen2.5_32b/grpo.yaml", world=256)
    assert made.models["actor"].spec.parameter_count() == pytest.approx(670e9, rel=0.01)
    assert made.memory.engine.weights == pytest.approx(78.2 * GIB, rel=0.01)
    assert any("KV cache of 0 tokens" in problem for problem in made.memory.problems)


def test_a_reference_that_is_replaced_is_part_of_a_checkpoint() -> None:
    kl = "algorithm.kl={{placement: loss, estimator: k3, coef: 0.001, replace_reference_every: {}}}"
    kept, replaced = (plan(kl.format(every)) for every in ("null", 100))
    weights = 2 * replaced.models["actor"].spec.parameter_count()
    parts = [
        made.memory.host.parts["copy of the state that is being saved"] for made in (kept, replaced)
    ]
    assert parts[1] - parts[0] == pytest.approx(weights * 8 / 128, rel=1e-3), (
        "what the eight ranks of a node save of it"
    )
    sizes = {name: replaced.models[name].spec.parameter_count() for name in ("actor", "critic")}
    assert (
        checkpoint_bytes(replaced.config, sizes) - checkpoint_bytes(kept.config, sizes) == weights
    )


def test_experts_and_running_responses_have_rates_of_their_own() -> None:
    mixture = (
        "model.path=Qwen3-30B-A3B",
        "actor.layout={tp: 1, ep: 8, sequence_parallel: false}",
        "rollout.tp=2",
    )
    fast, slow = (
        plan(
            *mixture, f"hardware.efficiency.experts={share}", example="aime_qwen2.5_32b/grpo.yaml"
        ).time.phases
        for share in (0.2, 0.1)
    )
    assert (
        1.4 < slow["score_policy"] / fast["score_policy"] < 2 and slow["rollout"] == fast["rollout"]
    )
    assert plan("hardware.efficiency.experts=0.1").time == plan().time, "a dense model has none"
    free, slowed = (
        plan(f"hardware.efficiency.request_overhead={seconds}") for seconds in (0, 1e-4)
    )
    uneven = imbalance(free.engines, 512, 512 * 16, free.lengths)
    tokens = 512 * 16 / free.engines * uneven * free.lengths.mean
    assert slowed.time.phases["rollout"] - free.time.phases["rollout"] == pytest.approx(
        tokens * 1e-4, rel=0.01
    )
