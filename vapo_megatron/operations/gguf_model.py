"""Converts a GGUF file to a Hugging Face directory that can be trained.

transformers reads the file; its output is then compared with the file, tensor by tensor and token
by token, through the gguf package alone.
"""

import importlib.util
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from vapo_megatron.errors import BadInput, reason_of
from vapo_megatron.files import follow_umask
from vapo_megatron.models.registry import FAMILIES, read_spec
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.operations.model_package import file_sha256
from vapo_megatron.weights.hf_files import HFTensors
from vapo_megatron.weights.hf_writer import new_directory, write_json
from vapo_megatron.weights.load import check_weights

ORIGIN_FILE = "origin.json"
EXTRA = ("gguf", "accelerate")
_MAGIC = b"GGUF"
# Memory of a conversion in units of the float32 weights: transformers holds the tensors that it
# read and the model.
_COPIES = 2.2
_TOKENIZER_BYTES = 32 << 20
# tokenizer.ggml.pre of byte-level tokenizers whose text GPT-2's rule splits; transformers 5 knows
# most of the others.
_SPLIT_AS_GPT2 = ("gpt-2", "default")
_SMOLLM = "smollm"
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class GgufFile:
    """An opened GGUF file.

    Attributes:
        path: of the file.
        reader: gguf's reader; its tensors are memory-mapped.
        architecture: GGUF's name of it, such as llama or qwen3moe.
    """

    path: Path
    reader: Any
    architecture: str

    def field(self, name: str) -> Any:
        """A metadata value, or None where the file does not state it."""
        entry = self.reader.fields.get(name)
        if entry is None:
            return None
        return entry.contents()

    @property
    def elements(self) -> int:
        """Numbers in all tensors."""
        return sum(int(tensor.n_elements) for tensor in self.reader.tensors)

    @property
    def quantization(self) -> dict[str, int]:
        """Number of tensors by GGUF type, such as Q4_1 or F32, the most frequent first."""
        counts = Counter(tensor.tensor_type.name for tensor in self.reader.tensors)
        return dict(counts.most_common())


def convert_gguf(
    path: Path,
    out: Path,
    dtype: torch.dtype,
    origin: Mapping[str, Any],
    report: Callable[[str], None] = lambda line: None,
) -> str:
    """Write the model, its tokenizer and ORIGIN_FILE to `out`, whole or not at all; returns a line
    that describes it.

    dtype: of the written weights, which a quantised file is expanded to. origin: what ORIGIN_FILE
    says of the source, beside the file's own digest and types. report: is given a line as each
    stage begins.

    Raises:
        BadInput: out exists, the file is cut or no GGUF file, its architecture, its rotary
            embedding or its tokenizer is not supported, disk or memory do not suffice, or the
            output differs from the file.
    """
    report(f"reading {path.name}")
    file = open_gguf(path)
    _check_supported(file)
    _check_room(file, out, dtype)
    with new_directory(out, replace=False) as folder:
        report(f"converting {len(file.reader.tensors)} tensors to {_name(dtype)}")
        _write_model(file, folder, dtype)
        _write_tokenizer(file, folder)
        spec = read_spec(folder)
        check_weights(folder, spec, "lm")
        report("comparing them with the file")
        check_tensors(file, folder, spec)
        facts = _facts(file, spec, dtype)
        write_json(folder / ORIGIN_FILE, {**origin, **facts})
    types = ", ".join(f"{count} {name}" for name, count in file.quantization.items())
    return (
        f"{spec.family}, {spec.parameter_count():,} parameters in {_name(dtype)}, "
        f"{len(file.reader.tensors)} tensors ({types}), each compared with the file"
    )


def open_gguf(path: Path) -> GgufFile:
    """Open a file. Raises BadInput where it is missing, no GGUF file, or shorter than its header
    says."""
    if path.is_dir():
        raise BadInput(f"{path}: is a directory, expected a GGUF file")
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file, expected a GGUF file") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None
    if magic != _MAGIC:
        raise BadInput(
            f"{path}: begins with {magic!r}, expected a GGUF file, which begins with {_MAGIC!r}"
        )
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        architecture = reader.fields["general.architecture"].contents()
    except Exception as error:  # of a cut file: whatever numpy raises where its mapping ends
        raise BadInput(
            f"{path}: cut or damaged, its header cannot be followed ({reason_of(error)}): fetch it "
            f"again"
        ) from None
    return GgufFile(path, reader, architecture)


def check_tensors(file: GgufFile, folder: Path, spec: ModelSpec) -> None:
    """Raises BadInput unless each tensor of the directory equals one of the file, and none of the
    file is left."""
    tensors = HFTensors(folder)
    sources = {tensor.name: tensor for tensor in file.reader.tensors}
    unread = set(sources)
    for name in sorted(tensors.names):
        source, expert = _gguf_name(name, file, spec)
        if source not in sources:
            raise BadInput(
                f"{file.path}: has no {source}, which {name} of a {spec.family} model comes from"
            )
        unread.discard(source)
        written = tensors[name][:]
        expected = _expected(file, source, sources[source], expert, spec).to(written.dtype)
        if not torch.equal(written, expected):
            raise BadInput(
                f"{file.path}: {name} was not converted to the values of {source}: "
                "this version of transformers reads the file otherwise, give the original "
                "checkpoint"
            )
    if unread:
        raise BadInput(
            f"{file.path}: tensor {min(unread)} has no place in a {spec.family} model "
            f"({len(unread)} of "
            f"{len(sources)} have none): give another model"
        )


def _expected(
    file: GgufFile, name: str, tensor: Any, expert: int | None, spec: ModelSpec
) -> Tensor:
    """The values that a Hugging Face tensor has by the file, float32."""
    from gguf.quants import dequantize

    if expert is None:
        data = tensor.data
    else:
        data = tensor.data[expert]
    values = torch.from_numpy(dequantize(data, tensor.tensor_type).copy())
    if not bool(values.isfinite().all()):
        raise BadInput(f"{file.path}: tensor {name} holds NaN or infinity: fetch the model again")
    if file.architecture == "llama" and ".attn_q." in name:
        return _rotary_halves(values, spec.attention.num_heads)
    if file.architecture == "llama" and ".attn_k." in name:
        return _rotary_halves(values, spec.attention.num_kv_heads)
    return values


def _rotary_halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys [heads * head_dim, hidden]: GGUF has the two channels of a rotation
    side by side, Hugging Face half a head apart (llama.cpp, convert_hf_to_gguf.py,
    LlamaModel.permute)."""
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _gguf_name(name: str, file: GgufFile, spec: ModelSpec) -> tuple[str, int | None]:
    """GGUF's name of a Hugging Face tensor, and its expert where GGUF has all experts of a layer in
    one."""
    if match := _EXPERT.fullmatch(name):
        layer, expert, part = match.groups()
        return f"blk.{layer}.ffn_{part}_exps.weight", int(expert)
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kinds = {gguf_name: kind for kind, gguf_name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(kinds[file.architecture], spec.num_layers)
    stem, _, ending = name.rpartition(".")
    return f"{names.get_name(stem)}.{ending}", None


def check_extra() -> None:
    """Raises BadInput where a package that a conversion needs is not installed."""
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(f"{', '.join(missing)}: not installed: pip install 'vapo-megatron[gguf]'")


def _check_supported(file: GgufFile) -> None:
    supported = {family.replace("_", ""): family for family in FAMILIES}
    if file.architecture not in supported:
        raise BadInput(
            f"{file.path}: general.architecture is {file.architecture!r}, expected one of "
            f"{', '.join(sorted(supported))}: give another model"
        )
    scaling = file.field(f"{file.architecture}.rope.scaling.type") or "none"
    has_factors = any(tensor.name.startswith("rope_") for tensor in file.reader.tensors)
    if scaling != "none" or has_factors:
        raise BadInput(
            f"{file.path}: its rotary embedding is scaled, which transformers does not read from "
            f"GGUF "
            "(rope.scaling.type, rope_freqs): give the original checkpoint"
        )
    if file.field("tokenizer.ggml.model") is None:
        raise BadInput(f"{file.path}: has no tokenizer (tokenizer.ggml.model): give another file")
    split = file.field("tokenizer.ggml.pre") or "default"
    if file.field("tokenizer.ggml.model") == "gpt2" and split not in _known_splits():
        raise BadInput(
            f"{file.path}: tokenizer.ggml.pre is {split!r}, and transformers would split text by "
            f"GPT-2's rule instead: "
            "give the original checkpoint"
        )


def _known_splits() -> set[str]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return {*GGUF_PRE_TOKENIZER_SPLITS, *_SPLIT_AS_GPT2, _SMOLLM}


def _check_room(file: GgufFile, out: Path, dtype: torch.dtype) -> None:
    needed = file.elements * dtype.itemsize + _TOKENIZER_BYTES
    existing = next(folder for folder in out.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise BadInput(
            f"{out}: {needed / 2**30:.2f} GiB are needed, {free / 2**30:.2f} are free there: "
            "make room or name another place"
        )
    memory = int(file.elements * torch.float32.itemsize * _COPIES)
    available = psutil.virtual_memory().available
    if available < memory:
        raise BadInput(
            f"{file.path}: converting it takes {memory / 2**30:.1f} GiB of memory, "
            f"{available / 2**30:.1f} are free: "
            "use another machine, or end other programs"
        )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without progress bars and warnings, which hide our own lines; what matters is raised."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    had_bars = logging.is_progress_bar_enabled()
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if had_bars:
                logging.enable_progress_bar()


def _write_model(file: GgufFile, folder: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    with _quiet_transformers():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                file.path.parent,
                gguf_file=file.path.name,
                dtype=dtype,
                quantization_config=GgufConfig(dequantize=True),
            )
        except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
            raise BadInput(
                f"{file.path}: transformers cannot read it ({reason_of(error)}): give another file"
            ) from None
        vars(model.config).pop("_model_name_or_path", None)  # general.name, which is no path
        model.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        follow_umask(weights)


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    with _quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(
                f"{file.path}: transformers cannot read its tokenizer ({reason_of(error)}): give "
                f"another file"
            ) from None
        tokens = file.field("tokenizer.ggml.tokens")
        if tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) != tokens:
            raise BadInput(
                f"{file.path}: its tokens were not converted as they are: give the original "
                f"checkpoint"
            )
        if file.field("tokenizer.ggml.pre") == _SMOLLM:
            # llama.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM: each digit by itself, then GPT-2's rule.
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        tokenizer.model_max_length = file.field(f"{file.architecture}.context_length")
        tokenizer.save_pretrained(folder)


def _facts(file: GgufFile, spec: ModelSpec, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "file_sha256": file_sha256(file.path),
        "file_bytes": file.path.stat().st_size,
        "architecture": file.architecture,
        "name": file.field("general.name") or "",
        "license": file.field("general.license") or "",
        "quantization": file.quantization,
        "family": spec.family,
        "parameters": spec.parameter_count(),
        "dtype": _name(dtype),
        "converted_with": {name: version(name) for name in ("transformers", "gguf")},
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
