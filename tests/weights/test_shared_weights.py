"""Weights that engines read where they are: moved without anybody noticing, seen by others, lent to a stream."""

import multiprocessing
from pathlib import Path
from typing import Any

import torch
from hf_models import write_model
from ranks import run_ranks

from vapo_megatron.config.model import ActorConfig, LayoutConfig, ModelConfig, OptimizerSettings
from vapo_megatron.mcore.mesh import make_mesh
from vapo_megatron.mcore.trainable import Trainable
from vapo_megatron.weights.bucket import SharedSlots, checksum
from vapo_megatron.weights.export import stream_hf
from vapo_megatron.weights.load import load_hf
from vapo_megatron.weights.shared_weights import SharedWeights, Whereabouts
from vapo_megatron.weights.spec import read_spec

LIMIT = 200_000


def read(where: Whereabouts, nbytes: int) -> list[int]:
    """As another process sees it."""
    whole = torch.from_file(where.path, shared=True, size=where.size, dtype=torch.uint8)
    return whole[where.start : where.start + nbytes].tolist()


def test_moved_tensors_keep_their_values_and_stay_views_of_one_another() -> None:
    flat = torch.arange(100.0)
    part = torch.nn.Parameter(flat[10:40].view(5, 6))
    other = torch.arange(7, dtype=torch.bfloat16)
    before = [flat.clone(), part.detach().clone(), other.clone()]
    shared = SharedWeights([part, flat, other])
    assert all(torch.equal(a, b) for a, b in zip((flat, part, other), before, strict=True))
    flat[11] = -1
    assert part[0, 1] == -1, "the parameter is no view of the buffer any more"
    assert part.grad_fn is None and part.is_leaf and part.requires_grad
    for tensor in (flat, part, other):
        where = shared.whereabouts(tensor)
        assert where is not None
        mine = tensor.detach().reshape(-1).view(torch.uint8)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(read, (where, len(mine))) == mine.tolist()
    assert shared.whereabouts(flat[::2]) is None and shared.whereabouts(before[0]) is None
    assert shared.whereabouts(flat[1:]) is None, "no sum of 8-byte words can be made of it"


def lend_after_a_step(model_dir: Path, distributed: bool) -> dict[str, Any]:
    """What a stream lends and copies of a model that was trained in shared memory."""
    spec, mesh = read_spec(model_dir), make_mesh(LayoutConfig())
    section = ActorConfig(optimizer=OptimizerSettings(distributed=distributed))
    actor = Trainable(spec, ModelConfig(path=str(model_dir), dtype="float32"), section, mesh, "lm", name="a", seed=1)
    load_hf(actor.chunks, spec, model_dir, mesh, "lm")
    actor.prepare()
    assert actor.shared_weights is not None
    with torch.no_grad():
        for chunk in actor.wrapped:
            for buffer in chunk.buffers:
                if buffer.param_data is not None:
                    buffer.param_data.mul_(2)  # as the optimizer writes: parameters must be views of it
    parameters = {p.untyped_storage().data_ptr() for chunk in actor.chunks for p in chunk.parameters()}
    slots = SharedSlots()
    copied = [
        (name, tensor.clone())
        for bucket in stream_hf(actor.chunks, spec, mesh, "lm", LIMIT, slots=slots)
        for name, tensor in bucket
    ]
    lent, found = [], []
    for bucket in stream_hf(actor.chunks, spec, mesh, "lm", LIMIT, slots=slots, sums=True, lent=actor.shared_weights):
        for index, (name, tensor) in enumerate(bucket):
            found.append((name, tensor.clone()))
            assert bucket.checksums()[index] == checksum(tensor)
            assert (index in bucket.lent) == (tensor.untyped_storage().data_ptr() in parameters)
            if index in bucket.lent:
                mine = tensor.detach().reshape(-1).view(torch.uint8)
                assert read(bucket.lent[index], len(mine)) == mine.tolist()
                lent.append(name)
    slots.close()
    assert [name for name, _ in found] == [name for name, _ in copied]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, copied, strict=True))
    return {"lent": lent, "names": [name for name, _ in copied]}


def test_a_stream_lends_what_needs_no_rearranging(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path, "qwen2")
    for distributed in (True, False):
        answer = run_ranks(1, lend_after_a_step, model_dir, distributed)[0]
        copied = set(answer["names"]) - set(answer["lent"])
        assert copied and all(name.split(".")[-2] in ("q_proj", "k_proj", "v_proj") for name in copied), copied


def shared_of(model_dir: Path, layout: LayoutConfig, offload: str) -> bool:
    spec, mesh = read_spec(model_dir), make_mesh(layout)
    section = ActorConfig(layout=layout, offload=offload)  # type: ignore[arg-type]
    actor = Trainable(spec, ModelConfig(path=str(model_dir), dtype="float32"), section, mesh, "lm", name="a", seed=1)
    load_hf(actor.chunks, spec, model_dir, mesh, "lm")
    actor.prepare()
    return actor.shared_weights is not None


def test_what_is_in_parts_or_sleeps_is_not_shared(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path, "qwen2")
    assert run_ranks(2, shared_of, model_dir, LayoutConfig(), "auto") == [True, True]
    assert run_ranks(2, shared_of, model_dir, LayoutConfig(tp=2), "auto") == [False, False]
    assert run_ranks(1, shared_of, model_dir, LayoutConfig(), "always") == [False]
