"""Migrations that are compared, refused, planned or inspected."""

import datetime
import json
import re
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.helpers.bad_input import run, succeed
from tests.pipeline.migrating import NEW, ROWS, Migration
from whiten_index import open_index
from whiten_index.errors import ConfigError, CorpusError, GateError, WhitenIndexError
from whiten_index.progress import Progress
from whiten_index.versions.gc import gc_store


def judged(migration: Migration) -> dict[str, str]:
    rows, texts = list(range(600, 1_000, 10)), migration.texts()
    queries, qrels = migration.folder / "q.parquet", migration.folder / "q.qrels"
    table = {"id": [f"q{row}" for row in rows], "text": [texts[row] for row in rows]}
    pq.write_table(pa.table(table), queries)
    qrels.write_text("".join(f"q{row}\t0\td{row}\t1\n" for row in rows))
    return {"queries": str(queries), "qrels": str(qrels)}


def test_a_model_that_loses_is_not_published(migration: Migration) -> None:
    given = judged(migration)
    before = migration.published()
    # Its prompt is all that a text of eight tokens has room for.
    worse = {"document_prompt": "the cat sat on the ", "max_length": 8}
    said = r"may lose more than 1 points of ndcg@10: 100\.00 before.*, of which '.*' 100 → \d+"
    with pytest.raises(GateError, match=said):
        migration.run(**given, **worse, max_loss=1.0)
    assert migration.published() == before
    report = migration.run(**given, max_loss=1.0)
    assert report.comparison["old"] == report.comparison["new"] == 100
    assert report.finished


def test_rows_that_a_condition_selects_come_first(migration: Migration) -> None:
    chosen = {"rows": 2_000, "first": "id >= 'd29'"}
    wanted = migration.table().filter(pc.field("id") >= "d29").num_rows
    assert migration.run(**chosen).encoded == wanted
    # All of them are there, so that others follow.
    assert migration.run(**chosen).encoded >= wanted + 1_000
    with pytest.raises(ConfigError, match="--first is for runs of --rows N"):
        migration.run(first="id >= 'd29'")


def test_sentences_compare_where_there_are_no_judgements(migration: Migration) -> None:
    texts = migration.texts()
    documents = [". ".join(texts[row : row + 4]) + "." for row in range(0, 1_200, 4)]
    migration.write(migration.table().slice(0, 0), *documents)
    migration.build(force=True)
    before = migration.published()
    worse = {"document_prompt": "the cat sat on the mat dog ran to ", "max_length": 20}
    # Already the first rows tell, before all are paid for.
    with pytest.raises(GateError, match="may lose more than 1 points of MRR"):
        migration.run(**worse, rows=100, max_loss=1.0)
    assert migration.published() == before
    report = migration.run(max_loss=100.0)
    assert report.finished
    assert report.comparison["measure"] == "MRR"
    assert 100 <= report.comparison["queries"] <= 300
    least, greatest = report.comparison["interval"]
    assert least < report.comparison["new"] - report.comparison["old"] < greatest
    changed = report.comparison["changed_most"]
    apart = [each["new"] - each["old"] for each in changed]
    assert sorted(apart[:5]) == apart[:5]
    assert apart[0] < 0 < apart[-1]
    assert {each["query"] for each in changed} <= {f"{text}." for text in texts}


def test_what_is_wrong_is_said_before_rows_are_encoded(migration: Migration) -> None:
    before = [*migration.store.rglob("segments/*")]
    missing = {"queries": migration.folder / "q.jsonl", "qrels": migration.folder / "r.tsv"}
    for wrong, said in (({"k": 999}, "999"), (missing, "q.jsonl")):
        with pytest.raises(WhitenIndexError, match=said):
            migration.run(**wrong)
    assert [*migration.store.rglob("segments/*")] == before


def test_a_corpus_that_shrank_is_migrated_if_that_is_meant(migration: Migration) -> None:
    index = migration.build_own()
    migration.write(migration.table().slice(0, 1_000))
    with pytest.raises(GateError, match="add --force"):
        migration.run(index=index)
    assert migration.run(index=index, force=True).rows == 1_000


def test_what_cannot_be_migrated_says_so(migration: Migration) -> None:
    with pytest.raises(ConfigError, match="say to which model: --model NAME"):
        migration.run(model=None)
    # Its texts are of one sentence.
    with pytest.raises(CorpusError, match=r"too short to cut .* add --queries and --qrels"):
        migration.run(max_loss=1.0)
    files, few = migration.folder / "files", migration.folder / "few"
    files.mkdir()
    for number in range(10):
        part = migration.table().slice(20 * number, 20)
        pq.write_table(part, files / f"{number}.parquet")
    migration.build(corpus=files, id_column=None, out=few, store=None, k=8)
    with pytest.raises(CorpusError, match="are needed; encode more with --rows"):
        migration.run(index=few, store=None, rows=1, bridge=True)


def test_the_command(migration: Migration) -> None:
    places = ("--store", migration.store, "--model", migration.built / "model")
    command = ("migrate", migration.index, *places, "--layers", "1", "--device", "cpu")
    out = succeed(*command, "--rows", "1000", "--bridge")
    assert "of 3,000 rows are encoded by the new model" in out
    assert "run the same command again to continue" in out
    assert run("verify", migration.index)[0] == 0
    gc_store(migration.store, keep_days=0)
    facts = json.loads(run("inspect", migration.index, "--json")[1])["migration"]
    assert (facts["from"], facts["to"], facts["rows"]) == ("model", "model", ROWS)
    assert 1_000 <= facts["encoded"] < ROWS
    assert facts["bridge"]["kind"] in ("ridge", "orthogonal")
    assert 0.3 < facts["bridge"]["agreement"] <= 1
    assert "migration" in run("inspect", migration.index)[1]
    assert run("search", migration.index, "the cat", "--device", "cpu")[0] == 0
    code, out, err = run(*command, "--json")
    assert (code, json.loads(out)["finished"]) == (0, True), err
    assert "migration" not in json.loads(run("inspect", migration.index, "--json")[1])


def test_inspect_tells_how_far_a_run_is(migration: Migration) -> None:
    index, found = migration.folder / "other", list[dict[str, Any]]()
    migration.build(out=index)

    def inspected() -> Any:
        out = succeed("inspect", index, "--json")
        return json.loads(out).get("migration")

    second_terminal = Mock(spec=Progress)
    second_terminal.advance.side_effect = lambda _: found.append(inspected())
    assert inspected() is None
    migration.run(index=index, rows=1_900, progress=second_terminal)
    counts = [each["encoded"] for each in found if each]
    assert counts == sorted(counts)
    assert {0, 1_024} <= {*counts}
    assert {each["rows"] for each in found if each} == {ROWS}
    since = datetime.datetime.fromisoformat(found[-1]["since"])
    assert datetime.timedelta(0) < datetime.datetime.now(datetime.UTC) - since
    assert re.search(rf"since +{re.escape(found[-1]['since'])}", run("inspect", index)[1])
    # The run that encodes the last rows is the last.
    assert migration.run(index=index, rows=1_024).finished
    assert inspected() is None


def test_a_plan_writes_nothing(migration: Migration) -> None:
    before = sorted(path for path in migration.folder.rglob("*"))
    places = ("--store", migration.store, "--model", migration.built / "model")
    out = succeed("migrate", migration.index, *places, "--layers", "1", "--plan", "--json")
    assert json.loads(out)["to_encode"] == ROWS
    assert sorted(path for path in migration.folder.rglob("*")) == before


def test_a_corpus_that_changes_in_the_course_of_a_migration(migration: Migration) -> None:
    index = migration.build_own()
    assert not migration.run(index=index, rows=1_000, bridge=True).finished
    migration.write(migration.table().slice(500), NEW)
    report = migration.run(index=index, rows=ROWS, **judged(migration))
    assert (report.finished, report.rows, report.encoded) == (True, ROWS - 499, ROWS - 499)
    assert report.comparison["queries"] >= 30
    assert open_index(index).search([NEW])[0][0].id == NEW
