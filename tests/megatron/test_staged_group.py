"""Groups by way of the host (staged_group.py) bring what gloo's bring: on CPUs, to the bit."""

from pathlib import Path
from typing import Any

import pytest
from batches import make_batch
from hf_models import write_model
from ranks import run_ranks
from staged_group import use_staged_groups
from trainables import loss_of, make_trainable

from vapo_megatron.config.model import LayoutConfig

LAYOUTS = {
    "tp2 pp2 sp": LayoutConfig(tp=2, pp=2, sequence_parallel=True),
    "tp2 cp2 sp": LayoutConfig(tp=2, cp=2, sequence_parallel=True),
    "ep2": LayoutConfig(ep=2),
}


def steps(model_dir: Path, layout: LayoutConfig, staged: bool) -> list[Any]:
    if staged:
        use_staged_groups()
    trainable = make_trainable(model_dir, "lm", layout=layout, max_tokens_per_microbatch=64)
    batch = make_batch()
    loss = loss_of(trainable, batch)
    norms = [trainable.train_step(batch, range(batch.samples), loss).grad_norm for _ in range(2)]
    return [*norms, trainable.score(batch).tolist()]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_staged_groups_bring_what_gloo_brings(tmp_path: Path, layout: LayoutConfig) -> None:
    model_dir = write_model(tmp_path, "qwen3_moe" if layout.ep > 1 else "qwen3")
    gloo, staged = (
        run_ranks(max(2, layout.model_size), steps, model_dir, layout, way) for way in (False, True)
    )
    assert staged == gloo
