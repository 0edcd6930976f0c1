"""What figures of a critic come to, in words: is it worth its place, and what is wrong with it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from vapo_megatron.algorithms.critic_faults import FAULTS
from vapo_megatron.algorithms.critic_probes import Interval

Choice = Literal["critic", "group", "residual", "nothing", "undecided"]

MEANING: dict[Choice, str] = {
    "critic": "keep the critic: it knows more of the true values than the free baselines do",
    "group": "use a group baseline (grpo, rloo): the mean of the other responses, or a table by position, knows as "
    "much or more, and is free",
    "residual": "use both (algorithm.value_loss.residual=true): critic and group know different things, together more "
    "than either",
    "nothing": "no state is better than another beyond chance: there is nothing for a critic to know here",
    "undecided": "not to be told with so many probes: raise critic_probes.prompts; until then a group baseline is free",
}

# Values that order states at least so well, and are too large or too small, are scaled by something.
_ORDERS, _WITHIN = 0.7, (0.8, 1.25)
# A gain smaller than this is not worth a second model's help.
_WORTH = 0.02


class Conclusion(NamedTuple):
    """choice: what to use; reasons: the figures that it rests on; faults: names in FAULTS."""

    choice: Choice
    reasons: list[str]
    faults: list[str]

    @property
    def text(self) -> str:
        """What to do."""
        return MEANING[self.choice]


def conclusion_of(figures: Mapping[str, Interval], faults: Sequence[str]) -> Conclusion:
    """The conclusion on critic_probes.figures and on the faults that are known already."""
    knowable, gain, residual = figures["knowable"], figures["gain"], figures["residual_gain"]
    reasons = [
        f"of the variance of returns {knowable} can be known at these states",
        f"of the variance of true values the critic explains {figures['explained_critic']}, the mean of the other "
        f"responses {figures['explained_group']}, the position {figures['explained_position']}",
        f"gain of the critic over the best of them {gain}",
        f"critic and group together explain {residual} more than the better of both, each scaled to fit",
    ]
    choice: Choice = "undecided"
    if knowable.low <= 0:
        choice = "nothing" if knowable.high < 0.05 else "undecided"
    elif residual.low > _WORTH:
        choice = "residual"
    elif gain.low > 0:
        choice = "critic"
    elif gain.high < _WORTH or figures["explained_critic"].high <= 0:
        choice = "group"
    return Conclusion(choice, reasons, [*faults, *(name for name in _probed(figures) if name not in faults)])


def _probed(figures: Mapping[str, Interval]) -> Iterator[str]:
    slope, found = figures["calibration_slope"], figures["correlation"]
    if slope.high < 0 and found.high < 0:
        yield "sign"
    elif found.low > _ORDERS and (slope.high < _WITHIN[0] or slope.low > _WITHIN[1]):
        yield "temperature"


def described(faults: Sequence[str]) -> list[str]:
    """Each fault with what it means."""
    return [f"{name}: {FAULTS[name]}" for name in faults]
