"""What tests of agents on stub engines share."""

import pytest
from stub_episodes import TEMPLATE, fresh_engine, make_tokenizer

from vapo_megatron.data.tokenizer import TextTokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """Of words, with the plain chat template; files with another template have their own."""
    return make_tokenizer(tmp_path_factory.mktemp("words"), TEMPLATE)


@pytest.fixture
def fresh() -> None:
    """Stub engines without the wishes of the test before."""
    fresh_engine()
