"""What a server is started with: its environment, derived from this process's, its arguments and
its ports."""

import json
import os
import random
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import vapo_megatron
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.errors import TryAgain
from vapo_megatron.weights.fp8 import BlockFp8

_MOST_CPU_TOKENS = 65536
_LEAST_WATCHDOG_SECONDS = 600.0  # a bucket of weights may take as long

# Files of which parts are in this process's memory.
_MAPS = Path("/proc/self/maps")
# As wheels and toolkits name it: libcudart.so.13, libcudart.so.13.0.48, libcudart-9335f6a2.so.12.
_RUNTIME = re.compile(r"libcudart(-[0-9a-f]+)?\.so\.(?P<major>\d+)(\.\d+)*")


def _visible(devices: Sequence[int], visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of the server, where this process's own may already hide or reorder
    devices."""
    names = visible.split(",") if visible else None
    return ",".join(names[index] if names else str(index) for index in devices)


def _link_runtime(folder: Path) -> Path | None:
    """The folder, with a link to the CUDA runtime that this process's torch uses; None if it uses
    none.

    The memory saver's library is loaded before Python in the server's children, and looks for the
    runtime in the system's places. If CUDA came with pip, only torch knows where it is
    (sgl-project/sglang issue 36533).
    """
    for line in _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        match = _RUNTIME.fullmatch(path.name)
        if match is not None:
            folder.mkdir()
            (folder / f"libcudart.so.{match['major']}").symlink_to(path)
            return folder
    return None


# Variables of a trainer rank's process group and allocator, which are not a server's.
_NOT_INHERITED = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "CUDA_DEVICE_MAX_CONNECTIONS",
}


def engine_environment(
    inherited: Mapping[str, str],
    scratch: Path,
    devices: Sequence[int] | None,
    *,
    float32: bool,
    offloads: bool = False,
    elsewhere: bool = False,
    tp: int = 1,
    nodes: int = 1,
    host: str = "127.0.0.1",
    cpu_threads: int = 1,
) -> dict[str, str]:
    """Variables of a server by name.

    Args:
        inherited: this process's environment.
        scratch: the server's directory of temporary files.
        devices: indices of its GPUs, as this process counts them; None without GPUs.
        float32: whether it computes in float32.
        offloads: whether it lends its memory to a trainer.
        elsewhere: whether it runs on other GPUs than the ranks that feed it.
        tp: its number of tensor-parallel ranks.
        nodes: number of nodes that they are on.
        host: this node's address, under which the others reach it.
        cpu_threads: threads of a rank without GPUs.
    """
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in _NOT_INHERITED and not name.startswith("TORCHELASTIC_")
    }
    # The package may run from a checkout that is not installed.
    paths = [str(Path(vapo_megatron.__file__).parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment["TMPDIR"] = str(scratch)
    environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "vapo_megatron.engines.inside.served_models"
    if nodes == 1:
        # A file instead of a TCP port for the rendezvous of its ranks: two servers cannot clash.
        environment["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{scratch}/rendezvous"
    else:
        # SGLang would look for it among all interfaces.
        environment.setdefault("SGLANG_HOST_IP", host)
    if float32:
        # What the convolutions of delta nets still see would be rounded to bfloat16.
        environment["SGLANG_MAMBA_CONV_DTYPE"] = "float32"
    if devices is None:
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        # On a machine that has GPUs as well, SGLang would take half of its code paths for them.
        environment["CUDA_VISIBLE_DEVICES"] = ""
        # Not the caller's: more threads than free cores make a small model dozens of times slower.
        environment["OMP_NUM_THREADS"] = str(cpu_threads)
        # Threads that wait in a loop take the core that the others wait for, once it is shared.
        environment.setdefault("OMP_WAIT_POLICY", "passive")
        # SGLang's seeded sampler would be compiled at the first batch, by a C++ compiler, for most
        # of a minute.
        environment["TORCH_COMPILE_DISABLE"] = "1"
        if tp > 1:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = _cpu_binding(tp)
        return environment
    environment["CUDA_VISIBLE_DEVICES"] = _visible(devices, inherited.get("CUDA_VISIBLE_DEVICES"))
    if float32:
        # Triton multiplies float32 in TF32 unless told otherwise: log-probs would be off by 1e-3.
        environment["TRITON_F32_DEFAULT"] = "ieee"
    if offloads and (runtime := _link_runtime(scratch / "cuda")) is not None:
        environment["LD_LIBRARY_PATH"] = ":".join(
            filter(None, (str(runtime), inherited.get("LD_LIBRARY_PATH", "")))
        )
    if elsewhere:
        # SGLang switches it off if it is not set. The trainer's NCCL decides by itself (-2), and
        # both ends of a connection within a machine must agree on how memory is shared.
        environment["NCCL_CUMEM_ENABLE"] = inherited.get("NCCL_CUMEM_ENABLE", "-2")
    else:
        # The ranks that share its GPUs hold different amounts; its caches are sized by the GPU with
        # the least room.
        environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    return environment


def _cpu_binding(tp: int) -> str:
    """One core for each tensor-parallel rank, taken in turn from the cores that this process may
    use."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[rank % len(cores)]) for rank in range(tp))


def cpu_cache_tokens(config: RolloutConfig) -> int:
    """Tokens of the KV cache of a server without a GPU, which takes its memory from the trainer: as
    many as its running responses can fill, unless the config says how many."""
    if config.max_total_tokens is not None:
        return config.max_total_tokens
    if config.context_length is None:
        return _MOST_CPU_TOKENS
    return min(_MOST_CPU_TOKENS, config.context_length * config.max_running_requests)


def engine_arguments(
    config: RolloutConfig,
    dtype: str,
    fp8: BlockFp8 | None,
    on_gpus: bool,
    offloads: bool,
    family: Mapping[str, object],
    quantised: bool = False,
    **place: object,
) -> list[str]:
    """Arguments of a server's command line.

    Args:
        config: the rollout section; its server_args come last.
        dtype: dtype that the server computes in.
        fp8: how its weights are quantised; None: not at all.
        on_gpus: whether it has GPUs.
        offloads: whether it lends their memory to a trainer.
        family: arguments that the model's family needs.
        quantised: whether the directory's own weights are.
        place: model_path, host, port and weight_version; of a part of a server on several nodes
            also nnodes, node_rank and dist_init_addr.
    """
    args: dict[str, object] = place | {
        "dtype": dtype,
        "load_format": config.load_format,
        "tp_size": config.tp,
        "context_length": config.context_length,
        "max_running_requests": config.max_running_requests,
        "mem_fraction_static": config.mem_fraction_static,
        "enable_deterministic_inference": config.is_deterministic(dtype, on_gpus),
        # Logits rounded to bfloat16 would shift log-probs by up to 0.1.
        "enable_fp32_lm_head": dtype == "bfloat16",
        "enable_return_routed_experts": config.router_replay,
        # Token ids in, token ids out: no tokenizer, no chat templates, no grammars, no defaults of
        # the model's own.
        "skip_tokenizer_init": True,
        "sampling_defaults": "openai",
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "log_level_http": "warning",
        # SGLang ends a server with requests that begins no batch for so long (300 s by default). It
        # may be compiling the kernels of its first batch, or be paused in place during a weight
        # sync.
        "watchdog_timeout": max(config.start_timeout_s, _LEAST_WATCHDOG_SECONDS),
        # An idle server otherwise spins on a core that the trainer needs. With attn_dp_size, parts
        # without requests must not sleep: the others wait for them at every layer.
        "sleep_on_idle": config.attention_parts == 1,
    }
    if not on_gpus:
        args |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "max_total_tokens": cpu_cache_tokens(config),
            "schedule_policy": "lpm" if config.share_prompts else None,
            # The overlapped scheduler begins a second batch before the first one's prompts are in
            # the cache, and computes one token after each response's end.
            "disable_overlap_schedule": config.share_prompts,
        }
    else:
        args |= {
            "device": "cuda",
            # SGLang's default, the fastest, takes only 16-bit numbers.
            "attention_backend": "triton" if dtype == "float32" else None,
            "max_total_tokens": config.max_total_tokens,
            "enable_memory_saver": offloads,
        }
    if fp8 is not None:
        args |= {
            "quantization": "fp8",
            "json_model_override_args": json.dumps({"quantization_config": fp8.config()}),
        }
    elif quantised and config.load_format == "dummy":  # the weights sent are not
        args["json_model_override_args"] = json.dumps({"quantization_config": None})
    if config.episode.tool_parser is not None:
        args["tool_call_parser"] = config.episode.tool_parser
    args |= family
    args |= config.server_args
    return [text for name, value in args.items() for text in _option(name, value)]


def _option(name: str, value: object) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    return [flag, str(value)]


# SGLang 0.5.23 beside its server's port, where parts of a server's GPUs attend to requests of their
# own (srt/server_args.py: PortArgs, srt/managers/data_parallel_controller.py:
# _broadcast_worker_ports).
BESIDE_SERVER = (13, *range(233, 240))

# The same beside dist_init_addr of a server on several nodes.
BESIDE_MEETING = (*range(1, 7), 13)

# Below Linux' usual range of ports that processes get by chance (32768 and above): one that is free
# stays so.
_FIRST = 20480
_END = 32256
# The ports of two multiples of this never overlap: servers that start at once differ in all ports
# or in none.
_STRIDE = 512


def free_port(beside: Sequence[int] = (), candidates: Sequence[int] = ()) -> int:
    """A free port such that those at the distances `beside` above it are free too. candidates:
    ports to try in turn.

    Raises:
        TryAgain: there is none.
    """
    ports = range(_FIRST, _END, _STRIDE if beside else 1)
    for port in candidates or random.SystemRandom().sample(ports, len(ports)):
        with ExitStack() as taken:
            if all(_take(port + distance, taken) for distance in (0, *beside)):
                return port
    if beside:
        others = f" together with those at {list(beside)} above it"
    else:
        others = ""
    raise TryAgain(f"no port of this machine is free{others}: end other servers")


def _take(port: int, taken: ExitStack) -> bool:
    held = taken.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    try:
        held.bind(("", port))
    except OSError:
        return False
    return True
