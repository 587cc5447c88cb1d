"""Updates of corpora of texts: encoded once, in passages, by a transform that was chosen."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.updates import assert_equals_fresh, codes_of, ids_of
from tests.pipeline import choosing
from tests.pipeline.choosing import choice, parquet, stages
from whiten_index import BuildConfig, UpdateConfig, build_index, open_index, update_index
from whiten_index.pipeline.build import BuildReport
from whiten_index.pipeline.plan import plan_update
from whiten_index.pipeline.update import UpdateReport

place = choosing.place
Texts = dict[str, str | None]
# What moments may differ by where texts are encoded in other batches.
ROUNDED = 1e-4


def some_texts(words: tuple[str, ...], numbers: Any, seed: int = 0, *, most: int = 40) -> Texts:
    """Texts of 3 to ``most`` words, of which the longest are beyond what the model takes."""
    found: Texts = {}
    for number in numbers:
        rng = np.random.default_rng([seed, number])
        found[f"d{number}"] = " ".join(rng.choice(words, int(rng.integers(3, most)))) + "."
    return found


def write(path: Path, texts: Texts) -> str:
    table = {"id": list(texts), "text": pa.array(texts.values(), pa.string())}
    pq.write_table(pa.table({**table, "year": range(len(texts))}), path)
    return str(path)


def build(out: Path, corpus: str, model: Path, **more: Any) -> BuildReport:
    options: dict[str, Any] = {
        "text_columns": "text", "id_column": "id", "model": str(model), "shard_rows": 20,
        "threads": 1, "device": "cpu", "whiten": "whitening", "k": 8,
    }  # fmt: skip
    return build_index(BuildConfig(corpus=(corpus,), out=str(out), **{**options, **more}))


def update(out: Path, **options: Any) -> UpdateReport:
    given = {"index": str(out), "device": "cpu", "threads": 1, **options}
    return update_index(UpdateConfig(**given))


def planned(out: Path, **options: Any) -> Any:
    given = {"index": str(out), "device": "cpu", "threads": 1, **options}
    return plan_update(UpdateConfig(**given))


def edited(texts: Texts, words: tuple[str, ...]) -> Texts:
    """Two deleted, two changed, three new, one of which is a text that is there already."""
    now = {name: text for name, text in texts.items() if name not in ("d3", "d44")}
    now |= some_texts(words, [7, 50], seed=9)
    return {**some_texts(words, [900, 901]), **now, "copy": texts["d5"]}


@pytest.mark.parametrize("refit", ["always", "never"])
def test_documents_in_passages(
    tmp_path: Path, tiny_model: Path, tiny_words: tuple[str, ...], refit: str
) -> None:
    texts = some_texts(tiny_words, range(60), most=80)
    corpus = write(tmp_path / "c.parquet", texts)
    options = {"passage_tokens": 16, "overlap": 4}
    build(tmp_path / "out", corpus, tiny_model, **options)
    before = codes_by_passage(tmp_path / "out")
    now = edited(texts, tiny_words)
    # A sentence at its end leaves the passages before as they were.
    now["d11"] = f"{texts['d11']} the king sings."
    write(tmp_path / "c.parquet", now)
    foretold = planned(tmp_path / "out")
    report = update(tmp_path / "out", refit=refit)
    counts = report.encoded.counts
    assert counts.encoded == foretold["to_encode"] == 5
    assert counts.passages == len(open_index(tmp_path / "out", device="cpu"))
    assert counts.read == len(now)
    assert report.changes.to_json() == foretold["rows"]
    expected = {"new": 3, "changed": 3, "document": 0, "deleted": 2}
    rest = {"total": len(now), "unchanged": len(now) - 6}
    assert report.changes.to_json() == {**expected, **rest}
    assert all(gate["passed"] for gate in report.gates)
    fresh = build(tmp_path / "fresh", corpus, tiny_model, **options)
    assert ids_of(tmp_path / "out") == ids_of(tmp_path / "fresh")
    assert counts.passages == fresh.encoded.counts.passages
    if refit == "always":
        assert_equals_fresh(tmp_path / "out", tmp_path / "fresh", within=ROUNDED)
    else:
        found = codes_by_passage(tmp_path / "out")
        same = before.keys() & found.keys()
        assert len(same) > 100
        assert all(found[passage] == before[passage] for passage in same)


def codes_by_passage(out: Path) -> dict[tuple[str, str], bytes]:
    documents = open_index(out, device="cpu").bundle.documents
    rows = [documents.get(row) for row in range(len(documents))]
    names = [(str(row["id"]), str(row["passage_text"])) for row in rows]
    codes = codes_of(out)
    return {name: codes[row] for row, name in enumerate(names)}


def change_corpus(place: Any) -> None:
    texts = [*choosing.documents(6, seed=3), *place.texts[4:]]
    ids = [*(f"n{i}" for i in range(6)), *(f"d{i}" for i in range(4, len(place.texts)))]
    parquet(Path(place.corpus), id=ids, text=texts, weight=list(range(1, len(texts) + 1)))


def test_what_was_chosen_is_not_chosen_again_unless_that_is_asked(
    place: Any, tmp_path: Path
) -> None:
    first = place.build("out")
    change_corpus(place)
    kept = update(place.root / "out", refit="never")
    assert (kept.manifest["choice"], choice(first)) == (choice(first), kept.manifest["choice"])
    same = ("k", "exponent", "center", "kind")
    refitted = update(place.root / "out", refit="always")
    for report in (kept, refitted):
        assert {name: report.manifest["whitening"][name] for name in same} == {
            name: first.manifest["whitening"][name] for name in same
        }
        assert report.manifest["choice"] == choice(first)
        assert not {"choose", "encode pieces"} & report.encoded.stages.seconds.keys()
        assert report.manifest["config"]["whiten"] == "auto"
    assert_equals_fresh_but_chosen(place, refitted, first)
    again = update(place.root / "out", choose_again=True)
    assert "choose" in again.encoded.stages.seconds
    fresh = place.build("fresh", store=str(tmp_path / "another"))
    assert "choose" in stages(fresh)
    # Pieces that are encoded again differ in the last bits, and the scores of the choice with them.
    assert again.manifest["choice"]["chosen"] == choice(fresh)["chosen"]
    assert again.manifest["whitening"]["k"] == fresh.manifest["whitening"]["k"]
    assert_equals_fresh(place.root / "out", place.root / "fresh", within=ROUNDED)


def assert_equals_fresh_but_chosen(place: Any, report: UpdateReport, first: Any) -> None:
    settled = {name: choice(first)["chosen"][name] for name in ("k", "exponent", "center")}
    place.build("named", whiten="whitening", **settled)
    assert_equals_fresh(report.out, place.root / "named", within=ROUNDED)
