"""The benchmark of one GPU trains the model that it times: shown on a CPU, where it runs the same
code on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks

from benchmarks.common import SHAPES, random_model, sample_batch
from benchmarks.gpu import check_gradients, step_seconds
from vapo_megatron.config.model import ActorConfig
from vapo_megatron.errors import RunFailed

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_row_times_passes_and_update_and_refuses_fp8_without_gpu(
    tmp_path: Path,
) -> None:
    out = tmp_path / "gpu.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--tiny",
        "--recipes",
        "none",
        "tensorwise",
        "--json",
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    plain, fp8 = json.loads(out.read_text())["rows"]
    assert plain["f+b s"] > 0 and plain["optimizer s"] > 0
    tokens = 2 * 63
    assert abs(plain["tok/s"] * (plain["f+b s"] + plain["optimizer s"]) - tokens) < 1e-6 * tokens
    assert fp8["tok/s"] == "refused" and fp8["f+b s"] == "-"


def weights_before_and_after(optimizer: bool) -> tuple[float, str]:
    """How far an update moves the weights, and the message about a model whose last layer is not
    trained."""
    config = ActorConfig(max_tokens_per_microbatch=128, optimizer={"lr": 1e-2, "warmup_steps": 0})
    model = random_model(SHAPES["tiny"], config, "bfloat16", optimizer=optimizer, gradients=True)
    batch = sample_batch([64, 64], SHAPES["tiny"].vocab)
    before = [parameter.detach().clone() for parameter in model.chunks[0].parameters()]
    passes, update = step_seconds(model, batch, repeats=1, update=optimizer)
    assert passes > 0 and (update > 0) == optimizer
    after = model.chunks[0].parameters()
    moved = max(
        float((one.float() - other.float()).abs().max())
        for one, other in zip(before, after, strict=True)
    )
    frozen = random_model(SHAPES["tiny"], config, "bfloat16", optimizer=False)
    said = ""
    try:
        step_seconds(frozen, batch, repeats=1, update=False)
    except RunFailed as error:
        said = str(error)
    model.chunks[0].decoder.final_layernorm.weight.grad = None
    if optimizer:
        model.chunks[0].decoder.final_layernorm.weight.main_grad.zero_()
    try:
        check_gradients(model)
    except RunFailed as error:
        return moved, f"{said}\n{error}"
    return moved, said


def test_the_optimizer_moves_weights_and_needs_all_gradients() -> None:
    ((moved, said),) = run_ranks(1, weights_before_and_after, True, deadline=240)
    frozen, one = said.splitlines()
    assert moved > 1e-3
    assert "of 0 trainable parameters have no gradient" in frozen
    assert one.startswith("1 of ") and "decoder.final_layernorm.weight" in one


def test_without_room_for_an_optimizer_weights_stay() -> None:
    ((moved, said),) = run_ranks(1, weights_before_and_after, False, deadline=240)
    assert moved == 0.0 and "decoder.final_layernorm.weight" in said.splitlines()[1]
