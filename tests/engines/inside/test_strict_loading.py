from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch

from vapo_megatron.engines.inside.strict_loading import StrictLoader
from vapo_megatron.engines.inside.strict_updates import problems_of_ranks, take_message
from vapo_megatron.weights.bucket import DeviceSlots, Purpose, SharedSlots, announce, pack


class StackingModel(torch.nn.Module):
    """Loads as SGLang's models do: gate and up stacked into one parameter, unknown names skipped
    without a word."""

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


def sync_weights(
    model: torch.nn.Module, weights: dict[str, torch.Tensor], purpose: Purpose = "load"
) -> list[str]:
    slots = SharedSlots()
    tensors = list(weights.items())
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


def test_comparison_names_a_differing_tensor_and_changes_nothing(
    weights: dict[str, torch.Tensor],
) -> None:
    model = StackingModel()
    sync_weights(model, weights)
    assert sync_weights(model, weights, "compare") == []
    before = model.gate_up.clone()
    changed = weights | {"up": weights["up"] + torch.tensor([[0.0, 0.0], [0.0, 1e-6], [0.0, 0.0]])}
    assert sync_weights(model, changed, "compare") == ["up differs"]
    assert torch.equal(model.gate_up, before)


def test_an_engine_of_another_dtype_is_compared_after_rounding(
    weights: dict[str, torch.Tensor],
) -> None:
    model = StackingModel().bfloat16()
    assert sync_weights(model, weights) == []
    assert sync_weights(model, weights, "compare") == []


class PaddingModel(StackingModel):
    """As SGLang on CPU with a feed-forward size that it rounds up: two rows arrive, the third is
    zeroed."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in ("gate", "up"):
                half = self.gate_up.data.narrow(0, 0 if name == "gate" else 3, 3)
                half[2:].zero_()
                half[:2].copy_(tensor)
            else:
                super().load_weights([(name, tensor)])


def test_padding_counts_only_where_the_engine_says_that_it_pads(
    weights: dict[str, torch.Tensor],
) -> None:
    short = weights | {"gate": weights["gate"][:2], "up": weights["up"][:2]}
    assert "8 of 12 elements, from gate [2, 2], up [2, 2]" in sync_weights(PaddingModel(), short)[0]
    padded = PaddingModel()
    padded.config = SimpleNamespace(original_intermediate_size=2, intermediate_size=3)
    assert sync_weights(padded, short) == []


FIRST, SECOND = (f"layers.0.{x}.weight" for x in ("q_a_proj", "kv_a_proj_with_mqa"))


class PairingModel(torch.nn.Module):
    """Loads as SGLang's models with latent attention do: of a pair the first is kept, within one
    call, until the second comes."""

    def __init__(self) -> None:
        super().__init__()
        module = torch.nn.Linear(2, 5, bias=False)
        self.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.layers[0].fused_qkv_a_proj_with_mqa = module
        self.norm = torch.nn.Parameter(torch.zeros(2))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        kept: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name == "norm":
                self.norm.data.copy_(tensor)
                continue
            kept[name] = tensor
            if kept.keys() == {FIRST, SECOND}:
                whole = torch.cat([kept.pop(FIRST), kept.pop(SECOND)])
                self.layers[0].fused_qkv_a_proj_with_mqa.weight.data.copy_(whole)


@pytest.fixture
def pair() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {SECOND: torch.randn(2, 2), "norm": torch.randn(2), FIRST: torch.randn(3, 2)}


def sync_one_by_one(
    loader: StrictLoader, weights: dict[str, torch.Tensor], purpose: Purpose = "load"
) -> list[str]:
    """Each tensor in a bucket of its own, whose memory is gone after it."""
    problems = []
    for name, tensor in weights.items():
        bucket = pack([(name, tensor)], DeviceSlots(torch.device("cpu")))
        first = name == next(iter(weights))
        last = name == list(weights)[-1]
        message = announce(bucket, purpose, first=first, last=last)
        problems += take_message(loader, message, bucket.buffer)
        assert loader.checksums == bucket.checksums()
        bucket.buffer.fill_(255)
    return problems


def test_halves_of_a_pair_may_come_in_different_buckets(pair: dict[str, torch.Tensor]) -> None:
    model = PairingModel()
    loader = StrictLoader(model)
    assert sync_one_by_one(loader, pair) == []
    whole = torch.cat([pair[FIRST], pair[SECOND]])
    assert torch.equal(model.layers[0].fused_qkv_a_proj_with_mqa.weight, whole)
    assert sync_one_by_one(loader, pair, "compare") == []
    changed = pair | {SECOND: pair[SECOND] + 1}
    assert sync_one_by_one(loader, changed, "compare") == [f"{SECOND} with {FIRST} differs"]


def test_half_of_a_pair_alone_is_not_the_whole(pair: dict[str, torch.Tensor]) -> None:
    loader = StrictLoader(PairingModel())
    half = {name: pair[name] for name in (SECOND, "norm")}
    for weights in (half, {"norm": pair["norm"], FIRST: pair[FIRST]}):
        (problem,) = sync_one_by_one(loader, weights)
        assert "fused_qkv_a_proj_with_mqa.weight" in problem and "0 of 10 elements" in problem


class VocabularyModel(torch.nn.Module):
    """An embedding of three tokens in a table of four rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 2)
        self.embed.shard_indices = SimpleNamespace(
            num_elements_padded=4, num_org_elements=3, num_added_elements=0
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.embed.weight.data[: len(tensor)].copy_(tensor)
            self.embed.weight.data[len(tensor) :].fill_(0)


def test_the_rows_that_round_a_vocabulary_up_are_not_expected() -> None:
    assert sync_weights(VocabularyModel(), {"embed.weight": torch.randn(3, 2)}) == []
    assert (
        "4 of 6 elements" in sync_weights(VocabularyModel(), {"embed.weight": torch.randn(2, 2)})[0]
    )


def test_what_no_rank_holds_is_unknown_and_what_one_holds_is_not() -> None:
    """Of experts that are shared out each rank knows its own alone."""
    line = "experts.3 of shape [2] is not known to the engine"
    other = "nrom of shape [2] is not known to the engine"
    assert problems_of_ranks([([line], [line]), ([], [])]) == []
    assert problems_of_ranks([([line, other], [line, other]), ([other], [other])]) == [other]
    assert problems_of_ranks([([line, "up differs"], [line]), (["up differs"], [])]) == [
        "up differs"
    ]
