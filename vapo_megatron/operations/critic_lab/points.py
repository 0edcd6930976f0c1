"""The states that a critic was probed at, as `vapo-megatron critic` leaves them for the report."""

from collections.abc import Sequence

from vapo_megatron.monitoring.pictures import Scatter, means_by_rank

POINTS = "probes.json"  # beside report.md


def picture_of_values(points: Sequence[tuple[float, float]]) -> Scatter:
    """Each state's value against the mean return of its continuations, and means of tenths: the
    calibration."""
    names = "critic's value", "mean return of the continuations"
    return Scatter("Values and what follows", *names, points, means_by_rank(points, 10))
