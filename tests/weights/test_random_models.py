"""A random model is its seed's, also where a program makes several at once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.weights.tiny import save_tiny_model, word_tokenizer

WEIGHTS = "model.safetensors"


def make(folder: Path, seed: int) -> bytes:
    tokenizer = word_tokenizer([str(number) for number in range(60)], 64, "")
    shape = TinyModel(vocab_size=len(tokenizer), max_positions=64, layers=8, seed=seed)
    save_tiny_model(shape, tokenizer, folder)
    return (folder / WEIGHTS).read_bytes()


def test_models_made_at_once_are_those_made_alone(tmp_path: Path) -> None:
    alone = [make(tmp_path / f"alone{seed}", seed) for seed in range(6)]
    assert len(set(alone)) == 6
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda seed: make(tmp_path / f"together{seed}", seed), range(6)))
    assert together == alone
