"""Compute the papers' tables and figures, next to the published ones.

Run it as ``python -m pipelines.reproduce_papers OUT``. Every published row is computed that names
a public model which is in the local cache or on the hub; the others are listed with the reason.
``--stand-in all-MiniLM-L6-v2`` computes their settings with another model, and says so.
``--trained DIR`` runs the rows of WhitenedCSE with models that ``pipelines.train_whitenedcse
--keep-models`` trained under the rows' names.
``OUT/papers.json`` has every figure and the command that gives it; ``OUT/papers.md`` shows them,
with the drawings in ``OUT/figures``.

Published figures are read from a CSV file (``--published``, or the variable
``WHITEN_INDEX_PUBLISHED``), the sets from the folder that ``WHITEN_INDEX_DATA`` names.

What is encoded or computed is kept in ``--work`` and found again. All layers of a text are kept,
8·(L + 1)·d bytes for L layers of width d: 80 kB with BERT-base, so 2.4 GB for the texts of STS at
one limit of tokens and 4 GB for those of the transfer tasks. Every line on standard output is one
JSON object with ``time`` and ``event``; the last is ``finished``, ``interrupted`` or ``failed``.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pipelines.papers import models
from pipelines.papers.bench import Bench
from pipelines.papers.commands import Files
from pipelines.papers.data import Data
from pipelines.papers.encoders import Encoders
from pipelines.papers.figures import figures_of
from pipelines.papers.kept import Kept
from pipelines.papers.pictures import require_drawing
from pipelines.papers.published import Row, chosen_rows, published_path, read_published
from pipelines.papers.recipes import Recipe
from pipelines.papers.report import write_papers
from pipelines.papers.settings import recipe_of
from pipelines.papers.tables import plan_row, tables_of, unrun
from pipelines.papers.trained import read_trained, row_name
from whiten_index.artifacts.atomic import replace_file
from whiten_index.artifacts.files import writing
from whiten_index.artifacts.lock import only_writer
from whiten_index.cli.log_lines import Ending, LogLines, log, run_job
from whiten_index.cli.signals import stop_on_signals
from whiten_index.errors import ConfigError
from whiten_index.progress import Stages

RESULTS = "papers.json"
_PACKAGES = ("whiten-index", "numpy", "torch", "transformers", "scikit-learn")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is asked of the job.

    Attributes:
        out: folder of results and report.
        work: folder of what is kept for later runs.
        published: file of the published figures, None to look for it.
        data: folder of the sets, None for that of ``WHITEN_INDEX_DATA``.
        stand_in: model in the place of those that are not to be had.
        models: only rows of these, names on the hub or folders.
        only: only these tables, ``SOURCE`` or ``SOURCE:TABLE``.
        files: what the user gives beside.
        trained: folders of models for the rows of WhitenedCSE.
        plan: only say what would be done.
    """

    out: Path
    work: Path
    published: str | None
    data: Path | None
    stand_in: str | None
    models: tuple[str, ...]
    only: tuple[str, ...]
    files: Files
    trained: tuple[Path, ...]
    plan: bool

    def rows(self) -> list[Row]:
        """Return the published rows that are asked for.

        Raises:
            WhitenIndexError: the figures cannot be read, or there is no such table or model.
        """
        rows = chosen_rows(read_published(published_path(self.published)), self.only)
        if not self.models:
            return rows
        named = [(row, recipe_of(row)) for row in rows]
        hubs = [(row, r.hub) for row, r in named if isinstance(r, Recipe) and r.hub is not None]
        known = {models.short(hub): hub for _, hub in hubs}
        if odd := [name for name in self.models if models.short(name) not in known]:
            raise ConfigError(
                f"no row is of {', '.join(odd)}; the models are {', '.join(known.values())} (or a "
                "folder called so). To compute their settings with another model, use --stand-in"
            )
        wanted = {models.short(name) for name in self.models}
        return [row for row, hub in hubs if models.short(hub) in wanted]

    def bench(self) -> Bench:
        """Return what computes the rows."""
        data, given = Data(self.data), {models.short(name): name for name in self.models}
        encoders = Encoders(data, self.work / "states", Stages(LogLines()), self.stand_in, given)
        kept, trained = Kept(self.work / "results"), read_trained(self.trained)
        if trained:
            names = {name for row in self.rows() if (name := row_name(row)) is not None}
            taken, unused = sorted(trained.keys() & names), sorted(trained.keys() - names)
            log("trained", taken=taken, unused=unused)
        return Bench(data, encoders, kept, self.files, self.work, trained)


def run(job: Job) -> int:
    """Do the job; return the exit status."""
    return run_job(lambda: _planned(job) if job.plan else _reproduced(job), kept="figures")


def _planned(job: Job) -> Ending:
    bench, counts = job.bench(), {"ran": 0, "stand-in": 0, "not run": 0}
    for row in job.rows():
        planned = plan_row(bench, row)
        counts[planned.status] += 1
        ran_with = None if planned.model is None else planned.model.name
        place = {"source": row.source, "table": row.table, "model": row.model}
        log(
            "planned",
            **place,
            setting=row.setting,
            status=planned.status,
            ran_with=ran_with,
            why=planned.why,
        )
    return Ending("finished", {"rows": counts})


def _reproduced(job: Job) -> Ending:
    started = time.perf_counter()
    require_drawing()
    rows, bench = job.rows(), job.bench()
    bench.data.sets()
    shape = _stand_in(bench)
    results = job.out / RESULTS

    def write(
        tables: Sequence[Mapping[str, Any]], drawn: Sequence[Any], missed: Any
    ) -> dict[str, Any]:
        made = {
            "versions": _versions(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": {**bench.encoders.stages.seconds, "all": time.perf_counter() - started},
        }
        lost = [*unrun(tables), *missed]
        found: dict[str, Any] = {"made": made, "stand_in": shape}
        found |= {"tables": tables, "figures": drawn, "not_run": lost}
        with writing(results):
            job.out.mkdir(parents=True, exist_ok=True)
            replace_file(results, json.dumps(found, indent=1, allow_nan=False).encode())
        return found

    with only_writer(job.work, what="work folder"):
        tables = tables_of(bench, rows, done=lambda so_far: write(so_far, [], []))
        drawn, missed = figures_of(bench, rows)
        page = write_papers(write(tables, drawn, missed), job.out)
    status = [row["status"] for table in tables for row in table["rows"]]
    counts = {name: status.count(name) for name in ("ran", "stand-in", "not run")}
    kept = {"computed": bench.kept.computed, "found": bench.kept.found}
    return Ending("finished", {"report": str(page), "rows": counts, "figures": len(drawn), **kept})


def _stand_in(bench: Bench) -> dict[str, Any] | None:
    """Return what stands in, refusing at once one that cannot be used."""
    if bench.encoders.stand_in is None:
        return None
    model = bench.encoders.substitute()
    return {"model": model.name, "layers": model.layers, "dim": model.dim}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        # Those of an extra may be missing.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--stand-in", help="Model that computes the settings of those not to be had.")
@click.option(
    "--model",
    "names",
    multiple=True,
    help="Only rows of this model: its name on the hub, or a folder called so; repeatable.",
)
@click.option(
    "--published",
    help="CSV of the published figures. [default: the file that WHITEN_INDEX_PUBLISHED names]",
)
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the sets. [default: that of WHITEN_INDEX_DATA]",
)
@click.option("--nli", help="Parquet of NLI sentences (premise, hypothesis), for fits on NLI.")
@click.option("--word-vectors", help="GloVe's vectors, for its rows.")
@click.option("--word-counts", help="Words and their counts, for SIF.")
@click.option("--quora", help="The Quora set in BEIR's form, for the search of the PyTorch port.")
@click.option(
    "--trained",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of pipelines.train_whitenedcse --keep-models, for the rows of WhitenedCSE; "
    "repeatable.",
)
@click.option(
    "--work",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of what is kept for later runs. [default: OUT/work]",
)
@click.option("--only", multiple=True, help="Only SOURCE, or SOURCE:TABLE; repeatable.")
@click.option("--plan", is_flag=True, help="Only log what would be done with each row.")
def main(
    out: Path,
    names: tuple[str, ...],
    nli: str | None,
    word_vectors: str | None,
    word_counts: str | None,
    quora: str | None,
    work: Path | None,
    **options: Any,
) -> None:
    """Compute the papers' tables and figures into OUT, the published figures beside."""
    stop_on_signals()
    files = Files(nli=nli, word_vectors=word_vectors, word_counts=word_counts, quora=quora)
    sys.exit(run(Job(out=out, work=work or out / "work", models=names, files=files, **options)))


if __name__ == "__main__":
    main()
