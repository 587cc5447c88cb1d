"""The job over sets in BEIR form: whose documents are searched, what fails alone, how it ends."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner

from pipelines import retrieval_benchmark
from pipelines.retrieval_benchmark import main
from tests.helpers.corpora import write_set
from whiten_index.errors import ConfigError, WhiteningError

ROWS = 120


@pytest.fixture(scope="module")
def documents(tiny_words: tuple[str, ...]) -> dict[str, str]:
    rng = np.random.default_rng(6)
    return {f"d{i}": " ".join(rng.choice(tiny_words, size=9)) for i in range(ROWS)}


def write(folder: Path, documents: dict[str, str]) -> Path:
    """Write a set with 30 documents' first words as queries."""
    queries = {f"q{i}": " ".join(documents[f"d{i}"].split()[:6]) for i in range(30)}
    return write_set(folder, documents, queries, {f"q{i}": {f"d{i}": 1} for i in range(30)})


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
    flat = write(tmp_path / "flat", few)
    torn = write(tmp_path / "torn", documents)
    (torn / "qrels.parquet").write_bytes(b"PAR1 torn")
    latin = write(tmp_path / "latin", documents)
    (latin / "corpus.jsonl").write_bytes(b'{"_id": "d0", "text": "\xe9"}\n')
    good = write(tmp_path / "good", documents)
    job = write_job(tmp_path / "job.toml", [flat, good, torn, latin], tiny_model)
    status, events = run(job)
    failed = {event["set"]: event["error"] for event in events if event["event"] == "set_failed"}
    assert failed == {"flat": "WhiteningError", "torn": "CorpusError", "latin": "CorpusError"}
    assert status == WhiteningError.exit_code
    last = events[-1]
    assert (last["event"], last["sets"], last["failed"]) == ("finished", 1, 3)
    assert "good" in Path(last["report"]).read_text()
    for each, measured in ((events, 1), (run(job)[1], 0)):
        (finished,) = (event for event in each if event["event"] == "set_finished")
        assert (finished["dataset"]["name"], finished["measured"]) == ("good", measured)


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError("https://user:hunter2@host"), 1), (OSError(28, "No space left"), 7)],
)
def test_a_set_fails_by_its_status_and_without_passwords(
    error, status, tmp_path, documents, tiny_model, monkeypatch
):
    monkeypatch.setattr(retrieval_benchmark, "run_sweep", Mock(side_effect=error))
    sets = [write(tmp_path / "good", documents)]
    done = CliRunner().invoke(main, [str(write_job(tmp_path / "job.toml", sets, tiny_model))])
    assert done.exit_code == status
    assert "hunter2" not in done.output
    assert ("Traceback" in done.output) == (status == 1)


def test_a_job_names_what_is_in_its_folder_and_addresses(tmp_path):
    (tmp_path / "m").mkdir()
    job = tmp_path / "job.toml"
    home = ("~/raw", str(Path.home() / "raw"))
    for store, expected in (("s3://b/store", "s3://b/store"), ("raw", str(tmp_path / "raw")), home):
        job.write_text(f'out = "x"\nsets = ["a"]\nstore = "{store}"\nmodel = "m"\n')
        read = retrieval_benchmark.Job.read(job)
        assert (read.store, read.options["model"]) == (expected, str(tmp_path / "m"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('sets = ["a"]', "says no folder for the report"),
        ('out = "x"', "names no sets"),
        ('out = "x"\nsets = ["a/s", "b/s"]', "names two sets alike"),
        ("out = ", "is not TOML"),
        ('out = "x"\nsets = ["a"]\nself = 1', "self is unknown; "),
        ('out = "x"\nsets = ["a"]\nstore = {a = 1}', "split or store, which must be texts"),
    ],
)
def test_a_job_that_cannot_be_read_says_why(text, message, tmp_path):
    (tmp_path / "job.toml").write_text(text)
    status, events = run(tmp_path / "job.toml")
    assert status == ConfigError.exit_code
    assert message in events[-1]["message"]
