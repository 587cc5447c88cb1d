"""A server of an index in a bucket takes up what another machine publishes."""

from pathlib import Path
from typing import Any

import pytest

from tests.objects.conftest import Machine
from tests.serving.conftest import build, corpus, started

pytestmark = pytest.mark.service


def test_a_server_answers_from_a_bucket(
    bucket: str, machine: Machine, tmp_path: Path, tiny_model: Path, tiny_words: tuple[str, ...]
) -> None:
    place: Any = f"s3://{bucket}/docs"
    build(place, corpus(tmp_path / "c", tiny_words), tiny_model)
    variables = {"WHITEN_INDEX_CACHE": str(tmp_path / "caches" / "server")}
    with started(tmp_path, place, "--reload-seconds", "0.2", variables=variables) as server:
        with server.client() as client:
            body = {"texts": "a cat sat on the mat", "top_k": 1}
            first = client.post("/v1/search", json=body).json()
            assert client.get("/v1/indexes").json()["indexes"][0]["name"] == "docs"
        build(place, corpus(tmp_path / "c", tiny_words, seed=1), tiny_model)

        def version(client: Any) -> str:
            return client.get("/readyz").json()["indexes"]["docs"]["version"]

        assert server.until(lambda client: version(client) != first["version"])
        with server.client() as client:
            second = client.post("/v1/search", json=body).json()
            assert client.get("/v1/indexes/docs").json()["version"] == second["version"]
            assert client.post("/v1/compare", json={"text": body["texts"]}).json()["note"] is None
    assert second["results"] != first["results"]
