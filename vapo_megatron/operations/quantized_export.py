"""A Hugging Face policy as a quantised directory for serving, made by NVIDIA's ModelOpt, with a report of its cost.

ModelOpt calibrates and writes; how far the quantised model's log-probs are from the original's is measured on the
calibration's texts.
"""

import copy
import importlib.util
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vapo_megatron.config.atomic import cannot_write, follow_umask, sync
from vapo_megatron.errors import BadInput
from vapo_megatron.weights.fp8 import BlockFp8, check_blocks
from vapo_megatron.weights.hf_writer import GENERATION_CONFIG, TOKENIZER_FILES, copy_carried
from vapo_megatron.weights.load import check_weights
from vapo_megatron.weights.model_files import read_config
from vapo_megatron.weights.spec import ModelSpec, read_spec

Format = Literal["fp8", "fp8_block", "nvfp4"]
REPORT_FILE = "quantization_report.json"

# ModelOpt recipes. fp8: a scale per tensor, activations by a static scale from calibration. fp8_block: a scale for
# 128 x 128 weights, activations dynamic. nvfp4: e2m1 with an e4m3 scale for 16 weights and a float32 one per tensor.
_RECIPES = {"fp8": "FP8_DEFAULT_CFG", "fp8_block": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "nvfp4": "NVFP4_DEFAULT_CFG"}


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


def check_source(source: Path, format_: Format) -> ModelSpec:
    """The spec of what is to be exported.

    Raises:
        BadInput: ModelOpt is not installed, source is no policy that is complete and not quantised yet, or its sizes do
            not suit the format.
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
    if format_ == "fp8_block":
        check_blocks(spec, 1)
    return spec


def export_quantized(
    source: Path, out: Path, format_: Format, sequences: Sequence[Sequence[int]], device: torch.device
) -> Report:
    """Quantise a policy and write it; the directory appears whole, or not at all.

    Args:
        source: its Hugging Face directory, checked by check_source.
        out: a place where nothing is yet.
        format_: see above.
        sequences: token ids of the calibration, of two tokens and more each.
        device: where the model fits in bfloat16.

    Raises:
        BadInput: out exists, or the file system refuses.
    """
    if out.exists():
        raise BadInput(f"{out}: exists already; name another place")
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        drift = _quantize_and_write(source, temporary, format_, sequences, device)
        if format_ == "fp8_block":
            _as_block_checkpoint(temporary)
        tokens, sizes = sum(len(sequence) - 1 for sequence in sequences), (_bytes(source), _bytes(temporary))
        report = Report(format_, str(source), version("nvidia-modelopt"), len(sequences), tokens, *sizes, *drift)
        copy_carried(source, temporary, (GENERATION_CONFIG, *TOKENIZER_FILES))
        (temporary / REPORT_FILE).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
        for path in temporary.glob("*.safetensors"):
            follow_umask(path)
        for path in (*temporary.rglob("*"), temporary):
            sync(path)  # a machine that is lost after the new name is on the disk must not leave empty files under it
        os.replace(temporary, out)
        sync(out.parent)
    except OSError as error:
        raise cannot_write(out, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
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


def _as_block_checkpoint(folder: Path) -> None:
    """Give ModelOpt's block FP8 the names and the config under which SGLang serves it.

    ModelOpt calls it fp8_pb_wo, which SGLang's loader knows in mixed checkpoints alone; the numbers are those of
    block-quantised checkpoints such as DeepSeek-V3's: scales [rows / 128, 1, columns / 128, 1] lose their two ones.
    """
    scale, served = ".weight_scale", ".weight_scale_inv"
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith(scale)]:
            tensors[name.removesuffix(scale) + served] = tensors.pop(name).squeeze((1, 3)).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text(encoding="utf-8"))
        content["weight_map"] = {
            name.removesuffix(scale) + served if name.endswith(scale) else name: place
            for name, place in content["weight_map"].items()
        }
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "hf_quant_config.json").unlink()
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] = BlockFp8().config()
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


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
