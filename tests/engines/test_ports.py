"""Ports that a server takes beside those it is told, found free before it starts."""

import re
import socket
import sysconfig
from pathlib import Path

import pytest

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.server import process
from vapo_megatron.engines.server.environment import BESIDE_SERVER, free_port
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.errors import TryAgain


def test_a_port_whose_neighbour_is_taken_is_not_chosen() -> None:
    first = free_port(BESIDE_SERVER)
    for distance in (0, *BESIDE_SERVER):
        with socket.create_server(("127.0.0.1", first + distance)):
            other = free_port(BESIDE_SERVER)  # not the first: its neighbour is taken
            assert free_port(BESIDE_SERVER, [first, other]) == other != first
            with pytest.raises(TryAgain, match="no port of this machine is free together with"):
                free_port(BESIDE_SERVER, [first])


def test_servers_that_start_at_once_share_no_port() -> None:
    ports = {free_port(BESIDE_SERVER) for _ in range(50)}
    taken = [port + distance for port in ports for distance in (0, *BESIDE_SERVER)]
    assert len(ports) > 4 and len(taken) == len(set(taken))


@pytest.mark.parametrize(
    ("server_args", "beside"), [({}, ()), ({"attn_dp_size": 2}, BESIDE_SERVER)]
)
def test_a_servers_port_is_none_that_the_kernel_hands_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server_args: dict[str, int],
    beside: tuple[int, ...],
) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        process, "free_port", lambda beside: asked.append(beside) or free_port(beside)
    )
    config = RolloutConfig.model_validate({"tp": 2, "server_args": server_args})
    with EngineServer("model", config, "float32", tmp_path / "log")._bound() as listener:
        port = listener.getsockname()[1]
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert asked == [beside] and not first <= port <= last


def test_they_are_those_of_the_installed_sglang() -> None:
    srt = Path(sysconfig.get_path("purelib"), "sglang", "srt")
    text = (srt / "server_args.py").read_text()
    derived = {int(n) for n in re.findall(r"_port = port_base \+ (\d)$", text, re.MULTILINE)}
    assert {0, *derived} == set(range(6)) and "port_base = dist_init_port + 1\n" in text
    assert (13, *range(233, 240)) == BESIDE_SERVER
    for name, value in (("ZMQ_TCP_PORT_DELTA", 233), ("DP_ATTENTION_HANDSHAKE_PORT_DELTA", 13)):
        assert f"\n{name} = {value}\n" in text
