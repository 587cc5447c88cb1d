"""Fixtures of the tests of the frameworks' classes."""

import pytest

from tests.integrations.faces_helpers import Places


@pytest.fixture(scope="package")
def places(tmp_path_factory: pytest.TempPathFactory, tiny_words: tuple[str, ...]) -> Places:
    return Places.make(tmp_path_factory.mktemp("places"), tiny_words)
