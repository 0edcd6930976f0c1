"""Low-rank adapters compute and learn what transformers with the same adapters, written out,
computes and learns.

That every layout gives the same is in test_invariance.py.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from batches import LENGTHS, make_batch
from family_table import FAMILIES
from hf_models import read_tensors, write_model
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor
from trainables import loss_of, make_trainable

from vapo_megatron.config.model import ActorConfig, AdapterConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.adapters import without_adapters
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.stacked_experts import Stacked
from vapo_megatron.weights.adapters import adapter_parameter_count, adapters_of, check_adapter
from vapo_megatron.weights.export import save_adapters, save_hf, stream_hf

ADAPTER = {"rank": 4, "alpha": 16.0}
STEPS = 3


class LowRank(torch.nn.Module):
    """x W^T + alpha / rank x A^T B^T, as the paper has it."""

    def __init__(self, base: torch.nn.Linear, a: Tensor, b: Tensor, alpha: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = alpha / len(a)
        self.a = torch.nn.Parameter(a)
        self.b = torch.nn.Parameter(b)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.scale * F.linear(F.linear(x, self.a), self.b)
        return out


def read_adapters(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of every projection of PEFT's file, by the name of its module."""
    tensors = load_file(folder / "adapter_model.safetensors")
    names = {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        for name in tensors
        if "lora_A" in name
    }
    assert len(tensors) == 2 * len(names)
    return {
        name: tuple(tensors[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        for name in names
    }  # type: ignore[misc]


class Experts(torch.nn.Module):
    """The experts of a layer, one after another, each with weights and adapters of its own, in
    place of transformers' fused ones."""

    def __init__(
        self, fused: Any, halves: list[dict[str, tuple[Tensor, Tensor]]], alpha: float
    ) -> None:
        super().__init__()
        self.projections = torch.nn.ModuleList()
        for gate_up, down, adapters in zip(
            fused.gate_up_proj, fused.down_proj, halves, strict=True
        ):
            gate, up = gate_up.chunk(2)
            expert = torch.nn.ModuleDict()
            for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                linear = torch.nn.Linear(*weight.T.shape, bias=False)
                linear.weight.data = weight.detach().clone()
                expert[name] = LowRank(linear, *adapters[name], alpha)
            self.projections.append(expert)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.projections):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            gated = F.silu(expert["gate_proj"](hidden)) * expert["up_proj"](hidden)  # type: ignore[index]
            out = out + share * expert["down_proj"](gated)  # type: ignore[index]
        return out


def in_memory(name: str) -> str:
    """Path of a weight's module in transformers' model: MiniMax-M2's experts have other names
    there."""
    for saved, module in (
        ("block_sparse_moe", "mlp"),
        (".w1", ".gate_proj"),
        (".w3", ".up_proj"),
        (".w2", ".down_proj"),
    ):
        name = name.replace(saved, module)
    return name


def with_adapters(model_dir: Path, folder: Path) -> Any:
    """transformers' model with the adapters of a PEFT directory, all else frozen."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32
    ).requires_grad_(False)
    alpha = json.loads((folder / "adapter_config.json").read_text())["lora_alpha"]
    of_experts: dict[str, dict[str, dict[str, tuple[Tensor, Tensor]]]] = {}
    for saved, (a, b) in read_adapters(folder).items():
        name = in_memory(saved)
        parent, _, leaf = name.rpartition(".")
        if ".experts." in name:
            layer, _, number = parent.partition(".experts.")
            of_experts.setdefault(layer, {}).setdefault(number, {})[leaf] = a, b
            continue
        module = model.get_submodule(parent)
        setattr(module, leaf, LowRank(getattr(module, leaf), a, b, alpha))
    for layer, by_number in of_experts.items():
        mlp = model.get_submodule(layer)
        mlp.experts = Experts(
            mlp.experts, [by_number[str(number)] for number in range(len(by_number))], alpha
        )
    return model


def logprobs(model: Any) -> Tensor:
    """[T, 2] log-probs and entropies, as Trainable.score gives them."""
    batch = make_batch()
    rows = []
    for s, (prompt, _) in enumerate(LENGTHS):
        ids = batch.tokens[batch.cu_seqlens[s] : batch.cu_seqlens[s + 1]].long()
        log_p = (model(ids[None, :-1]).logits[0] / 0.9).log_softmax(-1)
        rows.append(
            torch.stack((log_p.gather(1, ids[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)), -1)[
                prompt - 1 :
            ]
        )
    return torch.cat(rows)


def adapter_of(model_dir: Path) -> dict[str, Any]:
    """ADAPTER, of attention alone where experts are one tensor."""
    if any(isinstance(rule, Stacked) for rule in read_spec(model_dir).layer_rules):
        return ADAPTER | {"layers": ("linear_qkv", "linear_proj")}
    return ADAPTER


def train(
    model_dir: Path, out: Path, head: str, section: dict[str, Any]
) -> tuple[list[float], np.ndarray, np.ndarray]:
    """Gradient norms of some steps; scores after them, with adapters and without. Writes what there
    was before and after them."""
    trainable = make_trainable(
        model_dir, head, adapter=adapter_of(model_dir), max_tokens_per_microbatch=1000, **section
    )  # type: ignore[arg-type]
    batch = make_batch()

    def write(name: str) -> None:
        model = trainable.chunks, trainable.spec, trainable.mesh
        if head == "lm":
            save_adapters(*model, trainable.adapter, model_dir, out / f"{name}-adapter")  # type: ignore[arg-type]
        save_hf(*model, trainable.head, model_dir, out / name)

    write("before")
    losses = loss_of(trainable, batch)
    norms = [
        trainable.train_step(batch, range(batch.samples), losses).grad_norm for _ in range(STEPS)
    ]
    write("after")
    scores = trainable.score(batch).numpy()
    with without_adapters(trainable.chunks):
        return norms, scores, trainable.score(batch).numpy()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.mark.parametrize(
    "family,layout",
    [
        ("qwen3", {"tp": 2}),
        ("qwen3_moe", {"ep": 2}),
        *(
            pytest.param(family, {"ep": 2} if row.experts else {"tp": 2}, marks=pytest.mark.full)
            for family, row in FAMILIES.items()
            if family not in ("qwen3", "qwen3_moe")
        ),
    ],
)
def test_an_adapted_policy_learns_what_transformers_learns(
    tmp_path: Path, family: str, layout: dict[str, int]
) -> None:
    model_dir = write_model(tmp_path / "model", family)
    (norms, scores, _), *_ = run_ranks(2, train, model_dir, tmp_path, "lm", {"layout": layout})
    model = with_adapters(model_dir, tmp_path / "before-adapter")
    before = logprobs(transformers.AutoModelForCausalLM.from_pretrained(model_dir))
    row = FAMILIES[family]
    atol = row.logits if row.experts else 0
    torch.testing.assert_close(logprobs(model), before, rtol=0, atol=atol)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    batch = make_batch()
    expected = []
    advantages = torch.randn(batch.response_tokens, generator=torch.Generator().manual_seed(6))
    correct = batch.correct.repeat_interleave(batch.response_lengths)
    for _ in range(STEPS):
        optimizer.zero_grad()
        out = logprobs(model)
        ratio = (out[:, 0] - batch.rollout_logprobs).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        loss = (
            -surrogate.mean()
            - 0.1 * (correct / correct.sum() * out[:, 0]).sum()
            - 0.01 * out[:, 1].mean()
        )
        loss.backward()
        expected.append(torch.nn.utils.clip_grad_norm_(trained, 1.0).item())
        optimizer.step()
    assert norms == pytest.approx(expected, rel=5 * row.gradients)
    np.testing.assert_allclose(scores, logprobs(model).detach(), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["qwen2", pytest.param("qwen3_moe", marks=pytest.mark.full)])
def test_adapters_begin_as_those_of_peft(tmp_path: Path, family: str) -> None:
    """Each A is drawn for itself, uniformly within 1 / sqrt(in); every B is zero."""
    model_dir = write_model(tmp_path / "model", family)
    run_ranks(1, train, model_dir, tmp_path, "lm", {})
    halves = list(read_adapters(tmp_path / "before-adapter").values())
    assert not any(b.any() for _, b in halves)
    scaled = [a * a.shape[1] ** 0.5 for a, _ in halves]
    for number, one in enumerate(scaled):
        assert (
            one.abs().max() < 1 and one.max() > 0.8 and one.min() < -0.8 and abs(one.mean()) < 0.25
        )
        assert not any(
            one.shape == other.shape and torch.equal(one, other) for other in scaled[:number]
        )


def drawn(
    model_dir: Path, head: Any, seed: int, layers: list[str]
) -> tuple[set[str], np.ndarray, int, int]:
    """Which linear layers have adapters, an A, and how many parameters are trained, counted in two
    ways."""
    trainable = make_trainable(model_dir, head, adapter={"rank": 4, "layers": layers}, seed=seed)
    assert trainable.adapter is not None
    held = {
        name.split(".")[-2]: adapter for c in trainable.chunks for name, adapter in adapters_of(c)
    }
    trained = sum(
        p.numel() for chunk in trainable.chunks for p in chunk.parameters() if p.requires_grad
    )
    counted = adapter_parameter_count(trainable.spec, trainable.adapter, head)
    return set(held), held[layers[0]].a.detach().numpy(), trained, counted


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_seed_and_layers_are_what_the_config_says(tmp_path: Path, family: str) -> None:
    """And the parameters that are trained are those that a checkpoint's size is worked out from."""
    model_dir = write_model(tmp_path, family)
    layers = ["linear_proj", "linear_fc2"]
    ((names, first, trained, counted),) = run_ranks(1, drawn, model_dir, "lm", 1, layers)
    assert names == set(layers) and trained == counted
    ((_, again, *_),) = run_ranks(1, drawn, model_dir, "lm", 1, ["linear_proj"])
    ((_, other, trained, counted),) = run_ranks(1, drawn, model_dir, "value", 2, ["linear_proj"])
    assert np.array_equal(first, again) and not np.array_equal(first, other) and trained == counted


def replays(model_dir: Path) -> tuple[bool, bool, bool]:
    trainable = make_trainable(
        model_dir, "lm", adapter={"rank": 4, "layers": ["linear_qkv", "linear_proj"]}
    )
    before = trainable.replays
    with trainable.as_base():
        as_base = trainable.replays
    return before, as_base, trainable.replays


def test_policy_without_its_adapters_chooses_its_own_experts(tmp_path: Path) -> None:
    """As a reference policy does: the engines' experts were chosen with the adapters."""
    assert run_ranks(1, replays, write_model(tmp_path, "qwen3_moe"))[0] == (True, False, True)


@pytest.mark.parametrize(
    "family,layout",
    [("qwen2", {"pp": 2}), pytest.param("qwen3_moe", {"pp": 2, "ep": 2}, marks=pytest.mark.full)],
)
def test_what_is_exported_computes_what_was_trained(
    tmp_path: Path, family: str, layout: dict[str, int]
) -> None:
    model_dir = write_model(tmp_path / "model", family)
    ranks = layout["pp"] * layout.get("ep", 1)
    section = {"layout": layout}
    (_, scores, without), *_ = run_ranks(ranks, train, model_dir, tmp_path, "lm", section)
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "after", dtype=torch.float32
    )
    for model in (merged, with_adapters(model_dir, tmp_path / "after-adapter")):
        np.testing.assert_allclose(logprobs(model).detach(), scores, rtol=1e-4, atol=1e-4)
    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    np.testing.assert_allclose(logprobs(base).detach(), without, rtol=1e-4, atol=1e-4)
    assert np.abs(scores - without).max() > 1e-2
    config = json.loads((tmp_path / "after-adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 16.0)
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert config["target_modules"] == sorted(projections), (
        "PEFT leaves the weights of others unread"
    )


@pytest.mark.parametrize("family,layout", [("qwen2", {"tp": 2}), ("qwen3_moe", {"ep": 2})])
def test_peft_reads_what_is_exported(tmp_path: Path, family: str, layout: dict[str, int]) -> None:
    """PEFT's own class, as a user would load the adapters; peft is not among the requirements."""
    peft = pytest.importorskip(
        "peft", reason="peft is not installed: docs/lora.md says how it was tried"
    )
    model_dir = write_model(tmp_path / "model", family)
    run_ranks(2, train, model_dir, tmp_path, "lm", {"layout": layout})
    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = torch.arange(40)[None]
    before = base(ids).logits
    model = peft.PeftModel.from_pretrained(base, tmp_path / "after-adapter")
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "after", dtype=torch.float32
    )
    expected = merged(ids).logits
    assert (expected - before).abs().max() > 1e-2
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
    # Where experts have names of their own
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    tensors = read_tensors(tmp_path / "after")
    by_peft = read_tensors(tmp_path / "merged")
    assert by_peft.keys() == tensors.keys()
    for name, tensor in by_peft.items():
        torch.testing.assert_close(tensor, tensors[name], rtol=0, atol=1e-6, msg=name)


def test_a_critics_adapters_and_head_are_all_that_changes(tmp_path: Path, model_dir: Path) -> None:
    run_ranks(1, train, model_dir, tmp_path, "value", {})
    before = read_tensors(tmp_path / "before")
    after = read_tensors(tmp_path / "after")
    changed = {
        name.rpartition("layers.")[2][2:]
        for name in after
        if not torch.equal(before[name], after[name])
    }
    projections = [f"self_attn.{x}_proj.weight" for x in "qkvo"] + [
        f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")
    ]
    assert changed == {*projections, "ore.weight", "ore.bias"}


def rounded_twice(model_dir: Path) -> float:
    """In bfloat16: the share of exported numbers that are not the sum in float64, rounded."""
    trainable = make_trainable(model_dir, "lm", adapter=ADAPTER, dtype="bfloat16")
    linear = trainable.chunks[0].decoder.layers[1].self_attention.linear_proj
    torch.nn.init.normal_(linear.adapter.b, generator=torch.Generator().manual_seed(1))
    stream = stream_hf(trainable.chunks, trainable.spec, trainable.mesh, "lm")
    exported = {name: tensor.clone() for bucket in stream for name, tensor in bucket}
    merged = exported["model.layers.1.self_attn.o_proj.weight"]
    exact = linear.weight.double() + 4.0 * (linear.adapter.b.double() @ linear.adapter.a.double())
    assert merged.dtype == torch.bfloat16
    return float((merged != exact.bfloat16()).float().mean())


def test_weights_are_merged_in_float32_and_rounded_once(model_dir: Path) -> None:
    assert run_ranks(1, rounded_twice, model_dir)[0] < 1e-3


REFUSED = [
    ("qwen3", {"rank": 33}, {}, "model.adapter.rank=33 is above 32"),
    ("qwen3", {"rank": 32}, {}, None),
    ("qwen3", {"rank": 25, "layers": ["linear_proj"]}, {}, None),
    ("qwen3_moe", {"rank": 24}, {}, None),
    ("qwen3_moe", {"rank": 25}, {}, r"rank=25 is above 24, .*mlp.experts.0.gate_proj"),
    ("qwen3_moe", {"rank": 4, "layers": ["linear_qkv"]}, {}, None),
]


@pytest.mark.parametrize("family,adapter,section,message", REFUSED)
def test_adapters_that_a_model_cannot_have_are_refused(
    tmp_path: Path,
    family: str,
    adapter: dict[str, Any],
    section: dict[str, Any],
    message: str | None,
) -> None:
    spec = read_spec(write_model(tmp_path, family))
    config = AdapterConfig.model_validate(adapter)
    actor = ActorConfig.model_validate({"kind": "adapter", **section})
    if message is None:
        check_adapter(spec, config, actor, "actor")
        return
    with pytest.raises(BadInput, match=message):
        check_adapter(spec, config, actor, "actor")
    check_adapter(spec, config, actor.model_copy(update={"kind": "model"}), "actor")
