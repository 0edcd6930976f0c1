"""What tools say of a node, in their own words, and what doctor makes of it."""

import dataclasses
import resource
from pathlib import Path

import pytest

from vapo_megatron.config.hardware import HardwareConfig
from vapo_megatron.operations.doctor import bandwidth, nvidia
from vapo_megatron.operations.doctor.fabric import judge_ports, read_ports
from vapo_megatron.operations.doctor.report import Line, NodeReport, as_json, broken_nodes, exit_code, from_json
from vapo_megatron.operations.doctor.system import judge_limits
from vapo_megatron.operations.doctor.together import judge_clock
from vapo_megatron.operations.doctor.versions import MATRIX, check_versions

# Written from the documented formats of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` and
# `nvidia-smi nvlink --status`; not recorded on a machine of ours.
ROW = "{i}, NVIDIA H100 80GB HBM3, 81559, 4, 580.95.05, Enabled, 0, No, No, Disabled, Default"
GPUS = "".join(ROW.format(i=i) + "\n" for i in range(8))
LINK = "\t Link {i}: 26.562 GB/s\n"
LINKS = "".join(
    f"GPU {gpu}: NVIDIA H100 80GB HBM3 (UUID: GPU-0000-{gpu})\n" + "".join(LINK.format(i=i) for i in range(18))
    for gpu in range(8)
)
H100 = HardwareConfig()
SXM = dict.fromkeys(range(8), "NVIDIA H100 80GB HBM3")


def statuses(lines: list[Line]) -> list[str]:
    return [line.status for line in lines]


def test_healthy_gpus() -> None:
    gpus = nvidia.parse_gpus(GPUS)
    assert len(gpus) == 8 and gpus[3].index == 3 and gpus[3].driver == "580.95.05" and gpus[3].ecc is True
    assert statuses(nvidia.judge_gpus(gpus, H100)) == ["ok"]
    assert statuses(nvidia.judge_ecc(gpus)) == ["ok"]
    assert statuses(nvidia.judge_links(nvidia.parse_links(LINKS), SXM, H100)) == ["ok"]


@pytest.mark.parametrize(
    ("old", "new", "judge", "status", "named"),
    [
        ("7, NVIDIA H100 80GB HBM3, 81559, 4", "7, NVIDIA H200, 143771, 4", "gpus", "fault", "differ"),
        ("5, NVIDIA H100 80GB HBM3, 81559, 4", "5, NVIDIA H100 80GB HBM3, 81559, 61234", "gpus", "fault", "GPUs 5"),
        (ROW.format(i=2) + "\n", "", "gpus", "fault", "7 GPUs answer"),
        (ROW.format(i=6), ROW.format(i=6).replace("Default", "Exclusive_Process"), "gpus", "fault", "GPUs 6"),
        (ROW.format(i=6), ROW.format(i=6).replace("Disabled", "Enabled"), "gpus", "fault", "MIG"),
        (ROW.format(i=1), ROW.format(i=1).replace("Enabled, 0", "Enabled, 3"), "ecc", "fault", "GPUs 1"),
        (ROW.format(i=4), ROW.format(i=4).replace("0, No, No", "0, Yes, No"), "ecc", "fault", "waiting"),
        (ROW.format(i=4), ROW.format(i=4).replace("0, No, No", "0, No, Yes"), "ecc", "fault", "could not"),
        (ROW.format(i=0), ROW.format(i=0).replace("Enabled", "Disabled", 1), "ecc", "warning", "ECC is off"),
        (
            ROW.format(i=0),
            ROW.format(i=0).replace("Enabled, 0, No, No", "[N/A], [N/A], [N/A], [N/A]"),
            "ecc",
            "warning",
            "do not tell",
        ),
    ],
)
def test_a_bad_gpu_is_named(old: str, new: str, judge: str, status: str, named: str) -> None:
    assert old in GPUS
    gpus = nvidia.parse_gpus(GPUS.replace(old, new))
    lines = nvidia.judge_gpus(gpus, H100) if judge == "gpus" else nvidia.judge_ecc(gpus)
    bad = [line for line in lines if line.status == status and named in line.found]
    assert bad and all(line.remedy for line in bad)


@pytest.mark.parametrize("text", ["8, NVIDIA H100\n", GPUS.replace("81559", "much", 1), GPUS.replace("No", "Maybe", 1)])
def test_what_nvidia_smi_never_said_is_not_guessed_at(text: str) -> None:
    with pytest.raises(nvidia.Unreadable, match="nvidia-smi"):
        nvidia.parse_gpus(text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (LINK.format(i=17), ""),
        (LINK.format(i=3), "\t Link 3: <inactive>\n"),
        (LINKS.partition("GPU 1")[0], "GPU 0: NVIDIA H100\nUnable to retrieve: all links are inActive\n"),
    ],
)
def test_a_link_that_is_down(old: str, new: str) -> None:
    lines = nvidia.judge_links(nvidia.parse_links(LINKS.replace(old, new, 1)), SXM, H100)
    assert statuses(lines) == ["fault"] and "GPUs 0" in lines[0].found


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H800", "NVIDIA A100-SXM4-80GB"])
def test_what_has_other_links_than_the_module_is_no_fault(name: str) -> None:
    bridged = {gpu: rates[:12] for gpu, rates in nvidia.parse_links(LINKS).items()}
    lines = nvidia.judge_links(bridged, dict.fromkeys(bridged, name), H100)
    assert statuses(lines) == ["warning"] and name in lines[0].found


def test_a_tool_that_is_absent_fails_or_hangs_is_named() -> None:
    for command, said in (
        (("no-such-tool-here",), "not installed"),
        (("false",), "ended with code 1"),
        (("sleep", "30"), "did not end within"),
    ):
        with pytest.raises(nvidia.Unreadable, match=f"{command[0]}.*{said}"):
            nvidia.run_tool(command, 0.5)


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
    lines = bandwidth.judge("memory bandwidth", rates, expected, "see clocks")
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
    good = NodeReport("n1", 0, (Line("disk", "ok", "room"), Line("ecc", "not applicable", "no GPU here")))
    warned = NodeReport("n2", 8, (Line("disk", "warning", "little room", "make some"),))
    bad = NodeReport("n3", 16, (Line("ecc", "fault", "errors", "leave it out"), Line("disk", "ok", "room")))
    assert [report.status for report in (good, warned, bad)] == ["ok", "warning", "fault"]
    assert exit_code([good, warned]) == 0 and exit_code([good, bad]) == 1
    assert broken_nodes([good, warned, bad]) == ["n3"]
    written = as_json([good, warned, bad])
    assert written["broken_nodes"] == ["n3"] and written["status"] == "fault"
    assert [from_json(node) for node in written["nodes"]] == [good, warned, bad]
