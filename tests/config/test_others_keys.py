"""What verl calls differently leads to keys that exist, whatever is renamed here."""

import re

from vapo_megatron.config.others_keys import OURS, named_here
from vapo_megatron.config.suggest import known_keys
from vapo_megatron.config.train import TrainConfig


def test_every_name_given_for_another_trainers_key_is_one_of_ours() -> None:
    known = known_keys(TrainConfig)
    named = [name for text in OURS.values() for name in re.split(", or |, | and ", text)]
    assert [name for name in named if name not in known] == []


def test_no_key_of_ours_is_taken_for_another_trainers() -> None:
    assert [key for key in known_keys(TrainConfig) if named_here(key) is not None] == []
