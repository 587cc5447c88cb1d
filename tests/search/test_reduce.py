"""The query half: a transform with its encoder's identity, read from an index or its own folder."""

import ctypes
import errno
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers import tiny_models
from tests.helpers.bad_input import run_python
from tests.helpers.builds import build, build_texts, random_rows, write_rows
from tests.helpers.flipped import flip
from whiten_index import BuildConfig, PushConfig, QueryTransform, build_index, load_encoder
from whiten_index.artifacts.manifest import write_manifest
from whiten_index.errors import ArtifactError, ConfigError, StorageError
from whiten_index.integrations.lazy import name_of, open_transform
from whiten_index.integrations.sentence_transformers import export_model
from whiten_index.vectordb.push_source import PushSource
from whiten_index.versions.published import read_published
from whiten_index.whitening.transform import Whitening

ROWS, K = 120, 6
PROMPTS = {"document": "the cat ", "query": "the king sang "}


def texts_of(words: tuple[str, ...], count: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(words, size=n)) for n in random.integers(2, 12, count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a prompt for documents and another one for queries."""
    made = tiny_models.bert(tmp_path_factory.mktemp("models") / "bert")
    return tiny_models.add_modules(made, "mean", tiny_models.NORMALIZE, prompts=PROMPTS)


@pytest.fixture(scope="module")
def documents(tiny_words: tuple[str, ...]) -> list[str]:
    return texts_of(tiny_words, ROWS, 0)


@pytest.fixture(scope="module")
def queries(tiny_words: tuple[str, ...]) -> list[str]:
    return texts_of(tiny_words, 9, 1)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, folder: Path, documents: list[str]) -> Path:
    """An index of texts. Do not write to it."""
    root = tmp_path_factory.mktemp("texts")
    ids = [f"d{i}" for i in range(ROWS)]
    pq.write_table(pa.table({"id": ids, "text": documents}), root / "c.parquet")
    options = {"id_column": "id", "store_dtype": "float32", "k": K}
    return build_texts(root / "out", root / "c.parquet", folder, **options).out


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of an embedding column, which names no encoder. Do not write to it."""
    root = tmp_path_factory.mktemp("columns")
    build(root / "out", write_rows(root / "c.parquet", random_rows()))
    return root / "out"


def indexes_of_one_corpus(root: Path, documents: list[str]) -> list[Path]:
    """Return indexes of equal documents: by texts, then by a column; of each, queries differ.

    Only the query prompt or, of the column, the model of queries does.
    """
    models = []
    for number in range(2):
        model = tiny_models.bert(root / f"model{number}")
        tiny_models.add_modules(model, "mean")
        models.append(model)
    config = models[1] / "config.json"
    config.write_text(config.read_text().replace("1e-12", "1e-6"))
    embeddings = load_encoder(str(models[0]), device="cpu").encode(documents)
    array = pa.FixedSizeListArray.from_arrays(embeddings.ravel(), embeddings.shape[1])
    pq.write_table(pa.table({"id": documents, "text": documents, "e": array}), root / "c.parquet")
    of_texts = {"text_columns": ("text",), "device": "cpu"}
    asked: list[dict[str, Any]] = [
        {**of_texts, "model": str(models[0]), "query_prompt": prompt} for prompt in ("", "the cat ")
    ]
    asked += [
        {"embedding_column": "e", "model": str(model), "query_prompt": prompt, "device": "cpu"}
        for model in models
        for prompt in ("", "the cat ")
    ]
    for number, options in enumerate(asked):
        build_index(
            BuildConfig(
                corpus=(str(root / "c.parquet"),), out=str(root / f"index{number}"), k=K,
                id_column="id", whiten="whitening", store_dtype="float32", **options,
            )
        )  # fmt: skip
    return [root / f"index{number}" for number in range(len(asked))]


def test_other_vectors_of_queries_have_another_digest_and_name(
    tmp_path: Path, documents: list[str], queries: list[str]
) -> None:
    places = indexes_of_one_corpus(tmp_path, documents)
    transforms = [open_transform(place, device="cpu") for place in places]
    vectors = [transform.encode_queries(queries) for transform in transforms]
    for kind in (slice(0, 2), slice(2, 6)):
        # All that documents are encoded and reduced by is the same: no row need be pushed again.
        sources = [PushSource.open(PushConfig(index=str(p), to="x.npy")) for p in places[kind]]
        assert len({source.pushed().transform for source in sources}) == 1
        for first in range(*kind.indices(6)):
            for second in range(first + 1, kind.stop):
                assert np.abs(vectors[first] - vectors[second]).max() > 1e-6
    assert len({transform.query_digest for transform in transforms}) == 6
    assert len(set(map(name_of, transforms))) == 6
    at = tmp_path / "here"
    QueryTransform.of(places[0]).save(at)
    written = pickle.dumps(open_transform(at, device="cpu"))
    QueryTransform.of(places[1]).save(at)
    np.testing.assert_array_equal(pickle.loads(written).encode_queries(queries), vectors[0])


@pytest.mark.parametrize("name", ["whitening.safetensors", "manifest.json"])
def test_a_changed_byte_is_noticed(index: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(index, tmp_path / "copy"))
    saved = QueryTransform.of(copy).save(tmp_path / "saved")
    (place,) = (copy / "versions").iterdir()
    for file in (place / name, saved / name):
        flip(file, -3)
    with pytest.raises(ArtifactError):
        QueryTransform.of(copy)
    with pytest.raises(ArtifactError, match=r"damaged|cannot be read"):
        QueryTransform.load(saved)


def test_a_transform_of_another_folder_is_noticed(index: Path, tmp_path: Path) -> None:
    saved = [QueryTransform.of(index, k=k).save(tmp_path / f"{k}") for k in (K, K - 1)]
    shutil.copy(saved[1] / "whitening.safetensors", saved[0])
    # As if it were replaced between the check and the reading.
    fields = json.loads((saved[0] / "manifest.json").read_text())
    fields["files"] = json.loads((saved[1] / "manifest.json").read_text())["files"]
    write_manifest(saved[0] / "manifest.json", fields)
    with pytest.raises(ArtifactError, match="its transform is another one"):
        QueryTransform.load(saved[0])


@pytest.mark.parametrize("export", [QueryTransform.save, export_model])
def test_what_is_not_ours_is_not_replaced(index: Path, tmp_path: Path, export: Any) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    copy = shutil.copytree(index, tmp_path / "index")
    transform = QueryTransform.of(index)
    for name in ("own", "index", "file"):
        with pytest.raises(ConfigError, match="holds something else than"):
            export(transform, tmp_path / name)
    assert (tmp_path / "own" / "notes.txt").read_text() == "mine"
    read_published(Path(copy)).check()
    assert {path.name for path in tmp_path.iterdir()} == {"own", "file", "index"}


@pytest.mark.parametrize("export", [QueryTransform.save, export_model])
@pytest.mark.parametrize("mine", ["notes.md", ".git/HEAD", "1_Pooling/mine/x", "empty/"])
def test_what_lies_among_our_files_is_not_lost(
    index: Path, tmp_path: Path, export: Any, mine: str
) -> None:
    transform, folder = QueryTransform.of(index), tmp_path / "made"
    export(transform, folder)
    export(transform, folder)
    place = folder / mine
    if mine.endswith("/"):
        place.mkdir()
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("mine")
    before = {path: path.is_dir() or path.read_bytes() for path in folder.rglob("*")}
    with pytest.raises(ConfigError, match=f"holds {mine.rstrip('/')} beside .* would be lost"):
        export(transform, folder)
    assert before == {path: path.is_dir() or path.read_bytes() for path in folder.rglob("*")}
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_no_temporary_folder_is_put_in_place(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file in the new folder, whose removal failed once."""
    transform, real = QueryTransform.of(index), Whitening.save

    def save(self: Whitening, path: Path) -> None:
        real(self, path)
        (path.parent / f".tmp-config.json~{8 * '0'}-{12 * '0'}").mkdir()

    monkeypatch.setattr(Whitening, "save", save)
    for _ in range(2):
        transform.save(tmp_path / "made")
    assert not list((tmp_path / "made").glob(".tmp-*"))


def test_what_comes_while_a_folder_is_written_is_not_lost(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transform, place = QueryTransform.of(index), tmp_path / "made"
    real = Whitening.save

    def save(*arguments: Any) -> None:
        real(*arguments)
        place.mkdir()
        (place / "notes.txt").write_text("mine")

    monkeypatch.setattr(Whitening, "save", save)
    with pytest.raises(ConfigError, match="holds something else than"):
        transform.save(place)
    assert (place / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(errno.ENOSPC, "no space"), StorageError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_the_old_folder_stays_where_the_new_one_cannot_be_put(
    index: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    raised: type[BaseException],
) -> None:
    transform, folder = QueryTransform.of(index, k=5), tmp_path / "made"
    transform.save(folder)
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    # A system that cannot swap two folders in one step.
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: object())
    with pytest.raises(raised):
        transform.truncate(3).save(folder)
    monkeypatch.undo()
    assert QueryTransform.load(folder).k == 5
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_client_needs_neither_torch_nor_faiss(columns: Path, tmp_path: Path) -> None:
    QueryTransform.of(columns).save(tmp_path / "saved")
    script = (
        "import sys; from whiten_index import QueryTransform;"
        f"t = QueryTransform.load({str(tmp_path / 'saved')!r});"
        "print(t.reduce([[1.0] * t.dim]).shape, *({'torch', 'transformers', 'faiss'} & "
        "set(sys.modules)))"
    )
    assert run_python("-c", script) == f"(1, {K})\n"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((2, 5)), r"takes \(n, 12\) raw embeddings, .* these have shape \(2, 5\)"),
        (np.zeros(12), r"one a row .* shape \(12,\)"),
        (np.r_[np.ones((3, 12)), np.full((1, 12), np.nan)], "embeddings hold NaN or infinity"),
        (np.full((1, 12), -1e160), r"embeddings hold .* a number above 1e\+150"),
        ([["a"] * 12], r"embeddings are \(n, 12\) numbers"),
        ([["1.5"] * 12], r"embeddings are \(n, 12\) numbers, and these are of type <U3"),
        (np.ones((1, 12), dtype=np.complex64), "are of type complex64; convert them to float32"),
        (np.ones((1, 12), dtype="datetime64[s]"), r"are of type datetime64\[s\]"),
        (np.ones((1, 12), dtype="timedelta64[s]"), r"are of type timedelta64\[s\]"),
        (np.ones((1, 12), dtype=object), "are of type object"),
        (np.ma.masked_all((1, 12)), "these are masked; convert them to float32"),
        (np.zeros((2, K)), rf"not reduced; these have shape \(2, {K}\)"),
        ([[1.0] * 12, [1.0]], r"embeddings are \(n, 12\) numbers"),
    ],
)
def test_what_is_no_embedding_is_refused(columns: Path, rows: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QueryTransform.of(columns).reduce(rows)
