"""The job over sets in BEIR form: whose documents are searched, what fails alone, how it ends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pipelines.retrieval_benchmark import main
from whiten_index.errors import WhiteningError

ROWS = 120
LONG_AGO = 10**18


@pytest.fixture(scope="module")
def documents(tiny_words: tuple[str, ...]) -> dict[str, str]:
    rng = np.random.default_rng(6)
    return {f"d{i}": " ".join(rng.choice(tiny_words, size=9)) for i in range(ROWS)}


def write_set(folder: Path, documents: dict[str, str], *, when: int = LONG_AGO) -> Path:
    """Write a set with 30 documents' first words as queries; the corpus is of the time ``when``."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    queries = {f"q{i}": " ".join(documents[f"d{i}"].split()[:6]) for i in range(30)}
    for name, texts in (("corpus", documents), ("queries", queries)):
        lines = [json.dumps({"_id": key, "text": text}) for key, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    lines = ["query-id\tcorpus-id\tscore", *(f"q{i}\td{i}\t1" for i in range(30))]
    (folder / "qrels/test.tsv").write_text("\n".join(lines) + "\n")
    os.utime(folder / "corpus.jsonl", ns=(when, when))
    return folder


def write_job(path: Path, sets: list[Path], model: Path) -> Path:
    path.write_text(
        f'out = "out"\nsets = {json.dumps(list(map(str, sets)))}\nmodel = "{model}"\nk = [8]\n'
        'threads = 1\ntransforms = ["pca"]\ncodecs = ["fp32"]\nindexes = ["flat"]\n'
        "baselines = false\n"
    )
    return path


def run(job: Path) -> tuple[int, list[dict[str, Any]]]:
    done = CliRunner().invoke(main, [str(job)])
    return done.exit_code, [json.loads(line) for line in done.stdout.splitlines()]


def test_sets_that_cannot_be_measured_leave_the_report_to_the_others(
    tmp_path, documents, tiny_model, tiny_words
):
    few = {key: tiny_words[i % 3] for i, key in enumerate(documents)}
    flat = write_set(tmp_path / "flat", few)
    torn = write_set(tmp_path / "torn", documents)
    (torn / "qrels.parquet").write_bytes(b"PAR1 torn")
    latin = write_set(tmp_path / "latin", documents)
    (latin / "corpus.jsonl").write_bytes(b'{"_id": "d0", "text": "\xe9"}\n')
    good = write_set(tmp_path / "good", documents)
    status, events = run(write_job(tmp_path / "job.toml", [flat, good, torn, latin], tiny_model))
    failed = {event["set"]: event["error"] for event in events if event["event"] == "set_failed"}
    assert failed == {"flat": "WhiteningError", "torn": "CorpusError", "latin": "CorpusError"}
    assert status == WhiteningError.exit_code
    last = events[-1]
    assert (last["event"], last["sets"], last["failed"]) == ("finished", 1, 3)
    assert "good" in Path(last["report"]).read_text()
