"""Weights through CUDA IPC handles, and memory that an engine gives away: what only a GPU can
show."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_qwen3 import largest_difference, make_model, token_logprobs

from vapo_megatron.config.rollout import RolloutConfig, SyncConfig
from vapo_megatron.engines.server.client import EngineClient, MemoryTag
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.engines.weight_sync.broadcast_transport import DistributedTransport
from vapo_megatron.engines.weight_sync.logprob_difference import limits_for
from vapo_megatron.engines.weight_sync.session import WeightSync
from vapo_megatron.engines.weight_sync.transports import (
    IpcTransport,
    SharedMemoryTransport,
    Transport,
)
from vapo_megatron.errors import RunFailed
from vapo_megatron.weights.bucket import Bucket, DeviceSlots, pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA IPC handles"),
]
DEADLINE = 240.0
SEQUENCES = [list(range(10, 60)), [5, 9, 77, 31, 64, 8, 100]]
TOLERANCE = 1e-3  # GPU kernels in float32 against transformers on the CPU
GIB = 1 << 30

Tensors = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def gpu_server(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    config = RolloutConfig(max_running_requests=8, max_total_tokens=4096, mem_fraction_static=0.3)
    log_file = tmp_path_factory.mktemp("logs") / "gpu.log"
    with EngineServer(model_path, config, "float32", log_file, devices=range(1)) as running:
        yield running


@pytest.fixture(params=["ipc", "shared_memory", "distributed"])
def sync(request: pytest.FixtureRequest, gpu_server: EngineServer) -> Iterator[WeightSync]:
    client = EngineClient(gpu_server.address, DEADLINE)
    transport: Transport
    if request.param == "ipc":
        transport = IpcTransport(client, torch.device("cuda", 0), None)
    elif request.param == "shared_memory":
        transport = SharedMemoryTransport(client, 1)
    else:
        transport = DistributedTransport([client], 1, DEADLINE)
    with WeightSync(transport) as running:
        yield running


def in_slots(tensors: Tensors, size: int = 5) -> Iterator[Bucket]:
    """Buckets in two places on the GPU, each overwritten as soon as it may be."""
    slots = DeviceSlots(torch.device("cuda", 0))
    for index, start in enumerate(range(0, len(tensors), size)):
        part = tensors[start : start + size]
        yield pack(part, slots, index)
    slots.close()


def test_buckets_on_the_gpu_arrive(sync: WeightSync) -> None:
    for seed in (3, 4, 5):
        model = make_model(seed)
        sync.load(in_slots(list(model.state_dict().items())), version=seed)
        expected = [token_logprobs(model, tokens) for tokens in SEQUENCES]
        assert largest_difference(sync, SEQUENCES, expected) < TOLERANCE
        assert sync.differing_tensors(in_slots(list(model.state_dict().items()))) == []


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL refuses two ranks on one"
)
def test_nccl_sends_weights_to_another_gpu_and_the_next_trainer(
    model_path: Path, tmp_path: Path
) -> None:
    config = RolloutConfig(max_running_requests=8, max_total_tokens=4096, mem_fraction_static=0.3)
    with EngineServer(
        model_path, config, "float32", tmp_path / "engine.log", devices=range(1, 2)
    ) as server:
        for seed in (3, 4):  # each by a new group
            client = EngineClient(server.address, DEADLINE)
            model = make_model(seed)
            with WeightSync(
                DistributedTransport([client], 1, DEADLINE, torch.device("cuda", 0))
            ) as sync:
                sync.load(in_slots(list(model.state_dict().items())), version=seed)
                expected = [token_logprobs(model, tokens) for tokens in SEQUENCES]
                assert largest_difference(sync, SEQUENCES, expected) < TOLERANCE


def free_memory() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(0)[0]


def change_memory(server: EngineServer, method: str, *tags: MemoryTag) -> None:
    async def call() -> None:
        client = EngineClient(server.address, DEADLINE)
        await getattr(client, method)(tags)
        await client.close()

    asyncio.run(call())


def wide_model(seed: int) -> Any:
    """Its weights are exact in bfloat16."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
    return make_model(seed, **wide).bfloat16().float()


@contextmanager
def bfloat16_engine(folder: Path) -> Iterator[tuple[EngineServer, WeightSync]]:
    """Serves the model in the folder, and gives its memory away when it is asked to."""
    # 1 KiB per token: 1 GiB of cache.
    config = RolloutConfig(
        max_running_requests=8,
        max_total_tokens=1 << 20,
        mem_fraction_static=0.3,
        server_args={
            "attention_backend": "triton"
        },  # of memory and weights, not of FlashAttention's build
    )
    log_file = folder / "engine.log"
    with EngineServer(
        folder, config, "bfloat16", log_file, devices=range(1), offloads=True
    ) as server:
        client = EngineClient(server.address, DEADLINE)
        with WeightSync(IpcTransport(client, torch.device("cuda", 0), None)) as sync:
            yield server, sync


@pytest.mark.ipc_into_saved_memory
def test_bfloat16_engine_frees_memory_and_takes_weights_again(
    tmp_path: Path,
) -> None:
    models = {seed: wide_model(seed) for seed in (3, 4)}
    models[3].save_pretrained(tmp_path)
    expected = {
        seed: [token_logprobs(model, tokens) for tokens in SEQUENCES]
        for seed, model in models.items()
    }
    limits = limits_for(SyncConfig(), "bfloat16")
    with bfloat16_engine(tmp_path) as (server, sync):
        for seed, other in ((3, 4), (4, 3), (3, 4)):
            awake = free_memory()
            change_memory(server, "release_memory", "kv_cache", "weights")
            assert free_memory() - awake > 0.9 * GIB
            change_memory(server, "resume_memory", "weights")
            tensors = [
                (name, tensor.bfloat16()) for name, tensor in models[seed].state_dict().items()
            ]
            sync.load(in_slots(tensors), version=seed)
            change_memory(server, "resume_memory", "kv_cache")
            (right,) = sync.logprob_differences(SEQUENCES, expected[seed], limits.share).values()
            assert limits.excess(right) is None
            (wrong,) = sync.logprob_differences(SEQUENCES, expected[other], limits.share).values()
            assert wrong.mean > 3 * right.mean and wrong.quantile > 3 * right.quantile
            assert sync.differing_tensors(in_slots(tensors)) == []


@pytest.mark.indices_over_a_pause
def test_log_probs_after_a_pause_are_those_before_it(tmp_path: Path) -> None:
    """Indices that the engine keeps on the GPU may be stale then: sglang 28676, off by 3.8."""
    model = wide_model(3)
    model.save_pretrained(tmp_path)
    expected = [token_logprobs(model, tokens) for tokens in SEQUENCES]
    limits = limits_for(SyncConfig(), "bfloat16")
    with bfloat16_engine(tmp_path) as (server, sync):
        (before,) = sync.logprob_differences(SEQUENCES, expected, limits.share).values()
        assert limits.excess(before) is None
        for _ in range(3):
            change_memory(server, "release_memory", "kv_cache")
            change_memory(server, "resume_memory", "kv_cache")
            (after,) = sync.logprob_differences(SEQUENCES, expected, limits.share).values()
            assert limits.excess(after) is None and after.mean < 3 * before.mean


def test_a_tensor_dropped_on_its_way_is_named(sync: WeightSync) -> None:
    tensors = [
        (name, tensor)
        for name, tensor in make_model(3).state_dict().items()
        if "0.mlp.up_proj" not in name
    ]
    with pytest.raises(
        RunFailed, match=r"layers\.0\.mlp\.gate_up_proj\.weight .* was not sent in full"
    ):
        sync.load(in_slots(tensors), version=9)
