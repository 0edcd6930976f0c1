"""Engines that a run did not start: their requests, whom they serve, and that they outlive a
trainer."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attempts
import engine_faults
import psutil
import pytest
from command_lines import command_line
from tiny_runs import make_model, problems, write_config, write_rows

from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.engines.external_server import ask_health
from vapo_megatron.engines.inside.broadcast_group import BroadcastGroup
from vapo_megatron.engines.remote_engines import (
    PROTOCOL,
    compatibility_fields,
    serve_engine,
    take_over_engines,
)
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import EngineClient
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.engines.weight_sync.broadcast_transport import DistributedTransport
from vapo_megatron.engines.weight_sync.session import WeightSync
from vapo_megatron.errors import BadInput, RunFailed, TryAgain
from vapo_megatron.models.registry import read_spec
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.weights.hf_files import HFTensors

pytestmark = pytest.mark.full

KEY_VARIABLE = "VAPO_TEST_KEY"
KEY = "a secret of this test"
DEADLINE = 240.0
_SAYS = re.compile(r"engine at (http://127\.0\.0\.1:\d+), log (.*)")


@dataclass(frozen=True)
class Fleet:
    """Two engines of the command line, and the run whose config they were started from."""

    world: attempts.World
    urls: list[str]
    processes: list["subprocess.Popen[str]"]

    def config(self, name: str, *overrides: str) -> TrainConfig:
        return attempts.config_of(
            self.world,
            name,
            {"tp": 2},
            f"rollout.external_urls=[{','.join(self.urls)}]",
            f"rollout.api_key_variable={KEY_VARIABLE}",
            "value_pretraining.enabled=false",
            "run.steps=2",
            "data.eval=[]",
            *overrides,
        )

    def agreed(self, **changes: Any) -> dict[str, Any]:
        config = self.config("agreed")
        return (
            compatibility_fields(config.rollout, read_spec(self.world.model), "float32", None)
            | changes
        )


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    model = make_model(folder / "model")
    train, evaluation = (
        write_rows(folder / f"{name}.jsonl", problems(64)) for name in ("train", "eval")
    )
    world = attempts.World(folder, model, train, evaluation, EngineAddress("", ""))
    config = write_config(
        folder / "engine.yaml", attempts.config_of(world, "tiny", {"tp": 2}).model_dump(mode="json")
    )
    os.environ[KEY_VARIABLE] = KEY
    command = [sys.executable, "-m", "vapo_megatron.cli", "engine", str(config), "--port", "0"]
    command += [f"rollout.api_key_variable={KEY_VARIABLE}"]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    try:
        urls = []
        for process in processes:
            assert process.stdout is not None
            said = next(filter(None, map(_SAYS.search, process.stdout)), None)
            assert said is not None, f"an engine ended with code {process.wait()}"
            urls.append(said[1])
        yield Fleet(world, urls, processes)
    finally:
        del os.environ[KEY_VARIABLE]
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def rollout_of(*urls: str, **changes: Any) -> RolloutConfig:
    return RolloutConfig(
        external_urls=urls, api_key_variable=KEY_VARIABLE, start_timeout_s=2.0, **changes
    )


def test_what_is_asked_without_the_key_is_refused(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("vapo_engine", "server_info", "generate", "update_weights_from_tensor"):
        body = None if path in ("vapo_engine", "server_info") else b"{}"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(
                urllib.request.Request(f"{fleet.urls[0]}/{path}", data=body), timeout=120
            )
        assert refused.value.code == 401, path
    monkeypatch.setenv(KEY_VARIABLE, "another one")
    with pytest.raises(BadInput, match=r"does not accept our key: rollout\.api_key_variable"):
        take_over_engines(rollout_of(fleet.urls[0]), fleet.agreed())


def test_the_key_is_neither_in_the_log_nor_among_the_arguments(fleet: Fleet) -> None:
    logs = list((fleet.world.folder / "runs" / "tiny-engines").glob("*.log"))
    assert len(logs) == 2 and all("server_args" in log.read_text() for log in logs)
    assert not any(KEY in log.read_text() for log in logs)
    for process in fleet.processes:
        children = psutil.Process(process.pid).children(recursive=True)
        assert children and not any(KEY in " ".join(command_line(child)) for child in children)


@pytest.mark.parametrize(
    ("key", "value"),
    [("model.hidden_size", 128), ("model.dtype", "bfloat16"), ("rollout.max_total_tokens", 4096)],
)
def test_an_engine_of_another_config_is_named_with_what_differs(
    fleet: Fleet, key: str, value: Any
) -> None:
    with pytest.raises(
        BadInput, match=rf"{fleet.urls[0]} was started with {key}=.* and this run has {value}"
    ):
        take_over_engines(rollout_of(*fleet.urls), fleet.agreed(**{key: value}))


def test_an_engine_of_another_protocol_is_refused(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = PROTOCOL
    monkeypatch.setattr("vapo_megatron.engines.remote_engines.PROTOCOL", theirs + 1)
    told = f"has version {theirs} of the weight sync and this trainer version {theirs + 1}"
    with pytest.raises(BadInput, match=told):
        take_over_engines(rollout_of(fleet.urls[0]), fleet.agreed())


def test_an_engine_that_is_not_there_is_something_passing(fleet: Fleet) -> None:
    with pytest.raises(
        TryAgain, match=r"http://127\.0\.0\.1:9 did not answer within rollout\.start_timeout_s=2 s"
    ):
        take_over_engines(rollout_of("http://127.0.0.1:9"), fleet.agreed())


def test_engines_serve_one_trainer_at_a_time(fleet: Fleet, tmp_path: Path) -> None:
    """The second to come takes the engine over; the first hears of it before it trains on a
    sample."""
    tensors = HFTensors(fleet.world.model)
    weights = [(name, tensors[name][:]) for name in sorted(tensors.names)]
    prompts = [Prompt("p", "", "", (3, 4, 5))]
    config = rollout_of(fleet.urls[0])
    sampling = SamplingConfig(max_new_tokens=4)
    first, second = (take_over_engines(config, fleet.agreed())[0][0] for _ in range(2))
    for address in (first, second):
        with WeightSync(
            DistributedTransport([EngineClient(address, DEADLINE)], 1, DEADLINE)
        ) as sync:
            sync.load([weights], version=1)
        with Dispatcher([address], config, stop_token_ids=[1]) as dispatcher:
            assert (
                len(
                    dispatcher.collect(GenerationRequest(prompts, 2, sampling, 0, weight_version=1))
                )
                == 2
            )
    with (
        Dispatcher([first], config, stop_token_ids=[1]) as dispatcher,
        pytest.raises(RunFailed, match="it runs weights that another trainer has synced"),
    ):
        dispatcher.collect(GenerationRequest(prompts, 2, sampling, 0, weight_version=1))


def die_in_a_broadcast(call: int) -> None:
    """Have a trainer kill itself when the engines wait for the bytes of its call-th bucket."""
    broadcast = BroadcastGroup.broadcast
    calls = 0

    def trap(group: BroadcastGroup, buffer: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        broadcast(group, buffer)

    BroadcastGroup.broadcast = trap  # type: ignore[method-assign]


def test_trainer_killed_in_a_weight_sync_resumes_with_engines(fleet: Fleet) -> None:
    """To the bit as one that was not: the engines wait for bytes that never come, in a session that
    nobody ends."""
    whole = fleet.config("whole")
    end = attempts.live(fleet.world, whole, 2)
    assert end.code == 0, end.said
    config = fleet.config("killed", "run.resume=auto")
    end = attempts.live(fleet.world, config, 2, prepare=lambda: die_in_a_broadcast(3))
    assert end.code != 0
    end = attempts.live(fleet.world, config, 2)
    assert end.code == 0, end.said
    rows, expected = (attempts.metrics(Path(one.run.directory)) for one in (config, whole))
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    assert rows == expected
    assert max(row["rollout/train_infer_logprob_diff"] for row in rows) < 1e-4
    assert [row["rollout/weight_version"] for row in rows if row["step"] > 0] == [1.0, 2.0]


def test_an_external_engine_that_dies_leaves_and_comes_back(fleet: Fleet) -> None:
    """Its groups go to the other one, whose samples are the same; its owner starts it again, and it
    is taken back."""
    whole = fleet.config("undisturbed", "run.steps=3")
    end = attempts.live(fleet.world, whole, 2)
    assert end.code == 0, end.said
    config = fleet.config("dies", "run.steps=3")
    faults = {3: ("scheduler", signal.SIGKILL)}
    end = attempts.live(fleet.world, config, 2, prepare=lambda: engine_faults.disturb(faults))
    assert end.code == 0, end.said
    rows = engine_faults.same_run(Path(config.run.directory), Path(whole.run.directory))
    assert sum(row["rollout/engine_failures"] for row in rows) == 1
    deadline = time.monotonic() + 120
    while ask_health(EngineAddress(fleet.urls[0], "", KEY), 1) is None:
        assert time.monotonic() < deadline, "it was not started again"
        time.sleep(0.2)


def test_a_run_that_sends_only_changes_equals_one_that_sends_all(fleet: Fleet) -> None:
    """At a rate so small that most float32 weights stay as they are."""
    settings = ("run.steps=4", "actor.optimizer.lr=1e-9")
    whole = fleet.config("all", *settings)
    config = fleet.config("changes", *settings, "rollout.sync.only_changes=true")
    for one in (whole, config):
        end = attempts.live(fleet.world, one, 2)
        assert end.code == 0, end.said
    rows, expected = (attempts.metrics(Path(one.run.directory)) for one in (config, whole))
    shares = [row.pop("weight_sync/sent_share") for row in rows if row["step"] > 0]
    assert shares[-1] < 0.5 and rows == expected


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_an_engine_needs_a_key_on_loopback_too(fleet: Fleet, host: str) -> None:
    with pytest.raises(BadInput, match=rf"--host {host} without rollout\.api_key_variable"):
        serve_engine(attempts.config_of(fleet.world, "open", {"tp": 1}), host, 0)


def test_a_port_in_use_is_named(fleet: Fleet, tmp_path: Path) -> None:
    port = int(fleet.urls[0].rpartition(":")[2])
    server = EngineServer(
        fleet.world.model, RolloutConfig(), "float32", tmp_path / "log", port=port
    )
    with pytest.raises(BadInput, match=rf"cannot listen on 127\.0\.0\.1, port {port}"):
        server.start()


def test_an_engine_ends_when_it_is_asked_to(fleet: Fleet) -> None:
    process = fleet.processes[1]
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=240) == 0
    assert psutil.wait_procs(children, timeout=120)[1] == []
    with pytest.raises(TryAgain, match="did not answer"):
        take_over_engines(rollout_of(*fleet.urls), fleet.agreed())
