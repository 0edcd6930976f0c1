"""A checkpoint gets its name once all of it is on the disk: a power cut costs none of its files."""

import os
from pathlib import Path

from hf_models import write_model
from ranks import run_ranks

from vapo_megatron.checkpoint.checkpointer import Checkpointer
from vapo_megatron.checkpoint.checkpoints import list_checkpoints
from vapo_megatron.checkpoint.manifest import Progress
from vapo_megatron.checkpoint.resume import SavedModel
from vapo_megatron.checkpoint.state_saver import SavedRun, Snapshot
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.megatron.mesh import make_mesh
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.weights.load import load_hf


def not_synced(model_dir: Path, run_dir: Path) -> set[str]:
    """The files and folders of a checkpoint that nothing has waited for."""
    tree = {
        "model": {"path": str(model_dir), "dtype": "float32"},
        "data": {"train": "unread.jsonl"},
        "sampling": {"max_new_tokens": 8},
    }
    config = TrainConfig.model_validate(tree)
    spec = read_spec(model_dir)
    mesh = make_mesh(config.actor.layout)
    model = Trainable(spec, config.model, config.actor, mesh, "lm", name="actor", seed=1)
    load_hf(model.chunks, spec, model_dir, mesh, "lm")
    model.prepare()
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    saved = SavedRun(config, "train", run_dir, {"actor": SavedModel(model, model_dir)}, "run")
    snapshot = Snapshot(Progress(step=1), {}, contents={"more": b"1"})
    synced = set[tuple[int, int]]()
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced.add((status.st_dev, status.st_ino))

    os.fsync = noted  # type: ignore[assignment]
    with Recorder(run_dir, MonitoringConfig(), is_main_rank=False) as recorder:
        Checkpointer(config.checkpoint, saved, recorder, None).safe_point(
            snapshot, due=True, last=True
        )
    (checkpoint,) = list_checkpoints(run_dir).values()
    paths = {path: path.stat() for path in (checkpoint, *checkpoint.rglob("*"))}
    assert any(path.suffix == ".distcp" for path in paths)
    return {
        path.relative_to(run_dir).as_posix()
        for path, status in paths.items()
        if (status.st_dev, status.st_ino) not in synced
    }


def test_every_file_of_a_checkpoint_is_on_the_disk(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path / "model", "qwen3")
    assert run_ranks(1, not_synced, model_dir, tmp_path / "run")[0] == set()
