"""The critic from a policy, from a reward model and from a value model of our own; and out
again."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from family_table import FAMILIES
from hf_models import VOCAB, forward, megatron, read_tensors, write_model, write_tensors
from matrices import others_in_full
from ranks import run_ranks

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.models.registry import read_spec
from vapo_megatron.weights.export import save_hf
from vapo_megatron.weights.load import load_hf

IDS = torch.randint(0, VOCAB, (20,), generator=torch.Generator().manual_seed(3))


def head_of(
    layout: LayoutConfig, source: Path, options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Weight and bias of the value head, on the ranks that have one."""
    spec = read_spec(source)
    chunks, mesh = megatron(spec, layout, "value")
    torch.manual_seed(torch.distributed.get_rank())
    load_hf(chunks, spec, source, mesh, "value", **options)
    assert all(parameter.isfinite().all() for chunk in chunks for parameter in chunk.parameters())
    if not mesh.is_last_stage:
        return None
    head = chunks[-1].output_layer
    return head.weight.detach().numpy(), head.bias.detach().numpy()


def values(source: Path, value_head: str) -> np.ndarray:
    spec = read_spec(source)
    (chunk,), mesh = megatron(spec, LayoutConfig(), "value")
    load_hf([chunk], spec, source, mesh, "value", value_head=value_head)  # type: ignore[arg-type]
    return forward(chunk, IDS)[:, 0].numpy()


@pytest.mark.parametrize("tied", [False, True])
def test_new_head_is_zero_or_the_same_noise_on_every_rank(tmp_path: Path, tied: bool) -> None:
    policy = write_model(tmp_path / "policy", "qwen2", tie_word_embeddings=tied)
    layout = LayoutConfig(tp=2, pp=2)
    heads = [head for head in run_ranks(4, head_of, layout, policy, {}) if head is not None]
    assert len(heads) == 2
    assert all(not weight.any() and not bias.any() for weight, bias in heads)
    noisy = {"head_init_std": 0.02, "seed": 7}
    heads = [head for head in run_ranks(4, head_of, layout, policy, noisy) if head is not None]
    assert np.array_equal(heads[0][0], heads[1][0])
    assert 0.01 < heads[0][0].std() < 0.03
    assert not heads[0][1].any()


# Each kind of attention, and experts or none: a head comes behind the backbone of the policy, which
# test_logits.py and test_convert.py compare with transformers for every family.
REWARD_MODELS = (
    "qwen2",
    "granite",
    "gemma3_text",
    "gpt_oss",
    "glm4_moe",
    "deepseek_v3",
    "qwen3_5_moe_text",
)


@pytest.mark.parametrize("family", others_in_full(sorted(FAMILIES), REWARD_MODELS))
def test_a_reward_model_gives_its_own_scores(tmp_path: Path, family: str) -> None:
    source = write_model(
        tmp_path / "reward", family, task="SequenceClassification", num_labels=1, pad_token_id=0
    )
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source)
    with torch.no_grad():
        expected = model.score(model.model(IDS[None]).last_hidden_state)[0, :, 0]
    (got,) = run_ranks(1, values, source, "saved")
    near = FAMILIES[family].logits
    torch.testing.assert_close(torch.from_numpy(got), expected, rtol=near, atol=near)


def test_a_reward_models_head_may_carry_a_prefix_and_a_bias(tmp_path: Path) -> None:
    source = write_model(tmp_path / "reward", "llama", task="SequenceClassification", num_labels=1)
    weight = read_tensors(source)["score.weight"]

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["base.score.weight"] = tensors.pop("score.weight")
        tensors["base.score.bias"] = torch.tensor([0.5])

    write_tensors(source, rename)
    ((got_weight, got_bias),) = run_ranks(
        1, head_of, LayoutConfig(), source, {"value_head": "saved"}
    )  # type: ignore[misc]
    assert np.array_equal(got_weight, weight.numpy())
    assert got_bias.tolist() == [0.5]


def resave(layout: LayoutConfig, source: Path, out: Path) -> None:
    spec = read_spec(source)
    chunks, mesh = megatron(spec, layout, "value", spec.dtype)
    load_hf(chunks, spec, source, mesh, "value", value_head="saved")
    save_hf(chunks, spec, mesh, "value", source, out)


VALUE_MODELS = [
    (True, "qwen3"),
    (False, "gpt_oss"),
    (True, "gemma3_text"),
    (False, "deepseek_v3"),
    (False, "qwen3_5_moe_text"),
]


@pytest.mark.parametrize(
    ("tied", "family"),
    others_in_full(product((False, True), sorted(FAMILIES)), VALUE_MODELS),
)
def test_a_value_model_is_saved_as_transformers_loads_it(
    tmp_path: Path, family: str, tied: bool
) -> None:
    source = write_model(
        tmp_path / "value",
        family,
        task="TokenClassification",
        num_labels=1,
        tie_word_embeddings=tied,
        seed=4,
    )
    (source / "generation_config.json").write_text("{}")
    out = tmp_path / "out"
    run_ranks(2, resave, LayoutConfig(tp=2), source, out)
    before = read_tensors(source)
    after = read_tensors(out)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not (out / "generation_config.json").exists()
    model, loading = transformers.AutoModelForTokenClassification.from_pretrained(
        out, output_loading_info=True
    )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        expected = model.eval()(IDS[None]).logits[0, :, 0]
    (got,) = run_ranks(1, values, out, "saved")
    near = FAMILIES[family].logits
    torch.testing.assert_close(torch.from_numpy(got), expected, rtol=near, atol=near)


@pytest.mark.parametrize(
    ("task", "options", "value_head", "told"),
    [
        (
            "SequenceClassification",
            {"num_labels": 2},
            "saved",
            "score.weight has 2 rows and config.json",
        ),
        ("CausalLM", {}, "saved", "0 tensors named score.weight, expected one"),
        ("SequenceClassification", {"num_labels": 1}, "new", "tensor score.weight is not known"),
    ],
)
def test_directory_without_the_requested_head_is_refused(
    tmp_path: Path, task: str, options: dict[str, Any], value_head: str, told: str
) -> None:
    source = write_model(tmp_path / "model", "qwen3", task=task, **options)
    (message,) = run_ranks(1, refusal, source, value_head)
    assert told in message
    assert str(source) in message
    assert "\n" not in message


def refusal(source: Path, value_head: str) -> str:
    with pytest.raises(BadInput) as error:
        values(source, value_head)
    return str(error.value)
