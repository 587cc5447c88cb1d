"""Bad input of builds, searches and stores: one sentence, and what was published is unharmed."""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.parquet.encryption import (
    CryptoFactory,
    EncryptionConfiguration,
    KmsClient,
    KmsConnectionConfig,
)

from tests.helpers import bad_input
from tests.helpers.bad_input import (
    ARTIFACT,
    CORPUS,
    DIM,
    DISK,
    EMBEDDED,
    ENCODER,
    OPTIONS,
    ROWS,
    Place,
    assert_one_error,
    assert_refused,
    numbers,
    process,
    run,
    table,
)
from tests.helpers.flipped import flip
from whiten_index import CorpusConfig, ParquetCorpus
from whiten_index.errors import CorpusError

place = bad_input.place


def with_value(position: int, value: Any) -> list[Any]:
    return [value if i == position else list(row) for i, row in enumerate(numbers())]


TABLES: dict[str, tuple[Callable[[], pa.Table], tuple[Any, ...], int, str]] = {
    "filter that nothing passes": (table, (*EMBEDDED, "--filter", "year > 999"), CORPUS,
        "none of the 60 rows .*60 filtered"),
    "a size that no machine has": (table, (*EMBEDDED, "--memory-budget", "9" * 4400 + "GB"),
        OPTIONS, "--memory-budget '9{79}[.]{3} is no size"),
    "a number of 100 bits": (table, (*EMBEDDED, "--limit", str(1 << 99)), OPTIONS,
        "--limit takes a number of at most 64 bits; 6338253001"),
    "text for an embedding column": (table, ("--embedding-column", "text"), CORPUS,
        "'text' .*is string; .*columns that fit: e"),
    "no column": (table, (), OPTIONS, "--text-column or --embedding-column"),
    "beyond float32": (lambda: table(e=with_value(4, [1e100] * DIM)),
        (*EMBEDDED, "--whiten", "none"), OPTIONS, "beyond float32"),
    "beyond the square root of float64": (lambda: table(e=with_value(4, [1e200] * DIM)), EMBEDDED,
        OPTIONS, "beyond|large|scale"),
    "kept column named twice": (table,
        ("--embedding-column", "e", "--keep", "year", "--keep", "year"), OPTIONS,
        "--keep names year more than once"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(TABLES))
def test_a_corpus_or_option_that_cannot_be_used(place: Place, name: str) -> None:
    make, options, status, match = TABLES[name]
    corpus = place.write(make())
    assert_refused(place, ("build", corpus, *options, "--out", place.out), status, match)


TEXTS: dict[str, tuple[list[Any], tuple[Any, ...], int, str]] = {
    "null text": ([*"abc", None], ("--on-bad-row", "error"), CORPUS, "#0:3 .*no text in text"),
    "blank text": (["a", " \t\n", "b"], ("--on-bad-row", "error"), CORPUS, "#0:1 .*no text"),
    "only blanks": (["", None, "  "], (), CORPUS, "none of the 3 rows .*3 blank_text"),
    "length beyond the model": (["a", "b"], ("--max-length", 99), OPTIONS, "more than the 32"),
    "length without room": (["a", "b"], ("--max-length", 2), OPTIONS, "or equal to 3"),
    "layer beyond the model": (["a", "b"], ("--layers", "3"), OPTIONS, "layer 3 does not exist"),
    "layer below the model": (["a", "b"], ("--layers", "-4"), OPTIONS, "layer -4 does not exist"),
    "device unknown": (["a", "b"], ("--device", "abacus"), OPTIONS, "device 'abacus'"),
}


@pytest.mark.parametrize("name", list(TEXTS))
def test_texts_or_encoder_options_that_cannot_be_used(
    place: Place, tiny_model: Path, name: str
) -> None:
    texts, options, status, match = TEXTS[name]
    corpus = place.write(pa.table({"text": pa.array(texts, pa.string())}))
    arguments = ("--text-column", "text", "--model", tiny_model, *options, "--out", place.out)
    assert_refused(place, ("build", corpus, *arguments), status, match)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": lambda path: flip(path, path.stat().st_size // 3, 0xFF),
    "name": lambda path: path.write_bytes(path.read_bytes().replace(b"element", b"elemen\xf4")),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("id,text\n1,hello\n"),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_corrupt_file_among_good_ones_is_named(place: Place, damage: str) -> None:
    for name in "ace":
        part = table(id=[f"{name}{i}" for i in range(ROWS)], e=list(numbers(ord(name))))
        corpus = place.write(part, f"bad/{name}.parquet")
    DAMAGE[damage](corpus / "c.parquet")
    arguments = ("build", corpus, *EMBEDDED, "--k", 3, "--out", place.out)
    assert_refused(place, arguments, CORPUS, r"bad/c\.parquet .*(restore|take it out)")
    # Taken out of the corpus, as the message says, the rest goes through.
    (corpus / "c.parquet").unlink()
    assert run(*arguments)[0] == 0


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_corpus_whose_name_is_not_utf8(place: Place, scheme: str) -> None:
    arguments = ("build", f"{scheme}{place.root}/caf\udce9.parquet", *EMBEDDED, "--out", place.out)
    assert_refused(place, arguments, CORPUS, r"caf\\xe9.parquet is not UTF-8; rename the file")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("build", "{root}/good", *EMBEDDED, "--out", "{root}/caf\udce9"), OPTIONS),
        (("build", "{root}/good", *EMBEDDED, "--factory", "\udce9", "--out", "{root}/o"), OPTIONS),
        (("search", "{root}/out", "--like", "\udce9"), CORPUS),
    ],
)  # fmt: skip
def test_an_argument_that_is_not_utf8(place: Place, arguments: tuple[str], status: int) -> None:
    asked = tuple(each.replace("{root}", str(place.root)) for each in arguments)
    assert_refused(place, asked, status, r"no UTF-8 text|udce9")


def test_queries_cannot_come_from_a_model_of_another_width(place: Place, tiny_model: Path) -> None:
    arguments = ("build", place.root / "good", *EMBEDDED, "--model", tiny_model, "--out", place.out)
    assert_refused(place, arguments, CORPUS, "6-dim embeddings and .* gives 32")


def test_an_id_column_of_few_values_is_refused(place: Place) -> None:
    rows = 100_000
    languages = pa.array(["de", "en"] * (rows // 2))
    path = place.write(pa.table({"lang": languages, "e": pa.array([[1.0]] * rows)}))
    options: dict[str, Any] = {"embedding_column": "e", "id_column": "lang", "shard_rows": 2000}
    corpus = ParquetCorpus.open(CorpusConfig(sources=(str(path),), **options))
    match = r"^2 ids .* \(such as 'de', 'en'\), in .* leave out --id-column$"
    with pytest.raises(CorpusError, match=match):
        corpus.check_ids()


@pytest.mark.parametrize("name", ["sts", "retrieval", "geometry"])
@pytest.mark.parametrize("path", ["a" * 300, "/a/" + "b/" * 3000])
def test_data_named_by_a_path_that_no_file_can_have(
    place: Place, tiny_model: Path, name: str, path: str
) -> None:
    status, _, stderr = run("eval", name, path, "--model", tiny_model)
    assert status == OPTIONS
    assert_one_error(stderr, match="is longer than a path can be")
    place.assert_unharmed()


class _NoSecret(KmsClient):
    def wrap_key(self, key_bytes: bytes, _: str) -> bytes:
        return base64.b64encode(key_bytes)


@pytest.mark.parametrize("role", ["corpus", "queries"])
def test_encrypted_columns_under_a_plain_footer_do_not_end_the_process(
    place: Place, role: str
) -> None:
    path, plain = place.root / "encrypted.parquet", place.root / "plain.parquet"
    texts = pa.table({"_id": ["a"], "text": ["a cat"], "secret": ["x"]})
    pq.write_table(texts, plain)
    keys = CryptoFactory(lambda _: _NoSecret()).file_encryption_properties(
        KmsConnectionConfig(),
        EncryptionConfiguration(
            footer_key="a", column_keys={"a": ["secret"]}, plaintext_footer=True,
            double_wrapping=False,
        ),
    )  # fmt: skip
    with pq.ParquetWriter(path, texts.schema, encryption_properties=keys) as writer:
        writer.write_table(texts)
    corpus, labels = (path, []) if role == "corpus" else (plain, ["--queries", path])
    labels += ["--qrels", plain] if labels else []
    command = process("build", corpus, "--text-column", "text", "--out", place.root / "o", *labels)
    _, stderr = command.communicate(timeout=100)
    assert command.returncode == CORPUS, stderr
    assert_one_error(stderr, match="encrypted.parquet is not a readable Parquet file .*decrypt")


QUERIES = ("--queries", "q.parquet", "--embedding-column", "e", "--run")
SEARCHES: dict[str, tuple[tuple[Any, ...], int, str]] = {
    "nothing asked": ((), OPTIONS, "missing: --queries or --like or TEXT"),
    "two things asked": (("text", "--like", "d1"), OPTIONS, "one of"),
    "text without an encoder": (("text",), OPTIONS, "built from an embedding column"),
    "empty text without an encoder": (("",), OPTIONS, ""),
    "run without queries": (("--like", "d1", "--run", "r.trec"), OPTIONS, "--run needs --queries"),
    "run of no format": ((*QUERIES, "r.csv"), OPTIONS, "r.csv names no run format"),
    "run in a bucket": ((*QUERIES, "s3://b/r.trec"), OPTIONS, "a file of this machine"),
    "run in no folder": ((*QUERIES, "gone/r.trec"), DISK, "cannot write .*gone"),
    "run onto a folder": ((*QUERIES, "folder.trec"), DISK, "cannot write .*folder.trec"),
    "run onto the queries": (
        (*QUERIES, "./q.parquet"),
        OPTIONS,
        "is the file of the queries; name",
    ),
    "no column": (("--queries", "q.parquet", "--run", "r.trec"), OPTIONS, "--embedding-column"),
    "ids twice": ((*QUERIES, "r.trec", "--id-column", "same"), CORPUS, "more than once"),
}


@pytest.mark.parametrize("name", list(SEARCHES))
def test_a_search_that_cannot_be_answered(
    place: bad_input.Place, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options, status, match = SEARCHES[name]
    queries = pa.table({"e": list(bad_input.numbers(3, rows=2)), "same": ["q", "q"]})
    pq.write_table(queries, place.root / "q.parquet")
    (place.root / "folder.trec").mkdir()
    monkeypatch.chdir(place.root)
    bad_input.assert_refused(place, ("search", place.out, *options), status, match)
    assert not list(place.root.glob("r.*"))


@pytest.fixture(scope="module")
def text_index(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    root = tmp_path_factory.mktemp("texts")
    pq.write_table(table(), root / "c.parquet")
    arguments = ("--text-column", "text", "--model", tiny_model, "--k", 3, "--out", root / "out")
    assert run("build", root / "c.parquet", *arguments)[0] == 0
    return root / "out"


def test_another_encoder_than_the_one_of_the_index(
    tmp_path: Path, text_index: Path, tiny_model: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    status, _, stderr = run("search", text_index, "the cat", "--model", other)
    assert status == ENCODER
    assert_one_error(stderr, match="built with .*gives other embeddings")
    assert run("search", text_index, "the cat", "--model", tiny_model)[0] == 0


def test_a_blank_query(text_index: Path) -> None:
    status, _, stderr = run("search", text_index, "  ")
    assert status == OPTIONS
    assert_one_error(stderr, match="a query is blank")


def test_a_damaged_store_without_a_corpus_to_mend_it_from(place: Place) -> None:
    path = next((place.out / "store").rglob("embeddings.safetensors"))
    flip(path, -1)
    arguments = ("build", "--store", place.out / "store", "--k", 2, "--out", place.out)
    assert_refused(place, arguments, ARTIFACT, "damaged; run the same encode or build with the")


@pytest.mark.parametrize("store", ["gone", "good"])
def test_a_store_that_is_none(place: Place, store: str) -> None:
    arguments = ("build", "--store", place.root / store, "--out", place.out)
    assert_refused(place, arguments, ARTIFACT, "holds no store of embeddings")


def test_a_store_of_two_corpora_asks_which(place: Place) -> None:
    corpus = place.write(
        table(id=[f"x{i}" for i in range(ROWS)], e=list(numbers(4))), "b/b.parquet"
    )
    store = place.out / "store"
    bad_input.succeed("encode", corpus, *EMBEDDED, "--store", store)
    arguments = ("build", "--store", store, "--k", 2, "--out", place.out)
    assert_refused(place, arguments, ARTIFACT, "2 corpora .*good.*name the corpus")
