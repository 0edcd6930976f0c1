"""What the machine has, what it lacks, and how fast its memory, bus and matrix units are.

Exit code 1 where something is missing that a run needs.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec

import torch

from vapo_megatron.monitoring.facts import environment_facts
from vapo_megatron.operations.doctor.node import check_versions


def main() -> int:
    """Returns the exit code."""
    for name, value in environment_facts().items():
        print(f"{name}: {value}")
    gpu = torch.cuda.is_available()
    lines = check_versions(gpu)
    if gpu:
        _measure()
    for line in lines:
        print(f"{line.status}: {line.found}{f' -> {line.remedy}' if line.remedy else ''}")
    faults = [line.found for line in lines if line.status == "fault"]
    if gpu and find_spec("cutlass") is None:
        faults.append(
            "nvidia-cutlass-dsl, which SGLang's layers import on every GPU: no engine starts"
        )
    if faults:
        print(f"missing: {'; '.join(faults)}")
        return 1
    print(torch.cuda.get_device_name() if gpu else "what a CPU needs is there; no GPU to look at")
    return 0


def _measure() -> None:
    properties = torch.cuda.get_device_properties(0)
    print(
        f"{properties.name}, sm_{properties.major}{properties.minor}, "
        f"{properties.total_memory / 2**30:.1f} GiB"
    )
    print(f"cudnn {torch.backends.cudnn.version()}, nccl {torch.cuda.nccl.version()}")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    print(f"bf16 product {2 * 8192**3 / _seconds(lambda: a @ b) / 1e12:.0f} TFLOP/s")
    into_fp32 = _seconds(lambda: torch.mm(a, b, out_dtype=torch.float32))
    print(f"bf16 product into float32 {2 * 8192**3 / into_fp32 / 1e12:.0f} TFLOP/s")
    x = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    print(f"copy {2 * x.numel() / _seconds(lambda: y.copy_(x)) / 1e12:.2f} TB/s")
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    device = x[: 1 << 28]
    for name, copy in (
        ("to the device", lambda: device.copy_(host, non_blocking=True)),
        ("back", lambda: host.copy_(device, non_blocking=True)),
    ):
        print(f"pinned memory {name} {host.numel() / _seconds(copy) / 1e9:.1f} GB/s")


def _seconds(function: Callable[[], object]) -> float:
    repeats = 20
    for _ in range(3):
        function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


if __name__ == "__main__":
    sys.exit(main())
