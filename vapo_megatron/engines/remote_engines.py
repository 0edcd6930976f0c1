"""Engines that the trainer did not start: on devices of their own, from the same config, by `vapo-megatron engine`.

Such an engine outlives the trainers that it serves, one after another. A trainer therefore asks first what the engine
is, and takes it over: what an earlier trainer may have begun on it ends.
"""

import asyncio
import dataclasses
import logging
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue, TypeAdapter

from vapo_megatron.config.rollout import Dtype, RolloutConfig
from vapo_megatron.engines.client import REQUEST_SECONDS, EngineClient
from vapo_megatron.engines.keeper import LOOK_SECONDS, ask_health, end_server
from vapo_megatron.engines.server import EngineAddress
from vapo_megatron.errors import BadInput, TryAgain, VapoError
from vapo_megatron.weights.fp8 import BlockFp8
from vapo_megatron.weights.spec import ModelSpec

_logger = logging.getLogger(__name__)

PROTOCOL = 7
"""To be raised with every change of what engines and trainers say to each other: bucket_message.announce, the answers
of strict_loading, broadcast_group, engine.heartbeat, engine.generate_route and engine.columns. 6: an engine
says how many batches it has ended, and ends several responses in one request."""

_ANSWER_SECONDS = 30.0
_POLL_SECONDS = 1.0


def what_must_agree(config: RolloutConfig, spec: ModelSpec, dtype: Dtype, fp8: BlockFp8 | None) -> dict[str, JsonValue]:
    """What engine and trainer must have in common, by the key of the config that says it, in JSON's values.

    dtype: model.dtype.
    """
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


def identity_of_engine(agreed: Mapping[str, JsonValue], is_cuda: bool, log_file: str) -> dict[str, JsonValue]:
    """What an engine answers under server_main.IDENTITY_PATH."""
    return {
        "protocol": PROTOCOL,
        "agreed": dict(agreed),
        "cuda": is_cuda,
        "host": socket.gethostname(),
        "log_file": log_file,
    }


class ExternalServer:
    """An engine that somebody else started, and starts again, for an EngineKeeper: it serves already.

    agreed: what engine and trainer must have in common (what_must_agree).
    """

    def __init__(self, address: EngineAddress, answer_s: float, agreed: Mapping[str, JsonValue]) -> None:
        self.address, self._answer_s, self._agreed = address, answer_s, agreed
        self._refusal = ""

    def start(self) -> None:
        """Its owner did."""

    def wait_until_ready(self) -> None:
        """It answered when it was taken over."""

    def ended(self) -> None:
        """Its process is not ours to see."""

    def lost(self) -> None:
        """Nor are its others."""

    def end(self, cause: str) -> Path:
        """Tell it to end, if it still can."""
        end_server(self.address, cause)
        return Path(self.address.log_file)

    def start_again(self) -> None:
        """Its owner does."""

    def is_ready(self) -> bool:
        """Whether it is back and taken over; one that is another one now is not taken."""
        health = ask_health(self.address, LOOK_SECONDS)
        if health is None or health["lost"]:
            return False
        try:
            asyncio.run(self._take_back())
        except VapoError as error:
            if str(error) != self._refusal:
                _logger.warning("engine %s is not taken back: %s", self.address.url, error)
            self._refusal = str(error)
            return False
        return True

    def stop(self) -> None:
        """It lives on."""

    async def _take_back(self) -> None:
        identity = await meet(self.address.url, self.address.key, self._answer_s)
        check_identity(self.address.url, identity, self._agreed)
        await take_over(self.address)


def take_over_engines(config: RolloutConfig, agreed: Mapping[str, JsonValue]) -> tuple[tuple[EngineAddress, ...], bool]:
    """Meet the engines of rollout.external_urls, which may still be starting, and leave nothing of an earlier
    trainer's.

    They take requests again after the first weight sync. Returns their addresses, and whether all of them run on GPUs.

    Raises:
        BadInput: one is no engine of ours, wants another key, or differs in something that must agree.
        TryAgain: one did not answer within rollout.start_timeout_s.
    """
    owner, key = secrets.token_hex(4), config.api_key() or ""
    return asyncio.run(_take_over_all(config, agreed, owner, key))


async def _take_over_all(
    config: RolloutConfig, agreed: Mapping[str, JsonValue], owner: str, key: str
) -> tuple[tuple[EngineAddress, ...], bool]:
    identities = await asyncio.gather(*(meet(url, key, config.start_timeout_s) for url in config.external_urls))
    addresses = []
    for url, identity in zip(config.external_urls, identities, strict=True):
        check_identity(url, identity, agreed)
        here = identity["host"] == socket.gethostname()
        log_file = identity["log_file"] if here else f"{identity['host']}:{identity['log_file']}"
        addresses.append(EngineAddress(url, log_file, key, owner))
    await asyncio.gather(*(take_over(address) for address in addresses))
    return tuple(addresses), all(identity["cuda"] for identity in identities)


async def meet(url: str, key: str, deadline: float) -> dict[str, Any]:
    """What an engine tells of itself, once it answers.

    Raises:
        BadInput: it is no engine of ours, or wants another key.
        TryAgain: it did not answer within so many seconds.
    """
    client = EngineClient(EngineAddress(url, "that of `vapo-megatron engine` there", key), _ANSWER_SECONDS)
    end = time.monotonic() + deadline
    try:
        while True:
            try:
                identity = await client.identity()
                break
            except TryAgain as error:
                if time.monotonic() > end:
                    raise TryAgain(
                        f"rollout.external_urls: {url} did not answer within rollout.start_timeout_s={deadline:g} s "
                        f"({str(error.__cause__ or error.__context__ or 'silent').splitlines()[0]}): start "
                        "`vapo-megatron engine` there, or take it out"
                    ) from None
                await asyncio.sleep(_POLL_SECONDS)
    finally:
        await client.close()
    if identity is None or "protocol" not in identity:
        raise BadInput(f"rollout.external_urls: {url} is no engine of ours: start it by `vapo-megatron engine`")
    if identity["protocol"] != PROTOCOL:
        raise BadInput(
            f"rollout.external_urls: {url} has version {identity['protocol']} of the weight sync and this trainer "
            f"version {PROTOCOL}: start both from one version of vapo_megatron"
        )
    return identity


async def take_over(address: EngineAddress, deadline: float = REQUEST_SECONDS) -> None:
    """EngineClient.take_over, within so many seconds."""
    client = EngineClient(address, deadline)
    try:
        await client.take_over()
    finally:
        await client.close()


def check_identity(url: str, identity: Mapping[str, Any], agreed: Mapping[str, JsonValue]) -> None:
    """Raises BadInput where an engine and this run differ in what must agree."""
    theirs = identity["agreed"]
    for key in dict.fromkeys((*agreed, *theirs)):
        if theirs.get(key) != agreed.get(key):
            raise BadInput(
                f"rollout.external_urls: {url} was started with {key}={theirs.get(key)} and this run has "
                f"{agreed.get(key)}: start both from the same config"
            )
