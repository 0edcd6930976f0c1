"""A run whose output cannot be written goes on, and ends with its own exit code."""

import os
import subprocess
import sys
from pathlib import Path

import attempts
import pytest
from ports import free_port
from tiny_runs import make_model, problems, write_rows

from vapo_megatron.config.load import dump_config
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.run.ranks import LOST_A_PEER

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]

# What a rank prints, and how it then ends: by itself, or by its watchdog.
PROGRAM = """
import logging, sys, threading, time
from pathlib import Path

from vapo_megatron import logs
from vapo_megatron.checkpoint.resume import Start
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import TryAgain, told_in_one_line
from vapo_megatron.monitoring.console import RunConsole
from vapo_megatron.run import launch
from vapo_megatron.run.ranks import end_from_thread
from vapo_megatron.run.watchdog import Hang

config, end, went_on = sys.argv[1:]

def body(run_dir, start):
    RunConsole().step(1, 2, {})
    logging.getLogger("vapo_megatron").warning("an engine failed")
    Path(went_on).touch()
    if end == "hangs":
        hang = Hang("rank 0 did not arrive")
        threading.Thread(target=end_from_thread, args=(hang,), daemon=True).start()
        time.sleep(60)
        raise SystemExit("nobody ended it")
    raise TryAgain("saved")

logs.configure(logs.LogLevel.INFO)
launch.prepare_start = lambda *_: Start()
with told_in_one_line("vapo-megatron"):
    settings = load_config(TrainConfig, Path(config), [], PRESETS)
    launch.launch(settings, body, lambda *_: None)
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("output", "end", "is_external", "code"),
    [
        ("a full disk", "stops", False, 75),
        ("a full disk", "hangs", True, LOST_A_PEER),
        ("a reader that is gone", "stops", True, 75),
        ("a reader that is gone", "hangs", False, 75),
    ],
)
def test_a_run_outlives_its_output(
    tmp_path: Path, output: str, end: str, is_external: bool, code: int
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", problems(64))
    model = make_model(tmp_path / "model")
    world = attempts.World(tmp_path, model, rows, rows, EngineAddress("", ""))
    config = attempts.config_of(
        world, "run", {"tp": 1}, "cluster.ranks=1", "cluster.restarts=0", "run.resume=auto"
    )
    dump_config(config, tmp_path / "config.yaml")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    if is_external:
        place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        environment |= place | {"MASTER_PORT": str(free_port())}
    if output == "a full disk":
        written = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, written = os.pipe()
        os.close(reader)
    went_on = tmp_path / "went_on"
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "config.yaml"), end, str(went_on)],
        stdout=written,
        stderr=written,
        env=environment,
        timeout=120,
    )
    os.close(written)
    assert went_on.exists(), "it ended at the first line"
    assert ended.returncode == code
