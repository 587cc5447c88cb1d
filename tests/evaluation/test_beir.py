"""Sets in BEIR form: a corpus of JSON lines turned into Parquet, and lines that are none."""

import json

import pyarrow.parquet as pq
import pytest

from whiten_index.artifacts.limits import load_json
from whiten_index.errors import CorpusError
from whiten_index.evaluation import judgements
from whiten_index.evaluation.judgements import parquet_corpus


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
