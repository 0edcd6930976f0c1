"""Which parameter a rule governs: under local and fused names, wrapped or not; a model of another
shape is refused."""

from typing import Any

import pytest
import torch
from specs import spec_of
from torch.nn import Module, Parameter

from vapo_megatron.errors import RunFailed
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.weights.mapping import FUSED_NAMES, entries, local_parameters

SPEC = spec_of("qwen2")


class Stage(Module):
    """Parameters under Megatron's names; layers begin at `first` of the model."""

    def __init__(
        self, spec: ModelSpec, names: dict[str, str], first: int, changed: dict[str, Any]
    ) -> None:
        super().__init__()
        for entry in entries(spec, "lm"):
            local = names.get(entry.rule.megatron, entry.rule.megatron)
            shape = changed.get(entry.rule.megatron, entry.rule.shard_shape(1))
            if shape is not None:
                prefix = "" if entry.layer is None else f"decoder.layers.{entry.layer}."
                self._put(prefix + local, Parameter(torch.zeros(shape)))
        for index in range(spec.num_layers):
            self.decoder.layers.get_submodule(str(index)).layer_number = first + index + 1

    def _put(self, name: str, parameter: Parameter) -> None:
        *path, last = name.split(".")
        module: Module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.ModuleList() if part == "layers" else Module())
            module = module.get_submodule(part)
        module.register_parameter(last, parameter)


class Wrapper(Module):
    """As DistributedDataParallel does."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("fused", [False, True])
def test_local_and_fused_names_are_the_same_parameters(fused: bool) -> None:
    names = {local: name for name, local in FUSED_NAMES.items()} if fused else {}
    stage = Stage(SPEC, names, 0, {})
    assert fused == any("layer_norm_weight" in name for name, _ in stage.named_parameters())
    found = [entry for entry, _ in local_parameters([Wrapper(Wrapper(stage))], SPEC, "lm", 1)]
    assert sorted(map(str, found)) == sorted(map(str, entries(SPEC, "lm")))


def test_layers_are_counted_over_the_whole_model() -> None:
    whole = spec_of("qwen2", num_hidden_layers=6)
    found = local_parameters([Stage(SPEC, {}, 4, {})], whole, "lm", 1)
    assert {entry.layer for entry, _ in found} == {None, 4, 5}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"mlp.linear_fc1.weight": (41, 24)},
            r"mlp\.linear_fc1\.weight: shape \[41, 24\], expected \[40, 24\]",
        ),
    ],
)
def test_a_model_of_another_shape_is_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(RunFailed, match=told):
        local_parameters([Stage(SPEC, {}, 0, changed)], SPEC, "lm", 1)


def test_a_parameter_without_rule_is_refused() -> None:
    without_bias = spec_of("llama")
    with pytest.raises(RunFailed, match=r"linear_qkv\.bias: no rule of family llama"):
        local_parameters([Stage(SPEC, {}, 0, {})], without_bias, "lm", 1)
