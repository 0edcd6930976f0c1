"""Plans as a whole: they add up, more tokens never need less, proposals fit, and the command says
so."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from called import exit_code_of
from plans import ROOT, model_dir, planned_config
from tiny_runs import make_model

from vapo_megatron import cli
from vapo_megatron.checks.sizes import check_probe_layer
from vapo_megatron.config.load import load_config
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.probe import ProbeHead
from vapo_megatron.models.registry import read_spec
from vapo_megatron.operations.plan.command import warnings
from vapo_megatron.operations.plan.plan import Plan, make_plan
from vapo_megatron.operations.plan.search import propose

SMALL = "qwen2.5-math-1.5b.derived.json"
LARGE = "qwen2.5-32b.json"
MIXTURE = "qwen3-30b-a3b.third-party-unsloth.json"
OFFLOADED = "offloaded weights and optimizers"
LONG = (
    "sampling.max_new_tokens=20480",
    "rollout.context_length=null",
    "batch.prompts_per_step=512",
    "batch.samples_per_prompt=16",
    "actor.max_tokens_per_microbatch=24576",
    "critic.max_tokens_per_microbatch=24576",
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.mktemp("small"), SMALL)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.mktemp("large"), LARGE)


def with_budget(config: PlanConfig, name: str, budget: int) -> PlanConfig:
    section = getattr(config, name).model_copy(update={"max_tokens_per_microbatch": budget})
    return config.model_copy(update={name: section})


def totals(plan: Plan) -> list[float]:
    return [phase.total for phase in plan.memory.phases]


def probe_of(small: Path, *overrides: str) -> PlanConfig:
    alone = ("critic.kind=probe", "critic.layout.tp=1", "critic.layout.sequence_parallel=false")
    return planned_config(small, "preset=vapo_direct", *alone, *overrides)


def test_plan_counts_weights_and_hidden_states_of_a_probe(small: Path) -> None:
    plan = make_plan(probe_of(small), 8)
    wide = make_plan(
        probe_of(small, "critic.probe.width=4096", "algorithm.value_loss.kind=hl_gauss"), 8
    )
    for each, head in ((plan, ProbeHead(1536, 256, 1)), (wide, ProbeHead(1536, 4096, 51))):
        # Of every weight in float32 itself, its gradient and two moments, never offloaded.
        held = 4 * 4 * sum(p.numel() for p in head.parameters())
        assert {phase.parts["probe"] for phase in each.memory.phases} == {held}
    assert "critic" not in plan.models and "update_critic" not in {
        phase.phase for phase in plan.memory.phases
    }
    scored = next(phase.parts for phase in plan.memory.phases if phase.phase == "score_policy")
    assert (
        scored["hidden states in passing"]
        == 2 * 4 * 1536 * plan.config.actor.max_tokens_per_microbatch
    )
    tokens = plan.config.samples * plan.lengths.sample  # of all ranks: they are on one node
    assert plan.memory.host.parts["hidden states"] == pytest.approx(2 * tokens * 1536 * 2)


def test_a_copy_of_what_engines_have_is_on_rank_0(small: Path) -> None:
    urls = ('rollout.external_urls=["http://10.0.0.7:30000"]', "rollout.api_key_variable=KEY")
    parts = [
        make_plan(
            planned_config(small, *urls, f"rollout.sync.only_changes={value}"), 8
        ).memory.host.parts
        for value in ("true", "false")
    ]
    assert parts[0].keys() - parts[1].keys() == {"weights as the engines have them"}
    assert parts[0]["weights as the engines have them"] == pytest.approx(1.54e9 * 2, rel=0.03)


def test_values_by_regression_take_no_memory(small: Path) -> None:
    free, none, scored = (
        make_plan(planned_config(small, "critic=null", *overrides, "actor.optimizer.lr=1e-6"), 8)
        for overrides in (
            ("preset=vapo_regression",),
            ("preset=vapo_without_critic",),
            ("preset=vapo_regression", "critic.regression.entropy=true"),
        )
    )
    assert "critic" not in free.models and totals(free) == totals(none)
    assert free.memory.host.parts == none.memory.host.parts
    one_update = "algorithm.update.minibatch_size=8192"
    phases = [
        {phase.phase for phase in make_plan(with_one_update, 8).memory.phases}
        for with_one_update in (
            planned_config(small, "critic=null", "preset=vapo_regression", one_update),
            planned_config(
                small,
                "critic=null",
                "preset=vapo_regression",
                one_update,
                "critic.regression.entropy=true",
            ),
        )
    ]
    assert phases[1] - phases[0] == {"score_policy"}, "entropies are of the pass before the update"
    assert totals(scored) == totals(free)


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        ("tp=1", (1, 28)),
        ("pp=2", (15, 28)),
        ("pp=4", (22, 28)),
        ("{pp: 2, vpp: 7}", (27, 28)),
        ("pp=3", (20, 28)),
        ("{pp: 4, vpp: 3}", (27, 28)),
    ],
)
def test_a_probe_reads_a_layer_of_the_last_stage_or_is_refused(
    small: Path, layout: str, layers: tuple[int, int]
) -> None:
    def check(layer: int) -> None:
        where = f"actor.layout={layout}" if "{" in layout else f"actor.layout.{layout}"
        check_probe_layer(probe_of(small, where, f"critic.probe.layer={layer}"), spec)

    spec = read_spec(small)
    first, last = layers
    check(first)
    check(last)
    for layer in (first - 1, last + 1):
        if layer:
            with pytest.raises(
                BadInput, match=rf"critic.probe.layer={layer}: expected {first} to {last}, [^\n]*$"
            ):
                check(layer)


# Every part that a phase does not need leaves the GPU.
MOVED = ("actor.offload=always", "critic.offload=always")


@pytest.mark.parametrize(
    "overrides", [(), ("algorithm.kl={placement: loss, estimator: k3, coef: 0.001}",)]
)
def test_a_plan_adds_up(small: Path, overrides: tuple[str, ...]) -> None:
    plan = make_plan(planned_config(small, *MOVED, *overrides), 8)
    pretraining = sum(plan.time.value_pretraining.values())
    assert pretraining > 0 and plan.seconds == pytest.approx(
        200 * sum(plan.time.phases.values()) + pretraining
    )
    assert plan.gpu_hours == pytest.approx(8 * plan.seconds / 3600)
    assert ("reference" in plan.models) == bool(overrides)
    # Gradients and optimizers are where a model is updated, all else sleeps.
    for phase in plan.memory.phases:
        held = {part for part in phase.parts if part.endswith((" gradients", " optimizer"))}
        updated = {"update_policy": "actor", "update_critic": "critic"}.get(phase.phase)
        assert held == ({f"{updated} gradients", f"{updated} optimizer"} if updated else set())


def test_shared_base_is_on_gpu_for_both_and_once_in_host_memory(
    small: Path, tmp_path: Path
) -> None:
    kinds = ("actor.kind=adapter", "critic.kind=adapter", "value_pretraining.enabled=false", *MOVED)
    copy = model_dir(tmp_path, SMALL)
    shared, apart = (
        make_plan(planned_config(small, *kinds, *more), 8).memory
        for more in ((), (f"critic.model_path={copy}",))
    )
    parts = {phase.phase: phase.parts for phase in shared.phases}
    of_model = parts["update_policy"]["actor weights"]
    assert (
        parts["update_critic"]["base weights"]
        > 0.6 * of_model
        > 10 * parts["update_critic"]["critic weights"]
    )
    assert "base weights" not in parts["update_policy"]
    for phase, other in zip(shared.phases, apart.phases, strict=True):
        assert phase.total == pytest.approx(other.total)
    saved = apart.host.parts[OFFLOADED] - shared.host.parts[OFFLOADED]
    assert saved == pytest.approx(8 * parts["update_critic"]["base weights"])


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("actor.recompute.granularity=full",),
        ("actor.layout={tp: 2, pp: 2, sequence_parallel: true}",),
        ("actor.layout={tp: 1, pp: 2, vpp: 2, sequence_parallel: false}",),
        ("actor.layout={tp: 1, cp: 2, sequence_parallel: false}", "model.attention=sdpa"),
    ],
)
def test_more_tokens_never_need_less(small: Path, changes: tuple[str, ...]) -> None:
    changes = (*changes, *MOVED)
    config = planned_config(small, *changes)
    found = [
        totals(make_plan(with_budget(config, "actor", budget), 8))
        for budget in range(2048, 40960, 2048)
    ]
    for less, more in itertools.pairwise(found):
        assert all(a <= b for a, b in zip(less, more, strict=True))
    longer = make_plan(
        planned_config(
            small, *changes, "sampling.max_new_tokens=2048", "rollout.context_length=4096"
        ),
        8,
    )
    assert all(a <= b for a, b in zip(totals(make_plan(config, 8)), totals(longer), strict=True))


@pytest.mark.parametrize(
    ("model", "world", "overrides"),
    [
        (SMALL, 8, ()),
        (SMALL, 1, ()),
        pytest.param(LARGE, 128, LONG, marks=pytest.mark.full),
        pytest.param(LARGE, 32, LONG, marks=pytest.mark.full),
        (MIXTURE, 32, LONG),
    ],
)
def test_a_proposal_fits_and_is_no_slower(
    tmp_path: Path, model: str, world: int, overrides: tuple[str, ...]
) -> None:
    layouts = (
        "actor.layout={tp: 1, sequence_parallel: false}",
        "critic.layout={tp: 1, sequence_parallel: false}",
    )
    config = planned_config(model_dir(tmp_path, model), *layouts, *overrides)
    given = make_plan(config, world)
    proposals = propose(given)
    assert 1 <= len(proposals) <= 3 and all(found.plan.fits for found in proposals)
    seconds = [found.plan.seconds for found in proposals]
    assert seconds == sorted(seconds)
    if given.fits:
        assert seconds[0] <= given.seconds
    # What it tells to change, and nothing else, makes the plan.
    best = proposals[0]
    again = planned_config(
        tmp_path, *layouts, *overrides, *(f"{k}={v}" for k, v in best.changes.items())
    )
    assert make_plan(again, world).time.step == pytest.approx(best.plan.time.step)


def test_more_gpus_do_not_take_longer(large: Path) -> None:
    best = [propose(make_plan(planned_config(large, *LONG), world))[0] for world in (32, 64, 128)]
    seconds = [found.plan.time.step for found in best]
    assert seconds == sorted(seconds, reverse=True)


def test_refusal_of_a_32b_model_names_a_config_that_fits(
    large: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    example = str(ROOT / "examples" / "gsm8k" / "vapo.yaml")
    command = ["plan", example, f"model.path={large}", *LONG, "--nodes", "16"]
    assert exit_code_of(*command) == 2
    said = capfd.readouterr()
    assert len(said.err.splitlines()) == 1 and "does not fit 128 x h100-80g" in said.err
    proposed = said.err.strip().partition(": try ")[2].split()
    assert proposed
    code = exit_code_of(*command, *proposed)
    said = capfd.readouterr()
    assert code == 0, said.err
    assert "GPU-hours" in said.out and "Assumed" in said.out


def test_json_says_what_does_not_fit_and_what_would(
    small: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    example = ROOT / "examples" / "gsm8k" / "vapo.yaml"
    given = [f"model.path={small}", "actor.layout.tp=1", "critic.layout.tp=1"]
    given += ["actor.layout.sequence_parallel=false", "critic.layout.sequence_parallel=false"]
    short = [*given, "hardware.node_memory_gib=40"]
    assert exit_code_of("plan", example, *short, "--gpus", "1", "--json") == 2
    refused = capfd.readouterr()
    plan = json.loads(refused.out)
    assert plan["fits"] is False and plan["gpus"] == 1
    assert plan["problems"][0] in refused.err and len(refused.err.splitlines()) == 1
    proposal = plan["proposals"][0]
    changes = [f"{key}={value}" for key, value in proposal["changes"].items()]
    better = make_plan(load_config(PlanConfig, example, [*short, *changes], cli.PRESETS), 1)
    assert better.fits and better.time.step == pytest.approx(proposal["step_seconds"])
    assert better.memory.worst.total == proposal["worst_gpu_bytes"]


def test_json_of_a_plan_that_fits_adds_up(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    example = ROOT / "examples" / "gsm8k" / "vapo.yaml"
    shorter = ("sampling.max_new_tokens=1000", "rollout.context_length=null")
    command = ["plan", example, f"model.path={small}", *shorter, "--gpus", "2", "--json"]
    assert exit_code_of(*command, "--simulate") == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["fits"] is True and plan["problems"] == []
    seconds = plan["seconds"]
    assert seconds["step"] == pytest.approx(sum(seconds["phases"].values()))
    for phase in plan["memory"]["phases"]:
        assert phase["total"] == pytest.approx(sum(phase["parts"].values()))
        assert phase["total"] <= plan["memory"]["usable_bytes_per_gpu"]
    assert all(mode["step"] > 0 for mode in plan["simulation"]) and plan["simulation"]
    assert plan["assumptions"]
    # Weights, masters and moments of actor and critic, of two checkpoints and a third that is being
    # written; the export in bfloat16.
    assert plan["disk_bytes"] == pytest.approx(3 * 2 * 14 * 1.54e9 + 2 * 1.54e9, rel=0.05)


@pytest.mark.parametrize(
    ("short", "kinds"),
    [
        ("hardware.node_memory_gib=120", {"critic.kind=adapter"}),
        ("hardware.device_memory_gib=40", {"actor.kind=adapter", "critic.kind=adapter"}),
    ],
)
def test_adapters_are_proposed_where_no_full_layout_fits(
    capfd: pytest.CaptureFixture[str], short: str, kinds: set[str]
) -> None:
    """The critic's alone if that is enough; the model's sizes are those that the package has."""
    layouts = (
        "actor.layout={tp: 1, sequence_parallel: false}",
        "critic.layout={tp: 1, sequence_parallel: false}",
    )
    given = ["model.path=models/Qwen2.5-1.5B", *layouts, short]
    example = ROOT / "examples" / "gsm8k" / "vapo.yaml"
    assert exit_code_of("plan", str(example), *given, "--gpus", "1") == 2
    output = capfd.readouterr()
    assert (
        len(output.err.splitlines()) == 1
        and "no layout of 1 GPUs was found to fit but with adapters: try " in output.err
    )
    proposed = output.err.strip().partition(": try ")[2].split()
    assert {word for word in proposed if ".kind=" in word} == kinds
    assert make_plan(load_config(PlanConfig, example, [*given, *proposed], cli.PRESETS), 1).fits


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("rollout.tp=3", "rollout.tp=3"),
        ("actor.layout.tp=8", "actor.layout.tp=8"),
        ("plan.mean_response_tokens=5000", "plan.mean_response_tokens=5000"),
        ("hardware.kind=h100", "hardware.kind"),
        ("plan.gpus=12", "12 GPUs"),
        ("model.path=absent", "|Qwen2.5-32B|"),
    ],
)
def test_what_cannot_be_planned_is_named(
    small: Path, capfd: pytest.CaptureFixture[str], override: str, named: str
) -> None:
    example = str(ROOT / "examples" / "gsm8k" / "vapo.yaml")
    code = exit_code_of("plan", example, f"model.path={small}", override)
    lines = capfd.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1 and named in lines[0]


def test_a_rollout_that_would_be_given_up_is_warned_of(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from vapo_megatron.operations.plan.command import plan_run

    separate = ("rollout.tp=2", "rollout.server_args={attn_dp_size: 2}")
    plan_run(planned_config(small, "rollout.collect_timeout_s=1", *separate), 8, None)
    output = capsys.readouterr().out
    assert "is given up if nothing arrives for rollout.collect_timeout_s=1: raise it" in output
    assert "attn_dp_size is not counted" in output


def test_more_responses_than_the_cache_holds_is_a_warning(small: Path) -> None:
    def said(*overrides: str) -> list[str]:
        plan = make_plan(planned_config(small, *overrides), 8)
        return [line for line in warnings(plan) if "max_running_requests" in line]

    assert not said()
    tight = ("rollout.max_total_tokens=20000", "batch.samples_per_prompt=64")
    (line,) = said(*tight)
    room = make_plan(planned_config(small, *tight), 8)
    assert (
        f"room for {20000 / room.lengths.running:.0f} responses" in line
        and "mem_fraction_static" in line
    )
    assert not said(*tight, f"rollout.max_running_requests={int(20000 / room.lengths.running)}")
    assert not said("rollout.max_total_tokens=20000", "batch.prompts_per_step=1"), (
        "an engine gets no more than it holds"
    )


def test_efficiencies_are_the_configs(small: Path) -> None:
    given = make_plan(planned_config(small), 8)
    slower = make_plan(
        planned_config(small, "hardware.efficiency={linear: 0.225, attention: 0.175}"), 8
    )
    assert slower.time.phases["update_policy"] > 1.7 * given.time.phases["update_policy"]
    less_memory = make_plan(planned_config(small, "hardware.device_memory_gib=20"), 8)
    assert not less_memory.fits


def test_a_plan_imports_no_megatron() -> None:
    """That takes five seconds, and a plan two."""
    program = (
        "import sys\nimport vapo_megatron.operations.plan.command, "
        "vapo_megatron.operations.plan.rollout_modes\n"
        "print([name for name in ('megatron', 'transformers', 'sglang') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", ["quickstart/vapo", "gsm8k/vapo", "ablation/train"])
def test_examples_can_be_planned(name: str, tmp_path: Path) -> None:
    model = model_dir(tmp_path, SMALL) if name == "gsm8k/vapo" else make_model(tmp_path)
    path = ROOT / "examples" / f"{name}.yaml"
    # What the ablation's rows and settings give.
    given = ["preset=vapo", "sampling.max_new_tokens=64"] if name == "ablation/train" else []
    settings = load_config(PlanConfig, path, [f"model.path={model}", *given], cli.PRESETS)
    plan = make_plan(settings, settings.cluster.ranks or 8)
    assert plan.fits, plan.memory.problems


def test_the_adapter_example_trains_a_7b_model_on_two_gpus() -> None:
    """As docs/lora.md promises; the model's sizes are those that the package has."""
    path = ROOT / "examples" / "gsm8k" / "vapo_lora.yaml"
    settings = load_config(PlanConfig, path, ["model.path=models/Qwen2.5-7B"], cli.PRESETS)
    plan = make_plan(settings, 2)
    assert plan.models["actor"].spec.parameter_count() > 7e9 and plan.hardware.kind == "h100-80g"
    assert plan.fits, plan.memory.problems
    assert {name for name, model in plan.models.items() if model.adapter} == {"actor", "critic"}
