"""Quantises a Hugging Face policy for serving, by NVIDIA's ModelOpt, and reports what that costs.

ModelOpt calibrates and writes. How far log-probs move is measured on the texts of the calibration.
"""

import copy
import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vapo_megatron.config.atomic import follow_umask, sync
from vapo_megatron.errors import BadInput
from vapo_megatron.weights.hf_writer import carried_files, copy_carried, new_directory, write_json
from vapo_megatron.weights.load import check_weights
from vapo_megatron.weights.model_files import read_config
from vapo_megatron.weights.spec import ModelSpec, read_spec

Format = Literal["fp8", "nvfp4"]
REPORT_FILE = "quantization_report.json"

# ModelOpt's recipes. fp8: a scale per tensor, static scales of activations from the calibration. nvfp4: e2m1 with an
# e4m3 scale per 16 weights and a float32 scale per tensor.
_RECIPES = {"fp8": "FP8_DEFAULT_CFG", "nvfp4": "NVFP4_DEFAULT_CFG"}


@dataclass(frozen=True)
class Report:
    """What an export did: bytes of all weights before and after, and how far log-probs of the calibration's tokens
    moved, in nats (mean and largest |difference|; None where this device cannot compute the format)."""

    format: str
    source: str
    modelopt: str
    sequences: int
    tokens: int
    bytes_before: int
    bytes_after: int
    mean_drift: float | None
    largest_drift: float | None


def check_source(source: Path) -> ModelSpec:
    """The spec of what is to be exported.

    Raises:
        BadInput: ModelOpt is not installed, or source is no complete policy, or it is quantised already.
    """
    if importlib.util.find_spec("modelopt") is None:
        raise BadInput("nvidia-modelopt is not installed: pip install 'vapo-megatron[fp8export]'")
    config = read_config(source)
    if "quantization_config" in config or (source / "hf_quant_config.json").exists():
        raise BadInput(f"{source}: is quantised already, expected the trained checkpoint in float32 or bfloat16")
    spec = read_spec(source)
    architecture = (config.get("architectures") or ["nothing"])[0]
    if architecture != spec.table.causal_lm:
        raise BadInput(f"{source}/config.json: architectures names {architecture}, expected {spec.table.causal_lm}")
    check_weights(source, spec, "lm")
    return spec


def export_quantized(
    source: Path, out: Path, format_: Format, sequences: Sequence[Sequence[int]], device: torch.device
) -> Report:
    """Quantise a policy and write it; the directory appears whole, or not at all.

    Args:
        source: its Hugging Face directory, checked by check_source.
        out: must not exist.
        format_: of the weights.
        sequences: token ids of the calibration, of two tokens and more each.
        device: where the model fits in bfloat16.

    Raises:
        BadInput: out exists, or the file system refuses.
    """
    with new_directory(out, replace=False) as folder:
        drift = _quantize_and_write(source, folder, format_, sequences, device)
        tokens, sizes = sum(len(sequence) - 1 for sequence in sequences), (_bytes(source), _bytes(folder))
        report = Report(format_, str(source), version("nvidia-modelopt"), len(sequences), tokens, *sizes, *drift)
        copy_carried(source, folder, carried_files("lm"))
        write_json(folder / REPORT_FILE, asdict(report))
        for path in folder.glob("*.safetensors"):
            follow_umask(path)
        for path in folder.iterdir():
            sync(path)  # on the disk before the directory gets its name
    return report


def _quantize_and_write(
    source: Path, folder: Path, format_: Format, sequences: Sequence[Sequence[int]], device: torch.device
) -> tuple[float | None, float | None]:
    """Mean and largest drift of log-probs."""
    with _quietly():
        import modelopt.torch.quantization as quantization
        from modelopt.torch.export import export_hf_checkpoint

        model = _load(source, device)
        before = _logprobs(model, sequences, device)
        if not bool(before.isfinite().all()):
            raise BadInput(
                f"{source}: its log-probs are not finite: its weights hold NaN or infinity, take another one"
            )
        recipe = copy.deepcopy(getattr(quantization, _RECIPES[format_]))
        # ModelOpt's FP4 activations are computed by a kernel for GPUs; calibration and export are not.
        emulated = format_ != "nvfp4" or device.type == "cuda"
        with torch.no_grad():
            quantization.quantize(model, recipe, lambda quantized: _logprobs(quantized, sequences, device))
            after = _logprobs(model, sequences, device) if emulated else None
            export_hf_checkpoint(model, export_dir=str(folder))
    if after is None:
        return None, None
    difference = (after - before).double().abs()
    return float(difference.mean()), float(difference.max())


def _load(source: Path, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).to(device).eval()


@torch.no_grad()
def _logprobs(model: Any, sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Of every token but the first of each sequence, one after another, float32 on the CPU."""
    logprobs = []
    for sequence in sequences:
        ids = torch.tensor([list(sequence)], device=device)
        logits = model(ids).logits[0, :-1].float()
        logprobs.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu())
    return torch.cat(logprobs)


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
