"""Gates: sound versions pass them, whatever the index, and each kind of damage is caught by one."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.builds import build, write_rows
from whiten_index import EmbeddingStore, open_index
from whiten_index.errors import CorpusError
from whiten_index.index.factory import inner_of
from whiten_index.index.library import INDEX, load_faiss
from whiten_index.index.ondisk_ivf import IVF_DATA
from whiten_index.pipeline.encode import EncodeReport
from whiten_index.pipeline.gates import run_gates
from whiten_index.pipeline.query_files import CanaryFile
from whiten_index.pipeline.shard_encoding import Counts
from whiten_index.pipeline.update_config import GateConfig
from whiten_index.progress import Progress, Stages
from whiten_index.versions.bundle import open_unsealed
from whiten_index.versions.documents import write_documents
from whiten_index.versions.published import DOCUMENTS

DIM, K, ROWS = 24, 12, 1500


def clustered() -> np.ndarray:
    """Rows around forty topics, thirty of them one and the same row."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(40, DIM))
    made = centres[rng.integers(0, 40, ROWS)] + 0.4 * rng.normal(size=(ROWS, DIM))
    made[100:130] = made[100:101]
    return made.astype(np.float32)


class Version:
    """A built version whose files may be changed, and its gates."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.sealed = open_index(place / "out").bundle
        self.folder, self.fields = self.sealed.folder, dict(self.sealed.manifest)
        self.store = EmbeddingStore.open(place / "out" / "store")
        self.record = self.store.corpus()

    def gates(self, config: GateConfig | None = None, **options: Any) -> dict[str, Any]:
        candidate = open_unsealed(self.folder, self.fields)
        if "whitening" in options:
            candidate = replace(candidate, whitening=options.pop("whitening"))
        encoded = EncodeReport(self.store, self.record, Counts(), Stages(Progress()))
        found = run_gates(candidate, encoded, config=config or GateConfig(), **options)
        assert [gate.name for gate in found] == ["counts", "codes", "canaries", "size"]
        json.dumps([gate.to_json() for gate in found], allow_nan=False)
        assert all(gate.passed == (not gate.why) for gate in found)
        return {gate.name: gate for gate in found}

    def failing(self, *args: Any, **options: Any) -> dict[str, str]:
        """Return gate -> why, of those that were not passed."""
        gates = self.gates(*args, **options)
        return {name: gate.why for name, gate in gates.items() if not gate.passed}

    def change_index(self, change: Callable[[Any], Any]) -> None:
        """Change FAISS's index proper, or return another, and write the file."""
        faiss = load_faiss()
        index = faiss.read_index(str(self.folder / INDEX))
        other = change(inner_of(index))
        if other is not None:
            index.index = other
            index.ntotal = other.ntotal
        faiss.write_index(index, str(self.folder / INDEX))

    def change_documents(self, change: Callable[[pa.Table], pa.Table]) -> None:
        path = self.folder / DOCUMENTS
        table = pa.ipc.open_file(pa.OSFile(str(path))).read_all()
        path.unlink()
        write_documents(path, [change(table)])


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return ``built(factory)``: the folder of a build, made once."""
    made: dict[Any, Path] = {}

    def built(factory: str, **options: Any) -> Path:
        key = (factory, *sorted(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("built")
            path = write_rows(made[key] / "c.parquet", clustered())
            build(made[key] / "out", path, factory=factory, **{"k": K, **options})
        return made[key]

    return built


@pytest.fixture
def version(originals: Callable[..., Path], tmp_path: Path) -> Callable[..., Version]:
    """Return ``version(factory)``: a copy of a build, to be damaged."""

    def copied(factory: str = "Flat", **options: Any) -> Version:
        place = tmp_path / "copy"
        shutil.copytree(originals(factory, **options), place)
        return Version(place)

    return copied


FACTORIES = [
    *("Flat", "SQ8", "SQfp16", "PQ6", "PQ12x4fs", "RaBitQ", "HNSW16", "HNSW16_SQ8", "PRQ2x2x4"),
    *("IVF16,Flat", "IVF16,SQ8", "IVF16,PQ6x4fs", "IVF16,RaBitQ"),
]


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_sound_version_passes(version, factory):
    made = version(factory)
    assert made.failing(base_rows=ROWS - 7, expected_rows=ROWS) == {}
    found = made.gates()["canaries"].found
    assert found["sampled"] == 200
    assert found["hits_missing"] == 0


def test_recall_is_that_of_brute_force(version):
    made = version("IVF16,SQ8")
    made.change_index(lambda inner: setattr(inner, "nprobe", 2))
    gate = made.gates(GateConfig(canaries=60, canary_recall=0), seed=5)["canaries"]
    rows = np.sort(np.random.default_rng(5).choice(ROWS, 60, replace=False))
    raw = clustered()
    values, vectors = np.linalg.eigh(np.cov(raw.astype(float).T))
    exact = (raw - raw.mean(axis=0)) @ (vectors[:, ::-1][:, :K] * values[::-1][:K] ** -0.5)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    cosines = exact[rows] @ exact.T
    cosines[np.arange(60), rows] = -np.inf
    tenth = np.sort(cosines, axis=1)[:, -10]
    # The file was changed after the bundle was opened: set the same here.
    inner_of(made.sealed.index).nprobe = 2
    _, near = made.sealed.search(raw[rows], 11)
    hits = 0
    for own, least, some, cosine in zip(rows, tenth, near, cosines, strict=True):
        others = [row for row in some if row != own][:10]
        hits += int((cosine[others] >= least - 1e-5).sum())
    assert 0.3 < gate.found["recall"] < 1
    assert gate.found["recall"] == pytest.approx(hits / 600, abs=1 / 600)


class TestCounts:
    def test_swapped_ids(self, version):
        made = version()
        made.change_documents(swap_ids)
        failing = made.failing()
        assert failing == {"counts": "2 rows have the id of another document"}

    def test_documents_lost(self, version):
        made = version()
        made.change_documents(lambda table: table.slice(0, ROWS - 1))
        failing = made.failing()
        assert (
            f"the documents file holds {ROWS - 1} rows, and the corpus has {ROWS}"
            in (failing["counts"])
        )
        assert "not tried" in failing["canaries"]

    @pytest.mark.parametrize(
        ("counts", "why"),
        [
            ({"reused": 3}, f"{ROWS} rows were read, and {ROWS + 3} encoded, reused or skipped"),
            ({"skipped": {"blank": 2}}, f"{ROWS} rows were read, and {ROWS + 2} encoded"),
            (
                {"read": ROWS - 5, "encoded": ROWS - 5},
                f"{ROWS - 5} rows were encoded or reused, and the corpus has {ROWS}",
            ),
        ],
    )
    def test_rows_that_do_not_add_up(self, version, counts, why):
        made = version()
        made.fields["counts"] = {**made.fields["counts"], **counts}
        assert why in made.failing()["counts"]


def swap_ids(table: pa.Table) -> pa.Table:
    ids = table["id"].to_pylist()
    ids[3], ids[700] = ids[700], ids[3]
    return table.set_column(0, "id", pa.array(ids, table["id"].type))


def codes_of(inner: Any) -> np.ndarray:
    """Return the codes (n, bytes) of flat codes, to be changed in place."""
    faiss = load_faiss()
    size = inner.ntotal * inner.code_size
    return faiss.rev_swig_ptr(inner.codes.data(), size).reshape(inner.ntotal, -1)


class TestCodes:
    @pytest.mark.parametrize("factory", ["Flat", "SQfp16", "HNSW16"])
    def test_not_a_number(self, version, factory):
        made = version(factory)

        def broken(inner: Any) -> None:
            faiss = load_faiss()
            holder = faiss.downcast_index(getattr(inner, "storage", inner))
            # All bits set are NaN in every float format.
            codes_of(holder)[[5, 9], :4] = 255

        made.change_index(broken)
        failing = made.failing()
        assert failing["codes"] == "the codes of 2 rows hold NaN or infinity"
        assert "not tried" in failing["canaries"]

    def test_a_row_lost_and_another_there_twice(self, version):
        made = version("IVF16,SQ8")
        made.change_index(put_a_row_twice)
        why = made.failing()["codes"]
        assert f"1 of {ROWS} rows are in none of the index's lists" in why
        assert "1 entries of the index's lists are no row, or one twice" in why

    @pytest.mark.parametrize("damage", [False, True])
    def test_lists_in_a_file_of_their_own(self, tmp_path, damage):
        path = write_rows(tmp_path / "c.parquet", clustered())
        # Below what the lists take, so that they stay on disk.
        build(tmp_path / "out", path, factory="IVF16,Flat", k=K, memory_budget="80KB")
        made = Version(tmp_path)
        assert (made.folder / IVF_DATA).exists()
        if damage:
            codes = np.fromfile(made.folder / IVF_DATA, dtype=np.uint8)
            codes[: 4 * K] = 255
            codes.tofile(made.folder / IVF_DATA)
            assert made.failing()["codes"] == "the codes of 1 rows hold NaN or infinity"
        else:
            gates = made.gates()
            assert all(gate.passed for gate in gates.values())
            assert gates["codes"].found["decoded"]


def put_a_row_twice(inner: Any) -> None:
    """Let the first entry of a list be the row of the second."""
    kept = inner.invlists
    place = next(i for i in range(inner.nlist) if kept.list_size(i) > 1)
    ids = load_faiss().rev_swig_ptr(kept.get_ids(place), kept.list_size(place))
    ids[0] = ids[1]


class TestCanaries:
    @pytest.mark.parametrize("factory", ["SQ8", "PQ6", "RaBitQ", "HNSW16"])
    def test_shuffled_rows_of_every_kind(self, version, factory):
        made = version(factory)

        def shuffled(inner: Any) -> None:
            holder = load_faiss().downcast_index(getattr(inner, "storage", inner))
            codes = codes_of(holder)
            codes[:] = codes[::-1].copy()

        made.change_index(shuffled)
        assert set(made.failing()) == {"canaries"}

    def test_a_row_behind_longer_ones_is_missed_if_lost(self, version):
        made = version(similarity="dot", whiten="pca")
        assert made.failing() == {}

        def lose(inner: Any) -> None:
            vectors = codes_of(inner).view(np.float32)
            scores = vectors @ vectors.T
            nearer = (scores > np.diag(scores)[:, None]).sum(axis=1)
            vectors[(nearer > 0) & (nearer < 5)] = 0

        made.change_index(lose)
        assert "sampled rows do not find themselves" in made.failing()["canaries"]

    def test_a_store_that_lost_a_shard_fails_the_gate_and_raises_nothing(self, version):
        made = version()
        for shard in made.store.folder.glob("segments/*"):
            shutil.rmtree(shard)
        assert "could not be tried" in made.failing()["canaries"]


class TestSize:
    def test_bounds_are_on_the_rows_before(self, version):
        made = version()
        assert made.failing(base_rows=int(ROWS / 0.8)) == {}
        why = made.failing(base_rows=int(ROWS / 0.8) + 1)["size"]
        assert "20.0% fewer than the 1,876 before, and --max-shrink is 0.2" in why
        assert made.failing(base_rows=ROWS // 2) == {}
        why = made.failing(base_rows=ROWS // 2 - 1)["size"]
        assert "too many after the 749 before: --max-growth is 1" in why
        assert made.failing(GateConfig(max_growth=100), base_rows=20) == {}
        assert made.failing(GateConfig(max_shrink=1), base_rows=10**9) == {}


class TestCanaryFile:
    def write(self, path: Path, **columns: Any) -> Path:
        path = path / "canaries.parquet"
        pq.write_table(pa.table(columns), path)
        return path

    def test_embeddings_with_what_they_must_find(self, version, tmp_path):
        made = version("IVF16,SQ8")
        rows = clustered()[[3, 500, 1200]]
        path = self.write(
            tmp_path, embedding=list(rows), expected=pa.array([[3], None, [1200, 1200]])
        )
        canaries = CanaryFile.read(path, dim=DIM)
        assert (len(canaries), canaries.texts) == (3, None)
        gate = made.gates(canaries=canaries)["canaries"]
        assert gate.passed
        assert gate.found["queries"] == 3
        assert gate.found["query_recall"] > 0.9
        assert (gate.found["expected"], gate.found["expected_found"]) == (2, 2)

    @pytest.mark.parametrize(
        ("expected", "there"), [(700, ""), (99_999, ", which the index does not hold")]
    )
    def test_a_document_that_is_not_among_the_nearest(self, version, tmp_path, expected, there):
        path = self.write(tmp_path, embedding=list(clustered()[:2]), expected=[0, expected])
        why = version().failing(canaries=CanaryFile.read(path, dim=DIM))["canaries"]
        assert why == (
            "1 of 2 documents expected are not among the 10 nearest, the first being "
            f"'{expected}' of row 2 of the canary file{there}"
        )

    @pytest.mark.parametrize(
        ("columns", "why"),
        [
            ({"query": ["a"]}, "neither column text and embedding.*; its columns are query"),
            ({"text": ["a"], "embedding": [[1.0] * DIM]},
                "both columns .*; its columns are text, emb"),
            ({"text": pa.array([], pa.string())}, "holds no rows"),
            ({"text": ["a", " "]},
                "row 1 .*has ' ' as text, expected a text that is not blank; mend"),
            ({"text": ["a", None]}, "expected a text"),
            ({"text": [1, 2]}, "expected a text"),
            ({"embedding": [[1.0] * 3]}, f"expected {DIM} numbers, as the embeddings of the index"),
            ({"embedding": [[1.0] * DIM, [np.nan] * DIM]},
                "numbers that float32 can be searched with"),
            ({"embedding": [[1e300] * DIM]}, "numbers that float32 can be searched with"),
            ({"embedding": [[1.0] * DIM, [1.0]]}, f"expected {DIM} numbers"),
            ({"text": ["a"], "expected": [1.5]},
                "has 1.5 as expected, expected ids that are strings"),
            ({"text": ["a"], "expected": [[None]]}, "expected ids that are strings or integers"),
            ({"text": ["a"], "expected": [True]}, "expected ids that are strings or integers"),
            ({"text": ["a"], "expected": pa.array([None], pa.string())}, "names no document"),
            ({"text": ["a"] * 10_001}, "holds 10001 queries.*keep 10000 at most"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_used_is_refused(self, tmp_path, columns, why):
        with pytest.raises(CorpusError, match=why):
            CanaryFile.read(self.write(tmp_path, **columns), dim=DIM)
