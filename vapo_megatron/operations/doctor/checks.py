"""The checks of a node, each with a deadline."""

import asyncio
import hashlib
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from xml.etree.ElementTree import Element

import psutil
import torch

from vapo_megatron.checks.preflight import check_train
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.engines.engine_limits import engine_fp8
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import EngineClient
from vapo_megatron.engines.server.connection import REQUEST_SECONDS
from vapo_megatron.engines.server.environment import free_port
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.errors import VapoError
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.models.registry import read_spec
from vapo_megatron.monitoring.facts import installed_version
from vapo_megatron.operations.doctor import allreduce, node
from vapo_megatron.operations.doctor.nodes import Line, Meeting, check_alike, check_shared_files
from vapo_megatron.operations.plan.inputs import GIB, Hardware

_PROMPT = [1, 2, 3, 4]
_NEW_TOKENS = 8


@dataclass(frozen=True)
class Examination:
    """The input of every check. quick: slow checks are left out; wait: seconds to wait for other
    nodes."""

    config: PlanConfig
    meeting: Meeting
    quick: bool
    wait: float

    @property
    def gpus(self) -> int:
        """GPUs that PyTorch can use here; 0 on a CPU machine."""
        return current_platform().device_count()

    @property
    def has_gpus(self) -> bool:
        """Whether this machine has GPUs, whether or not PyTorch can use them."""
        return bool(self.gpus) or any(
            map(os.path.exists, ("/proc/driver/nvidia/version", "/dev/nvidia0"))
        )

    @cached_property
    def gpu_log(self) -> Element:
        """The output of nvidia-smi on the node's GPUs; raises Unreadable."""
        return node.read_gpus()


@dataclass(frozen=True)
class Check:
    """One check. `run` may raise VapoError (a fault with its message) or Unreadable (a warning);
    beyond `deadline` seconds it hangs, a fault. gpu, between, slow: for GPUs only, for several
    nodes only, left out by --quick."""

    name: str
    run: Callable[[Examination], list[Line]]
    deadline: float
    gpu: bool = False
    between: bool = False
    slow: bool = False


def checks(config: PlanConfig, wait: float) -> tuple[Check, ...]:
    """All checks in their order; wait: seconds to wait for other nodes.

    Checks between nodes come late, so that a node that hangs earlier is named by its own check.
    """
    root = Path(config.run.directory)
    starting = config.rollout.start_timeout_s
    return (
        Check("versions", lambda here: node.check_versions(here.has_gpus), 60),
        Check(
            "gpus",
            lambda here: node.judge_gpus(here.gpu_log, config.hardware, here.gpus),
            120,
            gpu=True,
        ),
        Check(
            "network",
            lambda _: node.judge_network(node.read_ports(), node.usable_adapters()),
            90,
            between=True,
        ),
        Check("config", _config, 300),
        Check("all-reduce", allreduce_in_node, 200, slow=True),
        Check(
            "shared files",
            lambda here: check_shared_files(here.meeting, root, wait),
            4 * wait + 60,
            between=True,
        ),
        Check("alike", _alike, 2 * wait + 60, between=True),
        Check(
            "engine",
            lambda here: check_engine(config, here.gpus),
            starting + REQUEST_SECONDS + 60,
            slow=True,
        ),
    )


def perform(check: Check, examination: Examination) -> list[Line]:
    """Run a check; whatever happens in it becomes its lines. A check that hangs is left behind in
    its thread."""
    lines: queue.SimpleQueue[list[Line]] = queue.SimpleQueue()
    if check.gpu and not examination.has_gpus:
        lines.put([Line("not applicable", "no GPU here")])
    elif check.between and len(examination.meeting.nodes) == 1:
        lines.put([Line("not applicable", "one node")])
    elif check.slow and examination.quick:
        lines.put([Line("skipped", "--quick")])
    else:
        threading.Thread(
            target=lambda: lines.put(_guarded(check, examination)), daemon=True, name=check.name
        ).start()
    try:
        return [replace(line, check=check.name) for line in lines.get(timeout=check.deadline)]
    except queue.Empty:
        remedy = (
            "leave the node out, and find out why it blocks (dmesg, a file system that does not "
            "answer)"
        )
        return [Line("fault", f"hangs: nothing after {check.deadline:g} s", remedy, check.name)]


def _guarded(check: Check, examination: Examination) -> list[Line]:
    try:
        return check.run(examination)
    except VapoError as error:
        return [Line("fault", str(error), "see the message")]
    except node.Unreadable as error:
        return [Line("warning", str(error), "install or repair the tool to have this checked")]
    except Exception as error:
        return [Line("fault", f"{type(error).__name__}: {error}", "please report this error")]


def _config(examination: Examination) -> list[Line]:
    """Checks that `train` makes on this node: model, tokenizer, weights, data, functions, engine
    arguments, disk."""
    facts: list[str] = []
    check_train(examination.config, None, facts)
    return [Line("ok", "; ".join(facts))]


def _alike(examination: Examination) -> list[Line]:
    facts = {name: str(installed_version(name)) for name in ("torch", "megatron-core", "sglang")}
    facts["files"] = fingerprint(examination.config)
    if examination.gpus:
        facts["gpu"] = torch.cuda.get_device_name()
        facts["driver"] = examination.gpu_log.findtext("driver_version", "")
    return check_alike(examination.meeting, facts, examination.wait)


def fingerprint(config: TrainConfig) -> str:
    """A digest of the files of model and data on this node: names, sizes, and the content of
    config.json."""
    digest = hashlib.sha256()
    directory = Path(config.model.path)
    files = [
        *sorted(path for path in directory.glob("*") if path.is_file()),
        *config.data.train_files,
    ]
    for path in (*files, *(entry.path for entry in config.data.eval)):
        digest.update(
            f"{path.name} {path.stat().st_size if path.exists() else 'absent'}\n".encode()
        )
    if (directory / "config.json").is_file():
        digest.update((directory / "config.json").read_bytes())
    return digest.hexdigest()[:16]


def check_engine(config: TrainConfig, gpus: int) -> list[Line]:
    """Start a server as the run would, have it write a few tokens, end it. gpus: of this node, 0 on
    the CPU.

    Raises:
        BadInput: the model's sizes do not suit rollout.quantization, or SGLang refuses
            rollout.server_args.
        RunFailed, TryAgain: it does not start or does not answer; the message has the cause from
            its log.
    """
    if config.rollout.external_urls:
        return [Line("not applicable", "the run's engines are elsewhere (rollout.external_urls)")]
    if config.rollout.nodes > 1:
        result = f"an engine is on {config.rollout.nodes} nodes, doctor starts one on a single node"
        return [Line("skipped", result, "start `vapo-megatron engine` on as many nodes")]
    spec = read_spec(Path(config.model.path))
    needed = 2 * spec.parameter_count() / GIB
    free = psutil.virtual_memory().available / GIB
    if not gpus and needed > free / 2:
        result = (
            f"no GPU here, where an engine takes more than {needed:.0f} of {free:.0f} GiB of free "
            f"memory"
        )
        return [Line("skipped", result, "run doctor on a node of the job")]
    if gpus:
        devices = range(config.rollout.tp)
    else:
        devices = None
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vapo-doctor-") as folder:
        log = Path(folder) / "engine.log"
        fp8 = engine_fp8(config.rollout, config.actor.precision, spec)
        with EngineServer(
            config.model.path,
            config.rollout,
            config.model.dtype,
            log,
            devices,
            fp8=fp8,
            offloads=gpus > 0,
        ) as server:
            asyncio.run(_ask(server.address))
    seconds = time.monotonic() - started
    cache = os.environ.get("TRITON_CACHE_DIR")
    # Slurm/task.sh keeps all caches there
    if cache:
        kernels = f"; kernels are cached in {Path(cache).parent}"
    else:
        kernels = ""
    return [
        Line(
            "ok",
            f"TP{config.rollout.tp} started and wrote {_NEW_TOKENS} tokens in {seconds:.0f} "
            f"s{kernels}",
        )
    ]


async def _ask(address: EngineAddress) -> None:
    client = EngineClient(address)
    try:
        sampling = {"max_new_tokens": _NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}
        await client.generate([_PROMPT], [sampling])
    finally:
        await client.close()


def allreduce_in_node(examination: Examination) -> list[Line]:
    """All-reduce over the node's GPUs; on a CPU machine over two processes."""
    gpus = examination.gpus
    if gpus == 1:
        return [Line("not applicable", "one GPU")]
    measured = allreduce.measure(gpus or 2, bool(gpus), 0, gpus or 2, "127.0.0.1", free_port())
    hardware = Hardware(examination.config.hardware)
    if gpus:
        expected = hardware.nvlink * hardware.efficiency.nvlink
    else:
        expected = None
    remedy = (
        "see `nvidia-smi nvlink --status`, that nvidia-fabricmanager runs, that /dev/shm has 1 GiB "
        "(--shm-size)"
    )
    return allreduce.judge(measured, expected, remedy)


def allreduce_over_nodes(examination: Examination) -> list[Line]:
    """All-reduce over the devices of all nodes, reported on node 0 alone."""
    meeting = examination.meeting
    gpus = examination.gpus
    meeting.put(f"allreduce/devices/{meeting.index}", gpus or 1)
    counts = meeting.get_all("allreduce/devices", examination.wait + 600)
    if None in counts:
        silent = ", ".join(
            name for name, count in zip(meeting.nodes, counts, strict=True) if count is None
        )
        return [Line("fault", f"not tried: {silent} did not arrive", "see their lines")]
    if meeting.index == 0:
        meeting.put("allreduce/port", free_port())
    port = meeting.get("allreduce/port", examination.wait)
    if port is None:
        return [Line("fault", "node 0 named no port", "see its lines")]
    first = sum(counts[: meeting.index])
    world = sum(counts)
    # MASTER_ADDR may be an address that leads to node 0, and that nothing there can be bound to.
    measured = allreduce.measure(
        gpus or 1, bool(gpus), first, world, os.environ["MASTER_ADDR"], port
    )
    hardware = Hardware(examination.config.hardware)
    if gpus:
        expected = hardware.network * hardware.efficiency.network
    else:
        expected = None
    remedy = (
        "see the lines on the network, `ulimit -l` (RDMA needs unlimited), NCCL_IB_HCA and NCCL_NET"
    )
    return allreduce.judge(
        measured, expected, remedy, beside_adapters=bool(gpus) and any(node.read_ports().values())
    )
