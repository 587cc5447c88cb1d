"""``--whiten auto`` from corpus to index: what it chooses by, what it keeps, what it refuses.

The model is random, so what is chosen says nothing; that it is what the scores say, and that the
scores are those of the definition, does.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count as counting
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from safetensors.numpy import load_file
from scipy.stats import rankdata, spearmanr

from tests import tiny_models
from whiten_index import BuildConfig, build_index, encode_corpus, open_index
from whiten_index.build import BuildReport
from whiten_index.choosing import Wishes, choose_setting, labelled
from whiten_index.choosing import sample as sampling
from whiten_index.cli import cli
from whiten_index.encode import encode_shards, open_corpus
from whiten_index.encoding import Encoder
from whiten_index.errors import (
    ConfigError,
    CorpusError,
    OutputError,
    WhitenIndexError,
    WhiteningError,
)
from whiten_index.fit import possible_widths
from whiten_index.index import choose_factory
from whiten_index.moments import Moments
from whiten_index.pieces import cut_pieces
from whiten_index.progress import Silent, Stages
from whiten_index.store import EmbeddingStore
from whiten_index.whitening import Whitening, WhiteningConfig

Array = NDArray[np.float64]
ROWS, DIM = 260, tiny_models.DIM
OPTIONS, CORPUS = 2, 3


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    faiss.omp_set_num_threads(1)


# --------------------------------------------------------------------------- a corpus of topics


def sentence(rng: np.random.Generator, topic: NDArray[np.str_]) -> str:
    return " ".join(rng.choice(topic, size=rng.integers(6, 9))) + "."


def document(rng: np.random.Generator, sentences: int = 4) -> str:
    """Return some sentences of a few words that recur, so that they resemble each other."""
    topic = rng.choice(tiny_models._WORDS, 6, replace=False)
    return " ".join(sentence(rng, topic) for _ in range(sentences))


def documents(rows: int = ROWS, seed: int = 0, sentences: int = 4) -> list[str]:
    rng = np.random.default_rng(seed)
    return [document(rng, sentences) for _ in range(rows)]


def parquet(path: Path, **columns: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return str(path)


@dataclass(frozen=True)
class Place:
    """A corpus and a model; its store is filled, and the transform chosen once."""

    root: Path
    model: Path
    texts: list[str]

    @property
    def corpus(self) -> str:
        return str(self.root / "c.parquet")

    @property
    def store(self) -> Path:
        return self.root / "store"

    def build(self, out: str | Path, **options: Any) -> BuildReport:
        given = {
            "corpus": (self.corpus,),
            "out": str(self.root / out),
            "store": str(self.store),
            "model": str(self.model),
            "text_columns": ("text",),
            "id_column": "id",
            "shard_rows": 100,
            **options,
        }
        return build_index(BuildConfig(**given))

    def arguments(self, *more: Any) -> list[Any]:
        columns = ("--text-column", "text", "--id-column", "id")
        places = ("--store", self.store, "--out", self.root / "told", "--model", self.model)
        return ["build", self.corpus, *columns, *places, "--shard-rows", 100, *more]

    def forget(self) -> None:
        """Take what was chosen, and what it was chosen on, out of the store."""
        for kind in ("choices", "samples"):
            for path in self.store.glob(f"*/{kind}"):
                shutil.rmtree(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_models.bert(tmp_path_factory.mktemp("models") / "bert")
    return tiny_models.add_modules(folder, max_length=tiny_models.POSITIONS)


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Place, BuildReport]:
    """A place and the report of its first build. Do not write to it; ``place`` is a copy."""
    root = tmp_path_factory.mktemp("chosen")
    texts = documents()
    ids = [f"d{i}" for i in range(ROWS)]
    parquet(root / "c.parquet", id=ids, text=texts, weight=list(range(1, ROWS + 1)))
    place = Place(root, model, texts)
    return place, place.build("first")


@pytest.fixture
def place(tmp_path: Path, chosen: tuple[Place, BuildReport]) -> Place:
    """A copy to write to; its corpus is at another path, so that only texts tell it is the same."""
    shutil.copytree(chosen[0].root, tmp_path / "place")
    return Place(tmp_path / "place", chosen[0].model, chosen[0].texts)


def stages(report: BuildReport) -> set[str]:
    return set(report.encoded.stages.seconds)


def choice(report: BuildReport) -> dict[str, Any]:
    found = report.manifest["choice"]
    assert isinstance(found, dict)
    return found


def setting_of(row: dict[str, Any]) -> tuple[int, float, bool]:
    return row["k"], row["exponent"], row["center"]


def assert_applied(report: BuildReport) -> None:
    """The transform of the index is the one that was chosen."""
    assert setting_of(report.manifest["whitening"]) == setting_of(choice(report)["chosen"])
    folder = report.out / "versions" / report.version
    whitening = Whitening.load(folder / "whitening.safetensors")
    assert (whitening.k, whitening.exponent, whitening.center) == setting_of(
        choice(report)["chosen"]
    )


def assert_same_choice(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Pieces encoded again may differ by float16's last bit, and ranks of near ties with it."""
    assert {**found, "candidates": []} == {**expected, "candidates": []}
    ours, theirs = found["candidates"], expected["candidates"]
    assert [setting_of(row) for row in ours] == [setting_of(row) for row in theirs]
    for name in ("score", "error"):
        assert [r[name] for r in ours] == pytest.approx([r[name] for r in theirs], abs=1e-3)


def run(*arguments: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def assert_refused(status: int, match: str, *arguments: Any) -> None:
    found, stdout, stderr = run(*arguments)
    assert found == status, stderr or stdout
    last = stderr.splitlines()[-1]
    assert last.startswith("Error: "), stderr
    assert re.search(match, last), last


def shards(folder: Path) -> list[Path]:
    return list(folder.rglob("shards/*/*"))


def names_of(report: BuildReport) -> list[str]:
    """Return the id of each row of the corpus."""
    store, parts = report.encoded.store, report.encoded.record.parts
    tables = [store.documents(part) for part in parts if part.rows]
    return [str(name) for table in tables for name in table["id"].to_pylist()]


def raw_embeddings(report: BuildReport) -> Array:
    store = report.encoded.store
    parts = [part.shard for part in report.encoded.record.parts if part.rows]
    return np.concatenate([store.embeddings(shard) for shard in parts]).astype(np.float64)


def vectors_of(fitted_on: Moments, row: dict[str, Any], *matrices: Array, **options: Any) -> Any:
    k, exponent, center = setting_of(row)
    config = WhiteningConfig(k=k, exponent=exponent, center=center, **options)
    whitening = Whitening.fit(fitted_on, config)
    for matrix in matrices:
        vectors = whitening.apply(matrix)
        yield vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def reciprocal_ranks(queries: Array, candidates: Array) -> Array:
    """1/rank of row i for query i."""
    ranks = rankdata(-(queries @ candidates.T), axis=1, method="average")
    return 1 / ranks[np.arange(len(queries)), np.arange(len(queries))]


def kept_sample(place: Place) -> dict[str, Array]:
    (path,) = place.store.glob("*/samples/*.safetensors")
    return load_file(path)


def assert_scored_by_pieces(
    report: BuildReport, sample: dict[str, Array], fitted_on: Moments, **options: Any
) -> None:
    """Each candidate's score is that of its own whitening, by brute force and in float64."""
    raw = raw_embeddings(report)
    around = raw[sample["candidates"]]
    for row in choice(report)["candidates"]:
        matrices = (sample[name] for name in ("sentences", "others", "windows"))
        sentences, others, windows, whole = vectors_of(fitted_on, row, *matrices, around, **options)
        each = (2 * reciprocal_ranks(sentences, others) + reciprocal_ranks(windows, whole)) / 3
        assert row["score"] == pytest.approx(each.mean(), abs=1e-3), row


# --------------------------------------------------------------------------- by pieces


def test_a_corpus_of_texts_is_chosen_by_its_pieces(chosen: tuple[Place, BuildReport]) -> None:
    _, report = chosen
    found = choice(report)
    assert found["rule"] == "pieces"
    assert found["sample"] == ROWS // 2
    assert "one standard error" in found["why"]
    tried = [setting_of(row) for row in found["candidates"]]
    assert len(set(tried)) == len(tried) > 30
    assert setting_of(found["chosen"]) in tried
    assert all(0 <= row["score"] <= 1 and row["error"] >= 0 for row in found["candidates"])
    assert_applied(report)
    assert "encode pieces" in stages(report)


def test_the_rule_can_be_checked_in_the_manifest(chosen: tuple[Place, BuildReport]) -> None:
    """The gentlest within one standard error of its width, the narrowest of those within 3 %."""
    found = choice(chosen[1])
    leaders = {}
    for k in {row["k"] for row in found["candidates"]}:
        rows = [row for row in found["candidates"] if row["k"] == k]
        best = max(row["score"] for row in rows)
        close = [row for row in rows if row["score"] >= best - row["error"] - 1e-12]
        gentlest = min(row["exponent"] for row in close)
        (leaders[k],) = (row for row in rows if row["leads"])
        assert leaders[k] in close
        assert leaders[k]["exponent"] == gentlest
    top = max(row["score"] for row in leaders.values())
    k = min(k for k, row in leaders.items() if row["score"] >= 0.97 * top)
    assert setting_of(found["chosen"]) == setting_of(leaders[k])


def test_scores_are_those_of_whitenings_fitted_without_the_sample(
    chosen: tuple[Place, BuildReport],
) -> None:
    place, report = chosen
    sample, raw = kept_sample(place), raw_embeddings(report)
    rest = Moments.of(np.delete(raw, sample["rows"], axis=0))
    assert_scored_by_pieces(report, sample, rest)


def test_with_unit_input_too(place: Place) -> None:
    report = place.build("out", normalize_input=True)
    sample, raw = kept_sample(place), raw_embeddings(report)
    rest = np.delete(raw, sample["rows"], axis=0)
    rest /= np.linalg.norm(rest, axis=1, keepdims=True)
    assert_scored_by_pieces(report, sample, Moments.of(rest), normalize_input=True)
    assert report.manifest["whitening"]["normalize_input"] is True
    assert_applied(report)


def test_with_weights_too(place: Place) -> None:
    place.forget()
    report = place.build("out", weight_column="weight")
    sample, raw = kept_sample(place), raw_embeddings(report)
    weights = np.arange(1, ROWS + 1) / np.mean(np.arange(1, ROWS + 1))
    rest = np.delete(np.arange(ROWS), sample["rows"])
    assert_scored_by_pieces(report, sample, Moments.of(raw[rest], weights=weights[rest]))


def test_pieces_are_those_of_the_sampled_documents_encoded_as_what_they_stand_for(
    tmp_path: Path, chosen: tuple[Place, BuildReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sentences and windows are queries; what is left of a document is a document."""
    place, cut = chosen[0], []

    def spy(text: str, *arguments: Any, **options: Any) -> Any:
        cut.append((text, cut_pieces(text, *arguments, **options)))
        return cut[-1][1]

    monkeypatch.setattr(sampling, "cut_pieces", spy)
    prompts = {"document_prompt": "passage ", "query_prompt": "query "}
    place.build(tmp_path / "out", store=str(tmp_path / "store"), choose_sample=60, **prompts)
    sample = kept_sample(Place(tmp_path, place.model, place.texts))
    kept = [(text, pieces) for text, pieces in cut if pieces is not None]
    assert len(kept) == len(sample["rows"]) == 60
    assert [place.texts[row] for row in sample["rows"]] == [text for text, _ in kept]
    encoder = Encoder.load(str(place.model), **prompts)
    for name, encode, texts in (
        ("sentences", encoder.encode_queries, [pieces.sentence for _, pieces in kept]),
        ("windows", encoder.encode_queries, [pieces.window for _, pieces in kept]),
        ("others", encoder.encode, [pieces.others for _, pieces in kept]),
    ):
        np.testing.assert_allclose(sample[name], encode(texts), atol=4e-3)
    # Each document once, its own before the others.
    assert sample["candidates"][:60].tolist() == sample["rows"].tolist()
    assert sorted(sample["candidates"]) == list(range(ROWS))


def test_the_sample_is_drawn_by_the_seed(place: Place) -> None:
    def sampled(**options: Any) -> tuple[list[int], dict[str, Any]]:
        shutil.rmtree(place.store)
        report = place.build("out", choose_sample=50, **options)
        return kept_sample(place)["rows"].tolist(), choice(report)

    first = sampled(seed=1)
    assert len(set(first[0])) == 50
    again = sampled(seed=1)
    assert again[0] == first[0]
    assert_same_choice(again[1], first[1])
    assert sampled(seed=2)[0] != first[0]


@pytest.mark.parametrize(
    "wishes",
    [
        {"k": 20},
        {"k": "0.9"},
        {"k": "full"},
        {"exponent": 0.3},
        {"center": False},
        {"center": True, "exponent": 0.0},
        {"k": 7, "exponent": 1.0, "center": False},
        {"floor": 0.1},
        {"floor": 0.1, "k": "full"},
        {"floor": 0.1, "normalize_input": True},
    ],
    ids=lambda wishes: ",".join(f"{name}={value}" for name, value in wishes.items()),
)
def test_what_is_settled_is_not_chosen(place: Place, wishes: dict[str, Any]) -> None:
    report = place.build("out", **wishes)
    assert_applied(report)
    for name in ("k", "exponent", "center"):
        if name in wishes and not isinstance(wishes[name], str):
            tried = {row[name] for row in choice(report)["candidates"]}
            assert tried == {wishes[name]}
    if (share := wishes.get("k")) == "0.9":
        values = np.linalg.eigvalsh(np.cov(raw_embeddings(report).T))[::-1]
        kept = np.cumsum(values) / values.sum()
        assert choice(report)["chosen"]["k"] == np.argmax(kept >= float(share)) + 1
    if "floor" in wishes:
        whitening = report.manifest["whitening"]
        folder = report.out / "versions" / report.version
        values = Whitening.load(folder / "whitening.safetensors").eigenvalues
        # Directions below the floor would be nought in every vector.
        assert values[whitening["k"] - 1] > wishes["floor"] * values[0]


def test_the_index_finds_by_the_chosen_transform(chosen: tuple[Place, BuildReport]) -> None:
    report = chosen[1]
    raw = raw_embeddings(report)
    opened = open_index(report.out)
    queries = opened.encode(["the cat sat on the mat", "king and queen"]).astype(np.float64)
    unit, found = vectors_of(Moments.of(raw), choice(report)["chosen"], queries, raw)
    for hits, cosines in zip(opened.search_embeddings(queries), unit @ found.T, strict=True):
        best = np.argsort(-cosines)[:10]
        assert [hit.row for hit in hits] == best.tolist()
        np.testing.assert_allclose([hit.score for hit in hits], cosines[best], atol=1e-4)


def test_widths_are_tried_from_the_widest_down_to_one_that_loses_3_percent(place: Place) -> None:
    report = place.build("out")
    given = (1, 2, 4, 8, 16, 32)
    moments = Moments.of(raw_embeddings(report))
    wishes = Wishes(widths=given)
    found = choose_setting(report.encoded, moments, wishes, Stages(Silent()))
    scores: dict[int, float] = {}
    for row in found.candidates:
        scores[row.setting.k] = max(row.score, scores.get(row.setting.k, 0))
    tried = sorted(scores, reverse=True)
    assert tuple(tried) == given[::-1][: len(tried)]
    assert 1 < len(tried) < len(given)
    # Each but the last is near the best so far, and the last is not.
    near = [scores[k] >= 0.97 * max(scores[wider] for wider in tried if wider >= k) for k in tried]
    assert near == [True] * (len(tried) - 1) + [False]
    assert found.setting.k > tried[-1]


# --------------------------------------------------------------------------- the corpus meanwhile


def test_a_corpus_that_changed_after_it_was_encoded_is_not_cut_into_pieces(place: Place) -> None:
    config = BuildConfig(
        corpus=(place.corpus,),
        store=str(place.root / "other"),
        model=str(place.model),
        text_columns=("text",),
        id_column="id",
        shard_rows=100,
    )
    stages = Stages(Silent())
    encoded = encode_shards(config, open_corpus(config, stages), stages)
    texts = list(place.texts)
    texts[150] = texts[150].replace(" ", "  ", 1)
    parquet(Path(place.corpus), id=[f"d{i}" for i in range(ROWS)], text=texts)
    with pytest.raises(CorpusError, match=r"changed after it was encoded; run the same"):
        sampling.sample_pieces(encoded, 60, 0, stages)
    encoded = encode_shards(config, open_corpus(config, stages), stages)
    assert len(sampling.sample_pieces(encoded, 60, 0, stages)) == 60


# --------------------------------------------------------------------------- a limit of time


def limit_documents(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let time pass so that ``count`` documents are encoded, each alone."""
    clock = counting()
    monkeypatch.setattr(sampling, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(sampling, "_CHUNK_CHARACTERS", 1)
    # A document takes one tick, and one passes before the next begins.
    monkeypatch.setattr(sampling, "_SECONDS", 2 * count)
    monkeypatch.setattr(sampling, "_SHARE_OF_BUILD", 0)


def test_where_time_runs_out_the_sample_is_smaller_and_says_so(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.forget()
    limit_documents(monkeypatch, 70)
    report = place.build("out")
    found, sample = choice(report), kept_sample(place)
    assert found["rule"] == "pieces"
    assert found["sample"] == len(sample["rows"]) == 70
    assert "pieces of 70 documents" in found["why"]
    assert {len(sample[name]) for name in ("sentences", "others", "windows")} == {70}
    assert sample["candidates"][:70].tolist() == sample["rows"].tolist()
    rest = Moments.of(np.delete(raw_embeddings(report), sample["rows"], axis=0))
    assert_scored_by_pieces(report, sample, rest)


def test_where_time_is_too_short_for_50_documents_the_spectrum_decides(
    place: Place, chosen: tuple[Place, BuildReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    place.forget()
    with monkeypatch.context() as short:
        limit_documents(short, 49)
        found = choice(place.build("out"))
    assert found["rule"] == "spectrum"
    assert "only 49 documents' pieces are encoded in 98 s" in found["why"]
    assert found["candidates"] == []
    # Another day there is more time.
    assert_same_choice(choice(place.build("out")), choice(chosen[1]))


# --------------------------------------------------------------------------- named or chosen


def test_the_manifest_tells_a_transform_that_was_chosen_from_the_same_one_named(
    place: Place, chosen: tuple[Place, BuildReport]
) -> None:
    named = {"whiten": "whitening", **choice(chosen[1])["chosen"]}
    first = place.build("out", **named)
    assert first.manifest["choice"] is None
    auto = place.build("out")
    assert choice(auto) == choice(chosen[1])
    assert auto.manifest["whitening"] == first.manifest["whitening"]
    assert auto.version != first.version
    again = place.build("out", **named)
    assert again.manifest["choice"] is None
    assert again.version == first.version
    assert not again.up_to_date
    # Neither is made a second time.
    assert place.build("out").version == auto.version
    assert len(list((place.root / "out" / "versions").iterdir())) == 2


def test_the_manifest_tells_by_what_the_same_transform_was_chosen(place: Place) -> None:
    settled = {"k": 16, "exponent": 0.25, "center": True}
    labels = {"pairs": pairs(place.root / "pairs.parquet")}
    for options, rule in (({}, "pieces"), (labels, "labels"), ({}, "pieces")):
        report = place.build("out", **settled, **options)
        assert choice(report)["chosen"] == settled
        assert choice(report)["rule"] == rule


# --------------------------------------------------------------------------- found again


def test_a_second_build_finds_the_choice_in_the_store(
    place: Place, chosen: tuple[Place, BuildReport]
) -> None:
    again = place.build("first")
    assert choice(again) == choice(chosen[1])
    assert not {"encode pieces", "choose"} & stages(again)
    elsewhere = place.build("elsewhere")
    assert choice(elsewhere) == choice(chosen[1])
    assert not {"encode pieces", "choose"} & stages(elsewhere)


def test_the_same_command_again_has_nothing_to_do(chosen: tuple[Place, BuildReport]) -> None:
    place, first = chosen
    again = place.build("first")
    assert again.up_to_date
    assert again.version == first.version


def test_other_wishes_choose_anew_from_the_same_sample(place: Place) -> None:
    report = place.build("out", k=20)
    assert "choose" in stages(report)
    assert "encode pieces" not in stages(report)
    assert choice(report)["rule"] == "pieces"


def test_a_store_alone_gives_the_same_choice(
    place: Place, chosen: tuple[Place, BuildReport]
) -> None:
    alone = {"corpus": (), "text_columns": (), "id_column": None}
    report = place.build("alone", **alone)
    assert choice(report) == choice(chosen[1])
    assert_applied(report)
    with_a_wish = place.build("wish", k=20, **alone)
    assert choice(with_a_wish)["rule"] == "pieces"
    assert_applied(with_a_wish)


@pytest.mark.parametrize(
    "change",
    [{"choose_sample": 60}, {"seed": 5}, {"query_prompt": "query "}],
    ids=lambda change: next(iter(change)),
)
def test_another_sample_is_encoded_where_it_would_differ(
    place: Place, change: dict[str, Any]
) -> None:
    """The query prompt is not part of a store's name, but it is part of every piece."""
    assert "encode pieces" in stages(place.build("out", **change))


def test_a_new_document_is_a_new_corpus(place: Place) -> None:
    texts = [*place.texts[1:], "the king and the queen. they sat. " * 3]
    parquet(Path(place.corpus), id=[f"d{i}" for i in range(ROWS)], text=texts)
    assert "encode pieces" in stages(place.build("out"))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"weight_column": "weight"}),
        (
            {"weight_column": "weight"},
            {"weight_column": "weight", "weighting": "inverse-frequency"},
        ),
        ({"keep": ("weight",)}, {"weight_column": "weight"}),
    ],
    ids=["none, then zipfian", "zipfian, then inverse", "kept, then zipfian"],
)
def test_a_choice_is_the_same_whatever_was_chosen_before(
    place: Place, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Weights change the moments, and so every score: an older choice is not theirs."""
    place.build("first", **first)
    warm = choice(place.build("second", **second))
    for folder in place.store.glob("*/choices"):
        shutil.rmtree(folder)
    report = place.build("cold", **second)
    assert "choose" in stages(report)
    cold = choice(report)
    scores = [[row["score"] for row in each["candidates"]] for each in (warm, cold)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    assert warm["chosen"] == cold["chosen"]


def damaged(path: Path, how: str) -> None:
    data = path.read_bytes()
    at = len(data) // 2
    path.write_bytes(
        {
            "empty": b"",
            "garbage": b"\xff\x00garbage",
            "another object": b'{"rule": "pieces"}',
            "half": data[:at],
            "list": b"[]",
        }[how]
    )


@pytest.mark.parametrize("how", ["empty", "garbage", "another object", "half", "list"])
@pytest.mark.parametrize("kind", ["choices", "samples"])
def test_a_damaged_note_is_made_anew(
    place: Place, chosen: tuple[Place, BuildReport], kind: str, how: str
) -> None:
    (path,) = place.store.glob(f"*/{kind}/*")
    damaged(path, how)
    if kind == "samples":
        for note in place.store.glob("*/choices/*"):
            note.unlink()
    report = place.build("out")
    assert_same_choice(choice(report), choice(chosen[1]))
    assert ("encode pieces" in stages(report)) is (kind == "samples")
    assert "choose" in stages(report)
    assert not {"encode pieces", "choose"} & stages(place.build("again"))


@pytest.mark.parametrize("name", ["rows", "candidates"])
def test_a_sample_of_rows_that_are_not_there_is_made_anew(
    place: Place, chosen: tuple[Place, BuildReport], name: str
) -> None:
    """A flipped byte may leave a file that can be read and says something else."""
    (path,) = place.store.glob("*/samples/*")
    (note,) = place.store.glob("*/choices/*")
    note.unlink()
    data, value = bytearray(path.read_bytes()), load_file(path)[name].tobytes()
    at = bytes(data).index(value) + 7  # the sign of the first number
    data[at] ^= 0x80
    path.write_bytes(data)
    assert_same_choice(choice(place.build("out")), choice(chosen[1]))


def test_a_store_that_cannot_be_written_still_serves(
    place: Place, chosen: tuple[Place, BuildReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    place.forget()

    def refuse(*_: Any) -> None:
        raise OutputError("the file system is read-only")

    monkeypatch.setattr(EmbeddingStore, "save_choice", refuse)
    monkeypatch.setattr(EmbeddingStore, "save_sample", refuse)
    assert_same_choice(choice(place.build("out")), choice(chosen[1]))


@pytest.mark.parametrize("kind", ["choices", "samples"])
def test_what_a_writer_that_died_left_is_removed(place: Place, kind: str) -> None:
    (folder,) = place.store.glob(f"*/{kind}")
    left = folder / ".tmp-left-by-a-writer"
    left.write_bytes(b"half")
    place.build("out")
    assert not left.exists()


# --------------------------------------------------------------------------- without pieces


def test_short_texts_are_chosen_for_by_the_spectrum_and_told_why(
    tmp_path: Path, model: Path
) -> None:
    texts = documents(150, sentences=1)
    corpus = parquet(tmp_path / "c.parquet", id=list(range(150)), text=texts)
    place = Place(tmp_path, model, texts)
    report = place.build("out", corpus=(corpus,))
    found = choice(report)
    assert found["rule"] == "spectrum"
    assert "150 of 150 texts are too short" in found["why"]
    assert found["candidates"] == []
    assert 0 <= found["chosen"]["exponent"] <= 1
    assert_applied(report)


def test_few_long_texts_among_many_short_ones_do_not_choose(tmp_path: Path, model: Path) -> None:
    texts = [*documents(20), *documents(180, sentences=1)]
    corpus = parquet(tmp_path / "c.parquet", id=list(range(200)), text=texts)
    found = choice(Place(tmp_path, model, texts).build("out", corpus=(corpus,)))
    assert found["rule"] == "spectrum"
    assert "180 of 200" in found["why"]


def test_a_corpus_in_many_small_files_is_chosen_by_its_pieces_too(
    tmp_path: Path, model: Path
) -> None:
    """Each file is a shard of its own; no text of this corpus is short."""
    texts = documents(200)
    for start in range(0, 200, 4):
        rows = range(start, start + 4)
        path = tmp_path / "c" / f"{start:03}.parquet"
        parquet(path, id=list(rows), text=[texts[row] for row in rows])
    found = choice(Place(tmp_path, model, texts).build("out", corpus=(str(tmp_path / "c"),)))
    assert "short" not in found["why"]
    assert found["rule"] == "pieces"


@pytest.mark.parametrize(("rows", "rule"), [(99, "spectrum"), (100, "pieces")])
def test_fewer_than_100_documents_are_too_few(
    tmp_path: Path, model: Path, rows: int, rule: str
) -> None:
    texts = documents(rows)
    corpus = parquet(tmp_path / "c.parquet", id=list(range(rows)), text=texts)
    found = choice(Place(tmp_path, model, texts).build("out", corpus=(corpus,)))
    assert found["rule"] == rule
    if rule == "spectrum":
        assert "99 documents are too few" in found["why"]


def embedded(path: Path, rows: int = 150) -> dict[str, Any]:
    embeddings = np.random.default_rng(0).normal(size=(rows, 12)) * np.geomspace(1, 0.1, 12) + 1
    corpus = parquet(path, id=list(range(rows)), e=list(embeddings.astype(np.float32)))
    return {"corpus": (corpus,), "embedding_column": "e", "id_column": "id"}


@pytest.mark.parametrize("wishes", [{}, {"k": 5}, {"exponent": 0.3}, {"center": False}])
def test_embeddings_are_chosen_for_by_the_spectrum(tmp_path: Path, wishes: dict[str, Any]) -> None:
    options = {**embedded(tmp_path / "c.parquet"), **wishes}
    report = build_index(BuildConfig(out=str(tmp_path / "out"), **options))
    assert choice(report)["rule"] == "spectrum"
    assert "only embeddings" in choice(report)["why"]
    assert choice(report)["chosen"].items() >= wishes.items()
    assert_applied(report)


def test_a_store_that_was_only_encoded_into_is_chosen_for_by_the_spectrum(
    tmp_path: Path, chosen: tuple[Place, BuildReport]
) -> None:
    place = chosen[0]
    config = BuildConfig(
        corpus=(place.corpus,),
        store=str(tmp_path / "store"),
        text_columns=("text",),
        model=str(place.model),
    )
    encode_corpus(config)
    report = build_index(BuildConfig(out=str(tmp_path / "out"), store=str(tmp_path / "store")))
    assert choice(report)["rule"] == "spectrum"
    assert_applied(report)


def test_what_is_named_is_not_chosen(chosen: tuple[Place, BuildReport]) -> None:
    report = chosen[0].build("named", whiten="pca", k=5)
    assert report.manifest["choice"] is None
    assert report.manifest["whitening"]["kind"] == "pca"
    assert not {"encode pieces", "choose"} & stages(report)


def test_passages_are_chosen_by_their_pieces(tmp_path: Path, model: Path) -> None:
    texts = documents(120, sentences=8)
    corpus = parquet(tmp_path / "c.parquet", id=list(range(120)), text=texts)
    place = Place(tmp_path, model, texts)
    report = place.build("out", corpus=(corpus,), passage_tokens=40)
    assert report.encoded.record.rows > 200
    assert choice(report)["rule"] == "pieces"
    sample, raw = kept_sample(place), raw_embeddings(report)
    rest = Moments.of(np.delete(raw, sample["rows"], axis=0))
    assert_scored_by_pieces(report, sample, rest)


def test_passages_of_one_document_are_no_wrong_answers(tmp_path: Path, model: Path) -> None:
    texts = documents(120, sentences=8)
    corpus = parquet(tmp_path / "c.parquet", id=[f"d{i}" for i in range(120)], text=texts)
    place = Place(tmp_path, model, texts)
    report = place.build("out", corpus=(corpus,), passage_tokens=40, choose_sample=60)
    sample, names = kept_sample(place), np.array(names_of(report))
    rows, candidates = sample["rows"], sample["candidates"]
    own = names[rows]
    assert len(set(own)) == len(rows) == 60
    assert candidates[: len(rows)].tolist() == rows.tolist()
    assert not set(names[candidates[len(rows) :]]) & set(own)
    # All but the other passages of these documents are there.
    others = np.flatnonzero(np.isin(names, own))
    assert len(others) > len(rows)
    left = np.setdiff1d(np.arange(len(names)), others)
    assert sorted(candidates[len(rows) :]) == left.tolist()
    assert len(left)


# --------------------------------------------------------------------------- widths for a factory


def column(path: Path, dim: int, *, rank: int | None = None, rows: int = 300) -> dict[str, Any]:
    """Embeddings that fill the first ``rank`` of their dims."""
    values = np.random.default_rng(0).normal(size=(rows, dim)) * np.geomspace(1, 0.2, dim) + 0.5
    values[:, dim if rank is None else rank :] = 0
    corpus = parquet(path, id=list(range(rows)), e=list(values.astype(np.float32)))
    return {"corpus": (corpus,), "embedding_column": "e", "id_column": "id"}


@pytest.mark.parametrize(
    ("factory", "expected"),
    [("PQ48", (96,)), ("PQ32", (32, 64, 96)), ("IVF64,PQ64", (64,)), ("auto", None)],
)
def test_widths_are_those_that_the_factory_can_be_built_over(
    factory: str, expected: tuple[int, ...] | None
) -> None:
    assert possible_widths(wishing(factory), 96) == expected


def wishing(factory: str, **options: Any) -> BuildConfig:
    return BuildConfig(out="o", corpus=("c",), embedding_column="e", factory=factory, **options)


@pytest.mark.parametrize(
    ("factory", "budget", "expected"),
    [
        ("auto", "1GB", None),
        ("auto", "200KB", (16, 32, 64)),
        ("PQ32x4fs", "4MB", (32, 64, 96, 128)),
        ("HNSW32", "10MB", (16, 32)),
    ],
)
def test_widths_over_which_nothing_fits_the_budget_are_left_out(
    factory: str, budget: str, expected: tuple[int, ...] | None
) -> None:
    config = wishing(factory, memory_budget=budget)
    found = possible_widths(config, 128, rows=10_000)
    assert found == expected
    for k in (16, 32, 64, 96, 128) if factory == "auto" else ():
        fits = contextlib.nullcontext() if k in (found or [k]) else pytest.raises(ConfigError)
        with fits:
            choose_factory(factory, rows=10_000, dim=128, k=k, budget=config.budget)
    # Without a number of rows the budget says nothing.
    assert possible_widths(config, 128) == possible_widths(wishing(factory), 128)


def test_where_no_width_fits_the_budget_the_narrowest_is_told() -> None:
    told = "holds no index of 10,000 vectors of 16 dims: the least takes"
    with pytest.raises(ConfigError, match=told):
        possible_widths(wishing("auto", memory_budget="1KB"), 128, rows=10_000)


def test_a_width_is_chosen_that_fits_the_budget(tmp_path: Path) -> None:
    options = column(tmp_path / "c.parquet", 96, rows=2_000) | {"store": str(tmp_path / "store")}
    free = build_index(BuildConfig(out=str(tmp_path / "free"), **options))
    assert choice(free)["chosen"]["k"] == 32
    # 2,000 rows of 32 dims take 16,640 bytes of binary codes and transforms, or more.
    kept = build_index(BuildConfig(out=str(tmp_path / "out"), memory_budget="30KB", **options))
    assert choice(kept)["chosen"]["k"] == 16
    assert kept.manifest["bytes"]["index"]["total"] <= 30_000


@pytest.mark.parametrize(
    ("factory", "k"), [("Flat", 32), ("PQ3x4", 96), ("IVF4,PQ6x4", 96), ("PQ4x4", 32)]
)
def test_the_spectrum_keeps_a_width_that_the_factory_can_be_built_over(
    tmp_path: Path, factory: str, k: int
) -> None:
    options = column(tmp_path / "c.parquet", 96)
    report = build_index(BuildConfig(out=str(tmp_path / "out"), factory=factory, **options))
    assert choice(report)["chosen"]["k"] == k
    assert_applied(report)
    assert report.manifest["factory"]["built"] == factory
    assert len(open_index(report.out).search_like("3", top_k=5)) == 5


def test_pieces_choose_among_the_widths_that_the_factory_can_be_built_over(place: Place) -> None:
    tried = {}
    for factory in ("Flat", "PQ32x4"):
        report = place.build(factory, factory=factory)
        tried[factory] = {row["k"] for row in choice(report)["candidates"]}
        assert choice(report)["rule"] == "pieces"
        assert_applied(report)
    assert tried == {"Flat": {16, 32}, "PQ32x4": {32}}


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        ("PQ7", "--factory PQ7 fits none of the round widths.*name one with --k"),
        ("PQ5", "cannot make 'PQ5' over 98 dims"),
        ("Nonsense", "cannot make 'Nonsense'"),
        ("PCA16,Flat", "a transform of its own"),
    ],
)
def test_a_factory_that_fits_no_width_is_refused_before_anything_is_encoded(
    tmp_path: Path, factory: str, told: str
) -> None:
    options = column(tmp_path / "c.parquet", 98)
    with pytest.raises(ConfigError, match=told):
        build_index(BuildConfig(out=str(tmp_path / "out"), factory=factory, **options))
    assert not shards(tmp_path)


def test_a_width_that_is_named_needs_not_be_round(tmp_path: Path) -> None:
    options = column(tmp_path / "c.parquet", 98)
    report = build_index(BuildConfig(out=str(tmp_path / "out"), factory="PQ7x4", k=49, **options))
    assert choice(report)["chosen"]["k"] == 49
    assert shards(tmp_path)


def test_embeddings_that_span_less_than_the_factory_needs_are_refused(tmp_path: Path) -> None:
    options = column(tmp_path / "c.parquet", 96, rank=50)
    with pytest.raises(WhiteningError, match=r"factory .*over 96 dims .*span 50.*--factory"):
        build_index(BuildConfig(out=str(tmp_path / "out"), factory="PQ48", **options))
    assert not (tmp_path / "out" / "CURRENT").exists()
    report = build_index(BuildConfig(out=str(tmp_path / "out"), factory="PQ4x4", **options))
    assert choice(report)["chosen"]["k"] == 32


# --------------------------------------------------------------------------- by judged queries


@dataclass(frozen=True)
class Judged:
    """Queries in files, and what they are in memory."""

    queries: str
    qrels: str
    texts: dict[str, str]
    grades: dict[str, dict[str, int]]

    def options(self) -> dict[str, str]:
        return {"queries": self.queries, "qrels": self.qrels}

    def flags(self) -> tuple[str, ...]:
        return "--queries", self.queries, "--qrels", self.qrels


def judged(folder: Path, texts: list[str], *, count: int = 40, prefix: str = "d") -> Judged:
    """Queries of some words of a document each, which is relevant, and a neighbour a little."""
    rng = np.random.default_rng(7)
    queries, grades = {}, {}
    for i, row in enumerate(rng.choice(len(texts) - 1, count, replace=False).tolist()):
        words = texts[row].replace(".", "").split()
        queries[f"q{i}"] = " ".join(rng.choice(words, 6))
        grades[f"q{i}"] = {f"{prefix}{row}": 2, f"{prefix}{row + 1}": 1, "not-in-corpus": 0}
    rows = [(q, d, grade) for q, each in grades.items() for d, grade in each.items()]
    query_ids, doc_ids, relevance = (list(column) for column in zip(*rows, strict=True))
    return Judged(
        parquet(folder / "queries.parquet", id=list(queries), text=list(queries.values())),
        parquet(folder / "qrels.parquet", query_id=query_ids, doc_id=doc_ids, relevance=relevance),
        queries,
        grades,
    )


def ndcg(ranked: list[str], grades: dict[str, int]) -> float:
    """nDCG@10 by its definition, with the gain trec_eval takes: the grade itself."""
    discount = 1 / np.log2(np.arange(2, 12))
    gains = [grades.get(name, 0) for name in ranked[:10]]
    ideal = sorted(grades.values(), reverse=True)[:10]
    return float(gains @ discount[: len(gains)] / (ideal @ discount[: len(ideal)]))


def assert_scored_by_labels(report: BuildReport, model: Path, labels: Judged) -> None:
    raw = raw_embeddings(report)
    names = names_of(report)
    embedded = Encoder.load(str(model)).encode_queries(list(labels.texts.values()))
    for row in choice(report)["candidates"]:
        queries, vectors = vectors_of(Moments.of(raw), row, embedded.astype(np.float64), raw)
        scores = []
        for cosines, query in zip(queries @ vectors.T, labels.texts, strict=True):
            # Each document at the place of its nearest row.
            ranked = list(dict.fromkeys(names[i] for i in np.argsort(-cosines)))
            scores.append(ndcg(ranked, labels.grades[query]))
        assert row["score"] == pytest.approx(np.mean(scores), abs=2e-3)


def test_judged_queries_choose_the_best_by_ndcg(place: Place) -> None:
    labels = judged(place.root, place.texts, count=60)
    report = place.build("out", **labels.options())
    found = choice(report)
    assert found["rule"] == "labels"
    assert found["sample"] == 60
    assert found["measure"].startswith("nDCG@10")
    assert "encode pieces" not in stages(report)
    assert_scored_by_labels(report, place.model, labels)
    assert_applied(report)
    # The best of each width, not the gentlest near it; and then the narrowest near the best.
    leaders = [row for row in found["candidates"] if row["leads"]]
    gentler_near = 0
    for leader in leaders:
        same = [row for row in found["candidates"] if row["k"] == leader["k"]]
        assert leader["score"] == max(row["score"] for row in same)
        near = (row for row in same if row["score"] >= leader["score"] - row["error"])
        gentler_near += any(row["exponent"] < leader["exponent"] for row in near)
    assert gentler_near  # else this would not tell one rule from the other
    top = max(row["score"] for row in leaders)
    near = min(row["k"] for row in leaders if row["score"] >= 0.97 * top)
    assert found["chosen"]["k"] == near


def test_judged_queries_are_scored_by_the_best_passage(tmp_path: Path, model: Path) -> None:
    texts = documents(120, sentences=8)
    ids = [f"d{i}" for i in range(120)]
    corpus = parquet(tmp_path / "c.parquet", id=ids, text=texts)
    labels = judged(tmp_path, texts, count=20)
    report = Place(tmp_path, model, texts).build(
        "out", corpus=(corpus,), passage_tokens=40, k=16, exponent=0.5, **labels.options()
    )
    assert report.encoded.record.rows > 200
    assert_scored_by_labels(report, model, labels)


def test_queries_beside_a_column_of_embeddings_are_encoded_by_its_model(
    tmp_path: Path, model: Path
) -> None:
    texts = documents(120)
    embeddings = Encoder.load(str(model)).encode(texts).astype(np.float32)
    corpus = parquet(tmp_path / "c.parquet", id=[f"d{i}" for i in range(120)], e=list(embeddings))
    labels = judged(tmp_path, texts)
    report = Place(tmp_path, model, texts).build(
        "out", corpus=(corpus,), text_columns=(), embedding_column="e", **labels.options()
    )
    assert choice(report)["rule"] == "labels"
    assert choice(report)["sample"] == 40
    np.testing.assert_array_equal(raw_embeddings(report), embeddings)
    assert_scored_by_labels(report, model, labels)
    assert_applied(report)


def test_labels_are_the_same_whatever_the_ids_look_like(tmp_path: Path, model: Path) -> None:
    texts = documents(120)
    found = []
    for prefix in ("d", "#"):
        # Beside the row numbers, so that an id looks like another row.
        ids = [f"{prefix}{i}" for i in range(120)]
        order = np.random.default_rng(0).permutation(120)
        corpus = parquet(
            tmp_path / prefix / "c.parquet",
            id=[ids[i] for i in order],
            text=[texts[i] for i in order],
        )
        labels = judged(tmp_path / prefix, texts, prefix=prefix)
        options = {"store": str(tmp_path / prefix / "store"), **labels.options()}
        report = Place(tmp_path, model, texts).build(prefix, corpus=(corpus,), **options)
        found.append([row["score"] for row in choice(report)["candidates"]])
    assert found[0] == pytest.approx(found[1], abs=1e-9)


def test_labels_choose_anew_where_they_or_the_query_prompt_change(place: Place) -> None:
    labels = judged(place.root, place.texts)
    place.build("a", **labels.options())
    assert "choose" not in stages(place.build("b", **labels.options()))
    fewer = judged(place.root / "fewer", place.texts, count=30)
    assert "choose" in stages(place.build("c", **fewer.options()))
    report = place.build("d", query_prompt="query ", **labels.options())
    assert "choose" in stages(report)


# --------------------------------------------------------------------------- by pairs


def pairs(path: Path, count: int = 60, scores: Any = None, seed: int = 3) -> str:
    rng = np.random.default_rng(seed)
    topics = [rng.choice(tiny_models._WORDS, 6, replace=False) for _ in range(count)]
    first, second = ([sentence(rng, topic) for topic in topics] for _ in range(2))
    columns = {} if scores is None else {"score": scores}
    return parquet(path, sentence1=first, sentence2=second, **columns)


def embedded_pairs(path: str, model: Path) -> tuple[Array, Array]:
    table, encoder = pq.read_table(path), Encoder.load(str(model))
    first, second = (table[name].to_pylist() for name in ("sentence1", "sentence2"))
    return (
        encoder.encode_queries(first).astype(np.float64),
        encoder.encode(second).astype(np.float64),
    )


def test_pairs_without_scores_find_each_other(place: Place) -> None:
    path = pairs(place.root / "pairs.parquet")
    report = place.build("out", pairs=path)
    assert choice(report)["rule"] == "labels"
    assert choice(report)["sample"] == 60
    assert_applied(report)
    raw, embedded = Moments.of(raw_embeddings(report)), embedded_pairs(path, place.model)
    for row in choice(report)["candidates"]:
        first, second = vectors_of(raw, row, *embedded)
        expected = reciprocal_ranks(first, second).mean()
        assert row["score"] == pytest.approx(expected, abs=2e-3)


def cosines_under(fitted_on: Moments, embedded: tuple[Array, Array], row: dict[str, Any]) -> Array:
    """Return the cosine of each pair after one of the transforms."""
    first, second = vectors_of(fitted_on, row, *embedded)
    return np.einsum("nk,nk->n", first, second)


@pytest.mark.parametrize(("exponent", "count"), [(0.125, 30), (0.125, 437), (0.875, 60)])
def test_scored_pairs_choose_the_transform_that_ranks_them_so(
    place: Place, exponent: float, count: int
) -> None:
    """The scores are its own cosines, so that it correlates with them as nothing else does."""
    wanted = {"k": 16, "exponent": exponent, "center": True}
    path = pairs(place.root / "pairs.parquet", count)
    raw = Moments.of(raw_embeddings(place.build("raw", whiten="none")))
    embedded = embedded_pairs(path, place.model)
    scores = cosines_under(raw, embedded, wanted)
    path = pairs(place.root / "pairs.parquet", count, np.round(scores, 6))
    report = place.build("out", pairs=path, k=16)
    assert choice(report)["chosen"] == wanted
    rows = {setting_of(row): row["score"] for row in choice(report)["candidates"]}
    assert rows[setting_of(wanted)] == pytest.approx(1, abs=1e-3)
    # The pair of i-th least score is of fold i mod n, n of them for ten pairs each, 20 at most.
    places = np.argsort(np.argsort(scores, kind="stable"), kind="stable")
    fold = places % {30: 3, 60: 6, 437: 20}[count]
    for row in choice(report)["candidates"]:
        found = cosines_under(raw, embedded, row)
        each = [spearmanr(scores[fold == i], found[fold == i]).statistic for i in set(fold)]
        assert row["score"] == pytest.approx(np.mean(each), abs=2e-3), row


def test_scores_that_grow_with_the_distance_still_choose(place: Place) -> None:
    """All correlations are below nought; that is odd, and no reason to fail without a word."""
    path = pairs(place.root / "pairs.parquet")
    raw = Moments.of(raw_embeddings(place.build("raw", whiten="none")))
    plain = {"k": 32, "exponent": 0.0, "center": True}
    scores = cosines_under(raw, embedded_pairs(path, place.model), plain)
    path = pairs(place.root / "pairs.parquet", scores=-scores)
    found = choice(place.build("out", pairs=path))
    assert all(-1 <= row["score"] <= 1 for row in found["candidates"])
    assert max(row["score"] for row in found["candidates"]) < 0


def test_pairs_that_are_too_many_are_drawn_by_the_seed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert labelled._MOST_PAIRS == 2_000
    monkeypatch.setattr(labelled, "_MOST_PAIRS", 40)
    embed, encoded = labelled._pairs, list[Any]()

    def spy(encoder: Encoder, drawn: Any, *arguments: Any) -> Any:
        encoded.append(drawn)
        return embed(encoder, drawn, *arguments)

    monkeypatch.setattr(labelled, "_pairs", spy)
    scores = np.random.default_rng(0).random(60)
    path = pairs(place.root / "pairs.parquet", scores=scores)
    table = pq.read_table(path)
    all_first, all_second = (table[f"sentence{i}"].to_pylist() for i in (1, 2))

    def drawn(seed: int) -> tuple[list[int], dict[str, Any]]:
        place.forget()
        report = place.build("drawn", pairs=path, seed=seed)
        kept = encoded.pop()
        rows = [all_first.index(text) for text in kept.first]
        assert [all_second[row] for row in rows] == kept.second
        return rows, choice(report)

    rows, found = drawn(1)
    assert found["sample"] == 40
    assert "on 40 pairs" in found["why"]
    assert sorted(set(rows)) == rows
    again = drawn(1)
    assert again[0] == rows
    assert_same_choice(again[1], found)
    assert drawn(2)[0] != rows
    # Each pair's score stays beside it.
    raw = Moments.of(raw_embeddings(place.build("raw", whiten="none")))
    first, second = (side[rows] for side in embedded_pairs(path, place.model))
    for row in found["candidates"]:
        cosines = cosines_under(raw, (first, second), row)
        order = np.argsort(scores[rows], kind="stable")
        folds = [order[i::4] for i in range(4)]
        each = [spearmanr(scores[rows][part], cosines[part]).statistic for part in folds]
        assert row["score"] == pytest.approx(np.mean(each), abs=2e-3), row


@pytest.mark.parametrize(("count", "values"), [(30, [0, 1, 2]), (40, [1, 0]), (400, [1, 0])])
def test_scores_that_take_turns_choose_too(place: Place, count: int, values: list[int]) -> None:
    """A file of a good pair, then a bad one, and so on, is a usual one."""
    scores = np.resize(values, count)
    path = pairs(place.root / "pairs.parquet", count, scores)
    found = choice(place.build("out", pairs=path))
    assert found["sample"] == count
    assert all(-1 <= row["score"] <= 1 for row in found["candidates"])
    assert len({row["score"] for row in found["candidates"]}) > 1


def test_pairs_without_a_score_are_left_out_and_counted(place: Place) -> None:
    scores = np.random.default_rng(0).random(60)
    path = pairs(place.root / "pairs.parquet", scores=[None, *scores[1:-1], None])
    found = choice(place.build("out", pairs=path))
    assert found["sample"] == 58
    assert "2 without a score left out" in found["why"]


# --------------------------------------------------------------------------- refused


@pytest.mark.parametrize("size", [0, 1, 49, -5])
def test_a_sample_too_small_to_choose_from_is_refused(place: Place, size: int) -> None:
    arguments = place.arguments("--choose-sample", size)
    assert_refused(OPTIONS, rf"a sample of {size} documents is too small.*50", *arguments)


def test_a_sample_too_small_is_refused_before_anything_is_encoded(
    tmp_path: Path, chosen: tuple[Place, BuildReport]
) -> None:
    place = chosen[0]
    with pytest.raises(ConfigError, match="too small"):
        place.build(tmp_path / "out", store=str(tmp_path / "store"), choose_sample=10)
    assert not shards(tmp_path)
    assert shards(place.root)


def test_qrels_that_name_no_document_of_the_corpus_are_refused(place: Place) -> None:
    labels = judged(place.root, place.texts, prefix="other-")
    told = r"names no document of the corpus.*not-in-corpus.*ids such as 'd\d+'.*--id-column"
    assert_refused(CORPUS, told, *place.arguments(*labels.flags()))


def test_too_few_judged_queries_are_refused(place: Place) -> None:
    labels = judged(place.root, place.texts, count=9)
    arguments = place.arguments(*labels.flags())
    assert_refused(CORPUS, r"leaves 9 queries to choose by.*10 are needed", *arguments)


def test_queries_without_a_text_do_not_count(place: Place) -> None:
    labels = judged(place.root, place.texts, count=20)
    few = parquet(place.root / "few.parquet", id=["q0", "q1"], text=["the cat", "the dog"])
    arguments = place.arguments("--queries", few, "--qrels", labels.qrels)
    assert_refused(CORPUS, r"leaves 2 queries.*2 of 20 have a text", *arguments)


@pytest.mark.parametrize("scores", [None, list(range(29))])
def test_too_few_pairs_are_refused(place: Place, scores: Any) -> None:
    path = pairs(place.root / "pairs.parquet", 29, scores)
    assert_refused(CORPUS, r"29 pairs, too few.*30", *place.arguments("--pairs", path))


def test_pairs_that_are_all_scored_alike_are_refused(place: Place) -> None:
    path = pairs(place.root / "pairs.parquet", scores=[0.5] * 60)
    assert_refused(CORPUS, "all scores.*equal", *place.arguments("--pairs", path))


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (("--queries", "{queries}"), "--qrels is missing"),
        (("--qrels", "{qrels}"), "--queries is missing"),
        (("--pairs", "{pairs}", "--qrels", "{qrels}"), "two kinds of labels"),
        (("--pairs", "{pairs}", "--queries", "{queries}"), "two kinds of labels"),
        (("--qrels-split", "test"), "--qrels-split test needs --qrels"),
        (("--pairs", "{pairs}", "--qrels-split", "test"), "--qrels-split"),
        (("--queries", "{queries}", "--qrels", "{qrels}", "--qrels-split", "dev"), "column split"),
        (("--whiten", "pca", "--pairs", "{pairs}"), "--pairs.*--whiten pca"),
        (("--whiten", "whitening", "--qrels", "{qrels}"), "--qrels.*nothing to choose"),
        (("--shrinkage", "oas"), "--shrinkage.*--whiten auto chooses"),
        (("--remove-top", "1"), "--remove-top.*--whiten auto chooses"),
        (("--group-size", "4"), "--group-size"),
        (("--k", "33"), "33.*32"),
        (("--exponent", "-1"), "outside 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_that_do_not_go_together_are_refused(
    place: Place, flags: tuple[str, ...], match: str
) -> None:
    labels = judged(place.root, place.texts)
    path = pairs(place.root / "pairs.parquet")
    names = {"queries": labels.queries, "qrels": labels.qrels, "pairs": path}
    arguments = place.arguments(*(flag.format(**names) for flag in flags))
    assert_refused(OPTIONS, match, *arguments)


def test_labels_need_an_encoder(tmp_path: Path, place: Place) -> None:
    path = pairs(place.root / "pairs.parquet")
    corpus = embedded(tmp_path / "e.parquet")["corpus"][0]
    columns = ("--embedding-column", "e", "--id-column", "id")
    arguments = ("build", corpus, *columns, "--out", tmp_path / "out", "--pairs", path)
    assert_refused(OPTIONS, "name the model of the embedding column", *arguments)
    alone = ("build", "--store", place.store, "--out", tmp_path / "out", "--pairs", path)
    assert_refused(OPTIONS, "name the corpus too", *alone)


@pytest.mark.parametrize("flag", ["--pairs", "--queries", "--qrels"])
def test_a_file_of_labels_that_is_not_there_is_named(place: Place, flag: str) -> None:
    labels = judged(place.root, place.texts)
    flags = {"--pairs": ("--pairs",)}.get(flag, ("--queries", "--qrels"))
    paths = {"--queries": labels.queries, "--qrels": labels.qrels}
    paths[flag] = str(place.root / "gone.parquet")
    given = [each for name in flags for each in (name, paths[name])]
    assert_refused(CORPUS, "gone.parquet does not exist", *place.arguments(*given))


def test_labels_are_read_before_anything_is_encoded(
    tmp_path: Path, chosen: tuple[Place, BuildReport]
) -> None:
    place = chosen[0]
    with pytest.raises(WhitenIndexError, match="does not exist"):
        place.build(
            tmp_path / "out", store=str(tmp_path / "store"), pairs=str(tmp_path / "no.parquet")
        )
    assert not shards(tmp_path)
    assert shards(place.root)


BAD_LABELS = {
    "29 pairs": "holds 29 pairs, too few",
    "29 scored pairs": "holds 29 pairs, too few",
    "pairs scored alike": "all scores in .* are equal",
    "9 judged queries": "leaves 9 queries to choose by",
    "9 queries with a text": r"leaves 9 queries to choose by \(9 of 20 have a text\)",
    "no pytrec_eval": r"whiten-index\[eval\]",
    "a column without its model": "name the model of the embedding column with --model",
}


@pytest.mark.parametrize("case", BAD_LABELS)
def test_labels_that_cannot_choose_are_refused_before_anything_is_encoded(
    tmp_path: Path,
    chosen: tuple[Place, BuildReport],
    case: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, options = chosen[0], dict[str, Any]()
    if "pairs" in case:
        count = 29 if "29" in case else 60
        scores = {"29 pairs": None, "29 scored pairs": range(29)}.get(case, [0.5] * 60)
        scores = None if scores is None else list(scores)
        options = {"pairs": pairs(tmp_path / "pairs.parquet", count, scores)}
    elif case == "a column without its model":
        options = {
            **embedded(tmp_path / "e.parquet"),
            "model": None,
            "text_columns": (),
            "pairs": pairs(tmp_path / "pairs.parquet"),
        }
    else:
        labels = judged(tmp_path, place.texts, count=9 if "9 judged" in case else 20)
        options = dict(labels.options())
        if case == "9 queries with a text":
            few = list(labels.texts)[:9]
            options["queries"] = parquet(
                tmp_path / "few.parquet", id=few, text=[labels.texts[name] for name in few]
            )
        if case == "no pytrec_eval":
            monkeypatch.setitem(sys.modules, "pytrec_eval", None)
    expected = ConfigError if case in list(BAD_LABELS)[-2:] else CorpusError
    with pytest.raises(expected, match=BAD_LABELS[case]):
        place.build(tmp_path / "out", store=str(tmp_path / "store"), **options)
    assert not shards(tmp_path)


def test_labels_without_a_corpus_are_refused(place: Place) -> None:
    alone = {"corpus": (), "text_columns": (), "id_column": None}
    labels = judged(place.root, place.texts)
    with pytest.raises(ConfigError, match="name the corpus too"):
        place.build("out", **alone, **labels.options())
    assert not (place.root / "out" / "CURRENT").exists()


# --------------------------------------------------------------------------- inspect


def table_rows(stdout: str, after: str) -> Iterator[list[str]]:
    lines = stdout.splitlines()
    for line in lines[lines.index(after) + 1 :]:
        if not line.startswith(" "):
            return
        yield re.split(r"\s{2,}", line.strip())


def test_inspect_shows_the_choice_and_the_geometry(chosen: tuple[Place, BuildReport]) -> None:
    report = chosen[1]
    status, stdout, stderr = run("inspect", report.out)
    assert status == 0, stderr
    found = choice(report)
    assert f"chosen by pieces: {found['why']}" in stdout
    assert found["measure"] in stdout
    (starred,) = (line for line in stdout.splitlines() if line.strip().startswith("*"))
    k, exponent, center = setting_of(found["chosen"])
    (score,) = (
        row["score"] for row in found["candidates"] if setting_of(row) == (k, exponent, center)
    )
    shown = [str(k), f"{exponent:g}", "yes" if center else "no", f"{score:.3f}"]
    assert starred.split()[1:5] == shown
    # Each width has its leader there, and PCA beside it.
    for width in {row["k"] for row in found["candidates"]}:
        assert re.search(rf"^\s+\*?\s+{width}\s+0\s+yes\s", stdout, re.MULTILINE)
    geometry = report.manifest["geometry"]
    rows = {row[0]: row[1:] for row in table_rows(stdout, "geometry")}
    assert len(rows) == 6
    for figures in rows.values():
        assert len(figures) == 2
    (isoscore,) = (figures for name, figures in rows.items() if name.startswith("IsoScore"))
    assert isoscore == [f"{geometry[kind]['isoscore']:.3f}" for kind in ("raw", "vectors")]


def test_inspect_gives_choice_and_geometry_as_json(chosen: tuple[Place, BuildReport]) -> None:
    report = chosen[1]
    status, stdout, _ = run("inspect", report.out, "--json")
    assert status == 0
    shown = json.loads(stdout)
    assert shown["choice"] == choice(report)
    assert shown["geometry"] == report.manifest["geometry"]


def test_build_prints_what_it_chose(place: Place) -> None:
    status, stdout, stderr = run(*place.arguments())
    assert status == 0, stderr
    assert "chosen by pieces: " in stdout
    status, stdout, _ = run(*place.arguments("--json"))
    assert json.loads(stdout)["choice"]["rule"] == "pieces"
    status, stdout, _ = run(*place.arguments("--whiten", "pca", "--k", 4))
    assert status == 0
    assert "chosen by" not in stdout


def test_inspect_draws_a_picture(tmp_path: Path, chosen: tuple[Place, BuildReport]) -> None:
    pytest.importorskip("matplotlib")
    out = chosen[1].out
    status, _, stderr = run("inspect", out, "--plot", tmp_path / "x.png")
    assert status == 0, stderr
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert_refused(OPTIONS, r"\.png", "inspect", out, "--plot", tmp_path / "x.docx")
    assert not (tmp_path / "x.docx").exists()


def test_inspect_shows_what_the_spectrum_chose(tmp_path: Path) -> None:
    options = embedded(tmp_path / "c.parquet")
    build_index(BuildConfig(out=str(tmp_path / "out"), **options))
    status, stdout, _ = run("inspect", tmp_path / "out")
    assert status == 0
    assert "chosen by spectrum: " in stdout
    assert "scores:" not in stdout
