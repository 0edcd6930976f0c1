from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch

from vapo_megatron.engines.inside.strict_loading import StrictLoader, problems_of_ranks, take_message
from vapo_megatron.weights.bucket import Purpose, SharedSlots, announce, pack


class StackingModel(torch.nn.Module):
    """Loads as SGLang's models do: gate and up stacked into one parameter, unknown names skipped without a word."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.zeros(6, 2))
        self.norm = torch.nn.Parameter(torch.zeros(2))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in ("gate", "up"):
                half = self.gate_up.data.narrow(0, 0 if name == "gate" else 3, 3)
                assert half.shape == tensor.shape
                half.copy_(tensor)
            elif name == "norm":
                self.norm.data.copy_(tensor)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"gate": torch.randn(3, 2), "up": torch.randn(3, 2), "norm": torch.randn(2)}


def sync_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor], purpose: Purpose = "load") -> list[str]:
    slots, tensors = SharedSlots(), list(weights.items())
    try:
        bucket = pack(tensors, slots)
        message = announce(bucket, purpose, first=True, last=True) | {"path": bucket.memory.path}
        return take_message(StrictLoader(model), message)
    finally:
        slots.close()


def test_all_weights_arrive(weights: dict[str, torch.Tensor]) -> None:
    model = StackingModel()
    assert sync_weights(model, weights) == []
    assert torch.equal(model.gate_up, torch.cat([weights["gate"], weights["up"]]))
    assert torch.equal(model.norm, weights["norm"])


def test_a_name_the_model_skips_is_named(weights: dict[str, torch.Tensor]) -> None:
    problems = sync_weights(StackingModel(), weights | {"nrom": torch.zeros(2)})
    assert problems == ["nrom of shape [2] is not known to the engine"]


def test_a_shape_that_does_not_fit_is_named(weights: dict[str, torch.Tensor]) -> None:
    problems = sync_weights(StackingModel(), weights | {"up": torch.zeros(2, 2)})
    assert problems[0].startswith("up of shape [2, 2] does not fit")


def test_half_of_a_stacked_parameter_left_out_is_named(weights: dict[str, torch.Tensor]) -> None:
    del weights["up"]
    assert sync_weights(StackingModel(), weights) == [
        "gate_up (the engine's name) was not sent in full: 6 of 12 elements, from gate [3, 2]"
    ]


def test_comparing_names_the_tensor_that_differs_and_changes_nothing(weights: dict[str, torch.Tensor]) -> None:
    model = StackingModel()
    sync_weights(model, weights)
    assert sync_weights(model, weights, "compare") == []
    before = model.gate_up.clone()
    changed = weights | {"up": weights["up"] + torch.tensor([[0.0, 0.0], [0.0, 1e-6], [0.0, 0.0]])}
    assert sync_weights(model, changed, "compare") == ["up differs"]
    assert torch.equal(model.gate_up, before)


def test_an_engine_of_another_dtype_is_compared_after_rounding(weights: dict[str, torch.Tensor]) -> None:
    model = StackingModel().bfloat16()
    assert sync_weights(model, weights) == []
    assert sync_weights(model, weights, "compare") == []


class PaddingModel(StackingModel):
    """As SGLang on CPU with a feed-forward size that it rounds up: two rows arrive, the third is zeroed."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in ("gate", "up"):
                half = self.gate_up.data.narrow(0, 0 if name == "gate" else 3, 3)
                half[2:].zero_()
                half[:2].copy_(tensor)
            else:
                super().load_weights([(name, tensor)])


def test_padding_counts_only_where_the_engine_says_that_it_pads(weights: dict[str, torch.Tensor]) -> None:
    short = weights | {"gate": weights["gate"][:2], "up": weights["up"][:2]}
    assert "8 of 12 elements, from gate [2, 2], up [2, 2]" in sync_weights(PaddingModel(), short)[0]
    padded = PaddingModel()
    padded.config = SimpleNamespace(original_intermediate_size=2, intermediate_size=3)
    assert sync_weights(padded, short) == []


class VocabularyModel(torch.nn.Module):
    """An embedding of three tokens in a table of four rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 2)
        self.embed.shard_indices = SimpleNamespace(num_elements_padded=4, num_org_elements=3, num_added_elements=0)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.embed.weight.data[: len(tensor)].copy_(tensor)
            self.embed.weight.data[len(tensor) :].fill_(0)


def test_the_rows_that_round_a_vocabulary_up_are_not_expected() -> None:
    assert sync_weights(VocabularyModel(), {"embed.weight": torch.randn(3, 2)}) == []
    assert "4 of 6 elements" in sync_weights(VocabularyModel(), {"embed.weight": torch.randn(2, 2)})[0]


def test_what_no_rank_holds_is_unknown_and_what_one_holds_is_not() -> None:
    """Of experts that are shared out each rank knows its own alone."""
    line, other = "experts.3 of shape [2] is not known to the engine", "nrom of shape [2] is not known to the engine"
    assert problems_of_ranks([([line], [line]), ([], [])]) == []
    assert problems_of_ranks([([line, other], [line, other]), ([other], [other])]) == [other]
    assert problems_of_ranks([([line, "up differs"], [line]), (["up differs"], [])]) == ["up differs"]
