"""What the tests of the corpus share: opening one, reading it whole, writing and damaging files."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from hypothesis import HealthCheck, settings

from whiten_index import CorpusConfig, ParquetCorpus

IN_TMP_PATH = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def open_corpus(*sources, **options) -> ParquetCorpus:
    if "embedding_column" not in options:
        options.setdefault("text_columns", ("text",))
    return ParquetCorpus.open(CorpusConfig(sources=tuple(map(str, sources)), **options))


def read_all(corpus: ParquetCorpus) -> tuple[list, list, Counter]:
    """Return ids, texts and skipped counts of a whole corpus of texts."""
    ids, texts, skipped = [], [], Counter()
    for batch in corpus.batches():
        assert batch.read == len(batch) + sum(batch.skipped.values())
        assert batch.documents.num_rows == len(batch)
        ids += batch.documents.column("id").to_pylist()
        texts += batch.texts
        skipped.update(batch.skipped)
    return ids, texts, skipped


def write_set(folder: Path, documents, queries, qrels) -> Path:
    """Write a set in BEIR form: texts by id, and grades of documents by query."""
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", documents), ("queries", queries)):
        lines = [json.dumps({"_id": key, "title": "", "text": text}) for key, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    lines = [f"{q}\t{d}\t{grade}" for q, grades in qrels.items() for d, grade in grades.items()]
    tsv = "\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n"
    (folder / "qrels" / "test.tsv").write_text(tsv)
    return folder


def write_judged(folder: Path, words, *, grades=(1,)) -> Path:
    """Write a set of 160 documents; 30 queries are the first words of every third one."""
    rng = np.random.default_rng(5)
    documents = {f"d{i}": " ".join(rng.choice(words, size=12)) for i in range(160)}
    queries = {f"q{i}": " ".join(documents[f"d{3 * i}"].split()[:7]) for i in range(30)}
    near = {f"q{i}": {f"d{3 * i + n}": grade for n, grade in enumerate(grades)} for i in range(30)}
    return write_set(folder, documents, queries, near)


def overwrite(path: Path, start: int, stop: int) -> None:
    data = bytearray(path.read_bytes())
    data[start:stop] = bytes(value ^ 0xA5 for value in data[start:stop])
    path.write_bytes(data)


def chunk_bytes(path: Path, name: str) -> tuple[int, int]:
    """Return where the first column chunk of a flat column lies in its file."""
    group = pq.read_metadata(path).row_group(0)
    chunk = next(
        group.column(i)
        for i in range(group.num_columns)
        if group.column(i).path_in_schema.split(".")[0] == name
    )
    offsets = (chunk.dictionary_page_offset, chunk.data_page_offset)
    start = min(offset for offset in offsets if offset is not None)
    return start, start + chunk.total_compressed_size
