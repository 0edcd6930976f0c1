"""Adapters between a run's checkpoint, PEFT's format and merged weights: the same numbers in every
form."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import make_batch
from called import called
from grouped_layers import use_grouped_layers
from hf_models import read_tensors, write_model, write_tensors
from megatron.core import dist_checkpointing
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainables import loss_of, make_trainable

from tools.convert_hf_to_megatron import app as to_megatron
from tools.convert_megatron_to_hf import app as to_hf
from vapo_megatron.checkpoint.dist_saver import ModelSaver
from vapo_megatron.config.model import AdapterConfig
from vapo_megatron.models.registry import read_spec
from vapo_megatron.weights.adapters import adapter_entries, base_identity, read_peft, write_peft
from vapo_megatron.weights.export import save_adapters, save_hf
from vapo_megatron.weights.torch_dist import model_state, put_model_state, write_model_card

CASES = [
    ("qwen3", "lm", {"tp": 2}, False),
    ("qwen2", "value", {"pp": 2}, False),
    pytest.param("qwen3_moe", "lm", {"ep": 2}, False, marks=pytest.mark.full),
    ("qwen3_moe", "lm", {"ep": 2}, True),
]


def save(source: Path, root: Path, head: Any, layout: dict[str, int]) -> None:
    """What a run leaves after a step: a checkpoint, the merged export, and PEFT's of a policy."""
    trainable = make_trainable(source, head, adapter={"rank": 4, "alpha": 8.0}, layout=layout)
    batch = make_batch()
    trainable.train_step(batch, range(batch.samples), loss_of(trainable, batch))
    model = (trainable.chunks, trainable.spec, trainable.mesh)
    folder = root / "checkpoint"
    save_hf(*model, head, source, root / "merged")
    if head == "lm":
        save_adapters(*model, trainable.adapter, source, root / "peft")  # type: ignore[arg-type]
    if torch.distributed.get_rank() == 0:
        folder.mkdir()
    torch.distributed.barrier()
    planned = ModelSaver(trainable).plan(folder)
    results = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(results, planned.write()[0])
    if torch.distributed.get_rank() == 0:
        planned.close(results)  # type: ignore[arg-type]
        write_model_card(
            folder,
            trainable.spec,
            head,
            source,
            "float32",
            (base_identity(source), trainable.adapter),
        )  # type: ignore[arg-type]


def save_grouped(*arguments: Any) -> None:
    """The same of a model whose experts have one grouped layer."""
    use_grouped_layers()
    save(*arguments)


def convert(app: Any, *arguments: object) -> str:
    code, output = called(app, *arguments)
    assert code == 0, output
    return output


def peft(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "adapter_config.json").read_text()), load_file(
        folder / "adapter_model.safetensors"
    )


def same(tensors: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize(("family", "head", "layout", "grouped"), CASES)
def test_a_checkpoint_of_adapters_comes_out_merged_and_alone(
    tmp_path: Path, family: str, head: str, layout: dict[str, int], grouped: bool
) -> None:
    source = write_model(tmp_path / "base", family)
    checkpoint = tmp_path / "checkpoint"
    run_ranks(2, save_grouped if grouped else save, source, tmp_path, head, layout)
    merged = tmp_path / "out"
    alone = tmp_path / "alone"
    convert(to_hf, "--checkpoint", checkpoint, "--base", source, "--out", merged)
    same(read_tensors(merged), read_tensors(tmp_path / "merged"), 1e-7)
    assert (merged / "config.json").read_bytes() == (
        tmp_path / "merged" / "config.json"
    ).read_bytes()
    convert(to_hf, "--checkpoint", checkpoint, "--out", alone)
    settings, halves = peft(alone)
    base = read_tensors(source)
    for name, tensor in read_tensors(merged).items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in halves:
            expected = (
                base[name]
                + 8 / 4 * halves[f"{stem}.lora_B.weight"] @ halves[f"{stem}.lora_A.weight"]
            )
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)
            assert not torch.equal(tensor, base[name])
        else:
            assert torch.equal(
                tensor, halves[f"base_model.model.{name}"] if "score" in name else base[name]
            )
    assert (settings["r"], settings["lora_alpha"]) == (4, 8.0)
    if head == "value":
        assert (settings["task_type"], settings["modules_to_save"]) == ("TOKEN_CLS", ["score"])
        return
    live, expected_halves = peft(tmp_path / "peft")
    same(halves, expected_halves)
    assert settings | {"base_model_name_or_path": str(source)} == live


def differing(
    folder: Path, checkpoint: Path, source: Path, peft_dir: Path, layout: dict[str, int]
) -> list[str]:
    """Adapters of a model, cut over ranks, that are not those of a PEFT directory after the
    checkpoint is loaded."""
    trainable = make_trainable(source, "lm", adapter={"rank": 4, "alpha": 8.0}, layout=layout)
    put_model_state(
        trainable.chunks, dist_checkpointing.load(model_state(trainable.chunks), str(checkpoint))
    )
    save_adapters(
        trainable.chunks,
        trainable.spec,
        trainable.mesh,
        trainable.adapter,
        source,
        folder,  # type: ignore[arg-type]
    )
    loaded = peft(folder)[1]
    expected = peft(peft_dir)[1]
    return [
        name
        for name in loaded.keys() | expected.keys()
        if not torch.equal(loaded[name], expected[name])
    ]


@pytest.mark.parametrize(
    "family,layout",
    [("qwen3", {"tp": 2}), pytest.param("qwen3_moe", {"ep": 2}, marks=pytest.mark.full)],
)
def test_peft_adapters_become_checkpoint_that_split_model_loads(
    tmp_path: Path, family: str, layout: dict[str, int]
) -> None:
    source = write_model(tmp_path / "base", family)
    given = tmp_path / "peft"
    run_ranks(1, save, source, tmp_path, "lm", {})
    output = convert(to_megatron, "--hf", source, "--adapter", given, "--out", tmp_path / "there")
    assert "in 1 file" in output
    assert run_ranks(
        2, differing, tmp_path / "loaded", tmp_path / "there", source, given, layout
    ) == [[], []]
    convert(to_hf, "--checkpoint", tmp_path / "there", "--out", tmp_path / "back")
    same(peft(tmp_path / "back")[1], peft(given)[1])
    convert(
        to_hf,
        "--checkpoint",
        tmp_path / "there",
        "--base",
        source,
        "--dtype",
        "bfloat16",
        "--out",
        tmp_path / "x",
    )
    for name, tensor in read_tensors(tmp_path / "x").items():
        assert torch.equal(tensor, read_tensors(tmp_path / "merged")[name].bfloat16()), (
            "rounded once"
        )


PROJECTIONS = {
    ("linear_qkv",): ["k_proj", "q_proj", "v_proj"],
    ("linear_proj", "linear_fc2"): ["down_proj", "o_proj"],
    ("linear_fc1",): ["gate_proj", "up_proj"],
}


@pytest.mark.parametrize("layers", PROJECTIONS)
def test_adapters_of_some_layers_are_read_as_they_were_written(
    tmp_path: Path, layers: tuple[Any, ...]
) -> None:
    source = write_model(tmp_path / "base", "qwen3")
    config = AdapterConfig(rank=4, alpha=8.0, layers=layers)
    spec = read_spec(source)
    shapes = {
        name: shape
        for entry in adapter_entries(spec, config)
        for name, shape in zip(entry.hf, entry.rule.hf_shapes(), strict=True)
    }
    halves = {name: torch.randn(shape) for name, shape in shapes.items()}
    (tmp_path / "peft").mkdir()
    write_peft(tmp_path / "peft", halves, config, spec, "lm", "base")
    read, tensors = read_peft(tmp_path / "peft", spec)
    assert read == config
    same(tensors, halves)
    (tmp_path / "critic").mkdir()
    write_peft(tmp_path / "critic", halves, config, spec, "value", "base")
    shared = {
        "peft_type": "LORA",
        "base_model_name_or_path": "base",
        "r": 4,
        "lora_alpha": 8.0,
        "lora_dropout": 0.0,
    }
    shared |= {"bias": "none", "inference_mode": True, "target_modules": PROJECTIONS[layers]}
    assert peft(tmp_path / "peft")[0] == shared | {
        "task_type": "CAUSAL_LM",
        "modules_to_save": None,
    }
    assert peft(tmp_path / "critic")[0] == shared | {
        "task_type": "TOKEN_CLS",
        "modules_to_save": ["score"],
    }


def change(folder: Path, **settings: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def tensors(folder: Path, act: Callable[[dict[str, Tensor]], object]) -> None:
    held = load_file(folder / "adapter_model.safetensors")
    act(held)
    save_file(held, folder / "adapter_model.safetensors")


K = "base_model.model.model.layers.1.self_attn.k_proj.lora_{}.weight"
EXPERTS = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
WRONG: list[tuple[Callable[[Path], Any], str]] = [
    (
        lambda folder: change(folder, peft_type="IA3"),
        "/adapter_config.json: peft_type is 'IA3', expected 'LORA'",
    ),
    (lambda folder: change(folder, use_rslora=True), "use_rslora is True, expected False"),
    (lambda folder: change(folder, init_lora_weights="pissa_niter_4"), "is 'pissa_niter_4', which"),
    (lambda folder: change(folder, init_lora_weights="olora"), "init_lora_weights is 'olora'"),
    (lambda folder: change(folder, init_lora_weights="corda"), "changes the weights that are"),
    (
        lambda folder: tensors(folder, lambda t: t[K.format("A")].fill_(float("nan"))),
        "k_proj.lora_A.weight holds NaN",
    ),
    (lambda folder: change(folder, alpha_pattern={"q_proj": 3}), "alpha_pattern is {'q_proj': 3}"),
    (
        lambda folder: change(folder, target_parameters=["mlp.experts.gate_up_proj"]),
        "adapts fused experts (mlp.experts.gate_up_proj)",
    ),
    (
        lambda folder: tensors(
            folder,
            lambda t: t.update({EXPERTS: torch.ones(1)}),
        ),
        f"adapts fused experts ({EXPERTS.removeprefix('base_model.model.')})",
    ),
    (lambda folder: change(folder, r=0), "/adapter_config.json: r or lora_alpha is 0"),
    (lambda folder: change(folder, r=5), "has shape [4, 32], expected [5, 32]"),
    (
        lambda folder: tensors(folder, lambda t: t.pop(K.format("A"))),
        "k_proj.lora_A.weight is missing",
    ),
    (
        lambda folder: tensors(folder, lambda t: t.update(other=torch.ones(1))),
        "tensor other cannot be held",
    ),
    (lambda folder: tensors(folder, lambda t: t.clear()), "expected A and B of all projections"),
    (
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        "adapter_model.safetensors: cannot be read",
    ),
    (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json: no such file"),
]


def test_what_cannot_be_held_is_refused_in_one_line(tmp_path: Path) -> None:
    source = write_model(tmp_path / "base", "qwen3")
    run_ranks(1, save, source, tmp_path, "lm", {})
    for number, (spoil, words) in enumerate(WRONG):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        for path in (tmp_path / "peft").iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        spoil(folder)
        code, output = called(
            to_megatron, "--hf", source, "--adapter", folder, "--out", tmp_path / "out"
        )
        assert code == 2 and words in output and len(output.strip().splitlines()) == 1, output
        assert not (tmp_path / "out").exists()
    code, output = called(
        to_megatron, "--hf", source, "--adapter", source, "--head", "value", "--out", tmp_path / "o"
    )
    assert code == 2 and "--adapter with --head value" in output
    write_tensors(source, lambda held: held["model.layers.1.mlp.up_proj.weight"].add_(1))
    base_identity.cache_clear()
    code, output = called(
        to_hf, "--checkpoint", tmp_path / "checkpoint", "--base", source, "--out", tmp_path / "o"
    )
    assert code == 2 and "its weights are not those that the adapters in" in output
    convert(to_megatron, "--hf", source, "--out", tmp_path / "whole")
    code, output = called(
        to_hf, "--checkpoint", tmp_path / "whole", "--base", source, "--out", tmp_path / "o"
    )
    assert (
        code == 2
        and "holds a whole model and no adapters" in output
        and not (tmp_path / "o").exists()
    )
