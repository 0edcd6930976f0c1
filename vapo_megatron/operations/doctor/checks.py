"""The table of checks, and how each is kept to its deadline."""

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

from vapo_megatron.checkpoint.state_saver import checkpoint_bytes, trained_parameters
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.prompts import eval_prompts, train_prompts
from vapo_megatron.data.rows import eval_problems, train_problems
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.client import REQUEST_SECONDS, EngineClient
from vapo_megatron.engines.node_part import free_port
from vapo_megatron.engines.server import EngineAddress, EngineServer
from vapo_megatron.engines.weight_sync.quantization import engine_fp8
from vapo_megatron.errors import VapoError
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.monitoring.facts import installed_version
from vapo_megatron.operations.doctor import allreduce
from vapo_megatron.operations.doctor.node import (
    Unreadable,
    check_disk,
    check_hostname,
    check_limits,
    check_toolkit,
    check_versions,
    diagnose,
    judge_gpus,
    judge_network,
    read_gpus,
    read_ports,
    usable_adapters,
)
from vapo_megatron.operations.doctor.nodes import Line, Meeting, check_alike, check_shared_files
from vapo_megatron.operations.hardware import GIB, Hardware
from vapo_megatron.operations.plan.inputs import model_directory
from vapo_megatron.run.first_checks import check_critic_source
from vapo_megatron.weights.load import check_weights
from vapo_megatron.weights.spec import read_spec

_PROMPT = [1, 2, 3, 4]
_NEW_TOKENS = 8


def check_engine(config: TrainConfig, gpus: int) -> list[Line]:
    """Start a server as the run would, have it write a few tokens, end it. gpus: of this node, 0 on the CPU.

    Raises:
        BadInput: the model's sizes do not suit rollout.quantization, or SGLang refuses rollout.server_args.
        RunFailed, TryAgain: it does not start, or does not answer; the cause in its log is named.
    """
    if config.rollout.external_urls:
        return [Line("not applicable", "the run's engines are elsewhere (rollout.external_urls)")]
    spec = read_spec(Path(config.model.path))
    needed, free = 2 * spec.parameter_count(), psutil.virtual_memory().available
    if not gpus and needed > free / 2:
        result = (
            f"no GPU here, where an engine takes more than {needed / GIB:.0f} of {free / GIB:.0f} GiB of free memory"
        )
        return [Line("skipped", result, "have doctor look at a node of the job")]
    devices = range(config.rollout.tp) if gpus else None
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vapo-doctor-") as folder:
        log = Path(folder) / "engine.log"
        fp8 = engine_fp8(config.rollout, config.actor.precision, spec)
        server = EngineServer(config.model.path, config.rollout, config.model.dtype, log, devices, fp8=fp8)
        server.check_arguments()
        with server:
            ready = time.monotonic() - started
            asyncio.run(_ask(server.address))
    seconds = time.monotonic() - started - ready
    return [Line("ok", f"TP{config.rollout.tp} started in {ready:.0f} s, {_NEW_TOKENS} tokens in {seconds:.1f} s")]


async def _ask(address: EngineAddress) -> None:
    client = EngineClient(address)
    try:
        sampling = {"max_new_tokens": _NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}
        await client.generate([_PROMPT], [sampling])
    finally:
        await client.close()


def check_model(config: TrainConfig) -> list[Line]:
    """config.json, the headers of all weights, and the tokenizer; raises BadInput for what is wrong with them."""
    directory = Path(config.model.path)
    spec = read_spec(directory)
    check_weights(directory, spec, "lm")
    TextTokenizer(directory, config.data.prompt).check_vocabulary(spec.vocab_size)
    lines = [Line("ok", f"{directory}: {spec.family}, {spec.parameter_count():,} parameters, tokenizer fits")]
    if config.has_critic_model and config.critic_source != directory:
        critic, is_new = check_critic_source(config, spec), config.critic.init == "policy"
        check_weights(config.critic_source, critic, "value", value_head="new" if is_new else "saved")
        TextTokenizer(directory, config.data.prompt).check_same(config.critic_source, config.critic_key)
        lines.append(Line("ok", f"{config.critic_source}: {critic.family}, {critic.parameter_count():,} parameters"))
    return lines


def check_data(config: TrainConfig) -> list[Line]:
    """Every problem of every file; raises BadInput for the first that cannot be used."""
    data = config.data
    for entry in data.eval:  # before what needs a model, which may be missing too
        eval_problems(entry, data.fields)
    train_problems(data)
    tokenizer = TextTokenizer(Path(config.model.path), data.prompt)
    counts = [f"{', '.join(map(str, data.train_files))}: {len(train_prompts(data, tokenizer))} prompts"]
    counts += [f"{entry.path}: {len(eval_prompts(entry, data, tokenizer))}" for entry in data.eval]
    return [Line("ok", ", ".join(counts))]


def fingerprint(config: TrainConfig) -> str:
    """A digest of what the model's and the data's files are here: names, sizes, and config.json as a whole."""
    digest = hashlib.sha256()
    directory = Path(config.model.path)
    files = [*sorted(path for path in directory.glob("*") if path.is_file()), *config.data.train_files]
    for path in (*files, *(entry.path for entry in config.data.eval)):
        digest.update(f"{path.name} {path.stat().st_size if path.exists() else 'absent'}\n".encode())
    if (directory / "config.json").is_file():
        digest.update((directory / "config.json").read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Examination:
    """What every check is given.

    Attributes:
        config: of the run that is to follow.
        meeting: this node's place among the nodes.
        quick: whether slow checks are left out.
        wait: seconds to wait for other nodes.
        passes_over_gpus: whether GPUs of this machine are as if they were not there.
    """

    config: PlanConfig
    meeting: Meeting
    quick: bool
    wait: float
    passes_over_gpus: bool = False

    @property
    def nodes(self) -> int:
        """Nodes that take part."""
        return len(self.meeting.nodes)

    @property
    def gpus(self) -> int:
        """GPUs that PyTorch can use here; 0 on a CPU machine."""
        return 0 if self.passes_over_gpus else current_platform().device_count()

    @property
    def has_gpus(self) -> bool:
        """Whether there are GPUs to look at, whether or not PyTorch can use them."""
        return not self.passes_over_gpus and bool(self.gpus or has_nvidia_driver())

    @cached_property
    def gpu_log(self) -> Element:
        """What nvidia-smi says of the node's GPUs; raises Unreadable."""
        return read_gpus()


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: as it stands in the report.
        run: the check; may raise VapoError (a fault, in its own words) or Unreadable (a warning).
        deadline: seconds after which it hangs, which is a fault.
        gpu: whether it says something about GPUs alone.
        between: whether it says something about several nodes alone.
        slow: whether --quick leaves it out.
    """

    name: str
    run: Callable[[Examination], list[Line]]
    deadline: float
    gpu: bool = False
    between: bool = False
    slow: bool = False


def has_nvidia_driver() -> bool:
    """Whether this machine has GPUs of NVIDIA, whether or not PyTorch can use them."""
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidia0")


def perform(check: Check, examination: Examination) -> list[Line]:
    """The lines of a check, whatever happens in it. A check that hangs is left behind in its thread."""
    return [replace(line, check=check.name) for line in _lines(check, examination)]


def _lines(check: Check, examination: Examination) -> list[Line]:
    if check.gpu and not examination.has_gpus:
        return [Line("not applicable", "--no-gpus" if examination.passes_over_gpus else "no GPU here")]
    if check.between and examination.nodes == 1:
        return [Line("not applicable", "one node")]
    if check.slow and examination.quick:
        return [Line("skipped", "--quick")]
    answers: queue.SimpleQueue[list[Line]] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: answers.put(_guarded(check, examination)), daemon=True, name=check.name)
    thread.start()
    try:
        return answers.get(timeout=check.deadline)
    except queue.Empty:
        remedy = "leave the node out, and see what it waits for (dmesg, a file system that does not answer)"
        return [Line("fault", f"hangs: nothing after {check.deadline:g} s", remedy)]


def _guarded(check: Check, examination: Examination) -> list[Line]:
    try:
        return check.run(examination)
    except VapoError as error:
        return [Line("fault", str(error), "see the message")]
    except Unreadable as error:
        return [Line("warning", str(error), "install or mend the tool to have this checked")]
    except Exception as error:
        return [Line("fault", f"{type(error).__name__}: {error}", "report it: this was not foreseen")]


def _allreduce_in_node(examination: Examination) -> list[Line]:
    hardware, gpus = Hardware(examination.config.hardware), examination.gpus
    count = gpus or 2
    if count == 1:
        return [Line("not applicable", "one GPU")]
    port = free_port()
    devices = [f"cuda:{rank}" if gpus else "cpu" for rank in range(count)]
    processes = [allreduce.start(device, rank, count, "127.0.0.1", port) for rank, device in enumerate(devices)]
    expected = hardware.nvlink * hardware.efficiency.nvlink if gpus else None
    remedy = "see `nvidia-smi nvlink --status`, that nvidia-fabricmanager runs, and NCCL_DEBUG=INFO"
    return allreduce.judge(allreduce.results(processes, 150), expected, remedy)


def _disk(examination: Examination) -> list[Line]:
    config = examination.config
    sources = {"actor": config.model.path}
    if config.has_critic_model:
        sources["critic"] = str(config.critic_source)
    specs = {name: read_spec(model_directory(path)) for name, path in sources.items()}
    needed = checkpoint_bytes(config, trained_parameters(config, specs))
    return check_disk(Path(config.run.directory), needed)


def _alike(examination: Examination) -> list[Line]:
    facts = {name: str(installed_version(name)) for name in ("torch", "megatron-core", "sglang")}
    facts["files"] = fingerprint(examination.config)
    if examination.gpus:
        facts["gpu"] = torch.cuda.get_device_name()
        facts["driver"] = examination.gpu_log.findtext("driver_version", "")
    return check_alike(examination.meeting, facts, examination.wait)


def checks(config: PlanConfig, wait: float) -> tuple[Check, ...]:
    """All checks in their order; wait: seconds to wait for other nodes.

    Those between nodes come last but one, so that a node that hangs in an earlier one is a matter of that node alone.
    """
    engine_seconds = config.rollout.start_timeout_s + REQUEST_SECONDS
    root = Path(config.run.directory)
    return (
        Check("versions", lambda node: check_versions(node.has_gpus), 60),
        Check("toolkit", lambda _: check_toolkit(torch.version.cuda), 240, gpu=True),
        Check("hostname", lambda node: check_hostname(node.nodes), 30),
        Check("limits", lambda node: check_limits(bool(node.gpus), node.nodes), 30),
        Check("gpus", lambda node: judge_gpus(node.gpu_log, config.hardware, node.gpus), 120, gpu=True),
        Check("diagnosis", lambda _: diagnose(), 300, gpu=True, slow=True),
        Check("network", lambda node: judge_network(read_ports(), usable_adapters(), node.nodes), 90),
        Check("model", lambda _: check_model(config), 300),
        Check("data", lambda _: check_data(config), 300),
        Check("disk", _disk, 180),
        Check("all-reduce", _allreduce_in_node, 200, slow=True),
        Check("shared files", lambda node: check_shared_files(node.meeting, root, wait), 4 * wait + 60),
        Check("alike", _alike, wait + 60, between=True),
        Check("engine", lambda node: check_engine(config, node.gpus), engine_seconds + 60, slow=True),
    )
