"""Certificates: figures by brute force, a loss in one stratum that stops a night, checks again."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tests.helpers.builds import build_texts
from whiten_index import (
    BuildConfig,
    CertifyConfig,
    UpdateConfig,
    build_index,
    certify_index,
    list_versions,
    open_index,
    update_index,
)
from whiten_index.cli import cli
from whiten_index.errors import ArtifactError, ConfigError, CorpusError, GateError
from whiten_index.evaluation.metrics import evaluate_each, mean_interval
from whiten_index.progress import Progress
from whiten_index.versions.retention import prune, rollback
from whiten_index.whitening.spectrum import unit_rows

ROWS = 160


def documents(words: Any, lang: str, seed: int) -> list[dict[str, Any]]:
    """Documents of twelve words each, in a language of their own."""
    rng = np.random.default_rng(seed)
    return [
        {"id": f"{lang}{n}", "text": " ".join(rng.choice(words, 12)), "lang": lang, "size": n}
        for n in range(ROWS)
    ]


class Place:
    """A corpus of two languages, of which the index was built before the second one came.

    The first has two words and the second all others.
    """

    def __init__(self, folder: Path, model: Path, words: tuple[str, ...]) -> None:
        self.folder, self.out = folder, folder / "index"
        self.rows = documents(words[:2], "de", 1)
        self.later = documents(words[2:], "en", 2)
        self.write(self.rows)
        options = {"id_column": "id", "keep": ("lang", "size"), "whiten": "pca", "k": 4}
        build_texts(self.out, folder / "corpus.parquet", model, threads=1, **options)
        asked = [*self.rows[::2], *self.later[::2]]
        queries = [
            {"id": row["id"], "text": " ".join(row["text"].split()[: 8 + n % 5])}
            for n, row in enumerate(asked)
        ]
        pq.write_table(pa.Table.from_pylist(queries), folder / "queries.parquet")
        lines = [f"{row['id']}\t{row['id']}\t1" for row in asked]
        (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(lines) + "\n")

    def write(self, rows: list[dict[str, Any]]) -> None:
        pq.write_table(pa.Table.from_pylist(rows), self.folder / "corpus.parquet")

    def certify(self, **options: Any) -> dict[str, Any]:
        files = {"queries": self.folder / "queries.parquet", "qrels": self.folder / "qrels.tsv"}
        given = {**{name: str(path) for name, path in files.items()}, **options}
        return certify_index(CertifyConfig(index=str(self.out), threads=1, **given))

    def verified(self) -> Any:
        """Return the run of a verification with the files of the certificate."""
        files = self.folder / "queries.parquet", self.folder / "qrels.tsv"
        given = ["--queries", str(files[0]), "--qrels", str(files[1])]
        return CliRunner().invoke(cli, ["verify", str(self.out), "--certificate", *given])


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path, tiny_words: tuple[str, ...]) -> Place:
    return Place(tmp_path, tiny_model, tiny_words)


def test_figures_are_those_of_exact_search_and_of_the_index(place: Place) -> None:
    made = place.certify(by=("lang", "size"))["certificate"]
    opened = open_index(place.out)
    queries = pq.read_table(place.folder / "queries.parquet").to_pylist()[: ROWS // 2]
    qrels = {row["id"]: {row["id"]: 1} for row in queries}
    asked = opened.encode([row["text"] for row in queries])
    rows = opened.encoder.encode([row["text"] for row in place.rows])
    found = {}
    for name, way in (("raw", np.asarray), ("index", opened.bundle.whitening.apply)):
        scores = unit_rows(way(asked)) @ unit_rows(way(rows)).T
        run = {
            row["id"]: {place.rows[i]["id"]: float(each[i]) for i in np.argsort(-each)[:10]}
            for row, each in zip(queries, scores, strict=True)
        }
        found[name] = 100 * np.array(list(evaluate_each(qrels, run, "ndcg@10").values()))
        assert made[name] == pytest.approx(found[name].mean(), abs=0.5)
    loss = found["raw"] - found["index"]
    assert made["questions"] == ROWS // 2
    assert list(made["interval"]) == pytest.approx(list(mean_interval(loss)), abs=0.5)
    assert made["at_most"] == max(made["interval"][1], *(s["interval"][1] for s in made["strata"]))
    # Queries have 8 to 12 words, sixteen each; thirds of 80 by size are below 30.
    strata = [(each["by"], each["value"], each["questions"]) for each in made["strata"]]
    assert strata == [
        ("words of the query", "8 to 9", 32), ("words of the query", "10 to 11", 32),
        ("lang", "'de'", 80),
    ]  # fmt: skip
    assert made["strata_left_out"] == 4


def test_the_version_is_published_again_with_its_certificate(place: Place) -> None:
    before = open_index(place.out)
    made = place.certify()
    after = open_index(place.out)
    assert after.bundle.version == made["version"] != before.bundle.version
    assert after.bundle.manifest["certificate"] == made["certificate"]
    assert after.bundle.manifest["rows"] == ROWS
    assert [hit.id for hit in after.search("w1 w2")] == [hit.id for hit in before.search("w1 w2")]
    run = place.verified()
    assert run.exit_code == 0, run.output
    assert "its certificate holds, at most" in run.output
    # Files that the manifest of a stranger may name are not opened.
    (place.folder / "qrels.tsv").rename(place.folder / "elsewhere.tsv")
    run = CliRunner().invoke(cli, ["verify", str(place.out), "--certificate"])
    assert run.exit_code == ConfigError.exit_code
    assert "by judged queries: name them with --queries and --qrels" in run.output
    (place.folder / "elsewhere.tsv").rename(place.folder / "qrels.tsv")
    with pytest.raises(ArtifactError, match="no sound version older"):
        rollback(place.out)
    shown = CliRunner().invoke(cli, ["inspect", str(place.out)])
    assert "at most" in shown.output
    # The next update has its changes, and those of the version before for databases.
    place.write(place.rows[1:])
    watcher = Mock(spec=Progress)
    done = update_index(UpdateConfig(index=str(place.out), threads=1), progress=watcher)
    # It has no certificate, and says so.
    assert "certificate" not in done.manifest
    notes = [call.args[0] for call in watcher.note.call_args_list]
    assert [note for note in notes if "certificate" in note] == [
        f"note: version {made['version']} has a certificate, and this one has none; write one with "
        "whiten-index certify, or give --certify-gate to each update"
    ]
    assert done.changes.to_json() == {
        "total": ROWS - 1, "new": 0, "changed": 0, "document": 0, "deleted": 1,
        "unchanged": ROWS - 1,
    }  # fmt: skip


def test_a_rollback_leaves_the_version_behind_with_and_without_its_certificate(
    place: Place,
) -> None:
    (good,) = (each.name for each in list_versions(place.out))
    place.write(place.rows[1:])
    bad = update_index(UpdateConfig(index=str(place.out), threads=1)).version
    copy = place.certify()["version"]
    assert rollback(place.out).to == good
    assert {each.name for each in list_versions(place.out) if each.withdrawn} == {bad, copy}
    place.write(place.rows[2:])
    newest = update_index(UpdateConfig(index=str(place.out), threads=1)).version
    assert set(prune(place.out, keep=2).kept) == {newest, good}


def test_a_loss_in_one_stratum_stops_the_night(place: Place) -> None:
    sure = place.certify(by=("lang",))["certificate"]["at_most"]
    assert len(list_versions(place.out)) == 2
    gate = {"index": str(place.out), "threads": 1, "refit": "never"}
    # Of texts of two words the transform keeps what they differ in, of those of many words little.
    place.write([*place.rows, *place.later])
    with pytest.raises(GateError, match=r"gate certificate: .*lang 'en' lose") as stopped:
        update_index(UpdateConfig(**gate, certify_gate=sure + 5))
    assert "lang 'de'" not in str(stopped.value)
    assert open_index(place.out).bundle.manifest["rows"] == ROWS
    (found,) = [each for each in stopped.value.gates if each["name"] == "certificate"]
    assert not found["passed"]
    # Nor may the questions of a language vanish.
    place.write(place.later)
    with pytest.raises(GateError, match="fewer than 30 questions are left with lang 'de'"):
        update_index(UpdateConfig(**gate, max_shrink=1, certify_gate=100))
    place.write([*place.rows, *place.later])
    # A gate that allows it lets it through, and the next version has a certificate of its own.
    update_index(UpdateConfig(**gate, certify_gate=100))
    manifest = open_index(place.out).bundle.manifest
    assert manifest["rows"] == 2 * ROWS
    strata = {each["value"]: each for each in manifest["certificate"]["strata"]}
    assert strata["'en'"]["loss"] > strata["'de'"]["loss"] + 5


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("file", ["queries.parquet", "qrels.tsv"])
def test_other_judgements_pass_no_gate(place: Place, file: str, when: str) -> None:
    place.certify()
    place.write(place.rows[1:])

    def replace() -> None:
        path = place.folder / file
        if path.suffix == ".parquet":
            pq.write_table(pq.read_table(path).slice(1), path)
            return
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines[:2], *lines[3:]]) + "\n")

    def meanwhile(stage: str, _: int) -> None:
        if stage == "encode":
            replace()

    watcher = Mock(spec=Progress)
    if when == "before":
        replace()
    else:
        watcher.start.side_effect = meanwhile
    given = UpdateConfig(index=str(place.out), threads=1, certify_gate=100, refit="never")
    with pytest.raises(GateError, match="not those of the certificate; certify the index by them"):
        update_index(given, progress=watcher)
    assert open_index(place.out).bundle.manifest["rows"] == ROWS


def test_pieces_of_documents_ask_where_nothing_is_judged(
    tmp_path: Path, tiny_model: Path, tiny_words: tuple[str, ...]
) -> None:
    rng = np.random.default_rng(0)
    sentences = [[" ".join(rng.choice(tiny_words, 9)) + "." for _ in range(5)] for _ in range(400)]
    table = pa.table({"text": [" ".join(each) for each in sentences]})
    pq.write_table(table, tmp_path / "corpus.parquet")
    given = {"corpus": str(tmp_path / "corpus.parquet"), "text_columns": "text", "threads": 1}
    build_index(
        BuildConfig(**given, model=str(tiny_model), k=6, whiten="pca", out=str(tmp_path / "index"))
    )
    made = certify_index(CertifyConfig(index=str(tmp_path / "index"), threads=1))["certificate"]
    assert made["questions"] >= 30
    assert made["inputs"]["queries"] is None
    assert made["raw"] > made["index"] > 0
    run = CliRunner().invoke(cli, ["verify", str(tmp_path / "index"), "--certificate"])
    assert run.exit_code == 0, run.output


def test_what_cannot_be_certified_is_refused_and_publishes_nothing(place: Place) -> None:
    published = open_index(place.out).bundle.version
    with pytest.raises(ConfigError, match=r"--by colour is no kept column .* keeps lang, size"):
        place.certify(by=("colour",))
    with pytest.raises(GateError, match="not certified: all questions lose"):
        place.certify(gate=0)
    (place.folder / "few.tsv").write_text("query-id\tcorpus-id\tscore\nde0\tde0\t1\n")
    with pytest.raises(CorpusError, match=r"1 queries of .* needs 30"):
        place.certify(qrels=str(place.folder / "few.tsv"))
    with pytest.raises(ConfigError, match="--queries is missing"):
        place.certify(queries=None)
    with pytest.raises(ArtifactError, match="no certificate; write one with whiten-index certify"):
        update_index(UpdateConfig(index=str(place.out), threads=1, certify_gate=2))
    assert open_index(place.out).bundle.version == published
    assert len(list_versions(place.out)) == 1
    place.write(place.later)
    with pytest.raises(CorpusError, match=r"the corpus changed .* run whiten-index update"):
        place.certify(queries=None, qrels=None)


def test_other_judgements_do_not_keep_the_certificate(place: Place) -> None:
    place.certify()
    text = (place.folder / "qrels.tsv").read_text().replace("de0\tde0", "de0\tde1")
    lines = [line for n, line in enumerate(text.splitlines()) if n % 2 == 0]
    (place.folder / "qrels.tsv").write_text("\n".join(lines) + "\n")
    run = place.verified()
    assert run.exit_code == ConfigError.exit_code
    assert "not those of the certificate" in run.output
    assert json.loads((place.out / "CURRENT").read_text())["version"]
