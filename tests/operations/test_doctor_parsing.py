"""What nvidia-smi and the kernel say of a node, and what doctor makes of it."""

import dataclasses
import resource
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.plan import HardwareConfig, PlanConfig
from vapo_megatron.operations.doctor import allreduce, checks, gpu
from vapo_megatron.operations.doctor.allreduce import Reduced
from vapo_megatron.operations.doctor.node import (
    Port,
    chosen_by_nccl,
    judge_limits,
    judge_network,
    read_ports,
    usable_adapters,
)
from vapo_megatron.operations.doctor.nodes import Meeting
from vapo_megatron.operations.doctor.report import Line, NodeReport, as_json, broken_nodes, from_json
from vapo_megatron.operations.doctor.toolkit import MATRIX, check_versions

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
    pending: str = "No"
    failure: str = "No"
    mig: str = "Disabled"
    mode: str = "Default"
    links: tuple[str, ...] = ("26.562 GB/s",) * 18

    def xml(self) -> str:
        return (
            f"<gpu><product_name>{self.name}</product_name>"
            f"<fb_memory_usage><total>{self.total} MiB</total><used>{self.used} MiB</used></fb_memory_usage>"
            f"<ecc_mode><current_ecc>{self.ecc}</current_ecc></ecc_mode>"
            f"<ecc_errors><volatile><dram_correctable>7</dram_correctable>"
            f"<dram_uncorrectable>{self.uncorrected}</dram_uncorrectable></volatile></ecc_errors>"
            f"<remapped_rows><remapped_row_pending>{self.pending}</remapped_row_pending>"
            f"<remapped_row_failure>{self.failure}</remapped_row_failure></remapped_rows>"
            f"<mig_mode><current_mig>{self.mig}</current_mig></mig_mode><compute_mode>{self.mode}</compute_mode></gpu>"
        )


class FakeDriver:
    """An nvidia-smi of our own, first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.gpus = folder, [FakeGpu() for _ in range(8)]

    def write(self) -> None:
        gpus = "".join(gpu.xml() for gpu in self.gpus)
        (self.folder / "log.xml").write_text(
            f"<?xml version='1.0' ?><nvidia_smi_log><driver_version>580.95.05</driver_version>{gpus}</nvidia_smi_log>"
        )
        states = [
            f"GPU {index}: {gpu.name} (UUID: GPU-{index})\n"
            + "".join(f"\t Link {link}: {state}\n" for link, state in enumerate(gpu.links))
            for index, gpu in enumerate(self.gpus)
        ]
        (self.folder / "links.txt").write_text("".join(states))
        script(
            self.folder / "nvidia-smi",
            f'[ "$1" = nvlink ] && exec cat {self.folder}/links.txt; exec cat {self.folder}/log.xml',
        )

    def read(self) -> list[gpu.Gpu]:
        self.write()
        return gpu.read_gpus()


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
    gpus = driver.read()
    assert len(gpus) == 8 and gpus[3].index == 3 and gpus[3].driver == "580.95.05" and gpus[3].memory_mib == 81559
    assert statuses(gpu.judge_gpus(gpus, H100)) == ["ok"], "corrected errors are no fault"
    assert statuses(gpu.judge_links(gpus, H100)) == ["ok"]


@pytest.mark.parametrize(
    ("number", "change", "status", "named"),
    [
        (7, {"name": "NVIDIA H200", "total": 143771}, "fault", "differ"),
        (5, {"used": 61234}, "fault", "GPUs 5"),
        (2, {"name": "GPU is lost"}, "fault", "7 GPUs answer"),
        (6, {"mode": "Exclusive_Process"}, "fault", "GPUs 6"),
        (6, {"mig": "Enabled"}, "fault", "MIG"),
        (1, {"uncorrected": "3"}, "fault", "GPUs 1"),
        (4, {"pending": "Yes"}, "fault", "waiting"),
        (4, {"failure": "Yes"}, "fault", "could not"),
        (0, {"ecc": "Disabled"}, "warning", "ECC is off"),
    ],
)
def test_a_bad_gpu_is_named(driver: FakeDriver, number: int, change: dict[str, Any], status: str, named: str) -> None:
    driver.gpus[number] = FakeGpu(**change)
    bad = [line for line in gpu.judge_gpus(driver.read(), H100) if line.status == status and named in line.found]
    assert bad and all(line.remedy for line in bad)


def test_gpus_of_a_login_node_can_be_passed_over(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.gpus.pop()  # not as many as the job's nodes have
    driver.write()
    monkeypatch.setattr(checks, "has_nvidia_driver", lambda: True)
    config = load_config(PlanConfig, ROOT / "examples" / "gsm8k" / "vapo.yaml", [], PRESETS)
    table = {check.name: check for check in checks.checks(config, 1)}

    def found(name: str, passes_over_gpus: bool) -> list[str]:
        login = checks.Examination(config, Meeting(None, "login", 1), True, 1, passes_over_gpus)
        return statuses(checks.perform(table[name], login))

    assert "fault" in found("gpus", False) and found("gpus", True) == ["not applicable"]
    assert "fault" in found("versions", False), "without torch_memory_saver"
    assert found("versions", True) == ["ok"]


@pytest.mark.parametrize(
    ("text", "named"),
    [(None, "cannot be run"), ("echo no devices >&2; exit 9", "no devices"), ("echo what", "is not understood")],
)
def test_a_tool_that_fails_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, named: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if text is not None:
        script(tmp_path / "nvidia-smi", text)
    with pytest.raises(gpu.Unreadable, match=named) as error:
        gpu.read_gpus()
    assert "nvidia-smi" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("links", [("26.562 GB/s",) * 17, ("26.562 GB/s",) * 17 + ("<inactive>",), ()])
def test_a_link_that_is_down(driver: FakeDriver, links: tuple[str, ...]) -> None:
    driver.gpus[0].links = links
    (line,) = gpu.judge_links(driver.read(), H100)
    assert line.status == "fault" and line.found.startswith("GPUs 0: ")


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H800"])
def test_a_card_with_fewer_links_than_the_module_is_no_fault(driver: FakeDriver, name: str) -> None:
    driver.gpus = [FakeGpu(name=name, links=("26.562 GB/s",) * 12)] * 8
    (line,) = gpu.judge_links(driver.read(), H100)
    assert line.status == "warning" and name in line.found


def test_the_makers_diagnosis_decides_by_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert statuses(gpu.diagnose()) == ["skipped"]
    script(tmp_path / "dcgmi", "echo '| Memory Bandwidth | Fail - GPU 3 |'; exit 226")
    (line,) = gpu.diagnose()
    assert line.status == "fault" and "GPU 3" in line.found
    script(tmp_path / "dcgmi", "exit 0")
    assert statuses(gpu.diagnose()) == ["ok"]


def write_port(root: Path, name: str, state: str, rate: str) -> None:
    folder = root / name / "ports" / "1"
    folder.mkdir(parents=True)
    (folder / "state").write_text(f"{state}\n")
    (folder / "rate").write_text(f"{rate}\n")


@pytest.fixture
def ports(tmp_path: Path) -> list[Port]:
    """Eight adapters of a node of H100s."""
    for index in range(8):
        write_port(tmp_path, f"mlx5_{index}", "4: ACTIVE", "400 Gb/sec (4X NDR)")
    return read_ports(tmp_path)


ADAPTERS = [f"mlx5_{index}" for index in range(10)]


def test_network_adapters(tmp_path: Path, ports: list[Port]) -> None:
    assert [port.rate for port in ports] == [400.0] * 8
    assert statuses(judge_network(ports, ADAPTERS, {}, 1)) == ["not applicable"]
    assert statuses(judge_network([], [], {}, 2)) == ["warning"]
    (line,) = judge_network(ports, ADAPTERS, {}, 2)
    assert line.status == "ok" and "8 ports at 400 Gb/s" in line.found
    write_port(tmp_path, "mlx5_8", "1: DOWN", "40 Gb/sec (4X QDR)")
    write_port(tmp_path, "mlx5_9", "4: ACTIVE", "100 Gb/sec (2X HDR)")
    lines = judge_network(read_ports(tmp_path), ADAPTERS, {}, 2)
    assert statuses(lines) == ["warning", "warning"]
    assert "mlx5_9" in lines[0].found and "mlx5_8" in lines[1].found
    down = [dataclasses.replace(port, state="DOWN") for port in ports]
    assert statuses(judge_network(down, ADAPTERS, {}, 2)) == ["fault"]


def test_adapters_without_a_provider_are_a_fault_though_the_kernel_shows_them(ports: list[Port]) -> None:
    (line,) = judge_network(ports, [], {}, 2)
    assert line.status == "fault" and "TCP" in line.found
    assert "ibverbs-providers" in line.remedy and "MELLANOX_VISIBLE_DEVICES" in line.remedy


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [
        ({}, range(8)),
        ({"NCCL_IB_DISABLE": "1"}, []),
        ({"NCCL_NET": "Socket"}, []),
        ({"NCCL_IB_HCA": "mlx5"}, range(8)),
        ({"NCCL_IB_HCA": "mlx5_1,mlx5_2"}, [1, 2]),
        ({"NCCL_IB_HCA": "=mlx5"}, []),
        ({"NCCL_IB_HCA": "=mlx5_3:1"}, [3]),
        ({"NCCL_IB_HCA": "^mlx5_0,mlx5_1"}, range(2, 8)),
        ({"NCCL_IB_HCA": "rocep"}, []),
    ],
)
def test_what_nccl_would_choose(ports: list[Port], environment: dict[str, str], chosen: Sequence[int]) -> None:
    assert [port.name for port in chosen_by_nccl(ports, ADAPTERS, environment)] == [f"mlx5_{i}:1" for i in chosen]
    status = "ok" if chosen else "fault"
    assert statuses(judge_network(ports, ADAPTERS, environment, 2)) == [status]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="compiles a stand-in for libibverbs")
def test_adapters_are_counted_as_libibverbs_counts_them(tmp_path: Path) -> None:
    (tmp_path / "verbs.c").write_text(
        'static char *names[] = {"mlx5_0", "mlx5_3", 0};\n'
        "char **ibv_get_device_list(int *count) { *count = 2; return names; }\n"
        "const char *ibv_get_device_name(char *device) { return device; }\n"
        "void ibv_free_device_list(char **list) {}\n"
    )
    library = tmp_path / "libverbs.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "verbs.c"], check=True)
    assert usable_adapters(str(library)) == ["mlx5_0", "mlx5_3"]
    assert usable_adapters("libnothing.so.1") == []


def test_the_image_brings_what_opens_the_adapters() -> None:
    image = (ROOT / "docker" / "h100.Dockerfile").read_text()
    assert "ibverbs-providers" in image and "MELLANOX_VISIBLE_DEVICES=all" in image


@pytest.mark.parametrize(
    ("files", "locked", "shared", "gpus", "nodes", "rdma", "expected"),
    [
        (1 << 20, resource.RLIM_INFINITY, 64 << 30, True, 2, True, ["ok"]),
        (resource.RLIM_INFINITY, 1 << 16, 64 << 30, False, 1, False, ["ok"]),
        (4096, resource.RLIM_INFINITY, 64 << 30, True, 2, True, ["warning"]),
        (512, 1 << 16, 64 << 20, True, 2, True, ["fault", "fault", "fault"]),
        (1 << 20, 1 << 16, 64 << 30, True, 2, False, ["warning"]),  # TCP locks nothing
        (1 << 20, 64 << 30, 64 << 30, True, 2, True, ["warning"]),
    ],
)
def test_limits(files: int, locked: int, shared: int, gpus: bool, nodes: int, rdma: bool, expected: list[str]) -> None:
    assert statuses(judge_limits(files, locked, shared, gpus, nodes, rdma)) == expected


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
def test_bandwidth(rates: list[float | str], expected: float | None, status: str, named: str) -> None:
    measured = [Reduced(0.0, rate) if isinstance(rate, str) else Reduced(rate, network="IB") for rate in rates]
    (line,) = allreduce.judge(measured, expected, "see clocks")
    assert line.status == status and named in line.found
    assert ("over IB" in line.found) == (status != "fault" or isinstance(rates[1], float))


def test_the_network_that_nccl_chose_is_read_from_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "n1:1:1 [0] NCCL INFO NET/IB : No device found.\\nn1:1:1 [0] NCCL INFO Using network Socket\\n"
    process = subprocess.Popen(
        ["printf", said + "\\n1.5e9\\n"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert allreduce.results([process], 30) == [Reduced(1.5e9, network="Socket")]


def test_versions_of_this_environment_are_supported() -> None:
    assert statuses(check_versions(False)) == ["ok"]
    names = {row.package for row in MATRIX}
    assert {"torch", "megatron-core", "sglang", "transformers", "transformer-engine"} <= names


def test_reports_survive_the_way_and_name_broken_nodes() -> None:
    good = NodeReport("n1", 0, (Line("ok", "room", check="disk"), Line("not applicable", "no GPU here", check="ecc")))
    warned = NodeReport("n2", 8, (Line("warning", "little room", "make some", "disk"),))
    bad = NodeReport("n3", 16, (Line("fault", "errors", "leave it out", "ecc"), Line("ok", "room", check="disk")))
    assert [report.status for report in (good, warned, bad)] == ["ok", "warning", "fault"]
    assert broken_nodes([good, warned]) == []
    assert broken_nodes([good, warned, bad]) == ["n3"]
    written = as_json([good, warned, bad])
    assert written["broken_nodes"] == ["n3"] and written["status"] == "fault"
    assert [from_json(node) for node in written["nodes"]] == [good, warned, bad]
