"""Labels and sets: read as they were written; an error names the row that cannot be used."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.corpora import IN_TMP_PATH
from whiten_index.artifacts.limits import load_json
from whiten_index.errors import CorpusError
from whiten_index.evaluation import judgements, label_table
from whiten_index.evaluation.judgements import parquet_corpus, read_qrels, read_queries
from whiten_index.evaluation.sts_sets import read_sts
from whiten_index.evaluation.trec_run import read_run

WORDS = st.text("abcXYZ019-_.:#é中", min_size=1, max_size=8)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).filter(str.strip)
# What a line of tabs can hold as it stands; every other line break of Unicode is a letter here.
FIELDS = TEXTS.filter(lambda text: not set(text) & set("\t\r\n\ufeff"))
QRELS = st.dictionaries(
    WORDS, st.dictionaries(WORDS, st.integers(-3, 5), min_size=1, max_size=5), min_size=1
).filter(lambda qrels: any(g > 0 for grades in qrels.values() for g in grades.values()))

Qrels = dict[str, dict[str, int]]


def rows_of(qrels: Qrels) -> list[tuple[str, str, int]]:
    return [(q, d, grade) for q, grades in qrels.items() for d, grade in grades.items()]


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def text(path: Path, content: str) -> Path:
    path.write_bytes(content.encode())
    return path


def jsonl(path: Path, *records: Any) -> Path:
    return text(path, "".join(f"{json.dumps(record)}\n" for record in records))


def qrels_as(kind: str, folder: Path, qrels: Qrels) -> Path:
    """Write qrels in one of the formats that can be read."""
    rows = rows_of(qrels)
    queries, documents, grades = (list(column) for column in zip(*rows, strict=True))
    if kind == "parquet":
        return parquet(folder / "q.parquet", query_id=queries, doc_id=documents, relevance=grades)
    if kind == "views.parquet":
        views = [pa.array(column, pa.string_view()) for column in (queries, documents)]
        names = {"query_id": views[0], "doc_id": views[1], "relevance": grades}
        return parquet(folder / "q.parquet", **names)
    if kind == "beir.parquet":
        names = {"query-id": queries, "corpus-id": documents, "score": grades}
        return parquet(folder / "q.parquet", **names)
    if kind == "beir.tsv":
        lines = ["query-id\tcorpus-id\tscore", *(f"{q}\t{d}\t{g}" for q, d, g in rows)]
        return text(folder / "q.tsv", "\n".join(lines) + "\n")
    if kind == "trec.tsv":
        return text(folder / "q.tsv", "".join(f"{q}\t0\t{d}\t{g}\n" for q, d, g in rows))
    return text(folder / f"q{kind}", "".join(f"{q} 0  {d}\t{g}\r\n" for q, d, g in rows))


QRELS_KINDS = [
    "parquet", "views.parquet", "beir.parquet", "beir.tsv", "trec.tsv", ".qrels", ".txt", ".trec",
]  # fmt: skip


@pytest.mark.parametrize("kind", QRELS_KINDS)
@IN_TMP_PATH
@given(qrels=QRELS)
def test_qrels_read_as_written(tmp_path: Path, kind: str, qrels: Qrels) -> None:
    assert read_qrels(qrels_as(kind, tmp_path, qrels)) == qrels


@IN_TMP_PATH
@given(queries=st.dictionaries(WORDS, TEXTS, min_size=1))
def test_queries_read_as_written(tmp_path: Path, queries: dict[str, str]) -> None:
    ids, texts = list(queries), list(queries.values())
    assert read_queries(parquet(tmp_path / "a.parquet", id=ids, text=texts)) == queries
    records = [{"_id": name, "text": value, "metadata": {}} for name, value in queries.items()]
    assert read_queries(jsonl(tmp_path / "a.jsonl", *records)) == queries


def test_a_pair_judged_twice_must_have_one_grade(tmp_path: Path) -> None:
    path = text(tmp_path / "q.qrels", "a 0 x 1\nb 0 x 2\na 0 x 1\n")
    assert read_qrels(path) == {"a": {"x": 1}, "b": {"x": 2}}
    path = text(tmp_path / "q.qrels", "a 0 x 1\nb 0 x 2\n\na 0 x 2\n")
    message = r"q\.qrels, line 4, gives query 'a' and document 'x' the grade 2, an earlier one 1"
    with pytest.raises(CorpusError, match=message):
        read_qrels(path)


@pytest.mark.parametrize("grade", ["one", "1.5", "", "nan", "1_0", "١", "1e3", "2000000", "9" * 99])
def test_a_grade_that_is_no_whole_number_names_its_line(tmp_path: Path, grade: str) -> None:
    path = text(tmp_path / "q.tsv", f"query-id\tcorpus-id\tscore\na\tx\t1\nb\tx\t{grade}\n")
    with pytest.raises(CorpusError, match=r"q\.tsv, line 3, has .* as score, expected a grade: a"):
        read_qrels(path)


@pytest.mark.parametrize("score", ["high", "inf", "-inf", "1,5", "1_0", "٣", "1.1e100", "-1e308"])
def test_a_score_that_is_no_number_names_its_line(tmp_path: Path, score: str) -> None:
    path = text(tmp_path / "p.tsv", f"sentence1\tsentence2\tscore\na\tb\t1\nc\td\t{score}\n")
    with pytest.raises(CorpusError, match=r"p\.tsv, line 3, has .* as score, expected a finite"):
        read_sts([path])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("q.tsv", "query-id\tcorpus-id\tscore\na\tx\t1\nb\tx\n",
            "line 3, has 2 fields, expected 3"),
        ("q.trec", "a 0 x 1\nb 0\n", "line 2, has 2 fields, expected 4 between blanks"),
        ("q.tsv", "a\tx\t1\nb\tx\t1\n",
            "no column query_id or query-id; its columns are a, x, 1: rename"),
        ("q.tsv", "query-id\tscore\na\t1\n", "no column doc_id or corpus-id; its columns are que"),
        ("q.tsv", "query-id\tscore\tscore\na\t1\t2\n", "names a column twice: query-id, score, sc"),
    ],
)  # fmt: skip
def test_malformed_qrels_name_the_line(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    with pytest.raises(CorpusError, match=message):
        read_qrels(text(tmp_path / name, content))


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "queries", "judgements"),
    [("scifact", 1109, 1258), ("cranfield", 225, 1837), ("cacm", 64, 796)],
)
def test_public_collections(data: Path, name: str, queries: int, judgements: int) -> None:
    folder = data / "retrieval" / name
    texts, qrels = read_queries(folder / "queries.parquet"), read_qrels(folder / "qrels.parquet")
    assert len(texts) == queries
    assert sum(map(len, qrels.values())) == judgements
    assert qrels.keys() <= texts.keys()


@pytest.mark.parametrize(
    ("name", "read", "text"),
    [
        ("r.trec", read_run, "q1 Q0 d1 1 0.5 t\n" * 9),
        ("j.qrels", read_qrels, "q1 0 d1 1\n" * 9),
        ("j.tsv", read_qrels, "query-id\tcorpus-id\tscore\n" + "q1\td1\t1\n" * 9),
        ("p.tsv", lambda path: read_sts([path]), "sentence1\tsentence2\tscore\n" + "a\tb\t1\n" * 9),
        ("r.jsonl", read_run, '{"query_id": "q1", "hits": [{"doc_id": "d1", "score": 1}]}\n'),
    ],
)
@pytest.mark.parametrize("how", ["rewritten", "longer", "cut"])
def test_a_mixture_is_refused(tmp_path, monkeypatch, name, read, text, how):
    path = tmp_path / name
    path.write_text(text)

    def read_up_to_a_change(file):
        yield file.readline()
        found = path.stat()
        data = text.encode()
        path.write_bytes(
            {"rewritten": data, "longer": data * 2, "cut": data[: len(data) // 2]}[how]
        )
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        yield from file

    monkeypatch.setattr(label_table, "iterate_lines", read_up_to_a_change)
    with pytest.raises(CorpusError, match=f"{name} changed while it was read; run the same"):
        read(path)


def test_a_table_that_is_written_to(tmp_path, monkeypatch):
    path = tmp_path / "j.parquet"
    columns = {"query-id": ["q1"], "corpus-id": ["d1"], "score": [1]}
    pq.write_table(pa.table(columns), path)
    monkeypatch.setattr(label_table, "check_footer", lambda _: os.utime(path))
    with pytest.raises(CorpusError, match="changed while it was read"):
        read_qrels(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"_id": None, "text": "cat"}, "its _id is None, expected text or a whole number"),
        ({"_id": 1.5, "text": "cat"}, "its _id is 1.5, expected text or a whole number"),
        ({"_id": True, "text": "cat"}, "its _id is True, expected text or a whole number"),
        ({"_id": " ", "text": "cat"}, "its _id is ' ', expected text or a whole number"),
        ({"_id": "a\0", "text": "cat"}, r"its _id is 'a\\x00', expected a text without a NUL"),
        ({"_id": "x", "text": ["the cat"]}, r"its text is \['the cat'\], expected a text"),
        ({"_id": "x", "text": 0}, "its text is 0, expected a text"),
        ({"_id": "x", "text": {}}, r"its text is \{\}, expected a text"),
        ({"_id": "x", "text": None}, "its text is None, expected a text"),
        ({"_id": "x", "title": 0, "text": "cat"}, "its title is 0, expected a text"),
        ({"_id": "x", "title": "\udfff", "text": "cat"}, "its title is .* UTF-8 can hold"),
        ({"text": "cat"}, "an object with _id, title and text .*KeyError: '_id'"),
    ],
)
def test_a_document_of_json_lines_that_is_none_names_its_line(tmp_path, line, message):
    lines = [{"_id": "a", "text": ""}, {"_id": 7, "title": None, "text": "x", "more": [1]}, line]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines[:2]))
    table = pq.read_table(parquet_corpus(path, tmp_path / "good"))
    assert table.to_pylist() == [
        {"id": "a", "title": "", "text": ""},
        {"id": "7", "title": "", "text": "x"},
    ]
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    message = f"corpus.jsonl, line 3, is not a document of BEIR.*{message}.*; mend it or take"
    with pytest.raises(CorpusError, match=message):
        parquet_corpus(path, tmp_path / "bad")


def test_a_corpus_of_json_lines_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path, lines = tmp_path / "corpus.jsonl", '{"_id": "a", "text": "old"}\n'
    path.write_text(lines)

    def late(*given):
        path.write_text(lines.replace("old", "new"))
        return load_json(*given)

    monkeypatch.setattr(judgements, "load_json", late)
    with pytest.raises(CorpusError, match="changed while it was read"):
        judgements.parquet_corpus(path, tmp_path / "work")
    assert not any((tmp_path / "work").iterdir())
