"""Models behind an API: faults, limits, money, resume, the canary, keys, and what is refused."""

import base64
import contextlib
import gzip
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.helpers.api_builds import MODEL, build, options, texts_of, write
from tests.helpers.bad_input import succeed
from tests.helpers.code_models import forged
from tests.helpers.embedding_server import EmbeddingServer, embedding
from whiten_index import (
    BuildConfig,
    PushConfig,
    QueryTransform,
    TrainingConfig,
    UpdateConfig,
    build_index,
    encode_corpus,
    load_encoder,
    open_index,
    push_index,
    train_encoder,
    update_index,
)
from whiten_index.artifacts.prefetch import overlapped
from whiten_index.encoding.canary import CANARY
from whiten_index.errors import ArtifactError, ConfigError, EncoderError
from whiten_index.pipeline.encode import EncodeReport
from whiten_index.pipeline.plan import plan_build
from whiten_index.progress import Progress
from whiten_index.store.sampling import CorpusEmbeddings

COMMAND = [sys.executable, "-c", "from whiten_index.cli import main; main()"]
FAULTS = (429, 500, 503, "cut", "slow", "malformed", "short", "twice", "nan")
CANARY_WORDS = sum(len(text.split()) for text in CANARY)


def sentences_of(rows: int) -> list[str]:
    every = texts_of(3 * rows)
    return [". ".join(every[row : row + 3]) + "." for row in range(0, 3 * rows, 3)]


def encode(folder: Path, url: str | None, **more: Any) -> EncodeReport:
    return encode_corpus(BuildConfig(**options(folder, url, store=str(folder / "store"), **more)))


def stored(report: EncodeReport) -> np.ndarray:
    return np.concatenate(list(CorpusEmbeddings(report.store, report.record).blocks()))


def test_every_text_is_in_the_store_once_whatever_fails(tmp_path: Path) -> None:
    texts, chosen = texts_of(3000), random.Random(1)
    write(tmp_path, texts)

    def fault(number: int) -> Any:
        return chosen.choice(FAULTS) if number > 2 and chosen.random() < 0.2 else None

    # The server takes fewer texts than are sent at first.
    with EmbeddingServer(fault, most_texts=16, at_once=12) as server:
        report = encode(tmp_path, server.url)
        assert set(map(str, FAULTS)) == set(server.failed)
        assert {server.answered[text] for text in texts} == {1}
        # Nothing is charged twice; the twelve texts of the canary come before and after.
        assert sum(server.answered.values()) == len(texts) + 24
    assert report.counts.encoded == len(texts)
    assert report.counts.tokens == sum(len(text.split()) for text in texts)
    expected = np.stack([embedding(text) for text in texts])
    np.testing.assert_allclose(stored(report), expected, atol=1e-3)


def test_requests_at_once_follow_what_the_endpoint_takes() -> None:
    with EmbeddingServer(at_once=4, latency=0.02, most_texts=6) as server:
        encoder = load_encoder(MODEL, base_url=server.url)
        encoder.encode(texts_of(1200))
        # Most requests are taken, though up to 64 might be sent.
        assert server.most_busy <= 16
        assert 0 < server.refused < server.requests / 4


def test_a_run_that_is_killed_asks_for_the_rest_alone(tmp_path: Path) -> None:
    texts = texts_of(4000)
    corpus = write(tmp_path, texts)
    process: subprocess.Popen[bytes] | None = None

    def kill(number: int) -> str | None:
        if sum(server.answered.values()) > 0.9 * len(texts) and process is not None:
            os.kill(process.pid, signal.SIGKILL)
            return "cut"
        return None

    command = ("encode", corpus, "--text-column", "text", "--model", MODEL)
    with EmbeddingServer(kill, most_texts=32, latency=0.1, at_once=6) as server:
        where = ("--store", str(tmp_path / "store"), "--base-url", server.url)
        process = subprocess.Popen([*COMMAND, *command, *where])
        assert process.wait(120) == -signal.SIGKILL
        process = None
        assert sum(server.answered.values()) > 0.9 * len(texts)
        server.answered.clear()
        report = encode(tmp_path, server.url)
        asked = sum(server.answered.values()) - 24
    # The last tenth, what came since it was saved last, and what was under way. It is saved every
    # 1,024 texts, and less often where saving takes long.
    assert 250 <= asked <= 0.9 * len(texts)
    assert report.counts.reused >= 0.1 * len(texts)
    np.testing.assert_allclose(stored(report), [embedding(text) for text in texts], atol=1e-3)
    assert not list((tmp_path / "store").glob("*/unfinished/*.safetensors"))


def test_no_more_is_spent_than_the_user_allows(tmp_path: Path, server: EmbeddingServer) -> None:
    texts = texts_of(4000)
    write(tmp_path, texts)
    total, price = sum(len(text.split()) for text in texts), 1000.0
    with pytest.raises(EncoderError, match="could pass --max-cost"):
        encode(tmp_path, server.url, price=price, max_cost=0.5 * total * price / 1e6)
    # Most of the money is used, and what it bought is kept.
    assert 0.3 * total < server.charged <= 0.5 * total
    report = encode(tmp_path, server.url, price=price, max_cost=2 * total * price / 1e6)
    assert report.counts.encoded + report.counts.reused == len(texts)
    # Of what came, up to 32 are asked for again.
    assert len(texts) < sum(server.answered[text] for text in texts) <= len(texts) + 32


def test_a_model_that_changes_in_mid_build_is_published_nowhere(tmp_path: Path) -> None:
    texts = texts_of(3000)
    write(tmp_path, texts)
    with EmbeddingServer() as server:
        server.hear = lambda _: setattr(server, "turn", 50.0 if server.requests > 12 else 0.0)
        with pytest.raises(EncoderError, match=r"openai:words .* has changed: the cosine"):
            build(tmp_path, server.url)
        assert not (tmp_path / "index" / "CURRENT").exists()
        # With the old model it goes on, and keeps nothing of the other one.
        server.hear, server.turn = lambda _: None, 0.0
        np.testing.assert_allclose(
            stored(encode(tmp_path, server.url)), [embedding(text) for text in texts], atol=1e-3
        )
    assert not list((tmp_path / "index" / "store").glob("*/unfinished/*.safetensors"))


def test_rows_of_a_model_that_had_changed_are_not_kept(tmp_path: Path) -> None:
    """An interrupted run keeps what came, and does not ask then."""
    texts = texts_of(3000)
    write(tmp_path, texts)
    with EmbeddingServer(lambda number: 401 if number > 20 else None) as server:
        server.hear = lambda _: setattr(server, "turn", 50.0 if server.requests > 12 else 0.0)
        with pytest.raises(EncoderError, match="cannot be asked"):
            encode(tmp_path, server.url)
        assert list((tmp_path / "store").glob("*/unfinished/*.safetensors"))
        server.hear, server.turn, server.fault = lambda _: None, 0.0, lambda _: None
        np.testing.assert_allclose(
            stored(encode(tmp_path, server.url)), [embedding(text) for text in texts], atol=1e-3
        )
    assert not list((tmp_path / "store").glob("*/unfinished/*.safetensors"))


@pytest.mark.parametrize("noise", [0.0, 0.002])
def test_rows_that_are_paid_for_are_kept_whatever_the_noise(tmp_path: Path, noise: float) -> None:
    """Of texts that are alike, some of which have an embedding of zeros."""
    texts = [f"{'a b c d e f g h ' * 4}{row}" for row in range(3000)]
    write(tmp_path, texts)
    random, asked = np.random.default_rng(0), threading.local()

    def answer(found: dict[str, Any]) -> None:
        for text, each in zip(asked.texts, found.get("data", ()), strict=False):
            row = np.frombuffer(base64.b64decode(each["embedding"]), "<f4")
            row = (row + noise * random.standard_normal(len(row))) * (not text.endswith("7"))
            each["embedding"] = base64.b64encode(row.astype("<f4").tobytes()).decode()

    with EmbeddingServer(lambda number: 401 if number > 20 else None) as server:
        server.hear = lambda given: setattr(asked, "texts", given["input"])
        server.change = answer
        with pytest.raises(EncoderError, match="cannot be asked"):
            encode(tmp_path, server.url)
        server.fault = lambda _: None
        assert encode(tmp_path, server.url).counts.reused >= 1024


def test_tries_that_may_have_been_charged_count(tmp_path: Path) -> None:
    write(tmp_path, texts_of(64))
    with EmbeddingServer(lambda number: "cut" if number > 2 else None) as server:
        with pytest.raises(EncoderError, match="could pass --max-cost"):
            encode(tmp_path, server.url, price=1.0, max_cost=0.02)
        assert 3 < server.requests < 8


def test_a_plan_tells_tokens_and_cost(tmp_path: Path, server: EmbeddingServer) -> None:
    texts = texts_of(2000)
    write(tmp_path, texts)
    given = options(tmp_path, server.url, store=str(tmp_path / "store"), price=20.0)
    plan = plan_build(BuildConfig(**given))
    tokens = sum(len(text.split()) for text in texts)
    assert plan["tokens"] == pytest.approx(tokens, rel=0.1)
    assert plan["cost"] == pytest.approx(plan["tokens"] * 20 / 1e6)
    assert sum(server.answered.values()) == 64 + 12
    assert [each.name for each in tmp_path.iterdir()] == ["c.parquet"]


def test_the_end_says_what_was_spent(tmp_path: Path, server: EmbeddingServer) -> None:
    write(tmp_path, texts_of(100))
    watcher = Mock(spec=Progress)
    given = options(tmp_path, server.url, store=str(tmp_path / "store"), price=20.0)
    encode_corpus(BuildConfig(**given), progress=watcher)
    tokens = server.charged - 2 * CANARY_WORDS
    spent = f"note: 1 requests, {tokens:,} tokens, cost {tokens * 20 / 1e6:.4g}"
    watcher.note.assert_called_once_with(spent)
    # That of a build has the pieces by which auto chooses.
    write(tmp_path, sentences_of(200))
    build = BuildConfig(**given, out=str(tmp_path / "index"))
    plan = plan_build(build)
    assert plan["cut_in_pieces"] == 100
    before = server.charged + CANARY_WORDS
    build_index(build, progress=watcher)
    assert plan["tokens"] == pytest.approx(server.charged - before, rel=0.15)
    assert f", {server.charged - before:,} tokens, cost" in str(watcher.note.call_args_list)


def test_a_text_that_is_too_long_is_named_with_its_row(tmp_path: Path) -> None:
    write(tmp_path, [*texts_of(300), "long " * 90, *texts_of(5)])
    with (
        EmbeddingServer(most_words=80) as server,
        pytest.raises(EncoderError, match=r"row c\.parquet#0:300: .*maximum context length is 80"),
    ):
        encode(tmp_path, server.url)


def test_lists_of_numbers_are_read_too(server: EmbeddingServer) -> None:
    server.base64_too = False
    encoder = load_encoder(MODEL, base_url=server.url)
    np.testing.assert_allclose(encoder.encode(["a b"]), [embedding("a b")], atol=1e-6)


def test_dimensions_prompts_and_input_types(server: EmbeddingServer) -> None:
    asked: list[dict[str, Any]] = []
    server.hear = asked.append
    encoder = load_encoder(
        MODEL, base_url=server.url, dimensions=8, input_types=("passage", "query"),
        document_prompt="doc: ", query_prompt="ask: ",
    )  # fmt: skip
    assert encoder.encode(["a"]).shape == (1, 8)
    assert (asked[-1]["input"], asked[-1]["input_type"]) == (["doc: a"], "passage")
    assert encoder.encode_queries(["a", "a"]).shape == (2, 8)
    assert (asked[-1]["input"], asked[-1]["input_type"]) == (["ask: a"], "query")
    assert encoder.spec.fingerprint != encoder.spec.query_fingerprint


def test_an_index_is_built_searched_updated_and_pushed(
    tmp_path: Path, server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = texts_of(300)
    write(tmp_path, texts)
    index = build(tmp_path, server.url)
    assert open_index(index, base_url=server.url).search([texts[7]], top_k=1)[0][0].row == 7
    write(tmp_path, [*texts, "one more text"])
    server.answered.clear()
    update_index(UpdateConfig(index=str(index), base_url=server.url))
    assert server.answered["one more text"] == 1
    assert not set(texts) & set(server.answered)
    # The endpoint may move, and the variable of the client names it for every command.
    with EmbeddingServer() as moved:
        monkeypatch.setenv("OPENAI_BASE_URL", moved.url)
        push_index(PushConfig(index=str(index), to=str(tmp_path / "pushed.parquet")))
        assert open_index(index).search(["one more text"], top_k=1)[0][0].row == 300
        assert "#0:3" in succeed("search", index, texts[3], "--top-k", 1)


def test_auto_chooses_and_certifies_by_the_api(tmp_path: Path, server: EmbeddingServer) -> None:
    write(
        tmp_path, [f"{a}. {b}. {c}." for a, b, c in zip(*[iter(texts_of(1800))] * 3, strict=True)]
    )
    given = options(tmp_path, server.url, out=str(tmp_path / "index"))
    index = open_index(build_index(BuildConfig(**given)).out, base_url=server.url)
    assert index.search(sentences_of(5)[4:], top_k=1)[0][0].row == 4


def test_pairs_are_evaluated(tmp_path: Path, server: EmbeddingServer) -> None:
    pairs = "".join(f"w{i} w{i + 1}\tw{i} w{i + 2}\t{i % 5}\n" for i in range(20))
    (tmp_path / "p.tsv").write_text("sentence1\tsentence2\tscore\n" + pairs)
    asked = ("eval", "sts", tmp_path / "p.tsv", "--model", MODEL, "--base-url", server.url)
    assert succeed(*asked).startswith("openai:words: 32 dims\n")


def test_an_endpoint_that_asks_for_no_pause_is_not_asked_for_ever() -> None:
    def ask(pause: str) -> int:
        with EmbeddingServer(
            lambda number: 429 if number > 2 else None, retry_after=pause
        ) as server:
            encoder = load_encoder(MODEL, base_url=server.url)
            with pytest.raises(EncoderError, match="cannot be asked"):
                encoder.encode_queries(["a"])
            return server.requests

    pauses = ("0", "0.00001", "nan", "-5", "1e999", "Wed, 21 Oct 2015 07:28:00 GMT")
    with ThreadPoolExecutor() as threads:
        assert max(threads.map(ask, pauses)) < 20


@pytest.mark.parametrize("pause", ["1000000000", "1e300", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_an_endpoint_that_asks_for_a_long_pause_is_not_waited_for(
    tmp_path: Path, pause: str
) -> None:
    write(tmp_path, texts_of(100))
    with (
        EmbeddingServer(lambda number: 429 if number > 2 else None, retry_after=pause) as server,
        pytest.raises(EncoderError, match=r"run this again in [\de+.]+ seconds, as it asks"),
    ):
        encode(tmp_path, server.url)


@pytest.mark.parametrize("first", [2, 3])  # the texts, and the check after them
def test_a_signal_ends_a_pause(tmp_path: Path, first: int) -> None:
    corpus, asked = write(tmp_path, texts_of(100)), threading.Event()

    def limit(number: int) -> int | None:
        asked.set() if number > first else None
        return 429 if number > first else None

    with EmbeddingServer(limit, retry_after="300") as server:
        where = ("--store", str(tmp_path / "store"), "--base-url", server.url)
        command = ("encode", corpus, "--text-column", "text", "--model", MODEL, *where)
        with subprocess.Popen([*COMMAND, *command]) as process:
            assert asked.wait(120)
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 130


def test_a_stream_that_ends_early_leaves_the_pauses_of_others(server: EmbeddingServer) -> None:
    limited = threading.Event()

    def fail() -> Iterator[list[str]]:
        assert limited.wait(60)
        yield ["x"]
        server.fault = lambda _: None
        raise OSError("a file of the caller")

    encoder = load_encoder(MODEL, base_url=server.url)
    with ThreadPoolExecutor() as threads:
        server.fault, server.retry_after = lambda _: limited.set() or 429, "3"
        other = threads.submit(encoder.encode, ["good", "better"])
        with pytest.raises(OSError, match="of the caller"):
            list(encoder.stream(fail()))
        assert other.result().shape == (2, 32)


def test_known_texts_are_asked_again_in_requests_of_the_usual_size(server: EmbeddingServer) -> None:
    texts, sizes = ["word " * 1500 + str(number) for number in range(1024)], list[int]()
    encoder = load_encoder(MODEL, base_url=server.url)
    rows = np.stack([embedding(text) for text in texts])
    server.hear = lambda asked: sizes.append(sum(len(text.split()) for text in asked["input"]))
    encoder.collect(encoder.run(replace(encoder.prepare(texts), known=rows)))
    assert len(sizes) > 1
    assert max(sizes) < 20_000


@pytest.mark.parametrize("known", [0, 256])
def test_a_signal_ends_the_pauses_of_two_windows(
    known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests of the second, or those for its known texts, wait behind those of the first."""
    texts, used_up = [[f"{name}{i}" for i in range(1024)] for name in "ab"], threading.Event()

    def fault(number: int) -> int | None:
        return 429 if used_up.is_set() or 2 < number < 25 else None

    def hear(asked: dict[str, Any]) -> None:
        if ("b255" if known else "a700") in asked["input"] and not used_up.is_set():
            server.retry_after = "300"
            used_up.set()
            threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()

    with EmbeddingServer(fault, retry_after="0.05") as server:
        server.hear = hear
        encoder = load_encoder(MODEL, base_url=server.url)

        def prepare(window: list[str]) -> Any:
            rows = np.stack([embedding(text) for text in window[:known]]) if known else ()
            found = encoder.prepare(window)
            return replace(found, known=rows) if known and window[0] == "b0" else found

        monkeypatch.setattr("whiten_index.encoding.remote._STOPPING_SECONDS", 2.0)
        # A background job of a shell ignores it.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                list(
                    overlapped(
                        texts, read=list, prepare=prepare, stop=encoder.stop,
                        finish=encoder.collect,
                        work=lambda window: encoder.run(window, stopped=lambda _: None),
                    )
                )  # fmt: skip
        finally:
            signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("embedding", [0.5, [], [[1.0, 2.0]], [1e999], ["a"], None])
def test_an_answer_of_another_shape_is_none(
    server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch, embedding: Any
) -> None:
    def change(found: dict[str, Any]) -> None:
        for each in found["data"]:
            each["embedding"] = embedding

    monkeypatch.setattr("whiten_index.encoding.endpoint._TRIES", 2)
    server.change = change
    with pytest.raises(EncoderError, match="cannot be asked"):
        load_encoder(MODEL, base_url=server.url)


def test_answers_of_two_widths_are_none(server: EmbeddingServer) -> None:
    widths = itertools.count(8)
    server.hear = lambda asked: asked.update(dimensions=next(widths))
    with pytest.raises(EncoderError, match=r"gives embeddings of \[8, 9.*\] dims by turns"):
        load_encoder(MODEL, base_url=server.url)


@pytest.mark.parametrize(
    ("head", "body", "match"),
    [
        ("", b"[" * 100_000 + b"]" * 100_000, "recursion"),
        ("", b'"' + b"a" * (8 << 20) + b'"', "above 1,179,648 bytes"),
        ("Content-Encoding: gzip", gzip.compress(b" " * (64 << 20)), "is packed"),
    ],
)
def test_no_answer_is_too_large_for_the_client(head: str, body: bytes, match: str) -> None:
    sent = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n{head or 'X: y'}\r\n\r\n".encode()
    with EmbeddingServer(lambda number: sent + body if number > 2 else None) as server:
        encoder = load_encoder(MODEL, base_url=server.url)
        with pytest.raises(EncoderError, match=match):
            encoder.encode_queries(["a"])


def test_a_key_that_the_endpoint_sends_back_is_not_kept(
    server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.change = lambda found: found.update(model="\x1b[1m sk-0123456789 " * 99)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789\n")
    served = load_encoder(MODEL, base_url=server.url).spec.served
    assert "0123" not in served
    assert len(served) <= 500


@pytest.mark.parametrize("tokens", [-50, 1e999, "many", None, 10**400])
def test_odd_counts_of_tokens_are_not_believed(
    server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch, tokens: Any
) -> None:
    encoder = load_encoder(MODEL, base_url=server.url)
    server.change = lambda found: found["usage"].update(total_tokens=tokens)
    monkeypatch.setattr("whiten_index.encoding.endpoint._TRIES", 2)
    with contextlib.suppress(EncoderError):
        encoder.encode(["a b c"])
    assert 0 <= encoder.meter.tokens < 1e13


def test_a_key_with_a_line_end_is_sent_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789\n")
    with EmbeddingServer(key="sk-0123456789") as server:
        load_encoder(MODEL, base_url=server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123\n456789")
    with pytest.raises(ConfigError, match="has other than printable letters") as caught:
        load_encoder(MODEL, base_url="http://127.0.0.1:9/v1")
    assert "0123" not in str(caught.value)


def test_a_forged_manifest_names_no_model_of_the_hub(
    tmp_path: Path, server: EmbeddingServer
) -> None:
    write(tmp_path, texts_of(100))
    index = forged(build(tmp_path, server.url), tmp_path / "forged", model="evil/model")
    with pytest.raises(ArtifactError):
        open_index(index, base_url=server.url)


def test_what_the_endpoint_does_not_do_is_said(tmp_path: Path, server: EmbeddingServer) -> None:
    server.hear = lambda asked: asked.update(dimensions=None)
    with pytest.raises(EncoderError, match="gives 32 dims, whatever is asked"):
        load_encoder(MODEL, base_url=server.url, dimensions=16)


def test_no_index_says_where_texts_and_keys_are_sent(
    tmp_path: Path, server: EmbeddingServer
) -> None:
    write(tmp_path, texts_of(100))
    index = build(tmp_path, server.url)
    asked = server.requests
    for attempt in (
        lambda: open_index(index).search(["a"]),
        lambda: update_index(UpdateConfig(index=str(index))),
    ):
        with pytest.raises(
            EncoderError, match=f"set the variable OPENAI_BASE_URL, .* add --base-url {server.url}"
        ):
            attempt()
    assert server.requests == asked


def test_a_key_is_in_no_file_and_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, texts_of(100))
    key = "sk-a-secret-key-of-mine"
    with EmbeddingServer(key=key) as server:
        monkeypatch.setenv("OPENAI_API_KEY", key)
        build(tmp_path, server.url)
        files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        assert not [data for data in files if key.encode() in data]
        monkeypatch.setenv("OPENAI_BASE_URL", server.url.replace("://", "://user:a-password@"))
        with pytest.raises(ConfigError, match="has a password before the @") as refusal:
            encode(tmp_path, None)
        assert "a-password" not in str(refusal.value)
        monkeypatch.setenv("OPENAI_BASE_URL", server.url.replace("/v1", f"/{key}/v1"))
        with pytest.raises(ConfigError, match="has the key in the variable") as refusal:
            encode(tmp_path, None)
        assert key not in str(refusal.value)
        # The server repeats a wrong key in its error.
        monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong-one")
        with pytest.raises(
            EncoderError, match="check the key in the variable OPENAI_API_KEY"
        ) as no:
            encode(tmp_path, server.url)
        # Python shows an error with its causes.
        assert "sk-wrong-one" not in "".join(traceback.format_exception(no.value))


def test_what_needs_a_model_here_says_so(tmp_path: Path, server: EmbeddingServer) -> None:
    write(tmp_path, texts_of(100))
    config = TrainingConfig(
        corpus=(str(tmp_path / "c.parquet"),), text_columns=("text",), out=str(tmp_path / "model"),
        model=MODEL,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="training needs the files of a model, and openai:words"):
        train_encoder(config)
    transform = QueryTransform.of(build(tmp_path, server.url), base_url=server.url)
    with pytest.raises(ConfigError, match="this export needs the files of a model"):
        transform.model_folder()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pooling": ({"pooling": "mean", "max_length": 64}, "--pooling and --max-length cannot apply"),
    "device": ({"device": "cpu"}, "--device cannot apply to openai:words"),
    "passages": ({"passage_tokens": 64}, "--passage-tokens cuts by the tokenizer"),
    "cluster": ({"runner": "ray"}, "--runner ray shares work"),
    "no price": ({"max_cost": 1.0}, "add --price"),
    "one type": ({"input_types": ("query",)}, "--input-types takes that of documents and"),
    "no address": ({"base_url": "tei:8080"}, "is no address; write one as http"),
    "no name": ({"model": "openai:"}, "names no model"),
    "a local model": ({"model": "all-MiniLM-L6-v2"}, "--base-url is for a model behind an API"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_options_that_cannot_apply(tmp_path: Path, name: str) -> None:
    changes, match = REFUSED[name]
    given = options(tmp_path, "http://127.0.0.1:9/v1", store=str(tmp_path / "store"))
    with pytest.raises(ConfigError, match=match):
        BuildConfig(**{**given, **changes})


def test_an_endpoint_that_cannot_be_asked(
    tmp_path: Path, server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="needs a key of OpenAI in the variable OPENAI_API_KEY"):
        load_encoder(MODEL)
    with pytest.raises(EncoderError, match="check the model's name and --base-url"):
        load_encoder(MODEL, base_url=server.url.replace("/v1", "/v2"))
    with pytest.raises(EncoderError, match="check the model's name"):
        load_encoder("openai:other", base_url=server.url)


def test_no_model_library_is_loaded(tmp_path: Path, server: EmbeddingServer) -> None:
    write(tmp_path, texts_of(50))
    given = options(tmp_path, server.url, store=str(tmp_path / "store"))
    code = (
        "import sys; from whiten_index import BuildConfig, encode_corpus\n"
        f"encode_corpus(BuildConfig(**{given!r}))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert sum(server.answered.values()) == 50 + 24
