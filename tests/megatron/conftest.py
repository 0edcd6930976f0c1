"""What tests of this folder share."""

import pytest

from vapo_megatron.megatron import optimizer


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket of gradients for every few parameters, so that many are on their way at once. Ranks
    are forked."""
    monkeypatch.setattr(optimizer, "BUCKET_ELEMENTS", 2000)
