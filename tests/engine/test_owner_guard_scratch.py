"""What a server leaves behind when it is killed."""

from pathlib import Path

import pytest

from vapo_megatron.engine import owner_guard


def test_shared_memory_named_after_a_servers_sockets_goes_with_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, scratch = tmp_path / "shm", tmp_path / "scratch"
    memory.mkdir()
    scratch.mkdir()
    monkeypatch.setattr(owner_guard, "_SHARED_MEMORY", memory)
    (scratch / "tmpab12").touch()
    for name in ("sglang_loads_tmpab12_0f3c.shm", "sglang_loads_tmpother_0f3c.shm"):
        (memory / name).touch()
    owner_guard.remove_scratch(scratch)
    assert not scratch.exists()
    assert [path.name for path in memory.iterdir()] == ["sglang_loads_tmpother_0f3c.shm"]
    owner_guard.remove_scratch(scratch)
