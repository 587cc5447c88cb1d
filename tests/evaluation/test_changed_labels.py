"""Files of labels that are written to while they are read."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whiten_index.errors import CorpusError
from whiten_index.evaluation import label_table
from whiten_index.evaluation.judgements import read_qrels
from whiten_index.evaluation.sts_sets import read_sts
from whiten_index.evaluation.trec_run import read_run


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
