"""Engines that the trainer did not start: `vapo-megatron engine` starts them on other devices, from the same config.

Such an engine outlives the trainers that it serves one after another. A trainer therefore first checks the engine's
identity and takes it over, which ends anything that an earlier trainer began. serve_engine() is that command.
"""

import dataclasses
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
from vapo_megatron.engines.engine_limits import engine_devices, engine_fp8
from vapo_megatron.engines.keeper import EngineKeeper
from vapo_megatron.engines.server.client import EngineClient, ask
from vapo_megatron.engines.server.process import EngineAddress, EngineServer
from vapo_megatron.errors import BadInput, TryAgain
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.signals import listen, stop_requested
from vapo_megatron.weights.fp8 import BlockFp8
from vapo_megatron.weights.spec import ModelSpec, read_spec

_logger = logging.getLogger(__name__)

PROTOCOL = 9
"""Raise it with every change of the messages between engines and trainers: weights.bucket.announce, the answers of
strict_loading, broadcast_group, heartbeat, server_main and columns."""

_ANSWER_SECONDS = 30.0
_POLL_SECONDS = 1.0
_LOOK_SECONDS = 0.5
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def what_must_agree(config: RolloutConfig, spec: ModelSpec, dtype: Dtype, fp8: BlockFp8 | None) -> dict[str, JsonValue]:
    """Settings that engine and trainer must share, by key of the config, as JSON values. dtype: model.dtype."""
    model = {f"model.{name}": value for name, value in dataclasses.asdict(spec).items() if name != "dtype"}
    rollout = {
        "model.dtype": dtype,
        "rollout.quantization": "none" if fp8 is None else fp8.config(),
        **{
            f"rollout.{key}": getattr(config, key)
            for key in ("tp", "context_length", "max_total_tokens", "deterministic", "router_replay")
        },
    }
    settings: dict[str, JsonValue] = TypeAdapter(dict[str, Any]).dump_python(model | rollout, mode="json")
    return settings


def take_back(address: EngineAddress, answer_s: float, agreed: Mapping[str, JsonValue]) -> None:
    """Take over again an engine that was lost.

    Raises:
        BadInput, TryAgain: see take_over_engines.
    """
    check_identity(address.url, meet(address.url, address.key, answer_s, time.monotonic()), agreed)
    ask(address, EngineClient.take_over)


def take_over_engines(config: RolloutConfig, agreed: Mapping[str, JsonValue]) -> tuple[tuple[EngineAddress, ...], bool]:
    """Wait for the engines of rollout.external_urls and end whatever an earlier trainer began on them.

    They take requests again after the first weight sync. Returns their addresses, and whether all of them run on GPUs.

    Raises:
        BadInput: one is not an engine of vapo_megatron, needs another key, or differs in something that must agree.
        TryAgain: one did not answer within rollout.start_timeout_s.
    """
    owner, key, start = secrets.token_hex(4), config.api_key() or "", time.monotonic()
    identities = {url: meet(url, key, config.start_timeout_s, start) for url in config.external_urls}
    addresses = []
    for url, identity in identities.items():
        check_identity(url, identity, agreed)
        here = identity["host"] == socket.gethostname()
        log_file = identity["log_file"] if here else f"{identity['host']}:{identity['log_file']}"
        addresses.append(EngineAddress(url, log_file, key, owner))
    for address in addresses:
        ask(address, EngineClient.take_over)
    return tuple(addresses), all(identity["cuda"] for identity in identities.values())


def meet(url: str, key: str, deadline: float, start: float) -> dict[str, Any]:
    """An engine's identity, once it answers within `deadline` seconds of `start` (time.monotonic()).

    Raises:
        BadInput: it is not an engine of vapo_megatron, or needs another key.
        TryAgain: it did not answer.
    """
    address = EngineAddress(url, "that of `vapo-megatron engine` there", key)
    while True:
        try:
            identity = ask(address, EngineClient.identity, _ANSWER_SECONDS)
            break
        except TryAgain as error:
            if time.monotonic() > start + deadline:
                cause = str(error.__cause__ or error.__context__ or "silent").splitlines()[0]
                raise TryAgain(
                    f"rollout.external_urls: {url} did not answer within rollout.start_timeout_s={deadline:g} s "
                    f"({cause}): start `vapo-megatron engine` there, or take it out"
                ) from None
            time.sleep(_POLL_SECONDS)
    if identity is None or "protocol" not in identity:
        raise BadInput(
            f"rollout.external_urls: {url} is not an engine of vapo-megatron: start it by `vapo-megatron engine`"
        )
    if identity["protocol"] != PROTOCOL:
        raise BadInput(
            f"rollout.external_urls: {url} has version {identity['protocol']} of the weight sync and this trainer "
            f"version {PROTOCOL}: start both from one version of vapo_megatron"
        )
    return identity


def check_identity(url: str, identity: Mapping[str, Any], agreed: Mapping[str, JsonValue]) -> None:
    """Raises BadInput if an engine and this run differ in a setting that must agree."""
    theirs = identity["agreed"]
    for key in dict.fromkeys((*agreed, *theirs)):
        if theirs.get(key) != agreed.get(key):
            raise BadInput(
                f"rollout.external_urls: {url} was started with {key}={theirs.get(key)} and this run has "
                f"{agreed.get(key)}: start both from the same config"
            )


def serve_engine(config: TrainConfig, host: str, port: int) -> None:
    """Serve the engine of a training config on this machine until SIGTERM or SIGUSR1.

    It takes the first rollout.tp GPUs that this process sees. Its log is run.root/<run.name>-engines/<host>_<port>.log.

    Args:
        config: the trainer's config.
        host: address of this machine to listen on.
        port: port to listen on; 0: a free one.

    Raises:
        BadInput: the config cannot work here, or the engine would listen on a network without a key.
        RunFailed: the engine did not start.
        TryAgain: it failed too often (rollout.health.max_failures).
    """
    listen()
    key = config.rollout.api_key()
    if key is None and host not in _LOOPBACK:
        raise BadInput(
            f"--host {host} without rollout.api_key_variable: whoever reaches the engine could run programs on this "
            "machine: name an environment variable that holds a key of yours"
        )
    rollout = config.rollout
    devices = engine_devices(rollout, current_platform())[0]
    spec = read_spec(Path(config.model.path))
    fp8 = engine_fp8(rollout, config.actor.precision, spec)
    check_room(Path(config.run.directory))
    folder = Path(config.run.directory).with_name(f"{config.run.name}-engines")
    log_file = (folder / f"{socket.gethostname()}_{port or time.time_ns()}.log").absolute()
    agreed = what_must_agree(rollout, spec, config.model.dtype, fp8)
    server = EngineServer(
        config.model.path,
        rollout,
        config.model.dtype,
        log_file,
        devices,
        host=host,
        fp8=fp8,
        port=port,
        key=key or "",
        identity={
            "protocol": PROTOCOL,
            "agreed": agreed,
            "cuda": devices is not None,
            "host": socket.gethostname(),
            "log_file": str(log_file),
        },
    )
    server.check_arguments()
    keeper = EngineKeeper(server, rollout)
    try:
        keeper.start()
        keeper.wait_until_ready()
        _logger.info("engine at %s, log %s", keeper.address.url, log_file)
        idle = threading.Event()
        while stop_requested() is None:
            if (kept := keeper.look()).state == "given up":
                raise TryAgain(
                    f"{log_file}: the engine failed {kept.in_a_row} times in a row, the last time {kept.cause} "
                    "(rollout.health.max_failures)"
                )
            idle.wait(_LOOK_SECONDS)
    finally:
        keeper.stop()
