"""Requests over HTTP: what they find, and how they are refused."""

import base64
import contextlib
import errno
import json
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from tests.helpers import api_builds, builds
from tests.helpers.bad_input import fails, succeed
from tests.helpers.builds import build_of, random_rows
from tests.helpers.embedding_server import EmbeddingServer, embedding
from tests.serving.conftest import ROWS, K, Make, Serve, Server
from whiten_index import QueryTransform, open_index
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.search.search_index import Opened
from whiten_index.serving.serve_options import ServeOptions
from whiten_index.serving.server import application, named
from whiten_index.serving.service import Service
from whiten_index.versions.retention import list_versions, prune, rollback

TEXT = "a cat sat on the mat"


@pytest.fixture(scope="module")
def client(server: Server) -> httpx.Client:
    return server.client()


def asking(*places: Any, **options: Any) -> TestClient:
    """Return a client of a server that runs in this process, and so loads no library again."""
    service = Service(named(tuple(map(str, places))), ServeOptions(**options))
    return TestClient(application(service), base_url="http://127.0.0.1")


def found(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/search", json={"index": "docs", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_search_finds_what_the_library_finds(client: httpx.Client, index: Path) -> None:
    opened = open_index(index)
    texts = [TEXT, "two birds flew north"]
    wanted = opened.search(texts, top_k=5, row_filter="lang == 'en'")
    answer = found(client, texts=texts, top_k=5, filter="lang == 'en'", columns=["lang"])
    assert answer["version"] == opened.bundle.version
    for hits, result in zip(wanted, answer["results"], strict=True):
        assert [hit["id"] for hit in result["hits"]] == [hit.id for hit in hits]
        assert np.allclose(
            [hit["score"] for hit in result["hits"]], [h.score for h in hits], atol=1e-5
        )
        assert all(hit["columns"] == {"lang": "en"} for hit in result["hits"])
    embeddings = opened.encode(texts).tolist()
    again = found(client, embeddings=embeddings, top_k=5, filter="lang == 'en'")["results"]
    packed = [base64.b64encode(np.array(each, "<f4").tobytes()).decode() for each in embeddings]
    again += found(client, embeddings=packed, top_k=5, filter="lang == 'en'")["results"]
    for hits, result in zip(wanted * 2, again, strict=True):
        assert [hit["id"] for hit in result["hits"]] == [hit.id for hit in hits]
    like = found(client, id="d7", top_k=3)["results"][0]["hits"]
    assert [hit["id"] for hit in like] == [hit.id for hit in opened.search_like("d7", top_k=3)]


def test_candidates_are_ranked_again_if_the_index_was_opened_so(tmp_path: Path, make: Make) -> None:
    coarse = make(tmp_path / "o", factory="PQ2x4", store=str(tmp_path / "st"))
    exact = open_index(coarse, rerank=ROWS).search(TEXT, top_k=5)
    rough = open_index(coarse, rerank=0).search(TEXT, top_k=5)
    assert [hit.id for hit in exact] != [hit.id for hit in rough]
    (tmp_path / "st").rename(tmp_path / "moved")
    with asking(coarse, rerank=ROWS, store=str(tmp_path / "moved")) as client:
        for rerank, wanted in ((None, exact), (0, rough), (ROWS, exact)):
            body = {"texts": TEXT, "top_k": 5, "rerank": rerank}
            hits = client.post("/v1/search", json=body).json()["results"][0]["hits"]
            assert [hit["id"] for hit in hits] == [hit.id for hit in wanted]
        like = [
            client.post("/v1/search", json={"id": "d7", "rerank": rerank}).json()["results"]
            for rerank in (0, ROWS)
        ]
        assert like[0] != like[1]
        assert client.post("/v1/compare", json={"text": TEXT}).json()["note"] is None


def test_one_store_is_named_for_those_of_several_indexes_that_it_is_of(
    tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = [make(tmp_path / n, seed, store=str(tmp_path / f"s{n}")) for seed, n in enumerate("ab")]
    (tmp_path / "sa").rename(tmp_path / "moved")
    moved = str(tmp_path / "moved")
    with asking(*made, rerank=ROWS, store=moved) as client:
        for name in "ab":
            answer = client.post("/v1/compare", json={"index": name, "text": TEXT}).json()
            assert answer["note"] is None
            assert [each["kind"] for each in answer["columns"]] == ["raw", "index"]
    with pytest.raises(ArtifactError, match="moved does not hold the corpus"):
        asking(made[1], rerank=ROWS, store=moved)
    nothing = str(tmp_path / "nothing")
    (tmp_path / "moved").rename(tmp_path / "sa")
    with pytest.raises(ArtifactError, match=r"^a: .*there is none in .*nothing"):
        asking(*made, rerank=ROWS, store=nothing)
    caplog.clear()
    with caplog.at_level("INFO", "whiten_index.serving"):
        asking(*made, rerank=ROWS, store=str(tmp_path / "sa"))
    messages = [each.getMessage() for each in caplog.records]
    (message,) = (each for each in messages if "recorded" in each)
    assert message.startswith("b: ")
    assert "sa does not hold the corpus" in message
    (tmp_path / "sa").rename(tmp_path / "moved")
    (tmp_path / "sb").rename(tmp_path / "gone")
    with pytest.raises(ArtifactError, match=r"^b: .*moved does not hold the corpus"):
        asking(*made, rerank=ROWS, store=moved)


def test_a_server_whose_searches_would_all_be_refused_does_not_start(index: Path) -> None:
    with pytest.raises(ConfigError, match=r"docs ranks 300 candidates again, .* raise --max-hits"):
        asking(index, rerank=10 * ROWS, max_hits=ROWS - 1)
    with asking(index, rerank=10 * ROWS, max_hits=ROWS) as client:
        for path, body in (("search", {"texts": TEXT}), ("compare", {"text": TEXT})):
            assert client.post(f"/v1/{path}", json=body).status_code == 200


def test_a_new_version_whose_searches_would_all_be_refused_is_a_fault(tmp_path: Path) -> None:
    def made(rows: int) -> Path:
        source = builds.write_rows(tmp_path / "c.parquet", random_rows(rows=rows))
        return builds.build(tmp_path / "i", source, store=str(tmp_path / "st")).out

    service = Service({"i": made(ROWS)}, ServeOptions(rerank=1000, max_hits=ROWS))
    made(ROWS + 100)
    # It stays a fault as long as that version answers.
    for _ in range(2):
        service.indexes["i"].reload()
    with TestClient(application(service), base_url="http://127.0.0.1") as client:
        (index,) = client.get("/v1/indexes").json()["indexes"]
        assert index["rows"] == ROWS + 100
        assert "ranks 400 candidates again" in index["fault"]
        assert client.get("/readyz").json()["indexes"]["i"]["reload_failed"]
        assert "--max-hits" in client.post("/v1/search", json={"id": "0"}).text


def test_an_index_built_to_rank_again_is_served_with_its_store_moved(tmp_path: Path) -> None:
    """Its kept columns are exact too: nanoseconds, and bytes in the usual base64."""
    rows = random_rows(rows=600, dim=64)
    never = -(2**63)  # NaT of pandas
    times = pa.array([never, *range(8, 607)]).view(pa.timestamp("ns", "UTC"))
    kept = {"at": times, "raw": [b"\xff\xfe"] * 600}
    source = builds.write_rows(tmp_path / "c.parquet", rows, **kept)
    made = builds.build(
        tmp_path / "i", source, keep=tuple(kept), store=str(tmp_path / "st"),
        memory_budget="27KB", k=64,
    )  # fmt: skip
    assert made.manifest["factory"]["rerank"]
    (tmp_path / "st").rename(tmp_path / "moved")
    with asking(tmp_path / "i", store=str(tmp_path / "moved")) as client:
        body = {"embeddings": rows[[5, 0]].tolist(), "top_k": 1}
        found = client.post("/v1/search", json=body).json()["results"]
    (hit, never_hit) = (each["hits"][0] for each in found)
    assert never_hit["columns"]["at"] is None
    assert hit["columns"] == {"at": "1970-01-01T00:00:00.000000012+00:00", "raw": "//4="}


def test_times_have_one_form_on_the_server_the_command_line_and_in_runs(tmp_path: Path) -> None:
    kept = {
        "micro": (pa.timestamp("us"), 1_700_000_000_000_005, "2023-11-14T22:13:20.000005"),
        "nano": (pa.timestamp("ns"), 5, "1970-01-01T00:00:00.000000005"),
        "zone": (pa.timestamp("s", "UTC"), 0, "1970-01-01T00:00:00+00:00"),
        "never": (pa.timestamp("ns"), -(2**63), None),
        "day": (pa.date32(), 1, "1970-01-02"),
        "clock": (pa.time64("us"), 1_000_002, "00:00:01.000002"),
        "whole": (pa.time64("ns"), 10**9, "00:00:01"),
        "part": (pa.time64("ns"), 10**9 + 1, 10**9 + 1),
        "parts": (pa.list_(pa.time64("ns")), [1, None], [1, None]),
        "took": (pa.duration("s"), 86_402, "P1DT2S"),
        "late": (pa.duration("us"), -1_500_000, "-PT1.5S"),
        "exact": (pa.duration("ns"), 10**9 + 5, "PT1.000000005S"),
        "list": (pa.list_(pa.duration("ns")), [0, -5], ["PT0S", "-PT0.000000005S"]),
    }
    rows = random_rows(rows=60, dim=8)
    columns = {name: pa.array([value] * 60, kind) for name, (kind, value, _) in kept.items()}
    source = builds.write_rows(tmp_path / "c.parquet", rows, **columns)
    index = builds.build(tmp_path / "i", source, keep=tuple(kept)).out
    with asking(index) as client:
        answer = client.post("/v1/search", json={"embeddings": rows[:1].tolist(), "top_k": 1})
    run = tmp_path / "run.jsonl"
    asked = ["--queries", str(source), "--embedding-column", "embedding", "--run", str(run)]
    succeed("search", index, *asked)
    printed = succeed("search", index, "--like", 0, "--json")
    wanted = {name: form for name, (_, _, form) in kept.items()}
    for found in (answer.text, run.read_text().splitlines()[0], printed):
        answered = json.loads(found)
        hits = answered.get("hits") or answered["results"][0]["hits"]
        assert hits[0]["columns"] == wanted


def test_a_store_that_moved_is_named_for_the_comparison(tmp_path: Path, make: Make) -> None:
    options = {"store": str(tmp_path / "st"), "whiten": "none", "k": None, "keep": ("score",)}
    columns = {"score": [np.nan, 1.0, np.inf] * (ROWS // 3)}
    out = make(tmp_path / "o", columns=columns, **options)
    (tmp_path / "st").rename(tmp_path / "moved")
    with asking(out, store=str(tmp_path / "moved")) as client:
        answer = client.post("/v1/compare", json={"text": TEXT}).json()
        assert [each["kind"] for each in answer["columns"]][:2] == ["raw", "index"]
        # Numbers that JSON does not have.
        scores = {str(hit["columns"]["score"]) for hit in answer["columns"][1]["hits"]}
        assert scores <= {"None", "1.0"}
        cut = client.post("/v1/embeddings", json={"model": "o", "input": TEXT, "dimensions": 3})
        assert (cut.status_code, "cannot be cut" in cut.json()["detail"]) == (400, True)


def test_versions_of_two_models_answer_side_by_side(migrated: Path) -> None:
    new, old = (each.name for each in list_versions(migrated))
    with asking(migrated, f"old={migrated / 'versions' / old}") as client:
        served = client.get("/v1/indexes").json()["indexes"]
        assert [(each["name"], each["version"]) for each in served] == [("docs", new), ("old", old)]
        models = client.get("/v1/indexes/docs").json()["models"]
        assert models["measure"] == "ndcg@10"
        worst = models["changed_most"][0]
        assert worst["new"] < worst["old"]
        body = {"index": "docs", "text": worst["query"]}
        columns = client.post("/v1/compare", json=body).json()["columns"]
    found = {each["name"]: [hit["id"] for hit in each["hits"]] for each in columns}
    assert [*found] == ["raw embeddings", "docs", "old"]
    assert found["docs"] == [hit.id for hit in open_index(migrated).search(worst["query"])]
    # Of the version alone, whatever is published.
    alone = open_index(migrated / "versions" / old)
    assert found["old"] == [hit.id for hit in alone.search(worst["query"])] != found["docs"]
    assert (alone.reload(), alone.bundle.version) == (False, old)
    with pytest.raises(ArtifactError, match="000009-0123456789ab"):
        open_index(migrated / "versions/000009-0123456789ab")


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_a_comparison_of_passages_is_by_document(
    tmp_path: Path, make: Make, similarity: str
) -> None:
    out = make(tmp_path / "o", passage_tokens=6, similarity=similarity, keep=("lang",))
    exact = open_index(out, rerank=4 * ROWS, rerank_by="embeddings").search(TEXT, top_k=10)
    own = open_index(out).search(TEXT, top_k=10)
    with asking(out) as client:
        answer = client.post("/v1/compare", json={"text": TEXT}).json()
    raw, width = answer["columns"][0], {each["k"]: each for each in answer["widths"]}[K]
    for found, wanted in ((raw, exact), (width, own)):
        assert [hit["id"] for hit in found["hits"]] == [hit.id for hit in wanted]
        scores = [hit.score for hit in wanted]
        assert np.allclose([hit["score"] for hit in found["hits"]], scores, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dimensions", [None, 3])
def test_vectors_are_those_that_a_push_sends(
    client: httpx.Client, index: Path, dimensions: int | None
) -> None:
    wanted = QueryTransform.of(index, k=dimensions).encode_queries([TEXT, "one"])
    body = {"model": "docs", "input": [TEXT, "one"], "dimensions": dimensions}
    plain = client.post("/v1/embeddings", json=body).json()
    assert np.allclose([each["embedding"] for each in plain["data"]], wanted, atol=1e-5)
    assert plain["usage"]["prompt_tokens"] == 8 + 3
    packed = client.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()
    rows = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in packed["data"]]
    assert np.allclose(rows, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("search", {"texts": TEXT}, 400, "name an index, one of docs, other"),
        ("search", {"index": "x", "texts": TEXT}, 404, "no index is served as 'x'"),
        ("search", {"index": "docs"}, 422, "give one of texts, embeddings, id"),
        ("search", {"index": "docs", "texts": TEXT, "id": "d1"}, 422, "give one of"),
        ("search", {"index": "docs", "texts": " "}, 400, "blank"),
        ("search", {"index": "docs", "texts": TEXT, "top_k": 0}, 422, "top_k"),
        ("search", {"index": "docs", "texts": [TEXT] * 21, "top_k": 100}, 400, "2,000 hits"),
        ("search", {"index": "docs", "texts": ["a"] * 7, "rerank": 300}, 400, "(--max-hits)"),
        # Of candidates there are no more than rows.
        ("search", {"index": "docs", "texts": TEXT, "rerank": 2001}, 400, "without its store"),
        ("search", {"index": "docs", "texts": ["a"] * 41}, 400, "takes 40 texts"),
        ("search", {"index": "docs", "texts": TEXT, "filter": "lang =="}, 400, "filter"),
        ("search", {"index": "docs", "texts": TEXT, "filter": "x == 1"}, 400, "does not keep"),
        ("search", {"texts": TEXT, "filter": "x" * 100_001}, 422, "at most 100000 characters"),
        ("search", {"index": "docs", "texts": TEXT, "columns": ["x"]}, 400, "'x' is not kept"),
        ("search", {"index": "docs", "texts": TEXT, "rerank": 10}, 400, "without its store"),
        ("search", {"index": "docs", "id": "no" * 8_000}, 404, "no document has the id 'nono"),
        ("search", {"index": "docs", "embeddings": [[1.0, 2.0]]}, 400, "embeddings of 32 numbers"),
        ("search", {"index": "docs", "embeddings": ["AAAA"]}, 400, "base64 of 32-bit floats"),
        ("search", {"index": "docs", "embeddings": ["%"]}, 400, "base64 of 32-bit floats"),
        ("search", {"index": "docs", "embeddings": [[1e300] * 32]}, 400, "float32"),
        ("search", {"index": "docs", "texts": TEXT, "k": 1}, 422, "k: Extra inputs"),
        ("embeddings", {"model": "docs", "input": TEXT, "dimensions": K + 1}, 400, "cut to 9"),
        ("embeddings", {"model": "docs", "input": [[1, 2]]}, 422, "input"),
        ("compare", {"index": "docs", "text": ""}, 400, "blank"),
        ("nothing", {}, 404, "Not Found"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_a_problem_in_words(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (answer.status_code, problem["status"]) == (status, status), answer.text
    assert words in problem["detail"]
    assert len(answer.text) < 2000
    assert set(problem) == {"type", "title", "status", "detail", "message"}


def test_an_api_that_fails_is_no_fault_of_the_request_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now: list[int | None] = [None]
    with EmbeddingServer(lambda _: now[0], retry_after="100", most_words=40) as api:
        monkeypatch.setenv("OPENAI_BASE_URL", api.url)
        api_builds.write(tmp_path, api_builds.texts_of(300))
        place = api_builds.build(tmp_path, api.url)
        with asking(place) as client, ThreadPoolExecutor() as threads:

            def search(**body: Any) -> int:
                return client.post("/v1/search", json=body).status_code

            assert search(texts=TEXT) == 200
            assert search(texts="word " * 41) == 400
            now[0] = 401
            assert search(texts=TEXT) == 503
            now[0], answer = None, api.answer

            def fail(asked: dict[str, Any]) -> tuple[int, Any]:
                texts = asked["input"]
                if any("secret" in text for text in texts):
                    return 500, {"error": {"message": f"cannot embed {texts}"}}
                return answer(asked)

            api.answer = fail  # type: ignore[method-assign]
            given = ["secret", "one", "two", "three"]
            assert [*threads.map(lambda text: search(texts=text), given)] == [503, 200, 200, 200]
            assert "status 500" in caplog.text
            assert "secret" not in caplog.text
            now[0], api.retry_after, before = 429, "8", api.requests
            texts = [threads.submit(search, texts=f"{TEXT} {number}") for number in range(4)]
            while api.requests == before:
                time.sleep(0.01)
            assert search(embeddings=embedding(TEXT)[None].tolist()) == 200
            assert not any(each.done() for each in texts)
            assert {each.result() for each in texts} == {503}


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xff",
        b"[" * 5000,
        b'{"index": "docs", "texts": NaN}',
        b'{"index": "docs", "texts": "\\ud800"}',
    ],
)
def test_a_body_that_is_no_json_is_refused(client: httpx.Client, body: bytes) -> None:
    answer = client.post("/v1/search", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422 or answer.status_code == 400, answer.text


def test_a_column_that_is_named_often_comes_once(client: httpx.Client) -> None:
    """It was looked up as often for each hit."""
    body = {"index": "docs", "texts": TEXT, "columns": ["lang"] * 400_000, "top_k": 100}
    answer = client.post("/v1/search", json=body)
    assert answer.status_code == 200, answer.text
    assert all(hit["columns"].keys() == {"lang"} for hit in answer.json()["results"][0]["hits"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("search", {str(i): 1 for i in range(300_000)}),
        ("search", {"texts": [1] * 10**6}),
        ("search", {"embeddings": [["x"] * 800_000]}),
        ("search", {"texts": TEXT, "columns": [1] * 10**6}),
        ("embeddings", {"model": "docs", "input": [1] * 10**6}),
    ],
    ids=["fields", "texts", "embeddings", "columns", "input"],
)
def test_of_a_million_wrong_values_one_is_told(
    server: Server, client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    """Errors of all of them would take a gigabyte and half a minute."""
    process = Path(f"/proc/{server.process.pid}")
    (process / "clear_refs").write_text("5")  # the peak of memory is counted from here

    def peak() -> int:
        (found,) = re.findall(r"VmHWM:\s+(\d+) kB", (process / "status").read_text())
        return int(found) >> 10

    before = peak()
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 422
    assert len(answer.content) < 1000
    assert peak() - before < 150


def test_what_is_known_of_an_index_is_told(client: httpx.Client, index: Path) -> None:
    both = client.get("/v1/indexes").json()["indexes"]
    assert [(each["name"], each["rows"], each["k"]) for each in both] == [
        ("docs", ROWS, K), ("other", ROWS, K),
    ]  # fmt: skip
    facts = client.get("/v1/indexes/docs").json()
    assert facts["whitening"]["k"] == K
    assert facts["spectrum"]
    assert str(index.parent) not in json.dumps(facts)
    assert client.get("/v1/indexes/docs/versions").json()["versions"][0]["published"]
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["docs", "other"]
    assert client.get("/v1/indexes/x").status_code == 404
    assert client.get("/healthz").json() == {"status": "ok"}


def test_a_comparison_holds_raw_search_and_every_width(client: httpx.Client, index: Path) -> None:
    body = {"index": "docs", "text": TEXT, "top_k": 10}
    answer = client.post("/v1/compare", json=body).json()
    raw, own, other = answer["columns"]
    exact = open_index(index, rerank=ROWS, rerank_by="embeddings").search(TEXT, top_k=10)
    assert [hit["id"] for hit in raw["hits"]] == [hit.id for hit in exact]
    assert np.allclose([hit["score"] for hit in raw["hits"]], [h.score for h in exact], atol=1e-5)
    assert own["hits"] == other["hits"]
    common = {hit["id"] for hit in own["hits"]} & {hit.id for hit in exact}
    assert own["overlap"] == pytest.approx(len(common) / 10)
    whole = {each["k"]: each for each in answer["widths"]}
    assert max(whole) > K
    assert [hit["id"] for hit in whole[K]["hits"]] == [hit["id"] for hit in own["hits"]]
    assert np.allclose(
        [h["score"] for h in whole[K]["hits"]], [h["score"] for h in own["hits"]], atol=1e-4
    )


def test_without_memory_the_comparison_has_no_raw_column(index: Path) -> None:
    with asking(index, compare_memory="0") as client:
        answer = client.post("/v1/compare", json={"text": TEXT}).json()
    assert "raise --compare-memory" in answer["note"]
    assert [each["kind"] for each in answer["columns"]] == ["index"]


def test_two_indexes_of_one_model_share_its_encoder(
    index: Path, tmp_path: Path, make: Make
) -> None:
    other = open_index(make(tmp_path / "out", seed=1))
    rows = random_rows(dim=K)
    table = pa.table({"id": range(len(rows)), "e": list(rows)})
    another = build_of(table, tmp_path / "columns", whiten="whitening", k=2)
    first, without = open_index(index, preload=True), open_index(another)
    other.share_encoder(first)
    assert other.encoder is first.encoder
    expected = open_index(other.bundle.folder.parents[1]).search(TEXT)
    assert [hit.id for hit in other.search(TEXT)] == [hit.id for hit in expected]
    without.share_encoder(first)
    with pytest.raises(ConfigError, match="built from an embedding column"):
        without.search(TEXT)


def test_queries_at_once_are_encoded_together_and_answered_each(client: httpx.Client) -> None:
    texts = [f"{word} {number % 7}" for number, word in enumerate(["cat", "dog", "bird"] * 30)]
    alone = {text: found(client, texts=text)["results"] for text in set(texts)}
    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(lambda text: (text, found(client, texts=text)["results"]), texts))
    for text, results in answers:
        assert [h["id"] for h in results[0]["hits"]] == [h["id"] for h in alone[text][0]["hits"]]
    counted = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines())
    together = "whiten_index_serve_batch_requests"
    assert float(counted[together + "_sum"]) > float(counted[together + "_count"])
    assert float(counted['whiten_index_serve_reload_failed{index="docs"}']) == 0


@pytest.fixture(scope="module")
def changing(
    serve: Serve, tmp_path_factory: pytest.TempPathFactory, make: Make
) -> tuple[Path, Server]:
    """An index that tests change, and a server that follows it."""
    out = make(tmp_path_factory.mktemp("changing") / "o")
    return out, serve(out, "--reload-seconds", 0.1)


def test_versions_come_and_go_without_a_failed_or_mixed_answer(
    changing: tuple[Path, Server], make: Make
) -> None:
    out, server = changing
    stop, seen, failures = threading.Event(), set[tuple[str, str]](), list[str]()

    def ask() -> None:
        with server.client() as client:
            while not stop.is_set():
                try:
                    answer = client.post("/v1/search", json={"texts": TEXT, "top_k": 1})
                    answer.raise_for_status()
                except httpx.HTTPError as error:
                    failures.append(str(error))
                    return
                value = answer.json()
                seen.add((value["version"], value["results"][0]["hits"][0]["columns"]["text"]))

    def ready(client: httpx.Client) -> dict[str, str]:
        return client.get("/readyz").json()["indexes"]["o"]

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    first = server.until(ready)["version"]
    make(out, seed=1)
    assert server.until(lambda client: ready(client)["version"] != first)
    second = server.until(ready)["version"]
    make(out, seed=2, k=4)
    assert server.until(lambda client: ready(client)["version"] != second)
    rollback(out, to=first)
    assert server.until(lambda client: ready(client)["version"] == first)
    prune(out, keep=1)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    # One text for each version: no answer is of two.
    assert len(seen) == len({version for version, _ in seen}) == 3


def ready_version(server: Server) -> str:
    with server.client() as client:
        return client.get("/readyz").json()["indexes"]["o"]["version"]


def test_a_version_that_cannot_be_opened_leaves_the_one_before(
    changing: tuple[Path, Server],
) -> None:
    out, server = changing
    first = ready_version(server)
    current = out / "CURRENT"
    whole = current.read_bytes()
    current.write_bytes(whole[:-20])
    assert server.until(lambda c: c.get("/readyz").json()["indexes"]["o"]["reload_failed"])
    with server.client() as client:
        assert "CURRENT" in client.get("/v1/indexes").json()["indexes"][0]["fault"]
        assert client.post("/v1/search", json={"texts": TEXT}).json()["version"] == first
        assert 'reload_failed{index="o"} 1.0' in client.get("/metrics").text
    current.write_bytes(whole)
    assert server.until(lambda c: not c.get("/readyz").json()["indexes"]["o"]["reload_failed"])


def test_sigterm_answers_what_is_under_way(serve: Serve, index: Path) -> None:
    server = serve(index)
    with server.client() as client, ThreadPoolExecutor(8) as pool:
        # Long to tokenise, so that all are there before the first is answered.
        body = {"texts": [f"{TEXT} {n} {'! ' * 150}" for n in range(250)], "top_k": 40}
        asked = [pool.submit(client.post, "/v1/search", json=body) for _ in range(8)]
        assert server.until(lambda c: "requests_under_way 9.0" in c.get("/metrics").text, 20)
        server.process.send_signal(signal.SIGTERM)
        assert [each.result().status_code for each in asked] == [200] * 8
    assert server.process.wait(60) == 0


TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def guarded(serve: Serve, index: Path, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server with a token and small limits."""
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(TOKEN + "\n")
    return serve(
        index, "--token-file", file, "--max-body", "2KiB", "--max-requests", 4,
        "--max-seconds", 0.5, "--cors-origin", "https://example.org", "--log-queries",
    )  # fmt: skip


def test_a_token_is_needed_for_data_and_none_for_probes(guarded: Server) -> None:
    with guarded.client() as client:
        for path in ("/healthz", "/readyz", "/"):
            assert client.get(path).status_code == 200
        for path in ("/v1/indexes", "/metrics", "/openapi.json", "/v1/models", "/mcp"):
            assert client.options(path).status_code == 401
            for header in (
                "",
                "Bearer",
                f"Bearer {TOKEN}x",
                TOKEN,
                "Bearer \xe9".encode("latin-1"),
            ):
                refused = client.get(path, headers={"authorization": header})
                assert refused.status_code == 401, path
                assert refused.headers["www-authenticate"] == "Bearer"
        client.headers["authorization"] = f"bearer {TOKEN}"
        assert client.get("/v1/indexes").status_code == 200
        # Behind a proxy that keeps the name.
        proxied = {"host": "search.example.org", "origin": "https://search.example.org"}
        asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        accepts = {"accept": "application/json, text/event-stream"}
        assert client.post("/mcp", json=asked, headers={**proxied, **accepts}).status_code == 200
        assert client.get("/mcp", headers=accepts).status_code == 405
        assert TOKEN not in guarded.log.read_text()


def test_the_schema_says_that_a_token_is_needed(guarded: Server, client: httpx.Client) -> None:
    with guarded.client(headers={"authorization": f"Bearer {TOKEN}"}) as asked:
        schema = asked.get("/openapi.json").json()
    assert schema["security"] == [{"token": []}]
    assert schema["components"]["securitySchemes"]["token"] == {"type": "http", "scheme": "bearer"}
    assert "security" not in client.get("/openapi.json").json()


def test_requests_have_limits(guarded: Server) -> None:
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    with guarded.client(headers=headers) as client:
        large = client.post("/v1/search", json={"texts": "cat " * 600})
        assert large.status_code == 413
        assert "2,048 bytes" in large.json()["detail"]
        # Without a length in its header.
        chunks = client.post("/v1/search", content=iter([b"[", b"1," * 2000]))
        assert chunks.status_code == 413

        def slowly() -> Any:
            yield b"{"
            threading.Event().wait(2)
            yield b"}"

        assert client.post("/v1/search", content=slowly()).status_code == 504
        with ThreadPoolExecutor(12) as pool:
            sent = [pool.submit(client.post, "/v1/search", content=slowly()) for _ in range(12)]
            answers = [each.result() for each in sent]
        assert {answer.status_code for answer in answers} == {429, 504}
        assert all(a.headers["retry-after"] for a in answers if a.status_code == 429)
        assert client.post("/v1/search", json={"texts": TEXT}).status_code == 200


@pytest.mark.parametrize("end", [b"0\r\nX\r\n\r\n", b"zz\r\n"])
def test_a_body_that_is_no_http_is_refused_in_a_line(guarded: Server, end: bytes) -> None:
    asked = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    address = httpx.URL(guarded.url).netloc.split(b":")
    with socket.create_connection(address, 60) as connection:
        connection.sendall(asked + end)
        assert b"400 Bad Request" in connection.makefile("rb").read()
    assert "Traceback" not in guarded.log.read_text()


@pytest.mark.parametrize("part", [b"a" * 1000, b"X: y\r\n" * 200])
def test_a_header_without_end_is_refused(guarded: Server, part: bytes) -> None:
    with socket.create_connection(httpx.URL(guarded.url).netloc.split(b":"), 60) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 8 << 20:
                connection.sendall(part)
                sent += len(part)
    # What the system keeps on the way.
    assert sent < 8 << 20
    with guarded.client() as client:
        assert client.get("/healthz").status_code == 200


def test_pages_of_others_ask_only_where_they_are_allowed_to(
    guarded: Server, server: Server
) -> None:
    asked = {"origin": "https://example.org", "access-control-request-method": "POST"}
    with guarded.client() as client:
        allowed = client.options("/v1/search", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://example.org"
        other = client.options("/v1/search", headers={**asked, "origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
    with server.client() as client:
        assert "access-control-allow-origin" not in client.get("/healthz", headers=asked).headers
        # A name that points to this machine, in a browser.
        evil = client.get("/v1/indexes", headers={"host": "evil.example"})
        assert evil.status_code == 421
        page = client.get("/")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"


def test_the_log_has_queries_only_if_asked(guarded: Server, server: Server) -> None:
    with guarded.client(headers={"authorization": f"Bearer {TOKEN}"}) as client:
        client.post("/v1/search", json={"texts": "secret \x1b[31m cat"})
    with server.client() as client:
        client.post("/v1/search", json={"index": "docs", "texts": "secret dog"})
        for method in ("prompts/get", "resources/read", "secret\nmethod"):
            asked = {"name": "secret\nname", "uri": "a://secret\nname"}
            answer = client.post(
                "/mcp",
                json={"jsonrpc": "2.0", "id": 1, "method": method, "params": asked},
                headers={"accept": "application/json, text/event-stream"},
            )
            assert "error" in answer.json()
    assert "secret \\x1b[31m cat" in guarded.log.read_text()
    assert "POST /v1/search 200" in server.log.read_text()
    assert "secret" not in server.log.read_text()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--host", "0.0.0.0"], 2, "others can reach --host 0.0.0.0"),
        (["--token-file", "nowhere"], 2, "--token-file cannot be read, as there is no such file"),
        (["--token-file", "eyJ" * 100], 2, "as there is no such file"),
        (["--token-file", "{large}"], 2, "large cannot be read (it has more than"),
        (["--cors-origin", "example.org"], 2, "is no origin"),
        (["--max-body", "much"], 2, "--max-body 'much' is no size"),
        (["--port", "70000"], 2, "--port"),
        (["--host", "192.0.2.1", "--no-auth"], 7, "cannot be listened on"),
        (["{index}"], 2, "two indexes are called docs"),
        (["nowhere"], 5, "does not exist"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_start_says_why(
    index: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    status: int,
    words: str,
) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(1 << 27)
    given = ["serve", index, *(each.format(index=index, large=large) for each in arguments)]
    monkeypatch.delenv("WHITEN_INDEX_TOKEN", raising=False)
    fails(status, words, *given, *([] if "--port" in given else ["--port", 0]))


def test_a_web_socket_is_no_way_in(guarded: Server) -> None:
    asked = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
             "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ=="}  # fmt: skip
    with guarded.client(headers=asked) as client:
        assert client.get("/v1/indexes").status_code == 401
        client.headers["authorization"] = f"Bearer {TOKEN}"
        assert client.get("/v1/indexes").status_code == 200
    assert "Traceback" not in guarded.log.read_text()


def test_clients_that_leave_before_all_answers_leave_nothing_in_the_log(server: Server) -> None:
    url, body = httpx.URL(server.url), json.dumps({"index": "docs", "texts": TEXT})
    head = ["POST /v1/search HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    asked = "\r\n".join([*head, f"Content-Length: {len(body)}", "", body])
    for _ in range(10):
        with socket.create_connection((url.host, url.port or 80)) as client:
            client.sendall(asked.encode() * 50)
    assert server.until(lambda client: client.get("/readyz").status_code == 200)
    assert "Traceback" not in server.log.read_text()


def test_a_request_that_may_open_no_file_is_refused_without_a_traceback(
    index: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Libraries import modules on first use."""
    with asking(index) as client:
        refused = Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        monkeypatch.setattr(Opened, "filter", refused)
        answer = client.post("/v1/search", json={"texts": TEXT})
    assert answer.status_code == 503
    assert "too many files" in answer.json()["detail"]
    assert "Traceback" not in caplog.text
