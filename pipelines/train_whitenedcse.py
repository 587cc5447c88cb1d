"""Trainings side by side: the ablations of WhitenedCSE, or any grid, over seeds.

Run it as ``python -m pipelines.train_whitenedcse SWEEP.toml CORPUS… --out OUT``. SWEEP has
``seeds``, ``[base]`` with options of ``whiten-index train``, and ``[[runs]]``, each with a
``table``, a ``name``, options over those of the base, and perhaps a ``grid`` of options with
several values, which the name may quote in braces. ``pipelines/whitenedcse.toml`` has the paper's
Tables 3 to 6.

``OUT/results.jsonl`` has a line a training: the rows it is of, its options, STS-B dev, curves, and
the STS sets of ``--sts`` as WhitenedCSE scores them (all pairs of a set together).
``OUT/results.md`` shows means and deviations over the seeds, and curves, which the extra ``plot``
draws. What is there is not trained again. Models are removed once they are scored, but with
``--keep-models``, which ``pipelines.reproduce_papers --trained OUT`` takes. Every line on standard
output is one JSON object with ``time`` and ``event``; the last is ``finished``, ``interrupted`` or
``failed``.
"""

from __future__ import annotations

import csv
import itertools
import json
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pipelines.training_tables import pictures, tables
from whiten_index.encoding import EncoderConfig
from whiten_index.errors import ConfigError
from whiten_index.evaluate.config import EvalConfig
from whiten_index.evaluate.sts import evaluate_sts
from whiten_index.labels import read_sts
from whiten_index.lock import only_writer
from whiten_index.log_lines import Ending, LogLines, log, run_job
from whiten_index.manifest import fingerprint, make_folder, replace_file, writing
from whiten_index.report import check_report
from whiten_index.stopping import stop_on_signals
from whiten_index.train import CURVES, model_of, require_trainable, train
from whiten_index.training.config import TrainingConfig

RESULTS, TABLES, FIGURES = "results.jsonl", "results.md", "figures"
_OWN = ("table", "name", "grid")


@dataclass(frozen=True)
class Run:
    """One training of a sweep.

    Attributes:
        table: that it is a row of.
        name: of the row.
        options: of the training.
    """

    table: str
    name: str
    options: Mapping[str, Any]


def read_sweep(path: Path, *, base: Mapping[str, Any], seeds: Sequence[int] = ()) -> list[Run]:
    """Return the trainings that a file asks for, each with each seed.

    Args:
        path: of the file.
        base: options over those of its own base.
        seeds: in place of its own.

    Raises:
        ConfigError: the file cannot be read, or asks for what is unknown.
    """
    try:
        sweep = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is no sweep that can be read ({error}); mend it") from error
    if unknown := sorted(sweep.keys() - {"seeds", "base", "runs"}):
        raise ConfigError(f"{path}: {', '.join(unknown)}: a sweep has seeds, base and runs")
    runs = list[Run]()
    for row in sweep.get("runs", []):
        own = {key: value for key, value in row.items() if key not in _OWN}
        for values in _grid(row.get("grid", {})):
            name = str(row.get("name", "")).format(**values)
            for seed in seeds or sweep.get("seeds", [0]):
                options = {**sweep.get("base", {}), **own, **values, **base, "seed": seed}
                runs.append(Run(str(row.get("table", "")), name, options))
    if not runs:
        raise ConfigError(f"{path} has no runs; give each a table [[runs]] with a name")
    return runs


def _grid(grid: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


@dataclass(frozen=True)
class Job:
    """A sweep with its data.

    Attributes:
        runs: its trainings.
        corpus: sentences.
        out: folder of results.
        dev: STS-B, for checkpoints.
        sts: files of STS sets that each model is scored on, None for none.
        keep_models: keep their folders.
    """

    runs: Sequence[Run]
    corpus: tuple[str, ...]
    out: Path
    dev: str | None
    sts: str | None
    keep_models: bool

    def config(self, run: Run, folder: Path) -> TrainingConfig:
        """Return what a training is asked to do.

        Raises:
            ConfigError: its options cannot be.
        """
        return TrainingConfig.from_options(
            {**run.options, "corpus": self.corpus, "out": str(folder)}
        )

    def key(self, run: Run) -> str:
        """Return what tells a training from others; equal rows of two tables are trained once."""
        config = self.config(run, self.out)
        names = (*self.corpus, self.dev, self.sts)
        return fingerprint(
            {
                "training": config.identity(),
                "model": [config.model, config.revision, config.keep_head],
                "sentences": [list(config.text_columns), config.limit],
                "files": [None if name is None else _facts_of(name) for name in names],
            }
        )

    def do(self) -> Ending:
        """Train and score what is not there yet, and write tables and curves."""
        # Before hours of training, not after.
        check_report()
        rows = [{**result, "table": run.table, "name": run.name} for run, result in self.results()]
        text = "\n".join([*tables(rows), *_drawn(rows, self.out / FIGURES)]) + "\n"
        with writing(self.out / TABLES):
            replace_file(self.out / TABLES, text.encode())
        return Ending("finished", {"out": str(self.out), "trainings": len(rows)})

    def results(self) -> list[tuple[Run, dict[str, Any]]]:
        """Train and score what is not there yet; return each row with what it came to."""
        with only_writer(self.out, what="folder of trainings"):
            done = {result["key"]: result for result in read_results(self.out)}
            # All of them, before the first is trained.
            for config in {self.config(run, self.out) for run in self.runs}:
                require_trainable(config)
            keys = [self.key(run) for run in self.runs]
            for number, (run, key) in enumerate(zip(self.runs, keys, strict=True)):
                result, row = done.get(key), {"table": run.table, "name": run.name}
                if result is None or (self.keep_models and not self._folder(key).is_dir()):
                    log("training", **row, seed=run.options["seed"], number=number + 1,
                        of=len(self.runs))  # fmt: skip
                    result = {**self._result(run, key), "rows": result["rows"] if result else []}
                if row not in result["rows"]:
                    result = {**result, "rows": [*result["rows"], row]}
                done[key] = result
                _write(self.out / RESULTS, done)
            return [(run, done[key]) for run, key in zip(self.runs, keys, strict=True)]

    def _result(self, run: Run, key: str) -> dict[str, Any]:
        folder = self._folder(key)
        config = self.config(run, folder)
        pooling = model_of(config)[0].pooling
        report = train(config, pairs=self.dev, progress=LogLines())
        with (folder / CURVES).open(encoding="utf-8") as file:
            curves = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
        result = {
            "key": key, "options": dict(run.options), "pooling": pooling, **report.facts,
            "curves": curves, "sts": self._scores(folder), "seconds": report.stages.seconds,
        }  # fmt: skip
        if not self.keep_models:
            shutil.rmtree(folder)
        return result

    def _folder(self, key: str) -> Path:
        return self.out / "models" / key

    def _scores(self, folder: Path) -> dict[str, float] | None:
        if self.sts is None:
            return None
        config = EvalConfig(encoder=EncoderConfig(model=str(folder)))
        found = evaluate_sts(config, read_sts([self.sts]), progress=LogLines())
        return {name: each["spearman"]["all"] for name, each in found["datasets"].items()}


def _drawn(rows: Sequence[Mapping[str, Any]], folder: Path) -> Iterator[str]:
    """Draw the curves; yield the lines that show them."""
    make_folder(folder)
    for picture in pictures(rows):
        picture.render(folder / f"{picture.slug}.png")
        yield f"![{picture.alt}]({FIGURES}/{picture.slug}.png)\n"
        yield f"{picture.caption}\n"


def _facts_of(name: str) -> list[Any]:
    """Return what tells that a file is another one now: of folders and URIs the name alone."""
    path = Path(name)
    if not path.is_file():
        return [name]
    found = path.stat()
    return [name, found.st_size, found.st_mtime_ns]


def read_results(out: Path) -> list[dict[str, Any]]:
    """Return the results in a folder, a training each, with the ``rows`` that it is of.

    Raises:
        ConfigError: its file of results cannot be read.
    """
    path = out / RESULTS
    if not path.exists():
        return []
    try:
        results = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [{"rows": [], **result} for result in results if result["key"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no file of results; move it away") from error


def _write(path: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    lines = [json.dumps(row, sort_keys=True) for row in results.values()]
    with writing(path):
        replace_file(path, ("\n".join(lines) + "\n").encode())


def _setting(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """Return options given as ``name=value``, values as TOML has them, or else as text."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"{text!r} is no name=value")
        try:
            found[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[name] = value
    return found


@click.command()
@click.argument("sweep", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("corpus", nargs=-1, required=True)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of results.")
@click.option("--dev", help="File with STS-B, whose dev split says which checkpoint is best.")
@click.option("--sts", help="File or folder of STS sets that each model is scored on.")
@click.option("--only", multiple=True, help="Only this table of the sweep; may be repeated.")
@click.option("--seed", "seeds", type=int, multiple=True, help="In place of the sweep's own.")
@click.option(
    "--set", "base", multiple=True, callback=_setting, help="Option over all: name=value."
)
@click.option("--keep-models", is_flag=True, help="Keep the folders of the models.")
def main(
    sweep: Path,
    corpus: tuple[str, ...],
    out: Path,
    dev: str | None,
    sts: str | None,
    only: tuple[str, ...],
    seeds: tuple[int, ...],
    base: Mapping[str, Any],
    keep_models: bool,
) -> None:
    """Train what SWEEP (TOML) describes on the sentences of CORPUS."""
    stop_on_signals()

    def work() -> Ending:
        runs = read_sweep(sweep, base=base, seeds=seeds)
        if only:
            runs = [run for run in runs if run.table in only]
        if not runs:
            raise ConfigError(f"{sweep} has no table called {' or '.join(only)}")
        return Job(runs, corpus, out, dev, sts, keep_models).do()

    sys.exit(run_job(work, kept="trainings and checkpoints"))


if __name__ == "__main__":
    main()
