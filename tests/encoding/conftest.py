"""The hub of models that tests fetch from, and the endpoint that they ask."""

from collections.abc import Iterator

import pytest

from tests.encoding.hub_server import Hub
from tests.helpers.embedding_server import EmbeddingServer


@pytest.fixture
def hub() -> Iterator[Hub]:
    served = Hub()
    yield served
    served.stop()


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[EmbeddingServer]:
    with EmbeddingServer() as running:
        yield running
