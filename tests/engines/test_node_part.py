"""The parts of an engine on several nodes: which rank owns which, and how they start and end
together."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import write_model
from ranks import run_ranks

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.engine_limits import check_engine_size, engine_devices
from vapo_megatron.engines.placement import Placement, part_owners
from vapo_megatron.engines.remote_engines import _part
from vapo_megatron.engines.server import node_part
from vapo_megatron.engines.server.node_part import NodePart
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.errors import BadInput

SILENT = 0.3


@pytest.fixture
def parts() -> Iterator[tuple[NodePart, NodePart]]:
    first = NodePart(0, 2, "127.0.0.1", 0, SILENT)
    yield first, NodePart(1, 2, "127.0.0.1", first.port, SILENT)


def test_a_part_joins_each_start_once(parts: tuple[NodePart, NodePart]) -> None:
    first, second = parts
    with pytest.raises(BadInput, match=f"the first part, at 127.0.0.1:{first.port}, has begun no"):
        second.join(0)
    for port in (4444, 5555):
        assert first.begin(port) == second.join(0) == f"127.0.0.1:{port}"
        with pytest.raises(BadInput, match="has begun no start"):
            second.join(0)
        assert first.look() is None and second.look() is None
    assert not second.is_ready()
    first.note_ready()
    assert second.is_ready()


def test_the_failure_of_one_part_is_that_of_all(parts: tuple[NodePart, NodePart]) -> None:
    first, second = parts
    first.begin(1)
    second.join(0)
    second.fail("its scheduler is dead")
    assert first.look() == "its part on node 1 failed: its scheduler is dead"
    assert second.look() is None, "its own keeper knows"
    first.begin(2)
    assert second.look() == "its first part was started again"
    second.join(0)
    assert first.look() is None and second.look() is None


def test_a_silent_part_is_lost(
    parts: tuple[NodePart, NodePart], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = parts
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None)
    monkeypatch.setattr(node_part, "time", clock)
    first.begin(1)
    second.join(0)
    now[0] = 100.0  # one that has not begun to look may be loading weights
    assert first.look() is None
    second.look()
    assert first.look() is None
    now[0] += SILENT + 0.1
    assert first.look() == "its part on node 1 has given no sign of life for 0 s"


def test_where_the_first_is_gone_the_others_end(parts: tuple[NodePart, NodePart]) -> None:
    first, second = parts
    first.begin(1)
    second.join(0)
    second._store = None
    second.port = 1
    assert second.look() == "the first part, at 127.0.0.1:1, is gone"
    assert not second.is_closed()
    third = NodePart(1, 2, "127.0.0.1", first.port, SILENT)
    third.join(0)
    first.close()
    assert third.is_closed() and first.is_closed()


def test_a_part_says_to_sglang_where_all_meet(
    parts: tuple[NodePart, NodePart], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", "qwen2")
    config = RolloutConfig(tp=4, nodes=2)
    for part in parts:
        server = EngineServer(model, config, "float32", tmp_path / "log", part=part)
        server._meet(0)
        arguments = server._engine_args(tmp_path)
        told = dict(pairwise(arguments))
        assert (told["--nnodes"], told["--node-rank"]) == ("2", str(part.index))
        assert told["--dist-init-addr"] == parts[1]._begun()[1]  # type: ignore[index]
        assert told["--tp-size"] == "4" and server.leads == (part.index == 0)
        environment = server._environment(tmp_path)
        assert "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE" not in environment
        assert environment["SGLANG_HOST_IP"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("hosts", "nodes", "engines", "owners"),
    [
        ("aabb", 1, 3, {0: (0, 0), 1: (1, 0), 2: (2, 0)}),
        ("aabb", 2, 1, {0: (0, 0), 2: (0, 1)}),
        ("aabb", 2, 2, {0: (0, 0), 2: (0, 1), 1: (1, 0), 3: (1, 1)}),
        ("abcd", 2, 2, {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}),
    ],
)
def test_each_part_is_on_a_node_of_its_own(
    hosts: str, nodes: int, engines: int, owners: dict[int, tuple[int, int]]
) -> None:
    assert part_owners(hosts, nodes, engines) == owners


@pytest.mark.parametrize(
    ("hosts", "engines", "told"),
    [("aaaa", 1, "the ranks of the run are on 1 nodes"), ("ab", 2, "a has 1 ranks")],
)
def test_too_few_nodes_are_refused(hosts: str, engines: int, told: str) -> None:
    with pytest.raises(BadInput, match=rf"rollout\.nodes=2.*{told}"):
        part_owners(hosts, 2, engines)


def placed(model_dir: Path) -> tuple[list[int], int, bool] | None:
    """Of this rank's server on nodes of two GPUs: its GPUs, its part, whether it leads."""
    device = torch.device("cuda", dist.get_rank() % 2)
    platform: Any = SimpleNamespace(is_cuda=True, device=device, device_count=lambda: 2)
    config = RolloutConfig(tp=4, nodes=2)
    found = Placement(config, model_dir, "bfloat16", Path("logs"), platform)
    keeper: Any = found.keeper
    if keeper is None:
        return None
    server = keeper._server
    assert [status.url for status in found.engines()] == [server.address.url] * server.leads
    dist.barrier()
    return list(server._devices), server._part.index, found._leads


def test_an_engine_has_a_part_on_every_node_that_it_is_on(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path, "qwen2")
    found = run_ranks(4, placed, model_dir)
    assert found == [([0, 1], 0, True), None, ([0, 1], 1, False), None]


@pytest.mark.parametrize(
    ("config", "gpus", "world", "told"),
    [
        ({"tp": 3}, 8, 8, r"tp=3 does not divide the 8 GPUs of a node: choose a divisor$"),
        ({"tp": 16}, 8, 16, r"tp=16 does not divide .*, or set rollout\.nodes=2$"),
        ({"tp": 8, "nodes": 2}, 8, 16, r"2 x 8: set rollout\.tp=16"),
        ({"tp": 16, "nodes": 2}, 8, 24, r"tp=16 does not divide the 24 GPUs of the run"),
    ],
)
def test_engines_that_nodes_cannot_share_are_refused(
    config: dict[str, int], gpus: int, world: int, told: str
) -> None:
    with pytest.raises(BadInput, match=told):
        check_engine_size(RolloutConfig(**config), gpus, world)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "node", "meet", "told"),
    [
        (1, 1, None, "--node 1 with rollout.nodes=1"),
        (1, 0, "a:1", "--meet a:1 with rollout.nodes=1"),
        (2, 0, None, "--meet  with rollout.nodes=2: expected HOST:PORT"),
        (2, 1, "a:70000", "--meet a:70000 with rollout.nodes=2: expected HOST:PORT"),
    ],
)
def test_a_command_that_names_no_part_is_refused(
    nodes: int, node: int, meet: str | None, told: str
) -> None:
    with pytest.raises(BadInput, match=told):
        _part(RolloutConfig(tp=2, nodes=nodes), node, meet)


def test_commands_on_one_machine_refuse_several_nodes() -> None:
    platform: Any = SimpleNamespace(device_count=lambda: 2)
    config = RolloutConfig(tp=4, nodes=2)
    assert engine_devices(config, platform, of_parts=True) == [range(2)]
    with pytest.raises(BadInput, match=r"rollout\.nodes=2: this command starts engines on its own"):
        engine_devices(config, platform)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tp": 3, "nodes": 2}, "nodes=2 does not divide tp=3"),
        ({"tp": 2, "nodes": 2, "sync": {"transport": "shared_memory"}}, "nodes share no memory"),
        ({"server_args": {"nnodes": 2}}, r"server_args\.nnodes is set by the trainer: use rollout"),
    ],
)
def test_settings_that_contradict_nodes_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        RolloutConfig(**settings)
