"""What a server on GPUs must find in its environment, beside what every server does."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

# As wheels and toolkits name it: libcudart.so.13, libcudart.so.13.0.48, libcudart-9335f6a2.so.12.
_RUNTIME = re.compile(r"libcudart(-[0-9a-f]+)?\.so\.(?P<major>\d+)(\.\d+)*")


def cuda_environment(
    own: Mapping[str, str], devices: Sequence[int], scratch: Path, *, float32: bool, memory_saver: bool, elsewhere: bool
) -> dict[str, str]:
    """Variables of a server by name; they take the place of this process's.

    Args:
        own: this process's environment.
        devices: indices of the server's GPUs, as this process counts them.
        scratch: a directory of the server's.
        float32: whether it computes in float32.
        memory_saver: whether it gives its memory away for a while.
        elsewhere: whether its GPUs are not those of the ranks that feed it.
    """
    found = {"CUDA_VISIBLE_DEVICES": _visible(devices, own.get("CUDA_VISIBLE_DEVICES"))}
    if float32:
        # Triton multiplies float32 in TF32 unless told otherwise: log-probs would be off by 1e-3.
        found["TRITON_F32_DEFAULT"] = "ieee"
    if memory_saver:
        runtime = _link_runtime(scratch / "cuda")
        if runtime is not None:
            found["LD_LIBRARY_PATH"] = ":".join(filter(None, (str(runtime), own.get("LD_LIBRARY_PATH", ""))))
    if elsewhere:
        # SGLang switches it off where it is not said. The trainer's NCCL decides by itself (-2), and two ends of one
        # connection within a machine must agree on how memory is shared.
        found["NCCL_CUMEM_ENABLE"] = own.get("NCCL_CUMEM_ENABLE", "-2")
    else:
        # Ranks that share its GPUs do not hold equally much; its caches are sized by the GPU with least room.
        found["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    return found


def _visible(devices: Sequence[int], visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of the server, where this process's own may already hide or reorder devices."""
    names = visible.split(",") if visible else None
    return ",".join(names[index] if names else str(index) for index in devices)


def _link_runtime(folder: Path) -> Path | None:
    """The folder, with a link to the CUDA runtime that this process's torch uses; None where it uses none.

    The memory saver's library is loaded before Python in the server's children, and wants the runtime from the places
    that the system knows. Where CUDA came with pip, torch alone knows its place (sgl-project/sglang issue 36533).
    """
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        match = _RUNTIME.fullmatch(path.name)
        if match is not None:
            folder.mkdir()
            (folder / f"libcudart.so.{match['major']}").symlink_to(path)
            return folder
    return None
