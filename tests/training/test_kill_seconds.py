"""How long an engine writes nothing after `kill -9` of one of its processes (`pytest -s -m faults`
on this file).

Until the kill is noticed, time is the keeper's. The start that follows is SGLang's and depends on
the load of the
machine: what it computes is printed as well, and how much of that are imports.
"""

import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from batches import random_sequences
from engine_faults import processes_of
from hf_models import write_model
from ranks import run_ranks

from vapo_megatron.config.model import ActorConfig, LayoutConfig, ModelConfig
from vapo_megatron.config.rollout import HealthConfig, RolloutConfig, SamplingConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.engines.engine_weights import EngineWeights
from vapo_megatron.engines.pool import EnginePool
from vapo_megatron.megatron.mesh import make_mesh
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.rollout.dispatcher import Dispatcher, connect
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.weights.load import load_hf

VOCAB = 96
ROLES = ("server", "scheduler", "detokenizer", "guard")
TIMES = int(os.environ.get("TIMES", "3"))
NOTICED_SECONDS = 2.0
PARTS = ("noticed", "start", "weights and a token", "in all", "computed by the start")
IMPORTS = "; ".join(
    (
        "import gc",
        "gc.disable()",  # as server_main does
        "from vapo_megatron.engines.inside import cpu_shim, owner_guard",
        "cpu_shim.install()",
        "from sglang.srt.entrypoints import http_server",
        "from vapo_megatron.engines.inside import processes",
    )
)


def killed_in_turn(model_dir: Path, log_dir: Path) -> list[tuple[str, float, tuple[float, ...]]]:
    """Of every kill: the process, the load of the machine (one minute), and the seconds of
    PARTS."""
    spec = read_spec(model_dir)
    layout = LayoutConfig()
    mesh = make_mesh(layout)
    model = ModelConfig(path=str(model_dir), dtype="float32")
    actor = Trainable(spec, model, ActorConfig(layout=layout), mesh, "lm", name="actor", seed=1)
    load_hf(actor.chunks, spec, model_dir, mesh, "lm")
    actor.prepare()
    health = HealthConfig(max_failures=len(ROLES) * TIMES)
    config = RolloutConfig(context_length=128, max_total_tokens=2048, health=health)
    rows = []
    with (
        EnginePool(config, model_dir, "float32", log_dir) as engines,
        EngineWeights(engines, config, "float32") as weights,
    ):
        engines.start()
        engines.wait_until_ready()
        dispatcher = connect(engines, config, [VOCAB - 1], VOCAB)
        weights.update_weights(actor)
        engines.on_no_engine_left(partial(weights.update_weights, actor, again=True))
        for _ in range(TIMES):
            for role in ROLES:
                rows.append(
                    (
                        role,
                        os.getloadavg()[0],
                        seconds_without_a_token(engines, weights.version, dispatcher, role),
                    )
                )
                print(
                    f"{role}: load {rows[-1][1]:.1f}, {dict(zip(PARTS, rows[-1][2], strict=True))}",
                    flush=True,
                )
    return rows


def seconds_without_a_token(
    engines: EnginePool, version: int, dispatcher: Dispatcher, role: str
) -> tuple[float, ...]:
    """Kill a process of the only engine while it writes responses of one token, one after the
    other."""
    keeper = engines._placement.keeper
    assert keeper is not None
    lose = keeper.on_lost
    lost = list[float]()
    served = list[float]()
    tokens = list[float]()
    computed: list[float] = []

    def note_loss(url: str) -> None:
        lost.append(time.monotonic())
        assert lose is not None
        lose(url)

    prompts = [Prompt("0", "", "", tuple(ids)) for ids in random_sequences(1, 12, VOCAB, seed=1)]
    request = GenerationRequest(
        prompts, 1, SamplingConfig(max_new_tokens=1), seed=1, weight_version=version
    )
    keeper.on_lost = note_loss
    with engines.rank0_uses_engines():
        collect: Callable[[], Any] = partial(dispatcher.collect, request)
        collect()
        os.kill(processes_of(keeper.address.url)[role], signal.SIGKILL)
        killed = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            look = keeper._look_at_start

            def looked(is_ready: bool) -> None:
                look(is_ready)
                if keeper._state == "serving":
                    served.append(time.monotonic())
                    computed.append(cpu_seconds(keeper._server.pid))  # type: ignore[union-attr]

            patch.setattr(keeper, "_look_at_start", looked)
            # An engine serves on until that is noticed
            while not (served and tokens and tokens[-1] > served[0]):
                collect()
                tokens.append(time.monotonic())
    keeper.on_lost = lose
    ends = (killed, lost[0], served[0], next(end for end in tokens if end > served[0]))
    return (*(end - begin for begin, end in pairwise(ends)), ends[-1] - killed, computed[0])


def cpu_seconds(server: int) -> float:
    """Of a server and its children so far."""
    process = psutil.Process(server)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_a_killed_process_of_an_engine_is_noticed_at_once(tmp_path: Path) -> None:
    model_dir = write_model(
        tmp_path / "model", "qwen2", vocab_size=VOCAB, max_position_embeddings=256
    )
    rows = run_ranks(1, killed_in_turn, model_dir, tmp_path / "logs", deadline=3000)[0]
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    before = children.ru_utime + children.ru_stime
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True)
    imports = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\nimports of a server compute for {imports.ru_utime + imports.ru_stime - before:.1f} s")
    for role in ROLES:
        seconds = [row for name, _, row in rows if name == role]
        parts = zip(PARTS, zip(*seconds, strict=True), strict=True)
        print(
            f"{role}: "
            + ", ".join(
                f"{name} {statistics.median(s):.1f} (at most {max(s):.1f})" for name, s in parts
            )
        )
    assert max(seconds[0] for _, _, seconds in rows) < NOTICED_SECONDS
