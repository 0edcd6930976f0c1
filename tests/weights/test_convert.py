"""Hugging Face -> torch_dist -> Hugging Face is the identity, and the checkpoint between loads at
every layout."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from family_table import FAMILIES, WITH_EXPERTS
from hf_models import megatron, read_tensors, write_model
from megatron.core import dist_checkpointing
from ranks import run_ranks
from safetensors.torch import save_file
from trainables import make_trainable

from vapo_megatron.checkpoint.dist_saver import ModelSaver
from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.models.registry import read_spec
from vapo_megatron.weights.convert import hf_to_megatron, megatron_to_hf
from vapo_megatron.weights.load import load_hf
from vapo_megatron.weights.torch_dist import (
    model_state,
    put_model_state,
    read_model_card,
    write_model_card,
)
from vapo_megatron.weights.torch_dist_files import PartReader

SMALL = 40_000  # bytes of a file: several files a model
LAYOUTS = [
    (2, LayoutConfig(tp=2)),
    (2, LayoutConfig(pp=2)),
    (2, LayoutConfig(pp=2, vpp=2)),
    (2, LayoutConfig(ep=2)),
    (4, LayoutConfig(tp=2, pp=2)),
]
# And which of the models. Every third one, from the first and from the second: all families, one
# in three of them tied and untied.
CASES = [
    (*LAYOUTS[0], slice(0, None, 3)),
    (*LAYOUTS[2], slice(1, None, 3)),
    (*LAYOUTS[3], slice(0, None, 3)),
    *(pytest.param(*layout, slice(None), marks=pytest.mark.full) for layout in LAYOUTS),
]


class Silent:
    """No progress bar."""

    def __call__(self, name: str, total: int) -> Callable[[int], None]:
        self.stage(name, total)
        return self.advance

    def stage(self, name: str, total: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A Hugging Face directory and the checkpoint made of it, for every family, in both dtypes,
    tied and not."""
    root = tmp_path_factory.mktemp("models")
    found = {}
    for number, family in enumerate(FAMILIES):
        for tied in (False, True):
            dtype = (torch.float32, torch.bfloat16)[(number + tied) % 2]
            name = f"{family}-{str(dtype)[6:]}-{'tied' if tied else 'untied'}"
            source = write_model(
                root / name,
                family,
                dtype=dtype,
                tie_word_embeddings=tied,
                max_shard_size="30KB" if tied else "1GB",
            )
            (source / "tokenizer_config.json").write_text("{}")
            (source / "chat_template.jinja").write_text("{{ messages }}")
            found[name] = source, root / f"{name}-megatron"
            hf_to_megatron(*found[name], Silent(), shard_bytes=SMALL)
    return found


def assert_same_tensors(out: Path, source: Path, dtype: torch.dtype | None = None) -> None:
    expected = read_tensors(source)
    got = read_tensors(out)
    assert got.keys() == expected.keys(), source.name
    for key, tensor in expected.items():
        assert got[key].dtype == (dtype or tensor.dtype)
        assert torch.equal(got[key], tensor.to(dtype or tensor.dtype)), (source.name, key)


def test_there_and_back_is_the_identity(
    models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    for name, (source, checkpoint) in models.items():
        out = tmp_path / name
        made = megatron_to_hf(checkpoint, out, Silent(), shard_bytes=SMALL)
        assert made.files > 1
        assert_same_tensors(out, source)
        carried = {"generation_config.json", "tokenizer_config.json", "chat_template.jinja"}
        assert {file.name for file in out.iterdir()} > carried
        for file in carried:
            assert (out / file).read_bytes() == (source / file).read_bytes()
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            out, output_loading_info=True
        )
        assert not any(
            loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
        )
        assert str(model.dtype)[6:] == read_model_card(checkpoint).dtype == read_spec(source).dtype


def equal_when_loaded(layout: LayoutConfig, pairs: list[tuple[Path, Path]]) -> list[str]:
    """Names of the parameters that differ between a model loaded from its checkpoint and one from
    its directory."""
    wrong = []
    for source, checkpoint in pairs:
        spec = read_spec(source)
        expected, mesh = megatron(spec, layout, "lm", spec.dtype)
        load_hf(expected, spec, source, mesh, "lm")
        found, _ = megatron(spec, layout, "lm", spec.dtype)
        put_model_state(found, dist_checkpointing.load(model_state(found), str(checkpoint)))
        for a, b in zip(expected, found, strict=True):
            pairs_ = zip(a.named_parameters(), b.parameters(), strict=True)
            wrong += [f"{source.name} {name}" for (name, x), y in pairs_ if not torch.equal(x, y)]
    return wrong


@pytest.mark.parametrize(("world_size", "layout", "part"), CASES)
def test_megatron_loads_a_converted_model_at_every_layout(
    models: dict[str, tuple[Path, Path]], world_size: int, layout: LayoutConfig, part: slice
) -> None:
    pairs = [
        pair for name, pair in models.items() if layout.ep == 1 or name.startswith(WITH_EXPERTS)
    ]
    answers = run_ranks(world_size, equal_when_loaded, layout, pairs[part], deadline=240)
    assert answers == [[]] * world_size


def save_checkpoint(source: Path, folder: Path) -> None:
    """What a run saves: model and optimizer after a step, cut over four ranks."""
    trainable = make_trainable(source, "lm", layout=LayoutConfig(tp=2, pp=2))
    if torch.distributed.get_rank() == 0:
        folder.mkdir()
    torch.distributed.barrier()
    planned = ModelSaver(trainable).plan(folder)
    results = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(results, planned.write()[0])
    if torch.distributed.get_rank() == 0:
        planned.close(results)  # type: ignore[arg-type]
        write_model_card(folder, trainable.spec, "lm", source, "float32")


def test_a_runs_state_becomes_a_directory(
    models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    source, _ = models["mistral-float32-untied"]
    run_ranks(4, save_checkpoint, source, tmp_path / "actor")
    assert any(key.startswith("optimizer.") for key in PartReader(tmp_path / "actor").tensors)
    megatron_to_hf(tmp_path / "actor", tmp_path / "out", Silent(), shard_bytes=SMALL)
    assert_same_tensors(tmp_path / "out", source)


def test_another_dtype_is_rounded_once(
    models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    source, checkpoint = models["qwen3-bfloat16-untied"]
    there = torch.float32
    megatron_to_hf(checkpoint, tmp_path / "out", Silent(), dtype=there)
    assert_same_tensors(tmp_path / "out", source, there)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(there)[6:]
    hf_to_megatron(source, tmp_path / "megatron", Silent(), dtype=torch.float16)
    assert read_model_card(tmp_path / "megatron").dtype == "float16"
    megatron_to_hf(tmp_path / "megatron", tmp_path / "half", Silent())
    assert_same_tensors(tmp_path / "half", source, torch.float16)


class Killed(Silent):
    """Ends the process, as a lost machine would, once so many bytes are written."""

    def __init__(self, after: int) -> None:
        self.left = after

    def advance(self, nbytes: int) -> None:
        self.left -= nbytes
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_conversion(to_hf: bool, source: Path, out: Path, after: int) -> None:
    """Convert in a process of its own that is killed on the way."""
    child = os.fork()
    if child == 0:
        try:
            (megatron_to_hf if to_hf else hf_to_megatron)(
                source, out, Killed(after), shard_bytes=SMALL
            )
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


@pytest.mark.parametrize("to_hf", [False, True])
def test_a_killed_conversion_is_not_taken_for_a_whole_one(
    models: dict[str, tuple[Path, Path]], tmp_path: Path, to_hf: bool
) -> None:
    source = models["mistral-float32-untied"][to_hf]
    convert = megatron_to_hf if to_hf else hf_to_megatron
    out = tmp_path / "out"
    partial = tmp_path / "out.partial"
    killed_conversion(to_hf, source, out, after=2 * SMALL)
    assert not out.exists()
    with pytest.raises(
        BadInput, match=rf"{partial}: another process .* was killed at it: .* remove it"
    ):
        convert(source, out, Silent(), shard_bytes=SMALL)
    assert not out.exists()
    shutil.rmtree(partial)
    assert convert(source, out, Silent(), shard_bytes=SMALL).files > 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _anonymous_bytes() -> int:
    """Memory of this process that is no page of a file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


def peak_of(source: Path, root: Path) -> list[int]:
    """Bytes that each direction took at most, beyond those before it."""
    peaks = []
    for convert, a, b in (
        (hf_to_megatron, source, root / "there"),
        (megatron_to_hf, root / "there", root / "back"),
    ):
        start = _anonymous_bytes()
        highest = [start]
        done = threading.Event()

        def watch(highest: list[int] = highest, done: threading.Event = done) -> None:
            while not done.wait(0.002):
                highest[0] = max(highest[0], _anonymous_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        convert(a, b, Silent(), shard_bytes=2 << 20)
        done.set()
        watcher.join()
        peaks.append(highest[0] - start)
    return peaks


def test_conversion_needs_memory_of_a_few_files_not_of_the_model(tmp_path: Path) -> None:
    source = tmp_path / "model"
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 20, "head_dim": 32}
    write_model(source, "qwen3", **sizes)
    size = (source / "model.safetensors").stat().st_size
    assert size > 75 << 20
    (peaks,) = run_ranks(1, peak_of, source, tmp_path)
    assert max(peaks) < size / 4, peaks


def test_mixed_dtypes_are_kept_unless_megatron_stacks_them(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", "qwen3", dtype=torch.bfloat16)
    tensors = read_tensors(source)
    save_file(
        tensors | {"model.norm.weight": tensors["model.norm.weight"].float()},
        source / "model.safetensors",
    )
    hf_to_megatron(source, tmp_path / "megatron", Silent())
    megatron_to_hf(tmp_path / "megatron", tmp_path / "out", Silent())
    assert_same_tensors(tmp_path / "out", source)
