"""Reading the tensors of a Hugging Face directory, a slice at a time."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vapo_megatron.errors import BadInput
from vapo_megatron.files import parse_json
from vapo_megatron.weights.fp8 import BLOCK, SCALE_SUFFIX
from vapo_megatron.weights.mxfp4 import BLOCKS, SCALES, Mxfp4Tensor, shape_of

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATING = ("F64", "F32", "F16", "BF16")


class FileTensor:
    """A tensor in a memory-mapped file; an index reads only the requested part."""

    def __init__(self, view: Any) -> None:
        self._view = view
        self.shape: tuple[int, ...] = tuple(view.get_shape())
        self.dtype: str = view.get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        return self._view[index]


class BlockTensor:
    """An FP8 tensor with a scale for each block (weights/fp8.py), read as the bfloat16 tensor that
    the two stand for."""

    dtype = "BF16"

    def __init__(self, values: FileTensor, scales: FileTensor) -> None:
        self._values = values
        self._scales = scales
        self.shape = values.shape

    def __getitem__(self, index: Any) -> Tensor:
        rows, columns = self._ranges(index)
        blocks = tuple(
            slice(part.start // BLOCK, -(-part.stop // BLOCK)) for part in (rows, columns)
        )
        spread = self._scales[blocks].float()
        for dim, part in enumerate((rows, columns)):
            places = torch.arange(part.start, part.stop) // BLOCK - part.start // BLOCK
            spread = spread.index_select(dim, places)
        values = self._values[slice(rows.start, rows.stop), slice(columns.start, columns.stop)]
        return spread.mul_(values.float()).to(torch.bfloat16)

    def _ranges(self, index: Any) -> list[range]:
        """The rows and columns that slices ask for."""
        given = index if isinstance(index, tuple) else (index,)
        slices = [*given, *[slice(None)] * (2 - len(given))]
        return [range(*part.indices(size)) for part, size in zip(slices, self.shape, strict=True)]


class HFTensors:
    """The tensors of a directory with model.safetensors, or with shards and their index. FP8
    tensors with scales of blocks are read as bfloat16, and the scales are not among its tensors.
    Opening reads the headers alone, which are checked against the size of the files. Raises
    BadInput where a file is missing, truncated or otherwise unreadable, or the index does not agree
    with its shards."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[Path, Any] = {}
        self._places: dict[str, Path] = {}
        self._quantised: dict[str, tuple[int, ...]] = {}
        index = directory / INDEX_FILE
        if index.is_file():
            self._open_shards(index)
        elif (directory / SINGLE_FILE).is_file():
            self._places = dict.fromkeys(
                self._open(directory / SINGLE_FILE), directory / SINGLE_FILE
            )
        else:
            raise BadInput(
                f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}; give a directory with "
                "safetensors weights"
            )
        self._find_quantised()

        names = (name.removesuffix(SCALE_SUFFIX) for name in self._places)
        self._scaled = {name for name in names if name + SCALE_SUFFIX in self._places}
        self._scaled &= self._places.keys()

    @property
    def names(self) -> set[str]:
        """Names of all tensors; of one in MXFP4, the name of the dequantised tensor."""
        parts = {name + end for name in self._quantised for end in (BLOCKS, SCALES)}
        parts |= {name + SCALE_SUFFIX for name in self._scaled}
        return self._places.keys() - parts | self._quantised.keys()

    @property
    def scaled(self) -> int:
        """How many tensors are FP8 with scales of blocks."""
        return len(self._scaled)

    def __getitem__(self, name: str) -> FileTensor | BlockTensor | Mxfp4Tensor:
        if name in self._quantised:
            blocks = self._in_file(name + BLOCKS)
            return Mxfp4Tensor(blocks, self._in_file(name + SCALES), self._quantised[name])
        values = self._in_file(name)
        if name not in self._scaled:
            return values
        return BlockTensor(values, self._in_file(name + SCALE_SUFFIX))

    def _in_file(self, name: str) -> FileTensor:
        path = self._places[name]
        try:
            return FileTensor(self._files[path].get_slice(name))
        except SafetensorError as error:
            raise BadInput(
                f"{path}: tensor {name} cannot be read ({error}); fetch the file again"
            ) from None

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises BadInput where a tensor has another shape, or is not of floating point."""
        path = self._places[name + BLOCKS if name in self._quantised else name]
        self._check(self[name], path, name, shape)

    def _check(
        self,
        tensor: FileTensor | BlockTensor | Mxfp4Tensor,
        path: Path,
        name: str,
        shape: tuple[int, ...],
    ) -> None:
        if tensor.shape != shape:
            raise BadInput(
                f"{path}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)} by "
                "config.json; the two do not belong together"
            )
        if name in self._scaled:
            self._check_scales(name)
        if tensor.dtype not in FLOATING:
            raise BadInput(
                f"{path}: tensor {name} has dtype {tensor.dtype}, expected one of "
                f"{', '.join(FLOATING)}: quantised weights cannot be trained, give the original"
            )

    def _find_quantised(self) -> None:
        """Pair blocks and scales. Raises BadInput where one has no other, or they do not fit."""
        for name in self._places:
            whole = name.removesuffix(BLOCKS).removesuffix(SCALES)
            if whole == name:
                continue
            end = name.removeprefix(whole)
            other = whole + (SCALES if end == BLOCKS else BLOCKS)
            if other not in self._places:
                raise BadInput(
                    f"{self._places[name]}: tensor {name} has no {other} beside it; fetch the "
                    "model again"
                )
            blocks = self._in_file(whole + BLOCKS)
            scales = self._in_file(whole + SCALES)
            shape = shape_of(blocks.shape, scales.shape)
            if shape is None or blocks.dtype != "U8" or scales.dtype != "U8":
                raise BadInput(
                    f"{self._places[name]}: tensor {whole}{BLOCKS} is {blocks.dtype} "
                    f"{list(blocks.shape)} and {whole}{SCALES} {scales.dtype} "
                    f"{list(scales.shape)}, expected U8 [experts, out, groups, 16] and U8 "
                    "[experts, out, groups]: fetch the model again"
                )
            self._quantised[whole] = shape

    def _check_scales(self, name: str) -> None:
        """Raises BadInput where values are not FP8, or scales do not match their blocks."""
        values = self._in_file(name)
        scales = self._in_file(name + SCALE_SUFFIX)
        expected = tuple(-(-size // BLOCK) for size in values.shape)
        kinds = (values.dtype, scales.dtype)
        known = kinds[0] == "F8_E4M3" and kinds[1] in ("F32", "BF16")
        if not known or len(expected) != 2 or scales.shape != expected:
            raise BadInput(
                f"{self._places[name]}: tensor {name} has dtype {kinds[0]} and scales of dtype "
                f"{kinds[1]} and shape {list(scales.shape)}, expected F8_E4M3 and F32 or BF16 of "
                f"shape {list(expected)}, one a block of {BLOCK} x {BLOCK}: give the bf16 original"
            )

    def _open(self, path: Path) -> Iterable[str]:
        """Open a file and return the names in it."""
        try:
            self._files[path] = safe_open(path, framework="pt", device="cpu")
        except FileNotFoundError:
            raise BadInput(f"{path}: no such file, but {INDEX_FILE} names it; fetch it") from None
        except (SafetensorError, OSError) as error:
            raise BadInput(
                f"{path}: truncated or no safetensors file ({error}); fetch it again"
            ) from None
        return self._files[path].keys()

    def _open_shards(self, index: Path) -> None:
        try:
            listed = parse_json(index.read_text(encoding="utf-8"))["weight_map"]
            shards = {name: index.parent / str(file) for name, file in listed.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(
                f"{index}: no readable weight_map ({type(error).__name__}: {error}); fetch it again"
            ) from None
        for path in sorted(set(shards.values())):
            self._places |= dict.fromkeys(self._open(path), path)
        for name, path in shards.items():
            if self._places.get(name) != path:
                raise BadInput(
                    f"{index}: tensor {name} is not in {path.name}, where the index has it; fetch "
                    "both again"
                )
