"""What NVML and the kernel say of a node, and what doctor makes of it."""

import dataclasses
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.hardware import HardwareConfig
from vapo_megatron.config.load import load_config
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.operations.doctor import bandwidth, checks, nvidia
from vapo_megatron.operations.doctor.meeting import Meeting
from vapo_megatron.operations.doctor.report import Line, NodeReport, as_json, broken_nodes, exit_code, from_json
from vapo_megatron.operations.doctor.system import judge_limits, judge_ports, read_ports
from vapo_megatron.operations.doctor.together import judge_clock
from vapo_megatron.operations.doctor.toolkit import MATRIX, check_versions

ROOT = Path(__file__).parents[2]
H100 = HardwareConfig()
NAME = "NVIDIA H100 80GB HBM3"
SXM = dict.fromkeys(range(8), NAME)


@dataclass
class FakeGpu:
    """What NVML answers for a GPU; a type of error is raised."""

    name: Any = NAME
    total: int = 81559 << 20
    used: int = 4 << 20
    ecc: Any = (1, 1)
    uncorrected: Any = 0
    rows: Any = (0, 0, 0, 0)
    mig: Any = (0, 0)
    mode: Any = pynvml.NVML_COMPUTEMODE_DEFAULT
    links: Any = (1,) * 18
    lost: bool = False


class FakeNvml:
    """The functions of pynvml that are called, over GPUs of our own; its constants and errors are the real ones."""

    def __init__(self, gpus: list[FakeGpu]) -> None:
        self.gpus, self.open = gpus, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if self.gpus[index].lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self.gpus[index]

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return said(gpu.name)

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: object) -> Any:
        assert version is pynvml.nvmlMemory_v2, "the first version counts what the driver reserves as used"
        return SimpleNamespace(total=gpu.total, used=gpu.used)

    def nvmlDeviceGetEccMode(self, gpu: FakeGpu) -> Any:
        return said(gpu.ecc)

    def nvmlDeviceGetTotalEccErrors(self, gpu: FakeGpu, kind: int, counter: int) -> Any:
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return said(gpu.uncorrected)

    def nvmlDeviceGetRemappedRows(self, gpu: FakeGpu) -> Any:
        return said(gpu.rows)

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> Any:
        return said(gpu.mig)

    def nvmlDeviceGetComputeMode(self, gpu: FakeGpu) -> Any:
        return said(gpu.mode)

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:
        if link >= len(gpu.links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return said(gpu.links[link])

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, fields: list[tuple[int, int]]) -> Any:
        ((field, _),) = fields
        assert field == pynvml.NVML_FI_DEV_NVLINK_GET_SPEED
        return [SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=SimpleNamespace(uiVal=26562))]


def said(value: Any) -> Any:
    if value is UNSUPPORTED:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return value


UNSUPPORTED = object()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """Eight sound H100s."""
    fake = FakeNvml([FakeGpu() for _ in range(8)])
    monkeypatch.setattr(nvidia, "pynvml", fake)
    yield fake
    assert fake.open == 0, "NVML was left open"


def statuses(lines: list[Line]) -> list[str]:
    return [line.status for line in lines]


def test_healthy_gpus(nvml: FakeNvml) -> None:
    gpus = nvidia.read_gpus()
    assert len(gpus) == 8 and gpus[3].index == 3 and gpus[3].driver == "580.95.05" and gpus[3].ecc is True
    assert gpus[0].memory_mib == 81559 and gpus[0].used_mib == 4
    assert statuses(nvidia.judge_gpus(gpus, H100)) == ["ok"]
    assert statuses(nvidia.judge_ecc(gpus)) == ["ok"]
    (line,) = nvidia.judge_links(nvidia.read_links(), SXM, H100)
    assert line.status == "ok" and "478 GB/s" in line.found


@pytest.mark.parametrize(
    ("gpu", "change", "judge", "status", "named"),
    [
        (7, {"name": "NVIDIA H200", "total": 143771 << 20}, "gpus", "fault", "differ"),
        (5, {"used": 61234 << 20}, "gpus", "fault", "GPUs 5"),
        (2, {"lost": True}, "gpus", "fault", "7 GPUs answer"),
        (6, {"mode": pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS}, "gpus", "fault", "GPUs 6"),
        (6, {"mig": (1, 1)}, "gpus", "fault", "MIG"),
        (1, {"uncorrected": 3}, "ecc", "fault", "GPUs 1"),
        (4, {"rows": (0, 1, 1, 0)}, "ecc", "fault", "waiting"),
        (4, {"rows": (0, 1, 0, 1)}, "ecc", "fault", "could not"),
        (0, {"ecc": (0, 1)}, "ecc", "warning", "ECC is off"),
        (0, dict.fromkeys(("ecc", "uncorrected", "rows"), UNSUPPORTED), "ecc", "warning", "do not report"),
    ],
)
def test_a_bad_gpu_is_named(
    nvml: FakeNvml, gpu: int, change: dict[str, Any], judge: str, status: str, named: str
) -> None:
    nvml.gpus[gpu] = FakeGpu(**change)
    gpus = nvidia.read_gpus()
    lines = nvidia.judge_gpus(gpus, H100) if judge == "gpus" else nvidia.judge_ecc(gpus)
    bad = [line for line in lines if line.status == status and named in line.found]
    assert bad and all(line.remedy for line in bad)


def test_gpus_of_a_login_node_can_be_passed_over(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.gpus.pop()  # not as many as the job's nodes have
    monkeypatch.setattr(checks, "has_nvidia_driver", lambda: True)
    config = load_config(PlanConfig, ROOT / "examples" / "gsm8k" / "vapo.yaml", [], PRESETS)
    table = {check.name: check for check in checks.checks(config, 1)}

    def found(name: str, passes_over_gpus: bool) -> list[str]:
        login = checks.Examination(config, Meeting(None, "login", 1), True, 1, passes_over_gpus)
        return statuses(checks.perform(table[name], login))

    assert "fault" in found("gpus", False) and found("gpus", True) == ["not applicable"]
    assert "fault" in found("versions", False), "without torch_memory_saver"
    assert found("versions", True) == ["ok"]


def test_without_nvml_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    with pytest.raises(nvidia.Unreadable, match=r"NVML \(libnvidia-ml\.so\.1.*Not Found") as told:
        nvidia.read_gpus()
    assert "\n" not in str(told.value)


def test_what_fails_on_the_way_is_named(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    monkeypatch.setattr(nvml, "nvmlDeviceGetName", fail, raising=False)
    with pytest.raises(nvidia.Unreadable, match="NVML failed: Unknown Error"):
        nvidia.read_gpus()


@pytest.mark.parametrize("links", [(1,) * 17, (1,) * 3 + (0,) + (1,) * 14, (UNSUPPORTED,), ()])
def test_a_link_that_is_down(nvml: FakeNvml, links: tuple[Any, ...]) -> None:
    nvml.gpus[0].links = links
    lines = nvidia.judge_links(nvidia.read_links(), SXM, H100)
    assert statuses(lines) == ["fault"] and "GPUs 0" in lines[0].found


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H800", "NVIDIA A100-SXM4-80GB"])
def test_what_has_other_links_than_the_module_is_no_fault(nvml: FakeNvml, name: str) -> None:
    bridged = {gpu: rates[:12] for gpu, rates in nvidia.read_links().items()}
    lines = nvidia.judge_links(bridged, dict.fromkeys(bridged, name), H100)
    assert statuses(lines) == ["warning"] and name in lines[0].found


def write_port(root: Path, name: str, state: str, rate: str, layer: str = "InfiniBand") -> None:
    folder = root / name / "ports" / "1"
    folder.mkdir(parents=True)
    for file, text in (("state", state), ("rate", rate), ("link_layer", layer)):
        (folder / file).write_text(text + "\n")


def test_network_adapters(tmp_path: Path) -> None:
    assert statuses(judge_ports(read_ports(tmp_path), 1)) == ["not applicable"]
    assert statuses(judge_ports(read_ports(tmp_path), 2)) == ["warning"]
    for index in range(8):
        write_port(tmp_path, f"mlx5_{index}", "4: ACTIVE", "400 Gb/sec (4X NDR)")
    ports = read_ports(tmp_path)
    assert [port.rate for port in ports] == [400.0] * 8
    assert statuses(judge_ports(ports, 2)) == ["ok"]
    write_port(tmp_path, "mlx5_8", "1: DOWN", "40 Gb/sec (4X QDR)")
    write_port(tmp_path, "mlx5_9", "4: ACTIVE", "100 Gb/sec (2X HDR)")
    lines = judge_ports(read_ports(tmp_path), 2)
    assert statuses(lines) == ["warning", "warning"]
    assert "mlx5_9" in lines[0].found and "mlx5_8" in lines[1].found
    down = [dataclasses.replace(port, state="DOWN") for port in ports]
    assert statuses(judge_ports(down, 2)) == ["fault"]


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
        ([3e11, 3e11, 2e11, 3e11], 3e11, "fault", "device 2"),
        ([3e11, "no answer within 5 s"], 3e11, "fault", "device 1"),
    ],
)
def test_bandwidth(rates: list[float | str], expected: float | None, status: str, named: str) -> None:
    lines = bandwidth.judge(rates, expected, "see clocks")
    assert statuses(lines) == [status] and named in lines[0].found


def test_clocks() -> None:
    assert judge_clock(0.3, 0.1).status == "ok"
    assert judge_clock(-5.0, 0.1).status == "warning"
    assert judge_clock(40.0, 0.1).status == "fault"
    assert judge_clock(40.0, 45.0).status == "ok", "a slow answer says nothing about the clock"


def test_versions_of_this_environment_are_supported() -> None:
    assert statuses(check_versions(False, None, None)) == ["ok"]
    names = {row.package for row in MATRIX}
    assert {"torch", "megatron-core", "sglang", "transformers", "transformer-engine"} <= names


@pytest.mark.parametrize(
    ("driver", "cuda", "usable", "expected"),
    [
        ("550.54.15", "13.0", False, ["fault"]),
        ("550.54.15", "13.0", True, ["warning"]),  # by the package cuda-compat
        ("535.183.06", "12.8", False, ["warning"]),
        ("470.57.02", "12.8", False, ["fault"]),
        ("580.95.05", "13.0", True, []),
    ],
)
def test_a_driver_older_than_the_build(driver: str, cuda: str, usable: bool, expected: list[str]) -> None:
    lines = [line for line in check_versions(True, driver, cuda, usable) if line.found.startswith("driver ")]
    assert statuses(lines) == expected and all(driver in line.found for line in lines)


def test_reports_survive_the_way_and_name_broken_nodes() -> None:
    good = NodeReport("n1", 0, (Line("ok", "room", check="disk"), Line("not applicable", "no GPU here", check="ecc")))
    warned = NodeReport("n2", 8, (Line("warning", "little room", "make some", "disk"),))
    bad = NodeReport("n3", 16, (Line("fault", "errors", "leave it out", "ecc"), Line("ok", "room", check="disk")))
    assert [report.status for report in (good, warned, bad)] == ["ok", "warning", "fault"]
    assert exit_code([good, warned]) == 0 and exit_code([good, bad]) == 1
    assert broken_nodes([good, warned, bad]) == ["n3"]
    written = as_json([good, warned, bad])
    assert written["broken_nodes"] == ["n3"] and written["status"] == "fault"
    assert [from_json(node) for node in written["nodes"]] == [good, warned, bad]
