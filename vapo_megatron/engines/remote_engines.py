"""Engines that `vapo-megatron engine` starts on other devices, from the same config as the
trainer's.

Such an engine serves one trainer after another. A trainer therefore first checks the engine's
identity and takes it over, which ends anything that an earlier trainer began. serve_engine() is
that command.
"""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue, TypeAdapter

from vapo_megatron.config.rollout import Dtype, RolloutConfig
from vapo_megatron.config.run_directory import check_room
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.engines.engine_limits import check_load_format, engine_devices, engine_fp8
from vapo_megatron.engines.keeper import EngineKeeper
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import EngineClient, call_once
from vapo_megatron.engines.server.node_part import NodePart
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.errors import BadInput, TryAgain
from vapo_megatron.logs import outlive_output
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.signals import listen, stop_requested
from vapo_megatron.weights.fp8 import BlockFp8

_logger = logging.getLogger(__name__)

PROTOCOL = 10
"""Increase it with every change of the messages between engines and trainers:
weights.bucket.announce, the answers of strict_loading, broadcast_group, heartbeat, server_main and
columns."""

_ANSWER_SECONDS = 30.0
_POLL_SECONDS = 1.0
_LOOK_SECONDS = 0.5


_COMPATIBLE_SETTINGS = (
    "tp",
    "context_length",
    "max_total_tokens",
    "deterministic",
    "router_replay",
)


def compatibility_fields(
    config: RolloutConfig, spec: ModelSpec, dtype: Dtype, fp8: BlockFp8 | None
) -> dict[str, JsonValue]:
    """Settings that engine and trainer must share, by config key, as JSON values.

    Args:
        config: the rollout section.
        spec: the model's shape.
        dtype: model.dtype.
        fp8: how weights are quantised for the engines; None: not at all.
    """
    fields: dict[str, Any] = {
        f"model.{name}": value for name, value in spec.facts().items() if name != "dtype"
    }
    fields["model.dtype"] = dtype
    fields["rollout.quantization"] = "none" if fp8 is None else fp8.config()
    for name in _COMPATIBLE_SETTINGS:
        fields[f"rollout.{name}"] = getattr(config, name)
    as_json: dict[str, JsonValue] = TypeAdapter(dict[str, Any]).dump_python(fields, mode="json")
    return as_json


def take_back(address: EngineAddress, deadline: float, fields: Mapping[str, JsonValue]) -> None:
    """Take over again an engine that was lost.

    Args:
        address: the engine's address.
        deadline: seconds in which it must answer.
        fields: this run's compatibility_fields().

    Raises:
        BadInput, TryAgain: see take_over_engines.
    """
    identity = wait_for_identity(address.url, address.key, deadline, time.monotonic())
    check_identity(address.url, identity, fields)
    call_once(address, EngineClient.take_over)


def take_over_engines(
    config: RolloutConfig, fields: Mapping[str, JsonValue]
) -> tuple[tuple[EngineAddress, ...], bool]:
    """Wait for the engines of rollout.external_urls and end whatever an earlier trainer began on
    them.

    They accept requests again after the first weight sync.

    Args:
        config: the rollout section.
        fields: this run's compatibility_fields().

    Returns:
        Their addresses, and whether all of them run on GPUs.

    Raises:
        BadInput: one is not an engine of vapo_megatron, needs another key, or differs in a setting
            that must agree.
        TryAgain: one did not answer within rollout.start_timeout_s.
    """
    owner = secrets.token_hex(4)
    key = config.api_key() or ""
    start = time.monotonic()
    identities = {
        url: wait_for_identity(url, key, config.start_timeout_s, start)
        for url in config.external_urls
    }
    addresses = []
    for url, identity in identities.items():
        check_identity(url, identity, fields)
        log_file = identity["log_file"]
        if identity["host"] != socket.gethostname():
            log_file = f"{identity['host']}:{log_file}"
        addresses.append(EngineAddress(url, log_file, key, owner))
    for address in addresses:
        call_once(address, EngineClient.take_over)
    return tuple(addresses), all(identity["cuda"] for identity in identities.values())


def wait_for_identity(url: str, key: str, deadline: float, start: float) -> dict[str, Any]:
    """An engine's identity, once it answers within `deadline` seconds of `start`
    (time.monotonic()).

    Raises:
        BadInput: it is not an engine of vapo_megatron, or needs another key.
        TryAgain: it did not answer.
    """
    address = EngineAddress(url, "of `vapo-megatron engine` on its machine", key)
    while True:
        try:
            identity = call_once(address, EngineClient.identity, _ANSWER_SECONDS)
            break
        except TryAgain as error:
            if time.monotonic() > start + deadline:
                cause = str(error.__cause__ or error.__context__ or "silent").splitlines()[0]
                raise TryAgain(
                    f"rollout.external_urls: {url} did not answer within "
                    f"rollout.start_timeout_s={deadline:g} s ({cause}): start `vapo-megatron "
                    "engine` there, or remove the URL"
                ) from None
            time.sleep(_POLL_SECONDS)
    if identity is None or "protocol" not in identity:
        raise BadInput(
            f"rollout.external_urls: {url} is not an engine of vapo-megatron: start one with "
            "`vapo-megatron engine`"
        )
    if identity["protocol"] != PROTOCOL:
        raise BadInput(
            f"rollout.external_urls: {url} has version {identity['protocol']} of the weight sync "
            f"and this trainer version {PROTOCOL}: start both from one version of vapo_megatron"
        )
    return identity


def check_identity(url: str, identity: Mapping[str, Any], fields: Mapping[str, JsonValue]) -> None:
    """Raises BadInput if an engine and this run (fields) differ in a setting that must agree."""
    theirs = identity["agreed"]
    for key in dict.fromkeys((*fields, *theirs)):
        if theirs.get(key) != fields.get(key):
            raise BadInput(
                f"rollout.external_urls: {url} was started with {key}={theirs.get(key)} and this "
                f"run has {fields.get(key)}: start both from the same config"
            )


def serve_engine(
    config: TrainConfig, host: str, port: int, node: int = 0, meet: str | None = None
) -> None:
    """Serve the engine of a training config on this machine until SIGTERM or SIGUSR1.

    It takes the first rollout.tp GPUs that this process sees, or as many of them as rollout.nodes
    leaves each node. Its log is run.root/<run.name>-engines/<host>_<port>.log.

    Args:
        config: the trainer's config.
        host: address of this machine to listen on.
        port: port to listen on; 0: a free one.
        node: this machine's number, from 0 to rollout.nodes - 1; a trainer is given the URL
            of the first.
        meet: HOST:PORT where the first node's command waits for the others; None: the engine is on
            one node.

    Raises:
        BadInput: the config cannot work here, or it names no key.
        RunFailed: the engine did not start.
        TryAgain: it failed too often (rollout.health.max_failures).
    """
    listen()
    outlive_output()
    key = config.rollout.api_key()
    if key is None:
        raise BadInput(
            f"--host {host} without rollout.api_key_variable: anyone who reaches the engine, on a "
            "shared machine every user of it, could run programs as you. Name an environment "
            "variable that holds a key, made by `export ENGINE_KEY=$(openssl rand -hex 32)`"
        )
    rollout = config.rollout
    part = _part(rollout, node, meet)
    devices = engine_devices(rollout, current_platform(), of_parts=True)[0]
    spec = read_spec(Path(config.model.path))
    check_load_format(Path(config.model.path), rollout)
    fp8 = engine_fp8(rollout, config.actor.precision, spec)
    check_room(Path(config.run.directory))
    folder = Path(config.run.directory).with_name(f"{config.run.name}-engines")
    name = f"{socket.gethostname()}_{port or time.time_ns()}"
    if part is not None and not part.leads:
        name += f"_node_{part.index}"
    log_file = (folder / f"{name}.log").absolute()
    identity: dict[str, JsonValue] = {
        "protocol": PROTOCOL,
        "agreed": compatibility_fields(rollout, spec, config.model.dtype, fp8),
        "cuda": devices is not None,
        "host": socket.gethostname(),
        "log_file": str(log_file),
    }
    server = EngineServer(
        config.model.path,
        rollout,
        config.model.dtype,
        log_file,
        devices,
        host=host,
        fp8=fp8,
        port=port,
        key=key,
        identity=identity,
        part=part,
    )
    server.check_arguments()
    _serve(EngineKeeper(server, rollout), log_file)


def _part(rollout: RolloutConfig, node: int, meet: str | None) -> NodePart | None:
    """This machine's part of an engine; None where the whole engine is on it.

    Raises:
        BadInput: node or meet do not fit rollout.nodes, or nothing can listen at meet.
    """
    nodes = rollout.nodes
    if node >= nodes:
        raise BadInput(
            f"--node {node} with rollout.nodes={nodes}: nodes are counted from 0, give a smaller "
            "one or set rollout.nodes"
        )
    if nodes == 1:
        if meet is not None:
            raise BadInput(
                f"--meet {meet} with rollout.nodes=1: set rollout.nodes, or leave it out"
            )
        return None
    host, _, port = (meet or "").rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise BadInput(
            f"--meet {meet or ''} with rollout.nodes={nodes}: expected HOST:PORT, an address and a "
            "free port of the first node, the same on all of them"
        )
    return NodePart(node, nodes, host.strip("[]"), int(port), rollout.health.answer_s)


def _serve(keeper: EngineKeeper, log_file: Path) -> None:
    """Keep an engine running until this process is asked to stop."""
    try:
        keeper.start()
        keeper.wait_until_ready()
        if keeper.leads:
            _logger.info("engine at %s, log %s", keeper.address.url, log_file)
        else:
            _logger.info("part of an engine, log %s", log_file)
        idle = threading.Event()
        while stop_requested() is None:
            status = keeper.status()
            if status.state == "given up":
                raise TryAgain(
                    f"{log_file}: the engine failed {status.in_a_row} times in a row (limit "
                    f"rollout.health.max_failures), most recently: {status.cause}"
                )
            idle.wait(_LOOK_SECONDS)
    finally:
        keeper.stop()
