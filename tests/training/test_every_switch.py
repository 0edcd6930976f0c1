"""Every key under algorithm, value_pretraining and critic has a test that fails when the key is ignored."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from test_step_switches import CASES, CUTS, OLD_LOGPROBS

from vapo_megatron.config.train import TrainConfig

TESTS = Path(__file__).parents[1]
STEP = "training/test_step_switches.py::test_weights_are_those_of_the_formula_and_of_no_other"
CUT = "training/test_step_switches.py::test_a_rollout_is_cut_into_the_steps_that_were_asked_for"
COLLECT, PRETRAINING = "training/test_collect_switches.py::test_", "training/test_value_pretraining_switches.py::test_"
CRITIC = "training/test_critic_switches.py::test_"
ADAMW = CRITIC + "the_critics_optimizer_is_the_one_that_was_asked_for"
LAYOUT = CRITIC + "a_layout_cuts_the_critic_and_changes_no_value"
OVERLAP, PRECISION = "megatron/test_overlap.py::test_overlap_changes_no_bit", "megatron/test_precision.py::test_"
RECOMPUTE, FP8 = PRECISION + "recomputation_reaches_megatron", CRITIC + "fp8_switches_reach_megatron"

TABLE: dict[str, str] = {case.key: STEP for case in CASES} | {
    "algorithm.update.minibatch_size": CUT,
    "algorithm.update.minibatches": CUT,
    "algorithm.update.minibatch_unit": CUT,
    "algorithm.update.epochs": CUT,
    "algorithm.update.critic_updates_per_policy_update": CUT,
    "algorithm.update.old_logprobs": "training/test_step_switches.py::"
    "test_old_logprobs_of_the_only_update_are_not_scored_unless_asked_for",
    "algorithm.kl.replace_reference_every": "training/test_reference_and_values.py::"
    "test_the_policy_of_every_nth_step_is_the_reference",
    "algorithm.dynamic_sampling.enabled": COLLECT + "dynamic_sampling_keeps_informative_groups_alone",
    "algorithm.dynamic_sampling.oversampling": COLLECT
    + "groups_are_refilled_one_by_one_and_what_is_too_much_goes_back",
    "algorithm.dynamic_sampling.max_rounds": COLLECT + "after_max_rounds_other_groups_fill_the_batch",
    "value_pretraining.enabled": PRETRAINING + "it_can_be_switched_off",
    "value_pretraining.steps": PRETRAINING + "steps_bound_the_replay",
    "value_pretraining.iterations": PRETRAINING
    + "iterations_are_rollouts_and_each_response_of_them_is_read_or_held_out",
    "value_pretraining.replay_epochs": PRETRAINING + "replay_epochs_read_every_response_so_often_in_other_orders",
    "value_pretraining.minibatch_size": PRETRAINING + "minibatch_size_is_in_samples",
    "value_pretraining.stop_explained_variance": PRETRAINING
    + "it_stops_at_the_first_measurement_that_reaches_every_stop",
    "value_pretraining.stop_bias": PRETRAINING + "it_stops_at_the_first_measurement_that_reaches_every_stop",
    "critic.init": CRITIC + "a_critic_starts_from_where_it_is_told",
    "critic.init_path": CRITIC + "a_critic_starts_from_where_it_is_told",
    "critic.model_path": "training/test_smaller_critic.py::test_a_smaller_critic_learns_and_is_exported",
    "critic.head_init_std": CRITIC + "a_critic_starts_from_where_it_is_told",
    "critic.freeze_attention": CRITIC + "frozen_attention_alone_stands_still",
    "critic.max_tokens_per_microbatch": CRITIC + "microbatches_hold_no_more_tokens_than_they_may",
    "critic.offload": CRITIC + "offload_says_whether_the_critic_makes_room",
    **{f"critic.layout.{key}": LAYOUT for key in ("tp", "pp", "vpp", "cp", "sequence_parallel")},
    "critic.layout.ep": "megatron/test_moe.py::test_experts_train_as_in_transformers",
    **{
        f"critic.optimizer.{key}": ADAMW
        for key in ("lr", "warmup_steps", "warmup_unit", "decay", "decay_steps", "min_lr", "weight_decay", "beta1")
    },
    **{f"critic.optimizer.{key}": ADAMW for key in ("beta2", "eps", "clip_grad", "distributed")},
    **{
        f"critic.optimizer.{key}": OVERLAP for key in ("overlap_grad_reduce", "overlap_param_gather", "bucket_elements")
    },
    **{f"critic.recompute.{key}": RECOMPUTE for key in ("granularity", "modules", "method", "layers")},
    "critic.precision.dtype": PRECISION + "a_critic_has_a_precision_of_its_own",
    **{f"critic.precision.{key}": FP8 for key in ("fp8", "fp8_format", "first_layers_bf16", "last_layers_bf16")},
    "critic.precision.fp8_param_gather": FP8,
}


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Sections among the types that a field may have."""
    found = [annotation, *get_args(annotation)]
    return [kind for kind in found if isinstance(kind, type) and issubclass(kind, BaseModel)]


def keys_of(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    """Every key below a section by its dotted name, with its type."""
    for name, field in section.model_fields.items():
        below = sections_in(field.annotation)
        if below:
            yield from keys_of(below[0], f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}", field.annotation


KEYS = dict(
    key
    for name in ("algorithm", "value_pretraining", "critic")
    for key in keys_of(sections_in(TrainConfig.model_fields[name].annotation)[0], name)
)


def choices(annotation: Any) -> set[Any]:
    """The values that a type names one by one."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    if annotation is bool:
        return {True, False}
    return set().union(*(choices(kind) for kind in get_args(annotation))) if get_origin(annotation) is Union else set()


def test_every_key_has_its_test() -> None:
    assert set(KEYS) == set(TABLE), "a new switch wants a test through the trainer, named in TABLE"


@pytest.mark.parametrize("test", sorted(set(TABLE.values())))
def test_the_tests_that_are_named_exist(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((TESTS / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("key", sorted({case.key for case in CASES}))
def test_every_choice_of_a_switch_is_taken_once(key: str) -> None:
    wanted = choices(KEYS[key])
    taken = {case.value for case in CASES if case.key == key}
    defaults = {"algorithm.value_loss.bounded": {False}, "algorithm.value_loss.residual": {False}}
    assert wanted <= taken | defaults.get(key, set())


def test_cuts_and_old_logprobs_take_every_choice() -> None:
    assert choices(KEYS["algorithm.update.old_logprobs"]) == set(OLD_LOGPROBS)
    units = {switches.get("algorithm.update.minibatch_unit", "samples") for switches, *_ in CUTS.values()}
    assert choices(KEYS["algorithm.update.minibatch_unit"]) == units
