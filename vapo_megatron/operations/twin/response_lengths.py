"""How many tokens a simulated response has: the same for the same prompt and seed."""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

from vapo_megatron.operations.plan.lengths import Lengths
from vapo_megatron.operations.plan.rollout import BETWEEN_PROMPTS

_NORMAL = NormalDist()


@dataclass(frozen=True)
class ResponseLengths:
    """A distribution of lengths.

    Attributes:
        shape: mean and longest, and the tail where no spread is given.
        spread: sigma of a log-normal distribution with this mean once it is cut at the longest.
    """

    shape: Lengths
    spread: float | None = None

    def draw(self, prompt: int, seed: int) -> int:
        """Tokens of the response to a prompt with a seed; those to one prompt are long together."""
        shared, own = math.sqrt(BETWEEN_PROMPTS), math.sqrt(1 - BETWEEN_PROMPTS)
        place = shared * _NORMAL.inv_cdf(_uniform(prompt)) + own * _NORMAL.inv_cdf(_uniform(seed))
        longest = self.shape.longest
        if self.spread is None:
            length = longest * _NORMAL.cdf(place) ** self.shape.exponent
        else:
            length = self._median * math.exp(self.spread * place)
        return max(1, min(longest, round(length)))

    @cached_property
    def _median(self) -> float:
        assert self.spread is not None
        low, high = 0.0, float(self.shape.longest)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean(middle) < self.shape.mean else (low, middle)
        return high

    def _mean(self, median: float) -> float:
        """Of the log-normal distribution with this median, cut at the longest."""
        assert self.spread is not None
        longest, edge = self.shape.longest, math.log(self.shape.longest / median) / self.spread
        below = median * math.exp(self.spread**2 / 2) * _NORMAL.cdf(edge - self.spread)
        return below + longest * (1 - _NORMAL.cdf(edge))


def _uniform(number: int) -> float:
    """A number in (0, 1) that follows from another one."""
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") + 0.5) / 2**64
