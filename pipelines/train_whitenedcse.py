"""Trainings side by side: the ablations of WhitenedCSE, or any grid, over seeds.

Run it as ``python -m pipelines.train_whitenedcse SWEEP.toml CORPUS… --out OUT``. SWEEP has
``seeds``, ``[base]`` with options of ``whiten-index train``, and ``[[runs]]``, each with a
``table``, a ``name``, options over those of the base, and perhaps a ``grid`` of options with
several values, which the name may quote in braces. Options are written with underscores
(``max_steps``). ``pipelines/whitenedcse.toml`` has the paper's
Tables 3 to 6.

``OUT/results.jsonl`` has a line a training: the rows it is of, its options, STS-B dev, curves, and
the STS sets of ``--sts`` as WhitenedCSE scores them (all pairs of a set together).
``OUT/results.md`` shows means and deviations over the seeds, and curves, which the extra ``plot``
draws, of the rows that were asked for last. What is there is not trained again. Models are removed
once they are scored, but with ``--keep-models``: where a model was not kept, or not scored on what
``--sts`` names now, it is trained again. ``pipelines.reproduce_papers --trained OUT`` takes them
for the rows of the paper that are called as they are. Every line on standard output is one JSON
object with ``time`` and ``event``; the last is ``finished``, ``interrupted`` or ``failed``.
"""

from __future__ import annotations

import csv
import itertools
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pipelines.papers.pictures import require_drawing
from pipelines.training_tables import draw, tables
from whiten_index.artifacts.atomic import discard, replace_file
from whiten_index.artifacts.files import exists, is_file, is_folder, read_bounded, reading, writing
from whiten_index.artifacts.limits import load_toml
from whiten_index.artifacts.lock import only_writer
from whiten_index.artifacts.manifest import fingerprint
from whiten_index.cli.log_lines import Ending, LogLines, failure, log, run_job
from whiten_index.cli.signals import stop_on_signals
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.load_encoder import CURVES_FILE
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.errors import ConfigError, EncoderError, WhiteningError
from whiten_index.evaluation.sts_sets import read_sts
from whiten_index.measure.eval_config import EvalConfig
from whiten_index.measure.evaluate_sts import evaluate_sts
from whiten_index.training.train import read_dev, require_trainable, train_encoder
from whiten_index.training.training_config import TrainingConfig

RESULTS, TABLES, FIGURES = "results.jsonl", "results.md", "figures"
_OWN = ("table", "name", "grid")
_FIELDS: Mapping[str, Any] = {
    "key": str, "rows": list, "options": dict, "pooling": str, "encoder": str, "steps": int,
    "sentences": int, "stsb_dev": float | None, "stsb_dev_before": float | None,
    "curves": list, "sts": dict | None,
}  # fmt: skip


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
        base: options over those of its own base; what a row sets itself, it keeps.
        seeds: in place of its own.

    Raises:
        ConfigError: the file cannot be read, or asks for what is unknown.
    """
    try:
        with reading(path):
            sweep = load_toml(read_bounded(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no sweep that can be read ({error}); mend it") from error
    if unknown := sorted(sweep.keys() - {"seeds", "base", "runs"}):
        raise ConfigError(f"{path}: {', '.join(unknown)}: a sweep has seeds, base and runs")
    runs = list[Run]()
    (shared,) = _tables(path, [sweep.get("base", {})], "[base]")
    for row in _tables(path, sweep.get("runs", []), "[[runs]]"):
        own = {key: value for key, value in row.items() if key not in _OWN}
        (grid,) = _tables(path, [row.get("grid", {})], "a grid")
        runs += _seeded(path, row, own, grid, {**shared, **base}, seeds or sweep.get("seeds", [0]))
    if not runs:
        raise ConfigError(f"{path} has no runs; give each a table [[runs]] with a name")
    _require_distinct(path, runs)
    return runs


def _seeded(
    path: Path,
    row: Mapping[str, Any],
    own: Mapping[str, Any],
    grid: Mapping[str, Any],
    shared: Mapping[str, Any],
    seeds: Any,
) -> Iterator[Run]:
    """Yield the settings of a row with each seed."""
    table, name = row.get("table"), row.get("name")
    if not (isinstance(table, str) and table and isinstance(name, str) and name):
        raise ConfigError(f"{path}: each of [[runs]] has a table and a name; give both as text")
    if odd := [key for key, values in grid.items() if not (isinstance(values, list) and values)]:
        raise ConfigError(f"{path}: a grid gives lists of values, and {odd[0]} none; mend it")
    if not isinstance(seeds, list | tuple):
        raise ConfigError(f"{path}: seeds is {seeds!r}; give a list of whole numbers")
    if "seed" in {*shared, *own, *grid}:
        raise ConfigError(f"{path}: seeds are of the whole sweep; give them as seeds = […]")
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        try:
            called = name.format(**chosen)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{path}: the name {name!r} quotes what its grid does not have ({error}); the grid "
                f"has {', '.join(grid) or 'nothing'}"
            ) from error
        for seed in seeds:
            yield Run(table, called, {**shared, **own, **chosen, "seed": seed})


def _tables(path: Path, given: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise ConfigError(f"{path}: {what} is no table of TOML; mend it")
    return given


def _require_distinct(path: Path, runs: Sequence[Run]) -> None:
    """Refuse rows whose means would be of several settings."""
    settings: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in runs:
        settings.setdefault((run.table, run.name), []).append(run.options)
    for (table, name), options in settings.items():
        seeds = [each["seed"] for each in options]
        unseeded = [{**each, "seed": None} for each in options]
        if len(seeds) != len(set(seeds)) or any(each != unseeded[0] for each in unseeded):
            raise ConfigError(
                f"{path}: several runs of {table} are called {name}; give each a name of its own, "
                "and each seed once"
            )


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
        try:
            return TrainingConfig(**{**run.options, "corpus": self.corpus, "out": str(folder)})
        except ConfigError as error:
            raise ConfigError(f"{run.table}, {run.name}: {error}") from error

    def do(self) -> Ending:
        """Train and score what is not there yet, and write tables and curves.

        Raises:
            ConfigError: a training cannot be what is asked for; told before the first one.
            EncoderError: some failed; the others are done.
        """
        # Before hours of training, not after.
        require_drawing()
        if self.dev is not None:
            read_dev(self.dev)
        if self.sts is not None:
            read_sts([self.sts])
        found, failed = self.results()
        rows = [{**result, "table": run.table, "name": run.name} for run, result in found]
        if rows:
            text = "\n".join([*tables(rows), *draw(rows, self.out / FIGURES)]) + "\n"
            with writing(self.out / TABLES):
                replace_file(self.out / TABLES, text.encode())
        if failed:
            raise EncoderError(
                f"{len(failed)} of {len(self.runs)} trainings failed, and the others are done; the "
                f"first: {failed[0]}"
            )
        return Ending("finished", {"out": str(self.out), "trainings": len(rows)})

    def results(self) -> tuple[list[tuple[Run, dict[str, Any]]], list[str]]:
        """Train and score what is not there yet; return rows with results, and what failed."""
        with only_writer(self.out, what="folder of trainings"):
            done = {result["key"]: result for result in read_results(self.out)}
            failed: dict[str, str] = {}
            keys = self._keys()
            for number, (run, key) in enumerate(zip(self.runs, keys, strict=True)):
                if key in failed:
                    continue
                result, row = done.get(key), {"table": run.table, "name": run.name}
                lacking = result is None or self._lacks(result)
                kept = is_folder(self._folder(key))
                if lacking:
                    place = {**row, "seed": run.options["seed"]}
                    log("training", **place, number=number + 1, of=len(self.runs))
                    try:
                        made = self._result(run, key)
                    except (EncoderError, WhiteningError, ConfigError) as error:
                        # As where it diverges; the others may not.
                        failed[key] = f"{run.table}, {run.name}: {error}"
                        log("training_failed", **place, **failure(error))
                        continue
                    result = {**made, "rows": result["rows"] if result else []}
                assert result is not None
                if row not in result["rows"]:
                    result = {**result, "rows": [*result["rows"], row]}
                done[key] = result
                _write(self.out / RESULTS, done)
                if lacking and not (kept or self.keep_models):
                    # Once its result is written, not before.
                    discard(self._folder(key))
            rows = zip(self.runs, keys, strict=True)
            return [(run, done[key]) for run, key in rows if key in done], list(failed.values())

    def _lacks(self, result: Mapping[str, Any]) -> bool:
        """Tell whether what is asked for now was not kept, or not scored."""
        unkept = self.keep_models and not is_folder(self._folder(result["key"]))
        return unkept or (self.sts is not None and result.get("sts_of") != _facts_of(self.sts))

    def _keys(self) -> list[str]:
        """Return what tells each training from others; equal rows are trained once.

        All of them are looked at before the first is trained.
        """
        specs: dict[TrainingConfig, EncoderSpec] = {}
        configs = [self.config(run, self.out) for run in self.runs]
        for run, config in zip(self.runs, configs, strict=True):
            if config not in specs:
                try:
                    specs[config] = require_trainable(config)[0]
                except (ConfigError, EncoderError, WhiteningError) as error:
                    raise type(error)(f"{run.table}, {run.name}: {error}") from error
        files = [_facts_of(name) for name in (*self.corpus, self.dev) if name is not None]
        return [
            fingerprint(
                {
                    "training": config.identity(),
                    "model": specs[config].fingerprint,
                    "sentences": [list(config.text_columns), config.limit],
                    "files": files,
                    "dev": self.dev is not None,
                }
            )
            for config in configs
        ]

    def _result(self, run: Run, key: str) -> dict[str, Any]:
        folder = self._folder(key)
        config = self.config(run, folder)
        pooling = require_trainable(config)[0].pooling
        report = train_encoder(config, pairs=self.dev, progress=LogLines())
        with (folder / CURVES_FILE).open(encoding="utf-8") as file:
            curves = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
        return {
            "key": key, "options": dict(run.options), "pooling": pooling, **report.facts,
            "curves": curves, "sts": self._scores(folder),
            "sts_of": None if self.sts is None else _facts_of(self.sts),
            "seconds": report.stages.seconds,
        }  # fmt: skip

    def _folder(self, key: str) -> Path:
        return self.out / "models" / key

    def _scores(self, folder: Path) -> dict[str, float] | None:
        if self.sts is None:
            return None
        config = EvalConfig(encoder=EncoderConfig(model=str(folder)))
        found = evaluate_sts(config, read_sts([self.sts]), progress=LogLines())
        return {name: each["spearman"]["all"] for name, each in found["datasets"].items()}


def _facts_of(name: str) -> list[Any]:
    """Return what tells that a file is another one now: of folders and URIs the name alone."""
    path = Path(name)
    if not is_file(path):
        return [name]
    found = path.stat()
    return [name, found.st_size, found.st_mtime_ns]


def read_results(out: Path) -> list[dict[str, Any]]:
    """Return the results in a folder, a training each, with the ``rows`` that it is of.

    Raises:
        ConfigError: its file of results cannot be read.
    """
    path = out / RESULTS
    if not exists(path):
        return []
    try:
        with reading(path):
            lines = path.read_text(encoding="utf-8").splitlines()
        results = [{"rows": [], **json.loads(line)} for line in lines]
        for result in results:
            _require_result(result)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no file of results ({error}); move it away") from error
    return results


def _require_result(result: Mapping[str, Any]) -> None:
    """Refuse what no training wrote."""
    for name, kind in _FIELDS.items():
        if not isinstance(result[name], kind):
            raise TypeError(f"{name} is {result[name]!r}")
    if not any("loss" in each for each in result["curves"]):
        raise ValueError("no curve has a loss")
    named = all(isinstance(row[key], str) for row in result["rows"] for key in ("table", "name"))
    if not named or not result["key"].isalnum() or "seed" not in result["options"]:
        raise ValueError("a field is not what a training writes")


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


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("sweep", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("corpus", nargs=-1, required=True)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of results.")
@click.option("--dev", help="File with STS-B, whose dev split says which checkpoint is best.")
@click.option("--sts", help="File or folder of STS sets that each model is scored on.")
@click.option("--only", multiple=True, help="Only this table of SWEEP; may be repeated.")
@click.option("--seed", "seeds", type=int, multiple=True, help="In place of the sweep's own.")
@click.option(
    "--set",
    "base",
    multiple=True,
    callback=_setting,
    help="Option over those of [base]: name=value, as limit=1000; may be repeated.",
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
        if odd := sorted(set(only) - {run.table for run in runs}):
            known = ", ".join(dict.fromkeys(run.table for run in runs))
            raise ConfigError(f"{sweep} has no table called {', '.join(odd)}; it has {known}")
        runs = [run for run in runs if not only or run.table in only]
        return Job(runs, corpus, out, dev, sts, keep_models).do()

    sys.exit(run_job(work, kept="trainings and checkpoints"))


if __name__ == "__main__":
    main()
