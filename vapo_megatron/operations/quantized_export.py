"""Quantises a Hugging Face policy for serving: NVIDIA's ModelOpt calibrates and writes it."""

import copy
import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Literal

import torch

from vapo_megatron.errors import BadInput
from vapo_megatron.files import follow_umask, sync
from vapo_megatron.models.model_files import read_config
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.weights.hf_writer import carried_files, copy_carried, new_directory
from vapo_megatron.weights.load import check_weights

Format = Literal["fp8", "nvfp4"]

# ModelOpt's recipes. fp8: a scale per tensor, static scales of activations from the calibration.
# nvfp4: e2m1 with an e4m3 scale per 16 weights and a float32 scale per tensor.
_RECIPES = {"fp8": "FP8_DEFAULT_CFG", "nvfp4": "NVFP4_DEFAULT_CFG"}


def check_source(source: Path) -> ModelSpec:
    """The spec of the model to export.

    Raises:
        BadInput: ModelOpt is not installed, or source is no complete policy, or it is quantised
            already.
    """
    if importlib.util.find_spec("modelopt") is None:
        raise BadInput("nvidia-modelopt is not installed: pip install 'vapo-megatron[fp8export]'")
    config = read_config(source)
    if "quantization_config" in config or (source / "hf_quant_config.json").exists():
        raise BadInput(
            f"{source}: is quantised already, expected the trained checkpoint in float32 or "
            f"bfloat16"
        )
    spec = read_spec(source)
    architecture = (config.get("architectures") or ["nothing"])[0]
    if architecture != spec.causal_lm:
        raise BadInput(
            f"{source}/config.json: architectures names {architecture}, expected {spec.causal_lm}"
        )
    check_weights(source, spec, "lm")
    return spec


def export_quantized(
    source: Path,
    out: Path,
    format_: Format,
    sequences: Sequence[Sequence[int]],
    device: torch.device,
) -> float:
    """Quantise the policy of a directory that check_source has checked; `out` appears whole, or not
    at all. Returns the ratio of its bytes to the source's.

    sequences: token ids of the calibration; device: where the model fits in bfloat16. Raises
    BadInput where out exists, the model computes NaN or infinity, or the file system refuses.
    """
    with new_directory(out, replace=False) as folder:
        with _quietly():
            _quantize_and_write(source, folder, format_, sequences, device)
        copy_carried(source, folder, carried_files("lm"))
        for path in folder.glob("*.safetensors"):
            follow_umask(path)
        for path in folder.iterdir():
            sync(path)  # on the disk before the directory gets its name
    return _bytes(out) / _bytes(source)


@torch.no_grad()
def _quantize_and_write(
    source: Path,
    folder: Path,
    format_: Format,
    sequences: Sequence[Sequence[int]],
    device: torch.device,
) -> None:
    import modelopt.torch.quantization as quantization
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).to(device).eval()

    def forward(model: Any) -> None:
        for sequence in sequences:
            if not bool(
                model(torch.tensor([list(sequence)], device=device)).logits.isfinite().all()
            ):
                raise BadInput(
                    f"{source}: its logits are not finite: its weights hold NaN or infinity, take "
                    f"another"
                )

    forward(model)
    quantization.quantize(model, copy.deepcopy(getattr(quantization, _RECIPES[format_])), forward)
    export_hf_checkpoint(model, export_dir=str(folder))


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@contextmanager
def _quietly() -> Iterator[None]:
    """ModelOpt and transformers talk much; what matters here is raised."""
    from transformers.utils import logging

    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        warnings.simplefilter("ignore")
        logging.disable_progress_bar()
        yield
