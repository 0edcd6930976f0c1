"""Every switch of the section value_pretraining through the loop's own pretraining of a real
critic, whose weights afterwards are compared with an independent one's."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pretraining_attempts import PROMPT, P, Seen, Tokens, pretrain, read_seen, resumed, script
from ranks import one_rank_in_process, run_ranks
from step_formulas import AdamW, Critic, Response
from switch_formulas import ADAM
from switch_rollout import models_of_this_process, write_models
from written_rollouts import CUT, RIGHT

from vapo_megatron.monitoring import names
from vapo_megatron.training.value_pretraining import largest_bias

CASES: dict[str, dict[str, Any]] = {
    "base": {},
    "off": {P + "enabled": False},
    "steps": {P + "steps": 3},
    "iterations": {P + "iterations": 3},
    "replay_epochs": {P + "replay_epochs": 3},
    "minibatch_size": {P + "minibatch_size": 8},
    "masked": {"algorithm.shaping.truncated": "mask"},
    "discounted": {"algorithm.advantage.gamma": 0.9},
    "clipped": {"algorithm.value_loss.kind": "clipped"},
}


# In the second rollout, before and in the replay of five updates, after it.
STOPS_AT = (1, 2, 4, 6)


def recorded(folder: Path) -> dict[str, Any]:
    """The responses of the two rollouts as files, in place of rollouts."""
    paths = [folder / "first.jsonl", folder / "second.jsonl"]
    for path, cursors in zip(paths, (range(4), range(4, 8)), strict=True):
        rows = [
            {
                "prompt_ids": [n, 7],
                "response_ids": [*ids],
                "result": RIGHT in ids and CUT not in ids,
            }
            | {"finish_reason": "length" if CUT in ids else "stop"}
            for n in cursors
            for ids in script(n)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {P + "from": [str(path) for path in paths], P + "iterations": None}


def pretrain_all(folder: Path) -> None:
    """All cases, and then stops at thresholds that the replay of three epochs is known to cross on
    its way."""
    torch.save(pretrain(folder, "from", recorded(folder)), folder / "from.pt")
    for name, switches in CASES.items():
        torch.save(pretrain(folder, name, switches), folder / f"{name}.pt")
    free = read_seen(folder / "replay_epochs.pt").rows
    for name, stops in thresholds(free).items():
        torch.save(
            (stops, pretrain(folder, name, CASES["replay_epochs"] | stops)), folder / f"{name}.pt"
        )
    for stop_at in STOPS_AT:
        torch.save(resumed(folder, stop_at), folder / f"resumed_{stop_at}.pt")


def explained(row: dict[str, float]) -> float:
    return row[names.EXPLAINED_VARIANCE]


def thresholds(rows: dict[int, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Stops between what the updates reach: some updates reach them and some do not."""
    found = {}
    after = [row for updates, row in sorted(rows.items()) if updates > 0]
    by_variance = sorted(map(explained, after))
    by_bias = sorted(map(largest_bias, after))
    variance = sum(by_variance[-4:-2]) / 2
    bias = sum(by_bias[2:4]) / 2
    found["stop_explained_variance"] = {P + "stop_explained_variance": variance}
    found["stop_bias"] = {P + "stop_bias": bias}
    found["stop_both"] = {P + "stop_explained_variance": variance, P + "stop_bias": by_bias[-2]}
    found["stop_never"] = {P + "stop_explained_variance": 1.0}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if one_rank_in_process():
        # Each test runs its own case: what it reaches is then known
        return models_of_this_process()
    folder = write_models(tmp_path_factory.mktemp("pretraining"))
    run_ranks(1, pretrain_all, folder, deadline=200)
    return folder


def load(folder: Path, name: str) -> Seen:
    if one_rank_in_process():
        return pretrain_here(folder, name, CASES[name])
    seen: Seen = read_seen(folder / f"{name}.pt")
    return seen


def pretrain_here(folder: Path, name: str, switches: dict[str, Any]) -> Seen:
    seen: Seen = run_ranks(1, pretrain, folder, name, switches)[0]
    return seen


def load_stopped(folder: Path, name: str) -> tuple[dict[str, float], Seen]:
    """The stops, and the result of each."""
    if not one_rank_in_process():
        stops, seen = read_seen(folder / f"{name}.pt")
        return stops, seen
    stops = thresholds(load(folder, "replay_epochs").rows)[name]
    return stops, pretrain_here(folder, name, CASES["replay_epochs"] | stops)


def load_resumed(folder: Path, stop_at: int) -> tuple[Seen, Seen]:
    if not one_rank_in_process():
        first, second = read_seen(folder / f"resumed_{stop_at}.pt")
        return first, second
    found: tuple[Seen, Seen] = run_ranks(1, resumed, folder, stop_at)[0]
    return found


def as_response(tokens: Tokens) -> Response:
    ids = torch.tensor(tokens)
    right = tokens[-2] == RIGHT
    cut = tokens[-1] == CUT
    return Response(ids, PROMPT, 1.0 if right else -1.0, right, cut, 0, ids, 0.0)


def target(response: Response, gamma: float) -> torch.Tensor:
    """A response that was cut off is wrong."""
    reward = response.reward if not response.truncated else -1.0
    return reward * gamma ** torch.arange(response.length - 1, -1, -1, dtype=torch.float64)


def check_weights(folder: Path, seen: Seen, gamma: float = 1.0, masked: bool = False) -> None:
    """The critic's weights follow from squared errors to Monte-Carlo returns on the steps that
    were seen."""
    critic = Critic(folder / "policy", seen.begin)
    named = critic.named_parameters()
    optimizer = AdamW([p for _, p in named], **ADAM)
    for step in seen.steps:
        counted = [r for r in map(as_response, step) if not (masked and r.truncated)]
        optimizer.step(
            torch.cat([(critic.values(r) - target(r, gamma)) ** 2 / 2 for r in counted]).mean()
        )
    found = torch.cat(
        [(seen.end[name].double() - seen.begin[name].double()).flatten() for name, _ in named]
    )
    wanted = torch.cat([(p.detach() - seen.begin[name].double()).flatten() for name, p in named])
    assert (found - wanted).norm() < 1e-3 * wanted.norm()


def steps_of(folder: Path, name: str) -> list[int]:
    return [len(step) for step in load(folder, name).steps]


def test_it_can_be_switched_off(folder: Path) -> None:
    seen = load(folder, "off")
    base = load(folder, "base")
    assert not seen.steps and not seen.asked and not seen.finished
    assert all(torch.equal(tensor, seen.begin[name]) for name, tensor in seen.end.items())
    assert base.finished and base.steps


@pytest.mark.parametrize(
    "name", ["base", "iterations", "replay_epochs", "minibatch_size", "clipped"]
)
def test_the_critic_learns_monte_carlo_returns(folder: Path, name: str) -> None:
    check_weights(folder, load(folder, name))


def test_returns_are_discounted_and_masked_as_in_training(folder: Path) -> None:
    check_weights(folder, load(folder, "discounted"), gamma=0.9)
    check_weights(folder, load(folder, "masked"), masked=True)


def test_iterations_are_rollouts_with_responses_read_or_held_out(
    folder: Path,
) -> None:
    for name, rollouts, prompts in (("base", 2, 1), ("iterations", 3, 2)):
        seen = load(folder, name)
        assert seen.asked == list(range(4 * rollouts))
        trained = Counter(tokens for step in seen.steps for tokens in step)
        held_out = set(seen.measured[0])
        assert set(trained.values()) == {1} and trained.keys().isdisjoint(held_out)
        assert len(trained) + len(held_out) == 12 * rollouts and len(held_out) == 3 * prompts
        assert {t[:PROMPT] for t in trained}.isdisjoint({t[:PROMPT] for t in held_out}), (
            "prompts are never cut"
        )


def test_steps_bound_the_replay(folder: Path) -> None:
    assert steps_of(folder, "base") == [5, 5, 5, 5, 1]
    assert steps_of(folder, "steps") == [5, 5, 5]


def test_minibatch_size_is_in_samples(folder: Path) -> None:
    assert steps_of(folder, "minibatch_size") == [8, 8, 5]


def test_replay_epochs_read_every_response_in_a_new_order(folder: Path) -> None:
    seen = load(folder, "replay_epochs")
    assert set(Counter(tokens for step in seen.steps for tokens in step).values()) == {3}
    assert len({str(seen.steps[i : i + 5]) for i in range(0, 15, 5)}) == 3
    for epoch in range(3):
        assert len({t for step in seen.steps[5 * epoch : 5 * epoch + 5] for t in step}) == 21


@pytest.mark.parametrize(
    "name", ["stop_explained_variance", "stop_bias", "stop_both", "stop_never"]
)
def test_it_stops_at_first_measurement_that_reaches_every_stop(folder: Path, name: str) -> None:
    free = load(folder, "replay_epochs")
    stops, seen = load_stopped(folder, name)
    good = [
        updates
        for updates, row in sorted(free.rows.items())
        if updates > 0
        and (explained(row) >= stops.get(P + "stop_explained_variance", -1e9))
        and (largest_bias(row) <= stops.get(P + "stop_bias", 1e9))
    ]
    expected = good[0] if good else len(free.steps)
    assert len(seen.steps) == expected and seen.finished
    assert (name == "stop_never") == (not good)
    assert seen.steps == free.steps[:expected]
    assert seen.points[-1] == (2, expected, True, True) and seen.notes[0].startswith(
        f"value pretraining: {expected} "
    )


def test_what_is_measured_is_the_held_out_part(folder: Path) -> None:
    """The explained variance of the last row belongs to the weights at the end, on responses that
    were held out."""
    seen = load(folder, "base")
    critic = Critic(folder / "policy", seen.end)
    held_out = [as_response(tokens) for tokens in seen.measured[-1]]
    with torch.no_grad():
        values = torch.cat([critic.values(r) for r in held_out])
    returns = torch.cat([target(r, 1.0) for r in held_out])
    expected = 1 - (returns - values).var() / returns.var()
    assert explained(seen.rows[max(seen.rows)]) == pytest.approx(float(expected), abs=1e-4)


def test_recorded_responses_are_learnt_from_like_drawn_ones(folder: Path) -> None:
    """The same critic to the bit, and nothing is drawn."""
    if one_rank_in_process():
        seen = pretrain_here(folder, "from", recorded(folder))
    else:
        seen = load(folder, "from")
    base = load(folder, "base")
    assert not seen.asked and seen.steps == base.steps and seen.measured == base.measured
    assert all(torch.equal(tensor, seen.end[name]) for name, tensor in base.end.items())
    assert explained(seen.rows[5]) == explained(base.rows[5])
    assert seen.points == [(2, 0, True, False), *base.points[2:]]


def test_what_is_recorded_and_learnt_is_safe_at_once(folder: Path) -> None:
    seen = load(folder, "base")
    recorded = [(1, 0, False, False), (2, 0, True, False)]
    assert seen.points == [
        *recorded,
        *((2, n, False, False) for n in range(1, 6)),
        (2, 5, True, True),
    ]
    assert seen.progress["value_pretraining"] == (5, 5)
    assert seen.onloaded[0] == "engines go" and {"weights", "optimizer"} <= set(seen.onloaded[1:])


@pytest.mark.parametrize("stop_at", STOPS_AT)
def test_it_goes_on_where_it_was_stopped(folder: Path, stop_at: int) -> None:
    base = load(folder, "base")
    first, second = load_resumed(folder, stop_at)
    assert first.points + second.points == base.points and not first.finished and second.finished
    assert first.asked + second.asked == base.asked
    assert first.steps + second.steps == base.steps
    assert [*first.rows, *second.rows] == [0, 1, 2, 3, 4, 5]
    assert second.progress["value_pretraining"] == (5, 5)
