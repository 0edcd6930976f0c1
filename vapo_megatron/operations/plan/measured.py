"""Efficiencies that benchmarks/gpu.py has measured, in place of assumed ones."""

import json
from pathlib import Path
from typing import Any

from vapo_megatron.config.hardware import EfficiencyConfig, Kind
from vapo_megatron.errors import BadInput


def measured_efficiency(path: Path, kind: Kind, parameters: int, assumed: EfficiencyConfig) -> EfficiencyConfig:
    """The efficiencies of a file that `python -m benchmarks.gpu --json FILE` wrote.

    Those of the measured shape whose parameters are nearest to the model's; linear and attention keep their ratio, as a
    step was timed as a whole. What was not measured stays as it is assumed.

    Raises:
        BadInput: the file cannot be read, was made on another GPU, or has no row in BF16 that was timed.
    """
    expected = "expected what `python -m benchmarks.gpu --json FILE` writes on the GPU that is planned for"
    try:
        content = json.loads(path.read_text())
        hardware = str(content["machine"]["hardware"])
        rows = [row for row in content["rows"] if isinstance(row.get("linear"), float)]
        shapes = {row["shape"]: int(row["parameters"]) for row in rows if row["precision"] == "bf16"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"plan.gpu_benchmark={path}: cannot be read ({error!r}): {expected}") from None
    if kind.partition("-")[0].upper() not in hardware.upper():
        raise BadInput(f"plan.gpu_benchmark={path} was measured on {hardware}, hardware.kind is {kind}: {expected}")
    if not shapes:
        raise BadInput(f"plan.gpu_benchmark={path} has no timed row in bf16: {expected}")
    nearest = min(shapes, key=lambda shape: abs(shapes[shape] - parameters))
    linear: dict[str, Any] = {row["precision"]: row["linear"] for row in rows if row["shape"] == nearest}
    found = float(min(linear["bf16"], 1.0))
    fp8 = max((value for precision, value in linear.items() if precision != "bf16"), default=None)
    gain = assumed.fp8_gain if fp8 is None else min(2.0, max(1.0, fp8 / linear["bf16"]))
    attention = min(1.0, found * assumed.attention / assumed.linear)
    return assumed.model_copy(update={"linear": found, "attention": attention, "fp8_gain": gain})
