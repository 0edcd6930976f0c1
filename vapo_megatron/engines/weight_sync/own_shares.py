"""Which buckets need no gather: those of which each rank of an engine reads nothing but the shares
of one trainer rank."""

from collections.abc import Hashable, Set

from vapo_megatron.collectives import gather_values

# The first weight sync teaches an engine where a bucket's tensors go. After the second, which shows
# that it was learnt right, it can say which it reads (engines/inside/strict_loading.py).
_LOADS_BEFORE = 1


class OwnShares:
    """What the engines of a run accepted, the same on all ranks.

    buckets: numbers of the buckets that are sent as own shares (weights.bucket.Bucket).
    """

    def __init__(self) -> None:
        self.buckets: Set[int] = frozenset()
        self._served: list[Hashable] = []
        self._loads = 0

    def begin(self, served: Hashable) -> None:
        """Collective, before a weight sync. served: what this rank's engines must have in common
        with those of the last sync, to which buckets they know."""
        everywhere = gather_values(served)
        if everywhere != self._served:
            self.forget()
            self._served = everywhere

    def forget(self) -> None:
        """Send whole tensors, until the engines have learnt their places once more."""
        self.buckets = frozenset()
        self._loads = 0

    @property
    def is_due(self) -> bool:
        """Whether engines are to be asked in the next weight sync, for accept()."""
        return self._loads == _LOADS_BEFORE

    def loaded(self) -> None:
        """Count a weight sync."""
        self._loads += 1

    def accept(self, buckets: Set[int]) -> None:
        """Collective: the buckets that this rank's engine accepts."""
        self.buckets = frozenset.intersection(*map(frozenset, gather_values(buckets)))
