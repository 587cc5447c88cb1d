"""A transform chosen by ``--whiten auto``: by the spectrum, by pieces or by labels; refusals."""

import json
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.helpers.bad_input import OPTIONS, assert_one_error, run
from tests.pipeline import choosing
from tests.pipeline.choosing import Judged, Place
from whiten_index import BuildConfig, Moments, Whitening, build_index, load_encoder
from whiten_index.artifacts.tensors import write_tensors
from whiten_index.errors import ConfigError, CorpusError, FormatError
from whiten_index.pipeline import pseudo_queries
from whiten_index.pipeline.build import BuildReport
from whiten_index.whitening.selection import LEAST_SAMPLE

place = choosing.place


def test_short_texts_are_chosen_for_by_the_spectrum_and_told_why(
    tmp_path: Path, model: Path
) -> None:
    texts = choosing.documents(150, sentences=1)
    corpus = choosing.parquet(tmp_path / "c.parquet", id=list(range(150)), text=texts)
    place = Place(tmp_path, model, texts)
    report = place.build("out", corpus=(corpus,))
    found = choosing.choice(report)
    assert found["rule"] == "spectrum"
    assert "150 of 150 texts are too short" in found["why"]
    assert found["candidates"] == []
    assert 0 <= found["chosen"]["exponent"] <= 1
    choosing.assert_applied(report)


@pytest.mark.parametrize("wishes", [{}, {"k": 5}, {"exponent": 0.3}, {"center": False}])
def test_embeddings_are_chosen_for_by_the_spectrum(tmp_path: Path, wishes: dict[str, Any]) -> None:
    options = {**choosing.embedded(tmp_path / "c.parquet"), **wishes}
    report = build_index(BuildConfig(out=str(tmp_path / "out"), **options))
    assert choosing.choice(report)["rule"] == "spectrum"
    assert "only embeddings" in choosing.choice(report)["why"]
    assert choosing.choice(report)["chosen"].items() >= wishes.items()
    choosing.assert_applied(report)


def test_a_width_is_chosen_that_fits_the_budget(tmp_path: Path) -> None:
    options = choosing.embedded(tmp_path / "c.parquet", 2_000, 96) | {
        "store": str(tmp_path / "store")
    }
    free = build_index(BuildConfig(out=str(tmp_path / "free"), **options))
    assert choosing.choice(free)["chosen"]["k"] == 32
    # 2,000 rows of 32 dims take 16,640 bytes of binary codes and transforms, or more.
    kept = build_index(BuildConfig(out=str(tmp_path / "out"), memory_budget="30KB", **options))
    assert choosing.choice(kept)["chosen"]["k"] == 16
    assert kept.manifest["bytes"]["index"]["total"] <= 30_000


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("PQ7", "--factory PQ7 fits none of the round widths.*name one with --k"),
        ("PQ5", "cannot make 'PQ5' over 98 dims"),
        ("Nonsense", "cannot make 'Nonsense'"),
        ("PCA16,Flat", "a transform of its own"),
    ],
)
def test_a_factory_that_fits_no_width_is_refused_before_anything_is_encoded(
    tmp_path: Path, factory: str, message: str
) -> None:
    options = choosing.embedded(tmp_path / "c.parquet", 300, 98)
    with pytest.raises(ConfigError, match=message):
        build_index(BuildConfig(out=str(tmp_path / "out"), factory=factory, **options))
    assert not choosing.shards(tmp_path)


def test_a_second_build_finds_the_choice_in_the_store(
    place: Place, chosen: tuple[Place, BuildReport]
) -> None:
    again = place.build("first")
    assert choosing.choice(again) == choosing.choice(chosen[1])
    assert not {"encode pieces", "choose"} & choosing.stages(again)
    elsewhere = place.build("elsewhere")
    assert choosing.choice(elsewhere) == choosing.choice(chosen[1])
    assert not {"encode pieces", "choose"} & choosing.stages(elsewhere)


def test_a_store_alone_gives_the_same_choice(
    place: Place, chosen: tuple[Place, BuildReport]
) -> None:
    alone = {"corpus": (), "text_columns": (), "id_column": None}
    report = place.build("alone", **alone)
    assert choosing.choice(report) == choosing.choice(chosen[1])
    choosing.assert_applied(report)
    with_a_wish = place.build("wish", k=20, **alone)
    assert choosing.choice(with_a_wish)["rule"] == "pieces"
    choosing.assert_applied(with_a_wish)


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


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("choices", how) for how in ("empty", "garbage", "another object", "half", "list")),
        ("samples", "garbage"),
        ("samples", "another object"),
    ],
)
def test_a_damaged_note_is_made_anew(
    place: Place, chosen: tuple[Place, BuildReport], kind: str, how: str
) -> None:
    (path,) = place.store.glob(f"*/{kind}/*")
    damaged(path, how)
    if kind == "samples":
        for note in place.store.glob("*/choices/*"):
            note.unlink()
    report = place.build("out")
    choosing.assert_same_choice(choosing.choice(report), choosing.choice(chosen[1]))
    assert ("encode pieces" in choosing.stages(report)) is (kind == "samples")
    assert "choose" in choosing.stages(report)
    assert not {"encode pieces", "choose"} & choosing.stages(place.build("again"))


def test_a_sample_of_a_later_release_is_left_alone(
    place: Place, chosen: tuple[Place, BuildReport]
) -> None:
    (path,) = place.store.glob("*/samples/*")
    for note in place.store.glob("*/choices/*"):
        note.unlink()
    arrays, facts = load_file(path), {"of": path.name}
    write_tensors(path, arrays, kind="sample", version=99, facts=facts, seal=True)
    before = path.read_bytes()
    with pytest.raises(FormatError, match="upgrade whiten-index"):
        place.build("out")
    assert path.read_bytes() == before


def test_scores_are_those_of_whitenings_fitted_without_the_sample(
    chosen: tuple[Place, BuildReport],
) -> None:
    place, report = chosen
    sample, raw = choosing.kept_sample(place), choosing.raw_embeddings(report)
    rest = Moments.of(np.delete(raw, sample["rows"], axis=0))
    choosing.assert_scored_by_pieces(report, sample, rest)


def test_the_sample_is_bounded_by_tokens_and_not_by_time(
    place: Place, chosen: tuple[Place, BuildReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    place.forget()
    hours = count(0, 3600)
    for clock in ("monotonic", "perf_counter", "time", "process_time"):
        monkeypatch.setattr(time, clock, lambda: float(next(hours)))
    status, _, stderr = run(*place.arguments())
    monkeypatch.undo()
    assert status == 0
    whole = choosing.choice(chosen[1])["sample"]
    assert f"{whole} documents chose k and exponent, and with fewer than 300 that is" in stderr
    assert choosing.kept_sample(place)["rows"].shape == (whole,)
    place.forget()
    monkeypatch.setattr(pseudo_queries, "_MOST_TOKENS", 500)
    monkeypatch.setattr(pseudo_queries, "_CHUNK_CHARACTERS", 500)
    assert LEAST_SAMPLE <= choosing.choice(place.build("less"))["sample"] < whole


@pytest.mark.parametrize(
    "wishes",
    [{"k": 20}, {"k": "0.9"}, {"k": "full"}, {"exponent": 0.3}, {"center": False},
     {"center": True, "exponent": 0.0}, {"k": 7, "exponent": 1.0, "center": False}, {"floor": 0.1},
     {"floor": 0.1, "k": "full"}, {"floor": 0.1, "normalize_input": True}],
    ids=lambda wishes: ",".join(f"{name}={value}" for name, value in wishes.items()),
)  # fmt: skip
def test_what_is_settled_is_not_chosen(place: Place, wishes: dict[str, Any]) -> None:
    report = place.build("out", **wishes)
    choosing.assert_applied(report)
    for name in ("k", "exponent", "center"):
        if name in wishes and not isinstance(wishes[name], str):
            tried = {row[name] for row in choosing.choice(report)["candidates"]}
            assert tried == {wishes[name]}
    if (share := wishes.get("k")) == "0.9":
        values = np.linalg.eigvalsh(np.cov(choosing.raw_embeddings(report).T))[::-1]
        kept = np.cumsum(values) / values.sum()
        assert choosing.choice(report)["chosen"]["k"] == np.argmax(kept >= float(share)) + 1
    if "floor" in wishes:
        whitening = report.manifest["whitening"]
        folder = report.out / "versions" / report.version
        values = Whitening.load(folder / "whitening.safetensors").eigenvalues
        # Directions below the floor would be nought in every vector.
        assert values[whitening["k"] - 1] > wishes["floor"] * values[0]


def test_a_note_names_what_was_chosen_on_few_documents(place: Place) -> None:
    assert "documents chose exponent, and" in run(*place.arguments("--k", 20))[2]


def piece_scores(
    sample: dict[str, Any], rows: choosing.Array, setting: dict[str, Any]
) -> Iterator[float]:
    """Yield the scores of a transform and of the raw embeddings, from their definition."""
    texts = [sample[name] for name in ("sentences", "others", "windows")]
    texts.append(rows[sample["candidates"]])
    raw = [matrix / np.linalg.norm(matrix, axis=1, keepdims=True) for matrix in texts]
    for spaces in list(choosing.vectors_of(Moments.of(rows), setting, *texts)), raw:
        first, second = (choosing.reciprocal_ranks(*spaces[at : at + 2]).mean() for at in (0, 2))
        yield (2 * first + second) / 3


def test_a_sweep_scores_every_transform_by_the_pieces_that_auto_has(
    place: Place, chosen: tuple[Place, BuildReport]
) -> None:
    place.forget()
    given = ("--k", 8, "--transforms", "auto,pca", "--codecs", "fp32", "--indexes", "flat")
    named = ("--text-column", "text", "--store", place.store, "--model", place.model)
    status, _, stderr = run("sweep", place.corpus, *named, *given, "--out", place.root / "sweep")
    assert (status, "--exponent" in stderr) == (0, False), stderr
    lines = map(json.loads, (place.root / "sweep" / "results.jsonl").read_text().splitlines())
    found = {line["key"]: line["pieces"] for line in lines if line["type"] == "point"}
    sample, rows = choosing.kept_sample(place), choosing.raw_embeddings(chosen[1])
    scores = piece_scores(sample, rows, {"k": 8, "exponent": 0, "center": True})
    keys = "ours/pca/k8/fp32/flat", f"raw/none/k{rows.shape[1]}/fp32/flat"
    # The rows that the sweep holds out are no part of its fit.
    assert [found[key] for key in keys] == pytest.approx(list(scores), abs=0.02)


def ndcg(ranked: list[str], grades: dict[str, int]) -> float:
    """nDCG@10 by its definition, with the gain trec_eval takes: the grade itself."""
    discount = 1 / np.log2(np.arange(2, 12))
    gains = [grades.get(name, 0) for name in ranked[:10]]
    ideal = sorted(grades.values(), reverse=True)[:10]
    return float(gains @ discount[: len(gains)] / (ideal @ discount[: len(ideal)]))


def assert_scored_by_labels(report: BuildReport, model: Path, labels: Judged) -> None:
    raw = choosing.raw_embeddings(report)
    names = choosing.names_of(report)
    embedded = load_encoder(str(model)).encode_queries(list(labels.texts.values()))
    for row in choosing.choice(report)["candidates"]:
        queries, vectors = choosing.vectors_of(
            Moments.of(raw), row, embedded.astype(np.float64), raw
        )
        scores = []
        for cosines, query in zip(queries @ vectors.T, labels.texts, strict=True):
            # Each document at the place of its nearest row.
            ranked = list(dict.fromkeys(names[i] for i in np.argsort(-cosines)))
            scores.append(ndcg(ranked, labels.grades[query]))
        assert row["score"] == pytest.approx(np.mean(scores), abs=2e-3)


def test_judged_queries_choose_the_best_by_ndcg(place: Place) -> None:
    labels = choosing.judged(place.root, place.texts, count=60)
    report = place.build("out", **labels.options())
    found = choosing.choice(report)
    assert found["rule"] == "labels"
    assert found["sample"] == 60
    assert found["measure"].startswith("nDCG@10")
    assert "encode pieces" not in choosing.stages(report)
    assert_scored_by_labels(report, place.model, labels)
    choosing.assert_applied(report)
    # So it is where the embeddings are given, and the model encodes the queries alone.
    raw = list(choosing.raw_embeddings(report).astype(np.float32))
    path = choosing.parquet(place.root / "e.parquet", id=choosing.names_of(report), e=raw)
    given = place.build(
        "given", corpus=(path,), text_columns=(), embedding_column="e", **labels.options()
    )
    choosing.assert_same_choice(choosing.choice(given), found)
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


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (("--queries", "{queries}"), "--qrels is missing"),
        (("--qrels", "{qrels}"), "--queries is missing"),
        (("--qrels-split", "test"), "--qrels-split test needs --qrels"),
        (("--queries", "{queries}", "--qrels", "{qrels}", "--qrels-split", "dev"), "column split"),
        (("--whiten", "whitening", "--qrels", "{qrels}"), "--qrels.*nothing to choose"),
        (("--shrinkage", "oas"), "--shrinkage.*--whiten auto chooses"),
        (("--remove-top", "1"), "--remove-top.*--whiten auto chooses"),
        (("--group-size", "4"), "--group-size"),
        (("--k", "33"), "33.*32"),
        (("--exponent", "-1"), "--exponent takes a value greater"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_that_do_not_go_together_are_refused(
    place: Place, flags: tuple[str, ...], match: str
) -> None:
    labels = choosing.judged(place.root, place.texts)
    names = {"queries": labels.queries, "qrels": labels.qrels}
    arguments = place.arguments(*(flag.format(**names) for flag in flags))
    status, _, stderr = run(*arguments)
    assert status == OPTIONS
    assert_one_error(stderr, match=match)


BAD_LABELS = {
    "9 judged queries": "leaves 9 queries to choose by",
    "9 queries with a text": r"leaves 9 queries to choose by \(9 of 20 have a text\)",
    "no pytrec_eval": r"whiten-index\[eval\]",
    "a column without its model": "name the model of the embedding column with --model",
}


@pytest.mark.parametrize("case", BAD_LABELS)
def test_labels_that_cannot_choose_are_refused_before_anything_is_encoded(
    tmp_path: Path, chosen: tuple[Place, BuildReport], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, options = chosen[0], dict[str, Any]()
    labels = choosing.judged(tmp_path, place.texts, count=9 if "9 judged" in case else 20)
    options |= labels.options()
    if case == "a column without its model":
        options |= {**choosing.embedded(tmp_path / "e.parquet"), "model": None, "text_columns": ()}
    elif case == "9 queries with a text":
        few = list(labels.texts)[:9]
        options["queries"] = choosing.parquet(
            tmp_path / "few.parquet", id=few, text=[labels.texts[name] for name in few]
        )
    elif case == "no pytrec_eval":
        monkeypatch.setitem(sys.modules, "pytrec_eval", None)
    expected = ConfigError if case in list(BAD_LABELS)[-2:] else CorpusError
    with pytest.raises(expected, match=BAD_LABELS[case]):
        place.build(tmp_path / "out", store=str(tmp_path / "store"), **options)
    assert not choosing.shards(tmp_path)
