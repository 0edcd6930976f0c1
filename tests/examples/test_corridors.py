"""A short run of the quickstart stays where recorded runs were, and a fault takes it elsewhere."""

import json
from pathlib import Path

import corridors
import pytest

FAULTS = {
    "advantages of the other sign": (
        "from vapo_megatron.algorithms import policy_loss\n"
        "clip = policy_loss.ppo_clip\n"
        "policy_loss.ppo_clip = lambda p, old, a, *bounds: clip(p, old, -a, *bounds)\n"
    ),
    "log-probs of engines shifted by a token": (
        "from vapo_megatron.data.batch import ExperienceBatch\n"
        "make = ExperienceBatch.__init__\n"
        "def shifted(self, *args, **fields):\n"
        "    make(self, *args, **fields)\n"
        "    self.rollout_logprobs = self.rollout_logprobs.roll(1)\n"
        "ExperienceBatch.__init__ = shifted\n"
    ),
    "engines sample at another temperature": (
        "from vapo_megatron.rollout.dispatcher import Dispatcher\n"
        "params = Dispatcher._sampling_params\n"
        "Dispatcher._sampling_params = (\n"
        "    lambda self, *of: params(self, *of) | {'temperature': 0.6}\n"
        ")\n"
    ),
}


@pytest.fixture(scope="module")
def recorded() -> dict[str, corridors.Figures]:
    runs: dict[str, corridors.Figures] = json.loads(corridors.RECORDED.read_text(encoding="utf-8"))
    return runs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corridors.cold_start(tmp_path_factory.mktemp("corridors"), seed=1)


def test_a_figure_outside_is_named_with_its_corridor() -> None:
    recorded = {str(seed): {"accuracy": 0.5 + 0.01 * seed, "loss": 1.0} for seed in range(-2, 3)}
    assert corridors.outside({"accuracy": 0.51, "loss": 1.0}, recorded) == []
    # 0.0158 apart, t(4) 4.604 at 99 %: 0.0797 on either side.
    low, high = (corridors.outside({"accuracy": a, "loss": 1.0}, recorded) for a in (0.41, 0.59))
    assert low == ["accuracy: 0.41, the corridor is 0.4203 to 0.5797"]
    assert high == ["accuracy: 0.59, the corridor is 0.4203 to 0.5797"]
    assert len(corridors.outside({}, recorded)) == 2


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_a_short_run_is_in_the_corridors(
    model: Path, recorded: dict[str, corridors.Figures]
) -> None:
    figures = corridors.short_run(model.parents[3], model, seed=1)
    assert corridors.outside(figures, recorded) == []


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_leaves_the_corridors(
    model: Path, recorded: dict[str, corridors.Figures], fault: str
) -> None:
    figures = corridors.short_run(model.parents[3], model, seed=1, planted=FAULTS[fault])
    assert corridors.outside(figures, recorded)
