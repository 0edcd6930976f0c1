"""A critic that is a probe: the hidden states that it reads, its steps and its state, at every
layout of the actor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import make_batch, spread, whole_of
from hf_models import write_model
from ranks import run_ranks
from safetensors.torch import load
from trainables import make_trainable
from transformers import AutoModelForCausalLM

from vapo_megatron.algorithms.segments import to_tokens
from vapo_megatron.config.model import CriticConfig, LayoutConfig, OptimizerSettings
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron import probe as probes
from vapo_megatron.megatron.probe import PROBE_FILE, Probe, read_probe
from vapo_megatron.training.losses import ValueLoss
from vapo_megatron.training.score import score_samples

# More responses than micro-batches of 40 tokens hold, and an observation within the third one.
LENGTHS = [(3, 1), (5, 9), (1, 30), (7, 2), (2, 17), (4, 4)]
MINIBATCHES = [range(6), [4, 0, 2], [5, 1, 3, 0]]
SETTINGS = OptimizerSettings(lr=1e-2, warmup_steps=2, weight_decay=0.1, clip_grad=0.05)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("policy"), "qwen3", num_hidden_layers=4)


def new_probe(width: int = 32, units: int = 256, layer: int | None = None) -> Probe:
    form = {"width": units, "layer": layer}
    config = CriticConfig.model_validate({"kind": "probe", "optimizer": SETTINGS, "probe": form})
    return Probe(config, width, 1, std=0.3, seed=7)


def targets(batch: ExperienceBatch) -> torch.Tensor:
    return torch.randn(batch.response_tokens, generator=torch.Generator().manual_seed(2))


def steps(model_dir: Path, layout: dict[str, Any]) -> Any:
    """On each rank: hidden states and values of all samples, what the steps report, weights after
    them."""
    probes._TOKENS = 16  # a batch comes in several parts
    actor = make_trainable(
        model_dir, "lm", layout=LayoutConfig(**layout), max_tokens_per_microbatch=40
    )
    batch = spread(make_batch(LENGTHS, observed={2: (11, 5)}))
    probe = new_probe()
    states = []
    outputs = score_samples(actor, batch, states=states)
    plain = score_samples(actor, batch)
    assert torch.equal(outputs, plain), "log-probs and entropies are those of any other pass"
    batch.local.hidden_states = states[0]
    reports = []
    whole = make_batch(LENGTHS, observed={2: (11, 5)})
    whole.returns = targets(whole)
    batch.local.returns = whole.select(
        range(batch.local_slice.start, batch.local_slice.stop)
    ).returns
    before = score_samples(probe, batch)
    for samples in MINIBATCHES:
        part = batch.model_input(probe, samples)
        assert part.batch.returns is not None
        weights = to_tokens(
            1 / whole.response_lengths[list(samples)][part.local_indices],
            part.batch.response_cu_seqlens,
        )
        loss = ValueLoss(ValueLossConfig(), part.batch.returns, None, weights.float())
        result = probe.train_step(part.batch, part.share, loss, keep_outputs=True)
        assert result.outputs is not None and len(result.outputs) == part.batch.response_tokens
        reports.append((result.grad_norm, result.lr, result.metrics["value_loss"]))
    batch.local.values = before[:, 0]
    found = whole_of(batch)
    assert found.hidden_states is not None and found.values is not None
    weights = {name: t.numpy() for name, t in load(probe.state()).items()}
    return found.hidden_states.numpy(), found.values.numpy(), reports, weights


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    return run_ranks(1, steps, model_dir, {})[0]


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(3, {}, marks=pytest.mark.full),
        (2, {"cp": 2}),
        pytest.param(4, {"pp": 2, "vpp": 2}, marks=pytest.mark.full),
        (4, {"tp": 2, "sequence_parallel": True}),
    ],
)
def test_no_layout_changes_a_probe(
    model_dir: Path, reference: Any, ranks: int, layout: dict[str, Any]
) -> None:
    for states, values, reports, weights in run_ranks(ranks, steps, model_dir, layout):
        np.testing.assert_allclose(states, reference[0], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(values, reference[1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(reports, reference[2], rtol=1e-4)
        for name, expected in reference[3].items():
            np.testing.assert_allclose(weights[name], expected, rtol=1e-3, atol=1e-5, err_msg=name)


@torch.no_grad()
def test_it_reads_the_state_before_each_response_token(model_dir: Path, reference: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir).model
    batch = make_batch(LENGTHS)
    expected = []
    batch = make_batch(LENGTHS, observed={2: (11, 5)})
    for sample in range(batch.samples):
        tokens = batch.tokens[batch.cu_seqlens[sample] : batch.cu_seqlens[sample + 1]].long()
        expected.append(model(tokens[None]).last_hidden_state[0, batch.response_places(sample) - 1])
    np.testing.assert_allclose(reference[0], torch.cat(expected).numpy(), rtol=1e-4, atol=1e-4)


def tapped(model_dir: Path, layout: dict[str, Any], layer: int) -> Any:
    """On each rank: the hidden states of all samples after a layer; and that log-probs are
    untouched."""
    actor = make_trainable(
        model_dir, "lm", layout=LayoutConfig(**layout), max_tokens_per_microbatch=40
    )
    batch = spread(make_batch(LENGTHS, observed={2: (11, 5)}))
    plain = score_samples(actor, batch)
    actor.tap(layer)
    for _ in range(2):  # a pass without them between two with them leaves none behind
        states: list[torch.Tensor] = []
        outputs = score_samples(actor, batch, states=states)
        assert torch.equal(outputs, plain) and torch.equal(score_samples(actor, batch), plain)
    batch.local.hidden_states = states.pop()
    found = whole_of(batch).hidden_states
    assert found is not None
    return found.numpy()


@pytest.mark.parametrize(
    ("ranks", "layout", "layer"),
    [
        pytest.param(1, {}, 1, marks=pytest.mark.full),
        (2, {"cp": 2}, 3),
        (4, {"pp": 2, "vpp": 2}, 4),
        pytest.param(2, {"pp": 2}, 3, marks=pytest.mark.full),
        pytest.param(4, {"tp": 2, "sequence_parallel": True}, 2, marks=pytest.mark.full),
    ],
)
def test_it_reads_the_layer_that_it_is_told_to(
    model_dir: Path, ranks: int, layout: dict[str, Any], layer: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir).model
    outputs = []
    batch = make_batch(LENGTHS, observed={2: (11, 5)})
    expected = []
    model.layers[layer - 1].register_forward_hook(lambda _, __, output: outputs.append(output))
    with torch.no_grad():
        for sample in range(batch.samples):
            model(
                batch.tokens[batch.cu_seqlens[sample] : batch.cu_seqlens[sample + 1]].long()[None]
            )
            states = outputs.pop()
            states = states[0] if isinstance(states, tuple) else states
            expected.append(states.view(-1, 32)[batch.response_places(sample) - 1])
    for states in run_ranks(ranks, tapped, model_dir, layout, layer):
        np.testing.assert_allclose(states, torch.cat(expected).numpy(), rtol=1e-4, atol=1e-4)


def test_its_steps_are_those_of_a_loop_in_float64(reference: Any) -> None:
    """The network, the loss over each mini-batch, the clip and AdamW, token by token and without
    the probe's code."""
    head = new_probe().head.double()
    batch = make_batch(LENGTHS, observed={2: (11, 5)})
    w1, b1, w2, b2 = (p.detach().clone().requires_grad_() for p in head.parameters())
    returns = targets(batch).double()
    bounds = batch.response_cu_seqlens.tolist()
    states = torch.from_numpy(reference[0]).double()
    adam = torch.optim.AdamW(
        [{"params": [w1, w2], "weight_decay": 0.1}, {"params": [b1, b2], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )

    def value(t: int) -> torch.Tensor:
        x = states[t] / (states[t].square().mean() + 1e-6).sqrt()
        inner = w1 @ x + b1
        return (w2 @ (inner * inner.sigmoid()) + b2)[0]

    values = [value(t).item() for t in range(len(states))]
    np.testing.assert_allclose(reference[1], values, rtol=1e-4, atol=1e-5)
    for number, samples in enumerate(MINIBATCHES, 1):
        loss = torch.zeros((), dtype=torch.float64)
        for sample in samples:
            tokens = range(bounds[sample], bounds[sample + 1])
            loss = loss + sum((value(t) - returns[t]) ** 2 / 2 for t in tokens) / len(tokens)
        adam.zero_grad()
        torch.autograd.backward(loss)
        norm = float(torch.stack([p.grad.square().sum() for p in (w1, b1, w2, b2)]).sum().sqrt())  # type: ignore[union-attr]
        for p in (w1, b1, w2, b2):
            p.grad = p.grad * min(1.0, 0.05 / norm)  # type: ignore[operator]
        for group in adam.param_groups:
            group["lr"] = 1e-2 * min(number / 2, 1.0)
        adam.step()
        np.testing.assert_allclose(
            reference[2][number - 1], (norm, 1e-2 * min(number / 2, 1.0), loss.item()), rtol=1e-4
        )
    for name, expected in zip(
        ("inner.weight", "inner.bias", "outer.weight", "outer.bias"), (w1, b1, w2, b2), strict=True
    ):
        np.testing.assert_allclose(
            reference[3][name], expected.detach().numpy(), rtol=1e-3, atol=1e-5, err_msg=name
        )


def learn(probe: Probe, times: int) -> None:
    generator = torch.Generator().manual_seed(probe.updates)
    for _ in range(times):
        batch = make_batch()
        batch.hidden_states = torch.randn(batch.response_tokens, 32, generator=generator)
        loss = ValueLoss(
            ValueLossConfig(), targets(batch), None, torch.full((batch.response_tokens,), 0.01)
        )
        probe.train_step(batch, range(batch.samples), loss)


def resumes(folder: Path) -> tuple[bool, int, bool]:
    straight = new_probe()
    before = new_probe()
    after = new_probe()
    after.load(before.state())
    assert after.state() == before.state(), "a new one has no moments"
    for probe in (straight, before):
        learn(probe, 3)
    after.load(before.state())
    learn(straight, 1)
    straight.accepts = lambda *_: False
    state = straight.state()
    learn(straight, 1)
    assert straight.state() == state, "a refused update changes nothing"
    learn(after, 1)
    straight.export(folder)
    x = torch.randn(5, 32)
    other = new_probe()
    other.start_from(folder)
    assert torch.equal(other.head(x), after.head(x)) and other.updates == 0
    with pytest.raises(BadInput, match=r"in_features=32, .* expected .*in_features=64"):
        new_probe(64).start_from(folder)
    with pytest.raises(BadInput, match=r"out_features=256, .* expected .*out_features=8, "):
        new_probe(units=8).start_from(folder)
    with pytest.raises(BadInput, match=r"layer=0 .* expected .*layer=3 "):
        new_probe(layer=3).start_from(folder)
    new_probe(units=8, layer=3).export(folder / "narrow")
    other = new_probe(units=8, layer=3)
    other.start_from(folder / "narrow")
    assert (
        read_probe(folder / "narrow" / PROBE_FILE).layer == 3 and other.head.inner.out_features == 8
    )
    return (
        after.state() == straight.state(),
        after.updates,
        torch.equal(read_probe(folder / PROBE_FILE)(x), after.head(x)),
    )


def test_it_goes_on_to_the_bit_and_its_export_is_read(tmp_path: Path) -> None:
    assert run_ranks(1, resumes, tmp_path) == [(True, 4, True)]
    (tmp_path / "other").write_text("no tensors")
    with pytest.raises(BadInput, match="other: expected a probe"):
        read_probe(tmp_path / "other")
