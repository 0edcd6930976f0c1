"""transformers' side of the update gets the same sequences and predicts the same tokens as ours."""

import torch
import transformers

from benchmarks.common import SHAPES
from benchmarks.update_beside_transformers import packed

SEQUENCES = [[5, 9, 3, 7, 11], [8, 2], [4, 6, 1], [12, 13, 14, 15]]


def model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = SHAPES["tiny"].hf_config()
    return transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation="sdpa"
    )


def test_the_loss_of_packed_sequences_is_that_of_each_alone() -> None:
    network = model()
    predicted = sum(len(sequence) - 1 for sequence in SEQUENCES)
    alone = sum(
        float(network(input_ids=ids[None], labels=ids[None]).loss.detach()) * (len(ids) - 1)
        for ids in map(torch.tensor, SEQUENCES)
    )
    together = sum(
        float(network(**batch, use_cache=False, num_items_in_batch=predicted).loss.detach())
        for batch in packed(SEQUENCES, 8)
    )
    # transformers computes its loss in float32.
    assert abs(together - alone / predicted) < 1e-5


def test_no_micro_batch_holds_more_than_it_may() -> None:
    batches = packed(SEQUENCES, 8)
    assert [batch["input_ids"].shape[1] for batch in batches] == [8, 6]
    tokens = torch.cat([batch["input_ids"][0] for batch in batches]).tolist()
    assert sorted(tokens) == sorted(token for sequence in SEQUENCES for token in sequence)
