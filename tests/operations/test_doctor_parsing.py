"""What nvidia-smi and the kernel say of a node, and what doctor makes of it."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plans import planned_config
from tiny_runs import make_model

from vapo_megatron.config.plan import HardwareConfig
from vapo_megatron.operations.doctor import allreduce, checks, node
from vapo_megatron.operations.doctor.allreduce import Reduced
from vapo_megatron.operations.doctor.node import (
    VERSIONS,
    check_versions,
    judge_gpus,
    judge_network,
    read_ports,
    usable_adapters,
)
from vapo_megatron.operations.doctor.nodes import Line, NodeReport, broken_nodes, from_json

ROOT = Path(__file__).parents[2]
H100 = HardwareConfig()
NAME = "NVIDIA H100 80GB HBM3"


@dataclass
class FakeGpu:
    """What nvidia-smi shows of a GPU."""

    name: str = NAME
    total: int = 81559
    used: int = 4
    ecc: str = "Enabled"
    uncorrected: str = "0"
    caches: str = "<sram_uncorrectable>0</sram_uncorrectable>"
    pending: str = "No"
    failure: str = "No"
    mig: str = "Disabled"
    mode: str = "Default"

    def xml(self) -> str:
        return (
            f"<gpu><product_name>{self.name}</product_name><fb_memory_usage><total>{self.total} "
            f"MiB</total><used>{self.used} "
            f"MiB</used></fb_memory_usage><ecc_mode><current_ecc>{self.ecc}</current_ecc></ecc_mode><ecc_errors><volatile><dram_correctable>7</dram_correctable><dram_uncorrectable>{self.uncorrected}</dram_uncorrectable>{self.caches}</volatile></ecc_errors><remapped_rows><remapped_row_pending>{self.pending}</remapped_row_pending><remapped_row_failure>{self.failure}</remapped_row_failure></remapped_rows><mig_mode><current_mig>{self.mig}</current_mig></mig_mode><compute_mode>{self.mode}</compute_mode></gpu>"
        )


class FakeDriver:
    """An nvidia-smi of our own, first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gpus = [FakeGpu() for _ in range(8)]

    def write(self) -> None:
        gpus = "".join(gpu.xml() for gpu in self.gpus)
        (self.folder / "log.xml").write_text(
            "<?xml version='1.0' "
            f"?><nvidia_smi_log><driver_version>580.95.05</driver_version>{gpus}</nvidia_smi_log>"
        )
        script(self.folder / "nvidia-smi", f"exec cat {self.folder}/log.xml")

    def judge(self) -> list[Line]:
        self.write()
        return judge_gpus(node.read_gpus(), H100, usable=8)


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Eight sound H100s."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return FakeDriver(tmp_path)


def statuses(lines: list[Line]) -> list[str]:
    return [line.status for line in lines]


def test_healthy_gpus(driver: FakeDriver) -> None:
    (line,) = driver.judge()
    assert line.status == "ok", "corrected errors are no fault"
    assert line.found.startswith(f"8 x {NAME}, driver 580.95.05")
    (line,) = judge_gpus(node.read_gpus(), H100, usable=3)
    assert line.status == "fault" and line.found == "PyTorch can use 3 of 8 GPUs"


@pytest.mark.parametrize(
    ("number", "change", "status", "named"),
    [
        (7, {"name": "NVIDIA H200", "total": 143771}, "fault", "differ"),
        (5, {"used": 61234}, "fault", "GPUs 5"),
        (2, {"name": "GPU is lost"}, "fault", "7 GPUs answer"),
        (6, {"mode": "Exclusive_Process"}, "fault", "GPUs 6"),
        (6, {"mig": "Enabled"}, "fault", "MIG"),
        (1, {"uncorrected": "3"}, "fault", "GPUs 1"),
        *(
            (1, {"caches": f"<sram_{kind}>2</sram_{kind}>"}, "fault", "GPUs 1: uncorrected errors")
            for kind in ("uncorrectable", "uncorrectable_parity", "uncorrectable_secded")
        ),
        (4, {"pending": "Yes"}, "fault", "waiting"),
        (4, {"failure": "Yes"}, "fault", "could not"),
        (0, {"ecc": "Disabled"}, "warning", "ECC is off"),
    ],
)
def test_a_bad_gpu_is_named(
    driver: FakeDriver, number: int, change: dict[str, Any], status: str, named: str
) -> None:
    driver.gpus[number] = FakeGpu(**change)
    bad = [line for line in driver.judge() if line.status == status and named in line.found]
    assert bad and all(line.remedy for line in bad)


def test_gpus_behind_a_lost_one_keep_their_numbers(driver: FakeDriver) -> None:
    driver.gpus[2] = FakeGpu(name="GPU is lost")
    driver.gpus[5] = FakeGpu(used=61234)
    assert [line.found for line in driver.judge() if "in use" in line.found] == ["GPUs 5: in use"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "No such file"),
        ("echo no devices >&2; exit 9", "no devices"),
        ("echo what", "syntax error"),
    ],
)
def test_a_tool_that_fails_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, named: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if text is not None:
        script(tmp_path / "nvidia-smi", text)
    with pytest.raises(node.Unreadable, match=named) as error:
        node.read_gpus()
    assert "nvidia-smi" in str(error.value) and "\n" not in str(error.value)


def write_port(root: Path, name: str, state: str) -> None:
    folder = root / name / "ports" / "1"
    folder.mkdir(parents=True)
    (folder / "state").write_text(f"{state}\n")


@pytest.fixture
def ports(tmp_path: Path) -> dict[str, bool]:
    """Eight adapters of a node of H100s, and a ninth that nothing is plugged into."""
    for index in range(8):
        write_port(tmp_path, f"mlx5_{index}", "4: ACTIVE")
    write_port(tmp_path, "mlx5_8", "1: DOWN")
    return read_ports(tmp_path)


ADAPTERS = [f"mlx5_{index}" for index in range(9)]


def test_network_adapters(ports: dict[str, bool]) -> None:
    assert statuses(judge_network({}, [])) == ["warning"]
    (line,) = judge_network(ports, ADAPTERS)
    assert line.status == "ok" and "8 of 9 ports" in line.found
    assert statuses(judge_network(dict.fromkeys(ports, False), ADAPTERS)) == ["fault"]


def test_adapters_without_a_provider_are_a_fault_despite_kernel(
    ports: dict[str, bool],
) -> None:
    (line,) = judge_network(ports, [])
    assert line.status == "fault" and "TCP" in line.found
    assert "ibverbs-providers" in line.remedy and "MELLANOX_VISIBLE_DEVICES" in line.remedy


def test_adapters_are_those_that_ibv_devices_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ports: dict[str, bool]
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert usable_adapters() is None and statuses(judge_network(ports, None)) == ["warning"]
    head = "    device                 node GUID\\n    ------              ----------------\\n"
    script(tmp_path / "ibv_devices", f"printf '{head}    mlx5_0              b8cef6030055a2a6\\n'")
    assert usable_adapters() == ["mlx5_0"]
    script(tmp_path / "ibv_devices", f"printf '{head}'")
    assert usable_adapters() == []


def test_the_image_brings_what_opens_the_adapters() -> None:
    image = (ROOT / "docker" / "h100.Dockerfile").read_text()
    assert "ibverbs-providers ibverbs-utils" in image and "MELLANOX_VISIBLE_DEVICES=all" in image


@pytest.mark.parametrize(
    ("rates", "expected", "status", "named"),
    [
        ([3e11, 3e11], 3e11, "ok", "300.0"),
        ([3e11, 3e11], None, "ok", "nothing to compare"),
        ([2.2e11, 2.2e11], 3e11, "warning", "expected 300.0"),
        ([1.2e11, 1.2e11], 3e11, "fault", "expected 300.0"),
        ([3e11, "no answer within 5 s"], 3e11, "fault", "device 1"),
    ],
)
def test_bandwidth(
    rates: list[float | str], expected: float | None, status: str, named: str
) -> None:
    measured = [
        Reduced(0.0, rate) if isinstance(rate, str) else Reduced(rate, network="IB")
        for rate in rates
    ]
    (line,) = allreduce.judge(measured, expected, "see clocks")
    assert line.status == status and named in line.found
    assert ("over IB" in line.found) == (status != "fault" or isinstance(rates[1], float))


def test_tcp_beside_active_adapters_is_a_fault() -> None:
    (line,) = allreduce.judge(
        [Reduced(3e11, network="Socket")], None, "see NCCL_NET", beside_adapters=True
    )
    assert line.status == "fault" and "TCP" in line.found
    (line,) = allreduce.judge(
        [Reduced(3e11, network="IB")], None, "see NCCL_NET", beside_adapters=True
    )
    assert line.status == "ok"


def test_the_network_that_nccl_chose_is_read_from_its_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = (
        "n1:1:1 [0] NCCL INFO NET/IB : No device found.\\nn1:1:1 [0] NCCL INFO Using network "
        "Socket\\n"
    )
    process = subprocess.Popen(
        ["printf", said + "\\n1.5e9\\n"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert allreduce.results([process], 30) == [Reduced(1.5e9, network="Socket")]


def test_processes_that_say_much_are_read_side_by_side(tmp_path: Path) -> None:
    """The first waits for the second, as in an all-reduce, which is still writing."""
    done = tmp_path / "done"
    much = "print('n1:1:1 [0] NCCL INFO ' * 20_000)"
    waits = f"import os, time\nwhile not os.path.exists({str(done)!r}): time.sleep(0.02)"
    programs = (f"{waits}\nprint(1e9)", f"{much}\nopen({str(done)!r}, 'w')\nprint(2e9)")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for program in programs
    ]
    assert allreduce.results(processes, 20) == [Reduced(1e9), Reduced(2e9)]


def test_versions_of_this_environment_are_supported() -> None:
    assert statuses(check_versions(False)) == ["ok"]
    assert {
        "torch",
        "megatron-core",
        "sglang",
        "transformers",
        "transformer-engine",
    } <= VERSIONS.keys()
    with_gpus = {line.found: line.status for line in check_versions(True)}
    assert with_gpus["torch_memory_saver is not installed: no run starts"] == "fault"
    assert with_gpus["flash-attn is not installed: attention is cuDNN's or PyTorch's"] == "warning"


def test_reports_survive_the_way_and_name_broken_nodes() -> None:
    good = NodeReport(
        "n1",
        0,
        (Line("ok", "room", check="disk"), Line("not applicable", "no GPU here", check="ecc")),
    )
    warned = NodeReport("n2", 8, (Line("warning", "little room", "make some", "disk"),))
    bad = NodeReport(
        "n3", 16, (Line("fault", "errors", "leave it out", "ecc"), Line("ok", "room", check="disk"))
    )
    assert [report.status for report in (good, warned, bad)] == ["ok", "warning", "fault"]
    assert broken_nodes([good, warned]) == []
    assert broken_nodes([good, warned, bad]) == ["n3"]
    assert [
        from_json(json.loads(json.dumps(asdict(report)))) for report in (good, warned, bad)
    ] == [good, warned, bad]


@pytest.mark.parametrize("cache", ["/scratch/kernels/3f2a/triton", None])
def test_an_engine_that_started_shows_where_its_kernels_stay(
    cache: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One folder above Triton's, where slurm/task.sh keeps all caches of a node and environment."""

    async def answers(address: Any) -> None: ...

    monkeypatch.setattr(
        checks, "EngineServer", lambda *_, **__: nullcontext(SimpleNamespace(address=""))
    )
    monkeypatch.setattr(checks, "_ask", answers)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    if cache is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", cache)
    (line,) = checks.check_engine(planned_config(make_model(tmp_path)), gpus=0)
    assert line.status == "ok" and "started and wrote" in line.found
    assert line.found.endswith("; kernels are cached in /scratch/kernels/3f2a") == (
        cache is not None
    )
    assert ("cached" in line.found) == (cache is not None)
