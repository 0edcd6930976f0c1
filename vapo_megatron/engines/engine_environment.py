"""The environment of a server: this process's, less what is its own, and what a server needs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import vapo_megatron
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.cuda_environment import cuda_environment
from vapo_megatron.engines.node_part import WHOLE, NodePart

# What a trainer rank's environment says of its own process group and allocator; a server has its own.
_NOT_INHERITED = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"),
}


def engine_environment(
    own: Mapping[str, str],
    scratch: Path,
    config: RolloutConfig,
    dtype: str,
    devices: Sequence[int] | None,
    elsewhere: bool,
    part: NodePart = WHOLE,
) -> dict[str, str]:
    """Variables of a server by name.

    Args:
        own: this process's environment.
        scratch: a directory of the server's.
        config: the rollout section.
        dtype: it computes in.
        devices: indices of its GPUs, as this process counts them; None without GPUs.
        elsewhere: whether its GPUs are not those of the ranks that feed it.
        part: of a server on several nodes.
    """
    found = {
        name: value
        for name, value in own.items()
        if name not in _NOT_INHERITED and not name.startswith("TORCHELASTIC_")
    }
    # The package may run from a checkout that is not installed.
    paths = [str(Path(vapo_megatron.__file__).parents[1]), found.get("PYTHONPATH", "")]
    found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    found["TMPDIR"] = str(scratch)
    found["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "vapo_megatron.engines.inside.served_models"
    if part.of == 1:
        # A file instead of a TCP port for the rendezvous of its ranks: two servers cannot clash.
        found["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{scratch}/rendezvous"
    if devices is not None:
        float32, saver = dtype == "float32", config.memory_saver
        return found | cuda_environment(
            found, devices, scratch, float32=float32, memory_saver=saver, elsewhere=elsewhere
        )
    found["SGLANG_USE_CPU_ENGINE"] = "1"
    # Where the machine has GPUs as well, SGLang would take half of its code for them.
    found["CUDA_VISIBLE_DEVICES"] = ""
    # More threads than free cores make a small model dozens of times slower.
    found["OMP_NUM_THREADS"] = "1"
    # SGLang's seeded sampler would be compiled at the first batch, by a C++ compiler, for most of a minute.
    found["TORCH_COMPILE_DISABLE"] = "1"
    if config.tp > 1:
        found["SGLANG_CPU_OMP_THREADS_BIND"] = _cpu_binding(config.tp)
    return found


def _cpu_binding(tp: int) -> str:
    """One core for each tensor-parallel rank, round the cores this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[rank % len(cores)]) for rank in range(tp))
