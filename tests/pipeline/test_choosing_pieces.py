"""A transform chosen by pieces of the corpus: scores, rule, sample, and the limit of tokens."""

import json
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from tests.pipeline import choosing
from tests.pipeline.choosing import Place
from whiten_index import Moments, Whitening
from whiten_index.pipeline import pseudo_queries
from whiten_index.pipeline.build import BuildReport
from whiten_index.whitening.selection import LEAST_SAMPLE

place = choosing.place


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
    status, _, stderr = choosing.run(*place.arguments())
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
    assert "documents chose exponent, and" in choosing.run(*place.arguments("--k", 20))[2]


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
    status, _, stderr = choosing.run(
        "sweep", place.corpus, *named, *given, "--out", place.root / "sweep"
    )
    assert (status, "--exponent" in stderr) == (0, False), stderr
    lines = map(json.loads, (place.root / "sweep" / "results.jsonl").read_text().splitlines())
    found = {line["key"]: line["pieces"] for line in lines if line["type"] == "point"}
    sample, rows = choosing.kept_sample(place), choosing.raw_embeddings(chosen[1])
    scores = piece_scores(sample, rows, {"k": 8, "exponent": 0, "center": True})
    keys = "ours/pca/k8/fp32/flat", f"raw/none/k{rows.shape[1]}/fp32/flat"
    # The rows that the sweep holds out are no part of its fit.
    assert [found[key] for key in keys] == pytest.approx(list(scores), abs=0.02)
