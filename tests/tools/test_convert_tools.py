"""The converters as one calls them: critic and policy, from a run's state, and what a bad call
says."""

import pickle
from pathlib import Path

import pytest
import torch
import transformers
from called import called_apart
from damage import flip
from hf_models import VOCAB, read_tensors, write_model, write_tensors
from ranks import run_ranks
from trainables import make_trainable
from typer import Typer

from tools.convert_hf_to_megatron import app as to_megatron
from tools.convert_megatron_to_hf import app as to_hf
from vapo_megatron.checkpoint.dist_saver import ModelSaver
from vapo_megatron.checkpoint.manifest import MANIFEST_FILE, Manifest, file_facts
from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.weights.hf_writer import write_json
from vapo_megatron.weights.torch_dist import write_model_card

IDS = torch.randint(0, VOCAB, (1, 20), generator=torch.Generator().manual_seed(3))


def _there_and_back(source: Path, root: Path, *options: object) -> Path:
    code, output = called_apart(to_megatron, "--hf", source, "--out", root / "there", *options)
    assert code == 0, output
    code, output = called_apart(to_hf, "--checkpoint", root / "there", "--out", root / "back")
    assert code == 0, output
    return root / "back"


def _values(out: Path) -> torch.Tensor:
    """Of IDS, by transformers from a directory that it has to load without a remark."""
    model, loading = transformers.AutoModelForTokenClassification.from_pretrained(
        out, output_loading_info=True
    )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(IDS).logits[0, :, 0]


def test_a_policy_comes_back_to_the_bit(tmp_path: Path) -> None:
    source = write_model(tmp_path / "policy", "qwen3_moe", dtype=torch.bfloat16)
    code, output = called_apart(
        to_megatron, "--hf", source, "--out", tmp_path / "there", "--shard-size", "1e-4"
    )
    assert code == 0, output
    code, output = called_apart(
        to_hf, "--checkpoint", tmp_path / "there", "--out", tmp_path / "back"
    )
    assert code == 0, output
    before = read_tensors(source)
    after = read_tensors(tmp_path / "back")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(("family", "bias"), [("qwen2", False), ("llama", True)])
def test_a_reward_model_becomes_a_critic_that_transformers_loads(
    tmp_path: Path, family: str, bias: bool
) -> None:
    source = write_model(
        tmp_path / "reward", family, task="SequenceClassification", num_labels=1, pad_token_id=0
    )
    if bias:
        write_tensors(source, lambda tensors: tensors.update({"score.bias": torch.tensor([0.5])}))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source)
    with torch.no_grad():
        expected = model.score(model.model(IDS).last_hidden_state)[0, :, 0] + (0.5 if bias else 0.0)
    out = _there_and_back(source, tmp_path, "--head", "value")
    torch.testing.assert_close(_values(out), expected, rtol=1e-5, atol=1e-5)


def test_a_policy_becomes_a_critic_with_a_head_of_zeros(tmp_path: Path) -> None:
    source = write_model(tmp_path / "policy", "mistral", tie_word_embeddings=True)
    out = _there_and_back(source, tmp_path, "--head", "value", "--dtype", "bfloat16")
    assert not _values(out).any()
    before = read_tensors(source)
    after = read_tensors(out)
    assert after.keys() - before.keys() == {"score.weight", "score.bias"}
    assert all(
        torch.equal(after[name], before[name].bfloat16()) for name in before.keys() & after.keys()
    )


def test_actor_or_critic_of_a_runs_state(tmp_path: Path) -> None:
    state = tmp_path / "checkpoints" / "step_000010"
    source = write_model(tmp_path / "policy", "qwen2")
    for model, head in (("actor", "lm"), ("critic", "value")):
        assert (
            called_apart(to_megatron, "--hf", source, "--out", state / model, "--head", head)[0]
            == 0
        )
    assert called_apart(to_hf, "--checkpoint", state, "--out", tmp_path / "actor")[0] == 0
    arguments = ("--checkpoint", state, "--out", tmp_path / "critic", "--model", "critic")
    assert called_apart(to_hf, *arguments)[0] == 0
    assert "lm_head.weight" in read_tensors(tmp_path / "actor")
    assert (tmp_path / "actor" / "model.safetensors").stat().st_mode & 0o044, (
        "others cannot serve it"
    )
    code, output = called_apart(
        to_hf, "--checkpoint", state / "actor", "--out", tmp_path / "no", "--model", "critic"
    )
    assert code == 2 and "is a policy" in output and not (tmp_path / "no").exists()
    assert "score.weight" in read_tensors(tmp_path / "critic")


def save_state(source: Path, state: Path) -> None:
    """The actor of a run's checkpoint."""
    trainable = make_trainable(source, "lm", layout=LayoutConfig())
    folder = state / "actor"
    folder.mkdir(parents=True)
    plan = ModelSaver(trainable).plan(folder)
    results, written = plan.write()
    rest = plan.close([results])
    write_model_card(folder, trainable.spec, "lm", source, "float32")
    rest += [folder / "model.json", *(path for path in (folder / "hf").iterdir())]
    files = file_facts(state, rest) | {f"actor/{name}": facts for name, facts in written.items()}
    ids = {
        "checkpoint_id": "c",
        "run_id": "r",
        "step": 10,
        "kind": "train",
        "models": ("actor",),
        "world_size": 1,
    }
    manifest = Manifest.model_validate(ids | {"layouts": {}, "metrics": {}, "files": files})
    write_json(state / MANIFEST_FILE, manifest.model_dump(mode="json"))


def flip_weight(folder: Path) -> None:
    storage = pickle.loads((folder / ".metadata").read_bytes()).storage_data
    place = next(
        info for index, info in storage.items() if index.fqn == "embedding.word_embeddings.weight"
    )
    path = folder / place.relative_path
    content = bytearray(path.read_bytes())
    content[place.offset + place.length // 2] ^= 4
    path.write_bytes(content)


def test_a_bit_of_a_runs_state_that_changed_is_not_converted(tmp_path: Path) -> None:
    state = tmp_path / "checkpoints" / "step_000010"
    source = write_model(tmp_path / "policy", "qwen2")
    run_ranks(1, save_state, source, state)
    call = (to_hf, "--checkpoint", state, "--out")
    assert called_apart(*call, tmp_path / "out")[0] == 0
    before = read_tensors(source)
    after = read_tensors(tmp_path / "out")
    assert all(torch.equal(after[name], before[name]) for name in before)
    for damage, what in (
        (flip_weight, ".distcp has changed"),
        (flip_config, "actor/hf/config.json has"),
    ):
        damage(state / "actor")
        code, output = called_apart(*call, tmp_path / "other")
        assert code == 2 and what in output.splitlines()[-1] and not (tmp_path / "other").exists()


def flip_config(folder: Path) -> None:
    flip(folder / "hf" / "config.json")


def test_options_that_would_be_ignored_or_overflow_are_refused(tmp_path: Path) -> None:
    places = ("--hf", tmp_path, "--out", tmp_path / "out")
    for option, value in (
        ("--value-outputs", 51),
        ("--shard-size", "inf"),
        ("--shard-size", "nan"),
    ):
        code, output = called_apart(to_megatron, *places, option, value)
        assert code == 2 and option in output and "Traceback" not in output


@pytest.mark.parametrize("tool", [to_megatron, to_hf])
def test_a_bad_call_is_one_line_and_exit_2(tmp_path: Path, tool: Typer) -> None:
    (tmp_path / "empty").mkdir()
    option = "--hf" if tool is to_megatron else "--checkpoint"
    code, output = called_apart(tool, option, tmp_path / "empty", "--out", tmp_path / "out")
    assert code == 2
    lines = [line for line in output.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith(f"error: {tmp_path / 'empty'}")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
