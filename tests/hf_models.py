"""Small random models that transformers itself writes: the independent side of every comparison."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from family_table import FAMILIES
from safetensors.torch import load_file
from transformers.modeling_layers import GenericForSequenceClassification

from vapo_megatron.config.model import ActorConfig, LayoutConfig, ModelConfig
from vapo_megatron.megatron.mesh import Mesh, make_mesh
from vapo_megatron.megatron.model import build_model, transformer_config
from vapo_megatron.models.spec import Head, ModelSpec
from vapo_megatron.models.token_classification import register

register()
VOCAB = 131
SIZES = dict(
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=48,
    vocab_size=VOCAB,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


def write_model(
    path: Path,
    family: str,
    task: str = "CausalLM",
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Save a model of a family and a task (CausalLM, SequenceClassification, TokenClassification)
    to path."""
    config = transformers.AutoConfig.for_model(
        family, **(SIZES | FAMILIES[family].sizes | overrides)
    )
    torch.manual_seed(seed)
    model = _auto(task).from_config(config)
    with torch.no_grad():  # biases and norms start at 0 and 1, where mistakes do not show
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        model.to(dtype)
        for name, buffer in model.named_buffers():  # float32, as in published checkpoints
            if name.endswith("e_score_correction_bias"):
                buffer.data = torch.randn(buffer.shape) * 0.3
    model.save_pretrained(path, max_shard_size=max_shard_size)
    written = json.loads((path / "config.json").read_text()) | FAMILIES[family].engine_keys
    (path / "config.json").write_text(json.dumps(written))
    return path


def _auto(task: str) -> Any:
    return getattr(transformers, f"AutoModelFor{task}")


def _register_reward_models() -> None:
    """Put together the reward models that transformers lacks, as it does for other
    families."""
    auto = transformers.AutoModelForSequenceClassification
    for row in FAMILIES.values():
        name = f"{row.classes}ForSequenceClassification"
        causal = getattr(transformers, row.classes + "ForCausalLM")
        if causal.config_class in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            continue
        modeling = importlib.import_module(causal.__module__)
        base = getattr(modeling, row.classes + "PreTrainedModel")
        settings = {"config_class": causal.config_class}
        made = type(name, (GenericForSequenceClassification, base), settings)
        auto.register(causal.config_class, made, exist_ok=True)


_register_reward_models()


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face directory."""
    return {
        name: tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def write_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a directory with a single file."""
    from safetensors.torch import save_file

    tensors = read_tensors(path)
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def megatron(
    spec: ModelSpec, layout: LayoutConfig, head: Head, dtype: str = "float32"
) -> tuple[list[Any], Mesh]:
    """This rank's chunks of an unfilled Megatron model, every parameter set to NaN, and their
    mesh."""
    mesh = mesh_of(layout)
    section = ActorConfig(layout=layout)
    model = ModelConfig(path="unread", dtype=dtype, attention="sdpa")  # type: ignore[arg-type]
    seed_megatron(mesh)
    chunks = build_model(
        spec, transformer_config(spec, model, section), mesh, head, attention="sdpa"
    )
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
    return chunks, mesh


_MESHES: dict[Any, Mesh] = {}


def mesh_of(layout: LayoutConfig) -> Mesh:
    """A mesh once per layout of a world: gloo's threads outlive its groups, and the models of all
    families together would have thousands of them."""
    key = (dist.group.WORLD, layout)
    if key not in _MESHES:
        _MESHES[key] = make_mesh(layout)
    return _MESHES[key]


def seed_megatron(mesh: Mesh) -> None:
    """Megatron's initialisation wants its generators seeded."""
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(
        1, force_reset_rng=True, tp_rank=mesh.tp_rank, ep_rank=0, etp_rank=mesh.tp_rank
    )


@torch.no_grad()
def forward(chunk: Any, ids: torch.Tensor) -> torch.Tensor:
    """Output [t, width] of a whole model (one chunk) for one sequence of token ids [t]."""
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = torch.tensor([0, len(ids)], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=len(ids),
        max_seqlen_kv=len(ids),
    )
    chunk.eval()
    output: torch.Tensor = chunk(
        ids[None], torch.arange(len(ids))[None], None, packed_seq_params=packed
    )
    return output[0]
