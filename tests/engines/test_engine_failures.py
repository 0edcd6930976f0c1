"""Engines that die, stop or compute something else: the others serve on, the same comes back
with weights."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from batches import random_sequences
from hf_models import write_model
from ranks import run_ranks
from synced_engines import Body, with_engines

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.config.rollout import HealthConfig, RolloutConfig
from vapo_megatron.engines.engine_weights import EngineWeights
from vapo_megatron.engines.keeper import LOOK_SECONDS
from vapo_megatron.engines.pool import EnginePool
from vapo_megatron.engines.weight_sync.logprob_difference import LogprobDifference
from vapo_megatron.megatron.trainable import Trainable

pytestmark = pytest.mark.full

VOCAB = 96
HEALTH = HealthConfig(answer_s=4, max_failures=2)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2")
    return write_model(
        path, "qwen2", vocab_size=VOCAB, max_position_embeddings=256, eos_token_id=VOCAB - 1
    )


def run_engines(model_dir: Path, log_dir: Path, count: int, body: Body) -> Any:
    """On each rank: what body returns, given so many engines and the actor."""
    config = RolloutConfig(
        context_length=128, num_engines=count, max_total_tokens=2048, health=HEALTH
    )
    return with_engines(model_dir, log_dir, LayoutConfig(tp=2), config, body)


def own_server(engines: EnginePool) -> int:
    keeper = engines._placement.keeper
    assert keeper is not None
    return keeper._server.pid


def child_of(pid: int) -> int:
    scratch = Path(psutil.Process(pid).environ()["TMPDIR"])
    return next(int(path.name.split("-")[2]) for path in scratch.glob("process-scheduler-*"))


def wait_until_serving(engines: EnginePool) -> None:
    keeper = engines._placement.keeper
    end = time.monotonic() + 120
    while keeper is not None and keeper.status().state != "serving":
        assert time.monotonic() < end
        time.sleep(0.1)
    dist.barrier()


SEQUENCES = random_sequences(2, 12, VOCAB, seed=1)


def stop_lie_and_die(engines: EnginePool, weights: EngineWeights, actor: Trainable) -> list[Any]:
    """With two engines: rank 1's is stopped in a weight sync, lies after another, is killed
    before a third."""
    found: list[Any] = []
    weights.check(actor, SEQUENCES)
    assert engines.serving == 2
    if dist.get_rank() == 1:
        os.kill(own_server(engines), signal.SIGSTOP)
    start = time.monotonic()
    weights.update_weights(actor)
    found.append((engines.serving, time.monotonic() - start, engines.pop_failures()))
    weights.check(actor, SEQUENCES)
    wait_until_serving(engines)
    weights.update_weights(actor)
    assert engines.serving == 2 and engines.pop_failures() == []
    session = weights.session
    honest = None
    if dist.get_rank() == 1:
        honest = session.logprob_differences
        lie = dict.fromkeys(session.served, LogprobDifference(0.5, 0.5, 0.5))
        session.logprob_differences = lambda *_: lie  # type: ignore[method-assign]
    worst = weights.check(actor, SEQUENCES)
    found.append((engines.serving, worst.largest, engines.pop_failures()))
    if honest is not None:
        session.logprob_differences = honest  # type: ignore[method-assign]
    wait_until_serving(engines)
    weights.update_weights(actor)
    found.append((engines.serving, weights.check(actor, SEQUENCES).largest, engines.pop_failures()))
    weights.update_weights(actor)  # twice survived: what was before counts no more
    if dist.get_rank() == 1:
        os.kill(child_of(own_server(engines)), signal.SIGKILL)
        found.append(engines._placement.engines()[0].in_a_row)
    dist.barrier()
    wait_until_lost(engines)
    weights.update_weights(actor)
    weights.check(actor, SEQUENCES)
    found.append((weights.version, engines.failure))
    return found


def wait_until_lost(engines: EnginePool) -> None:
    keeper = engines._placement.keeper
    end = time.monotonic() + 120
    assert keeper is not None
    if dist.get_rank() == 1:
        while keeper.status().state == "serving":
            assert time.monotonic() < end
            time.sleep(0.05)
    dist.barrier()


def test_other_engines_serve_on(model_dir: Path, tmp_path: Path) -> None:
    answers = run_ranks(2, run_engines, model_dir, tmp_path, 2, stop_lie_and_die, deadline=240)
    for stopped, lied, back, *_ in answers:
        serving, seconds, failures = stopped
        assert serving == 1 and seconds < 30 and len(failures) == 1, stopped
        assert "its HTTP server (process" in failures[0]
        serving, worst, failures = lied
        assert serving == 1 and worst < 1e-4, "the liar's log-probs are not the run's"
        assert len(failures) == 1 and "its log-probs differ from the trainer's" in failures[0]
        serving, worst, failures = back
        assert serving == 2 and worst < 1e-4 and failures == []
    assert answers[1][3] == 0
    assert all(answer[-1] == (5, None) for answer in answers)


def alone(engines: EnginePool, weights: EngineWeights, actor: Trainable) -> list[Any]:
    """With one engine, which is killed: it comes back with the weights, and has to serve before its
    failure is past."""
    weights.check(actor, SEQUENCES)
    if dist.get_rank() == 0:
        os.killpg(own_server(engines), signal.SIGKILL)
        time.sleep(3 * LOOK_SECONDS)
    dist.barrier()
    found: list[Any] = []
    for _ in range(2):
        weights.update_weights(actor)
        largest = weights.check(actor, SEQUENCES).largest
        # Its check is of the same sync
        in_a_row = [report.in_a_row for report in engines._placement.engines()]
        found.append((engines.serving, largest, len(engines.pop_failures()), in_a_row))
    return found


def test_an_engine_alone_is_waited_for(model_dir: Path, tmp_path: Path) -> None:
    for rank, answer in enumerate(
        run_ranks(2, run_engines, model_dir, tmp_path, 1, alone, deadline=240)
    ):
        assert [serving for serving, *_ in answer] == [1, 1] and max(
            largest for _, largest, *_ in answer
        ) < 1e-4
        assert [failures for _, _, failures, _ in answer] == [1, 0]
        assert rank or [in_a_row for *_, in_a_row in answer] == [[1], [0]]
