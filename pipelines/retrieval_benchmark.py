"""The sweep as a scheduled job over retrieval sets in BEIR form: a TOML job file in, a report out.

Run it as ``python -m pipelines.retrieval_benchmark job.toml``. A job file::

    out = "benchmark"                  # report.html and results.jsonl
    store = "embeddings"               # shared with builds; out/store where it is left out
    sets = ["data/scifact", "data/nfcorpus"]
    split = "test"                     # of BEIR's qrels/, or of a column split
    pooling = "mean"                   # and whatever else `whiten-index sweep` takes
    k = [64, 128]

A set is a folder with ``corpus``, ``queries`` and ``qrels``, each as Parquet, or as BEIR has them:
``corpus.jsonl``, ``queries.jsonl`` and ``qrels/<split>.tsv``. What is encoded or measured is found
again. Every line on standard output is one JSON object with ``time`` and ``event``; the last is
``finished``, ``interrupted`` or ``failed``. A set that cannot be used does not keep the others from
being measured: its ``set_failed`` says why, and the exit status is that of the first of them.
"""

from __future__ import annotations

import json
import sys
import tomllib
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.build_index import LogLines, log
from whiten_index.errors import ConfigError, CorpusError, WhitenIndexError
from whiten_index.manifest import replacing, writing
from whiten_index.report import write_report
from whiten_index.stopping import INTERRUPTED, stop_on_signals
from whiten_index.sweep import SweepConfig, run_sweep, sweep_config

_RESULTS = "results.jsonl"
_SCHEMA = pa.schema([("id", pa.string()), ("title", pa.string()), ("text", pa.string())])
_ROWS = 8_192
_SPLIT = "test"


@dataclass(frozen=True)
class Job:
    """What a job file says; its paths are relative to its own folder.

    Attributes:
        out: folder of results and report.
        store: folder of raw embeddings.
        sets: folders of the sets.
        split: which judgements.
        options: of the sweep, the same for all sets.
    """

    out: Path
    store: Path
    sets: tuple[Path, ...]
    split: str
    options: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job file.

        Raises:
            ConfigError: it cannot be read, is not TOML, or lacks what a job needs.
        """
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"job file {path} cannot be read ({error})") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"job file {path} is not TOML ({error}); mend that line") from error
        named = {key.replace("-", "_"): value for key, value in values.items()}
        out, sets = named.pop("out", None), named.pop("sets", None)
        if not isinstance(out, str) or not out:
            raise ConfigError(f'job file {path} says no folder for the report: out = "DIR"')
        if not isinstance(sets, list) or not sets or not all(isinstance(s, str) for s in sets):
            raise ConfigError(f'job file {path} names no sets: sets = ["FOLDER", …]')
        split = str(named.pop("split", _SPLIT))
        folders = tuple(path.parent / name for name in sets)
        if len({folder.name for folder in folders}) < len(folders):
            raise ConfigError(f"job file {path} names two sets alike; rename a folder")
        store = path.parent / str(named.pop("store", Path(out) / "store"))
        return cls(path.parent / out, store, folders, split, named)

    def config(self, folder: Path) -> SweepConfig:
        """Return the sweep of one set.

        Raises:
            ConfigError: an option is unknown or cannot be used, or a file of the set is missing.
            CorpusError: the corpus is not as BEIR has it.
        """
        files = set_files(folder, self.split, work=self.out / "corpora")
        options = {
            "id_column": "id",
            "text_columns": _text_columns(files.corpus),
            **self.options,
            "corpus": [str(files.corpus)],
            "store": str(self.store),
            "out": str(self.out),
            "name": folder.name,
            "queries": str(files.queries),
            "qrels": str(files.qrels),
            "qrels_split": files.split,
        }
        if "k" in options:
            options["widths"] = options.pop("k")
        return sweep_config(options)


@dataclass(frozen=True)
class SetFiles:
    """The files of a set.

    Attributes:
        corpus: Parquet.
        queries: Parquet or JSON lines.
        qrels: Parquet or TSV.
        split: which rows of the qrels, None for all of them.
    """

    corpus: Path
    queries: Path
    qrels: Path
    split: str | None


def set_files(folder: Path, split: str, *, work: Path) -> SetFiles:
    """Find the files of a set, and turn a corpus of JSON lines into Parquet in ``work``.

    Raises:
        ConfigError: one is missing.
        CorpusError: a line of the corpus is not as BEIR has it.
    """
    queries = _first(folder, "queries.parquet", "queries.jsonl")
    qrels = _first(folder, "qrels.parquet", f"qrels/{split}.parquet", f"qrels/{split}.tsv")
    corpus = _first(folder, "corpus.parquet", "corpus.jsonl")
    if corpus.suffix == ".jsonl":
        corpus = _as_parquet(corpus, work / folder.name / "corpus.parquet")
    # A file of one split says so by its name.
    of_several = qrels.suffix == ".parquet" and "split" in pq.read_schema(qrels).names
    return SetFiles(corpus, queries, qrels, split if of_several else None)


def _first(folder: Path, *names: str) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"{folder} is no retrieval set: it has no {' and no '.join(names)}")


def _text_columns(corpus: Path) -> list[str]:
    names = pq.read_schema(corpus).names
    return [name for name in ("title", "text") if name in names]


def _as_parquet(source: Path, target: Path) -> Path:
    """Turn BEIR's corpus.jsonl (_id, title, text) into Parquet (id, title, text)."""
    if target.exists() and target.stat().st_mtime >= source.stat().st_mtime:
        return target
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary, pq.ParquetWriter(temporary, _SCHEMA) as writer:
            for batch in _batches(source):
                writer.write_table(pa.Table.from_pylist(batch, _SCHEMA))
    return target


def _batches(source: Path) -> Iterator[list[dict[str, str]]]:
    batch: list[dict[str, str]] = []
    with source.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                batch.append(_document(line, f"line {number} of {source}"))
            if len(batch) == _ROWS:
                yield batch
                batch = []
    yield batch


def _document(line: str, where: str) -> dict[str, str]:
    try:
        found = json.loads(line)
        return {
            "id": str(found["_id"]),
            "title": str(found.get("title") or ""),
            "text": str(found["text"]),
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorpusError(
            f"{where} is not a document of BEIR, an object with _id, title and text; mend it"
        ) from error


def run(path: Path) -> int:
    """Do the job; return the exit status."""
    try:
        job = Job.read(path)
        failed = [status for folder in job.sets if (status := _measure(job, folder))]
        if len(failed) == len(job.sets):
            log("failed", message="no set could be measured", exit_code=failed[0])
            return failed[0]
        page = write_report(job.out / _RESULTS, job.out)
    except WhitenIndexError as error:
        log("failed", error=type(error).__name__, message=str(error), exit_code=error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        log("interrupted", message="finished points are kept; run the same job to go on")
        return INTERRUPTED
    except Exception as error:
        # Whoever reads the log lines must see an end, whatever it was; the rest is for people.
        log("failed", error=type(error).__name__, message=str(error), exit_code=1)
        traceback.print_exc()
        return 1
    log("finished", report=str(page), sets=len(job.sets) - len(failed), failed=len(failed))
    return failed[0] if failed else 0


def _measure(job: Job, folder: Path) -> int:
    """Sweep one set; return 0, or the exit status of what kept it from being measured."""
    log("set_started", set=folder.name)
    try:
        report = run_sweep(job.config(folder), progress=LogLines())
    except (ConfigError, CorpusError) as error:
        log("set_failed", set=folder.name, error=type(error).__name__, message=str(error))
        return error.exit_code
    log("set_finished", set=folder.name, **report.to_json())
    return 0


@click.command()
@click.argument("job", type=click.Path(dir_okay=False, path_type=Path))
def main(job: Path) -> None:
    """Measure every setting on the sets that JOB (TOML) names, and report."""
    stop_on_signals()
    sys.exit(run(job))


if __name__ == "__main__":
    main()
