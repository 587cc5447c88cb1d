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
``finished``, ``interrupted`` or ``failed``. A set that cannot be measured, for whatever reason,
does not keep the others from being measured and reported: its ``set_failed`` says why, and the exit
status is that of the first of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from whiten_index.artifacts.files import is_folder
from whiten_index.cli.log_lines import Ending, LogLines, ending_of, log, run_job
from whiten_index.cli.schema_options import paths_from, read_toml
from whiten_index.cli.signals import stop_on_signals
from whiten_index.cli.streams import print_exception
from whiten_index.errors import ConfigError
from whiten_index.evaluation.judgements import (
    corpus_file,
    parquet_corpus,
    qrels_file,
    queries_file,
    text_columns,
)
from whiten_index.evaluation.metrics import require_evaluator
from whiten_index.index.library import load_faiss
from whiten_index.measure.sweep_config import SweepConfig
from whiten_index.measure.sweep_report import require_own_reports, write_report
from whiten_index.measure.sweep_run import run_sweep
from whiten_index.options import job_keys, unknown


@dataclass(frozen=True)
class Job:
    """What a job file says; its paths are relative to its own folder.

    Attributes:
        out: folder of results and report.
        store: folder or URI of raw embeddings.
        sets: folders of the sets.
        split: which judgements.
        options: of the sweep, the same for all sets.
    """

    out: Path
    store: str
    sets: tuple[Path, ...]
    split: str | None
    options: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job file.

        Raises:
            ConfigError: it cannot be read, is not TOML, or lacks what a job needs.
        """
        named = {key.replace("-", "_"): value for key, value in read_toml(path).items()}
        out, sets = named.pop("out", None), named.pop("sets", None)
        if not isinstance(out, str) or not out:
            raise ConfigError(f'job file {path} says no folder for the report: out = "DIR"')
        if not isinstance(sets, list) or not sets or not all(isinstance(s, str) for s in sets):
            raise ConfigError(f'job file {path} names no sets: sets = ["FOLDER", …]')
        split, store = named.pop("split", None), named.pop("store", str(Path(out) / "store"))
        if not isinstance(split, str | None) or not isinstance(store, str):
            raise ConfigError(f"job file {path} says split or store, which must be texts")
        folders = tuple(path.parent / name for name in sets)
        if len({folder.name for folder in folders}) < len(folders):
            raise ConfigError(f"job file {path} names two sets alike; rename a folder")
        keys = job_keys(SweepConfig)
        for name in named:
            if name not in keys:
                raise ConfigError(f"job file {path}: {unknown(name, keys)}")
        options = {keys[name]: value for name, value in named.items()}
        # One that is no folder here has a name on the hub.
        if isinstance(model := options.get("model"), str) and is_folder(path.parent / model):
            options["model"] = paths_from(path.parent, model)
        store = paths_from(path.parent, store)
        return cls(path.parent / out, store, folders, split, options)

    def config(self, folder: Path) -> SweepConfig:
        """Return the sweep of one set.

        Raises:
            ConfigError: an option is unknown or cannot be used, or a file of the set is missing.
            CorpusError: a file is damaged, or the corpus is not as BEIR has it.
            StorageError: the corpus cannot be written as Parquet.
        """
        queries, (qrels, split) = queries_file(folder), qrels_file(folder, self.split)
        corpus = parquet_corpus(corpus_file(folder), self.out / "corpora" / folder.name)
        options = {
            "id_column": "id",
            "text_columns": text_columns(corpus),
            **self.options,
            "corpus": [str(corpus)],
            "store": self.store,
            "out": str(self.out),
            "name": folder.name,
            "queries": str(queries),
            "qrels": str(qrels),
            "qrels_split": split,
        }
        return SweepConfig(**options)


def run(path: Path) -> int:
    """Do the job; return the exit status."""
    return run_job(lambda: _benchmark(path), kept="points")


def _benchmark(path: Path) -> Ending:
    job = Job.read(path)
    _require_extras()
    require_own_reports(job.out)
    failed = [status for folder in job.sets if (status := _measure(job, folder))]
    if len(failed) == len(job.sets):
        said = {"message": "no set could be measured", "exit_code": failed[0]}
        return Ending("failed", said, failed[0])
    page = write_report(job.out)
    counts = {"sets": len(job.sets) - len(failed), "failed": len(failed)}
    return Ending("finished", {"report": str(page), **counts}, failed[0] if failed else 0)


def _require_extras() -> None:
    """Make sure, before the work, that whatever every set needs is installed.

    Raises:
        ConfigError: it is not.
    """
    load_faiss()
    require_evaluator()


def _measure(job: Job, folder: Path) -> int:
    """Sweep one set; return 0, or the exit status of what kept it from being measured."""
    log("set_started", set=folder.name)
    try:
        report = run_sweep(job.config(folder), progress=LogLines())
    except Exception as error:
        # Such as a set that the memory does not hold: those after it, and the report, still count.
        ending = ending_of(error)
        log("set_failed", set=folder.name, **ending.fields)
        if ending.exit_code == 1:
            print_exception(error)
        return ending.exit_code
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
