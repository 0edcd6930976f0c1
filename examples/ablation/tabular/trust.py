"""How the trust g of calibrated values could be read off their regression otherwise.

    python -m examples.ablation.tabular.trust

Areas of vapo_direct and vapo_direct_groups by each rule, and of groups with values of noise, on
seeds that settings were chosen on (1005 to 1010), at learning rates chosen with the rule that is in
use. It says where the gap to `calibration: values` comes from, and is no evidence for its size.
"""

from dataclasses import dataclass, replace
from statistics import mean

import torch
import typer
from torch import Tensor

from vapo_megatron.algorithms import baselines, calibration
from vapo_megatron.errors import told_in_one_line

from .price import area
from .run import console
from .settings import DIRECT, FORKS, INSIGHT, STEPS, Row, Setting
from .training import Rollout, Training

SEEDS = list(range(1005, 1011))
RATES = {"forks": 2.0, "steps": 4.0, "insight": 1.0}
ROWS = {
    "groups": replace(DIRECT, groups=True),
    "one response a prompt": DIRECT,
    "groups, values of noise": replace(DIRECT, groups=True, critic="noise"),
}


@dataclass(frozen=True)
class Rule:
    """g as the mean of clamp(slope b_p, 0, 1) over bins of position p; slope None: 1 from the first
    step. weighed: by the responses that reach a bin, or by its tokens."""

    slope: float | None
    weighed: str = "tokens"

    @property
    def title(self) -> str:
        """For the table."""
        if self.slope is None:
            return "1 from the first step"
        return f"clamp({self.slope:g} b, 0, 1) by {self.weighed}"


RULES = (Rule(2, "responses"), Rule(2), Rule(4), Rule(8), Rule(None))


class TrustedBy(Training):
    """Training with another rule for g."""

    def __init__(self, setting: Setting, row: Row, seeds: list[int], rule: Rule) -> None:
        super().__init__(setting, row, seeds)
        self.rule = rule
        # Tokens of past steps in each bin, by seed.
        self.tokens = [torch.zeros(calibration.BINS, dtype=torch.float64) for _ in seeds]

    def calibrated(
        self, seed: int, rollout: Rollout, values: Tensor, rewards: Tensor, lam: Tensor
    ) -> tuple[Tensor, float]:
        of, tokens, bounds = rollout.of_seed(seed)
        returns = rollout.rewards[of]
        siblings = baselines.siblings_mean(returns, rollout.group[seed])
        others = baselines.leave_one_out(returns, rollout.group[seed])
        past = self.past[seed]
        fit = None if past is None else calibration.coefficients(past)
        baseline, _ = calibration.baseline_and_trust(values[tokens], siblings, others, bounds, fit)
        trust = self.trust(seed, past, fit)
        sums = calibration.response_sums(values[None, tokens], bounds)
        now = calibration.moments(sums, returns, siblings[None])
        self.past[seed] = now if past is None else past.followed_by(now)
        self.tokens[seed] = calibration.DECAY * self.tokens[seed] + sums[..., 0].sum(0)
        advantages = calibration.trusted_advantages(
            rewards[tokens], baseline, bounds, lam[of], trust
        )
        return advantages, trust

    def trust(
        self,
        seed: int,
        past: calibration.Moments | None,
        fit: calibration.Coefficients | None,
    ) -> float:
        """g of this step."""
        if self.rule.slope is None:
            return 1.0
        if past is None or fit is None:
            return 0.0
        weights = past.responses if self.rule.weighed == "responses" else self.tokens[seed]
        by_bin = (self.rule.slope * fit.bins[:, 1]).clamp(0, 1)
        return float((by_bin * weights).sum() / weights.sum())


def main() -> None:
    """Run all rules on all settings."""
    with told_in_one_line("ablation"):
        torch.set_num_threads(1)
        for setting in (FORKS, STEPS, INSIGHT):
            total = (setting.rollouts + setting.pretraining) * setting.samples
            for name, row in ROWS.items():
                for rule in RULES:
                    tuned = replace(row, lr=RATES[setting.name])
                    courses = TrustedBy(setting, tuned, SEEDS, rule).run()
                    found = mean(area(course, total) for course in courses)
                    console.print(
                        f"{setting.name:<8} {name:<24} {rule.title:<30} {found:.3f}", markup=False
                    )


if __name__ == "__main__":
    typer.run(main)
