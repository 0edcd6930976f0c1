import mmap
from pathlib import Path

import pytest

from vapo_megatron.engines.server import environment as server_environment
from vapo_megatron.engines.server.environment import engine_environment


def environment(
    own: dict[str, str], devices: list[int], scratch: Path, **facts: bool
) -> dict[str, str]:
    return engine_environment(own, scratch, devices, **({"float32": False} | facts))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("visible", "devices", "expected"),
    [(None, [2, 3], "2,3"), ("4,5,6,7", [2, 3], "6,7"), ("GPU-a,GPU-b", [1], "GPU-b")],
)
def test_a_server_sees_the_gpus_of_its_ranks(
    visible: str | None, devices: list[int], expected: str, tmp_path: Path
) -> None:
    own = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert environment(own, devices, tmp_path)["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize(
    "name", ["libcudart.so.13.0.48", "libcudart.so.13", "libcudart-9335f6a2.so.13"]
)
def test_cuda_runtime_of_this_process_found_before_python_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / name
    scratch = tmp_path / "scratch"
    runtime.write_bytes(bytes(mmap.PAGESIZE))
    scratch.mkdir()
    with runtime.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        # The CUDA build of torch has a runtime of its own in this process.
        mapped = Path("/proc/self/maps").read_text().splitlines(keepends=True)
        maps = tmp_path / "maps"
        maps.write_text(
            "".join(line for line in mapped if "cudart" not in line or str(tmp_path) in line)
        )
        monkeypatch.setattr(server_environment, "_MAPS", maps)
        found = environment({"LD_LIBRARY_PATH": "/opt/lib"}, [0], scratch, offloads=True)
    first, rest = found["LD_LIBRARY_PATH"].split(":")
    # Under the name that a library asks the loader for, and nothing else with it.
    assert [path.name for path in Path(first).iterdir()] == ["libcudart.so.13"]
    assert (Path(first) / "libcudart.so.13").resolve() == runtime
    assert rest == "/opt/lib"


def test_the_cuda_runtime_is_looked_for_in_this_process() -> None:
    assert Path("/proc/self/maps") == server_environment._MAPS


def test_only_what_is_needed_is_set(tmp_path: Path) -> None:
    assert "LD_LIBRARY_PATH" not in environment({}, [0], tmp_path)
    assert "TRITON_F32_DEFAULT" not in environment({}, [0], tmp_path)
    assert environment({}, [0], tmp_path, float32=True)["TRITON_F32_DEFAULT"] == "ieee"


def test_both_ends_of_a_broadcast_share_memory_in_the_same_way(tmp_path: Path) -> None:
    """SGLang sets NCCL_CUMEM_ENABLE=0 where it is not set, a trainer's NCCL decides by itself."""
    assert "NCCL_CUMEM_ENABLE" not in environment({}, [0], tmp_path)
    assert environment({}, [0], tmp_path, elsewhere=True)["NCCL_CUMEM_ENABLE"] == "-2"
    assert (
        environment({"NCCL_CUMEM_ENABLE": "0"}, [0], tmp_path, elsewhere=True)["NCCL_CUMEM_ENABLE"]
        == "0"
    )
