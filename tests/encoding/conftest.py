"""The hub of models that tests fetch from."""

from collections.abc import Iterator

import pytest

from tests.encoding.hub_server import Hub


@pytest.fixture
def hub() -> Iterator[Hub]:
    served = Hub()
    yield served
    served.stop()
