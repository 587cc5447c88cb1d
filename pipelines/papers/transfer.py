"""Transfer tasks of any model and transform, as the papers report them.

Run it as ``python -m pipelines.papers.transfer [DATA]``. The options, the report and the exit
statuses are those of ``whiten-index eval``. It needs scikit-learn.

No gain is to be expected of whitening before a linear classifier, which can undo any invertible
linear map itself: what changes is what its penalty on large weights costs in each direction, and
what a smaller k leaves out. Lengths are left as they are, so a normalisation that a model itself
ends with is not applied: on unit vectors the grid of C would be another one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from pipelines.papers.data import data_path
from pipelines.papers.transfer_tasks import (
    FOLDS,
    Task,
    check_splits,
    pair_features,
    read_task,
    require_learner,
    score_transfer,
    task_files,
)
from whiten_index.cli import main, measure_commands, terminal
from whiten_index.cli.schema_options import given
from whiten_index.errors import ConfigError
from whiten_index.measure.eval_config import EvalConfig
from whiten_index.measure.spaces import Scores, Spaces, TextEmbedder, evaluate_sets
from whiten_index.progress import Progress

# The seven sets whose mean the papers print.
SEVEN = ("mr", "cr", "subj", "mpqa", "sst2", "trec", "mrpc")
# As published it has train and test only: its dev split is of the train part.
_DEV_OF_TRAIN = ("mrpc",)
_POINTS = ("accuracy", "deviation", "majority")


def evaluate_transfer(
    config: EvalConfig,
    tasks: Sequence[Task],
    *,
    folds: int = FOLDS,
    embedder: TextEmbedder | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score each task by a classifier on its vectors in each space, as ``score_transfer`` does.

    Pairs are classified by their ``pair_features``. The dev split of mrpc joins its train split, as
    in SentEval; dev is tested where there is no test split, as in GLUE's RTE. Transforms fitted on
    the target see the texts of all splits and no label. ``folds`` are those of every
    cross-validation.

    Returns:
        JSON values: encoder, name, setting, datasets and average of the first space, and ``runs``,
        one for each space. Figures times 100.
    """
    require_learner()
    tasks = [replace(task, splits=_splits(task)) for task in tasks]
    for task in tasks:
        _check(task, folds)

    def score(task: Task, embedder: TextEmbedder, spaces: Spaces) -> Scores:
        sides = [embedder.embed(side) for side in (task.first, task.second) if side is not None]
        for space in spaces.of(task.texts, scored=np.isin(task.splits, ("all", "test"))):
            vectors = [space.apply(side) for side in sides]
            features = pair_features(*vectors) if len(vectors) == 2 else vectors[0]
            setting = {**space.setting, "normalized": False}
            yield replace(space, setting=setting), _score(task, features, config, folds)

    return evaluate_sets(
        config,
        tasks,
        score,
        stage="classify",
        average=average,
        embedder=embedder,
        progress=progress,
    )


def average(datasets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the mean accuracy of the papers' seven sets if all are there, else of all.

    None for fewer than two sets.
    """
    by_name = {name.lower(): each for name, each in datasets.items()}
    names = SEVEN if set(SEVEN) <= set(by_name) else tuple(by_name)
    if len(names) < 2:
        return None
    mean = float(np.mean([by_name[name]["accuracy"] for name in names]))
    return {"accuracy": mean, "sets": list(names)}


def _score(
    task: Task, features: NDArray[np.float64], config: EvalConfig, folds: int
) -> dict[str, Any]:
    """Return what a task scores in one space, times 100."""
    scored = score_transfer(
        features,
        task.labels,
        task.splits,
        folds=folds,
        seed=config.seed,
        threads=config.encoder.threads,
    )
    notes = list(_notes(scored))
    for name in _POINTS:
        if scored.get(name) is not None:
            scored[name] *= 100
    return {**scored, "dropped": task.dropped, "notes": notes}


def _splits(task: Task) -> NDArray[np.str_]:
    """Return the split of each row as it is used: for folds, to train, to choose by, or tested."""
    if {"all", "test"}.isdisjoint(task.splits.tolist()):
        return np.where(task.splits == "dev", "test", task.splits)
    if task.name.lower() in _DEV_OF_TRAIN:
        return np.where(task.splits == "dev", "train", task.splits)
    return task.splits


def _check(task: Task, folds: int) -> None:
    """Refuse, before anything is encoded, a task that cannot be scored."""
    try:
        check_splits(np.array(task.classes, object)[task.labels], task.splits, folds)
    except ConfigError as error:
        raise ConfigError(f"{task.name}: {error}") from error


def _notes(scored: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a reader must know besides the figures."""
    if scored["unconverged"]:
        yield f"{scored['unconverged']} fits ended before they converged"


@click.command()
@click.argument("data", nargs=-1)
@click.option("--set", "names", multiple=True, help="Only this task, such as mr; repeatable.")
@click.option(
    "--folds",
    type=click.IntRange(min=2),
    default=FOLDS,
    show_default=True,
    help="Of every cross-validation, outer and inner.",
)
@measure_commands.setting_options()
def transfer(data: tuple[str, ...], names: tuple[str, ...], folds: int, **options: Any) -> None:
    """Score a linear classifier on frozen embeddings, as SentEval does.

    DATA are files of tasks (text, or sentence1 and sentence2; label; split) or folders of such;
    a task is called as its file. Split all is cross-validated; else C is chosen on dev or by
    folds of train, and test is scored, or dev without a test. A label -1 all through a split is a
    hidden one and its row is left out. Vectors keep their lengths, also where the model itself
    ends by normalising. No gain of whitening is to be expected here: a linear classifier can undo
    any invertible linear map.
    """
    config = EvalConfig.from_options(given(options))
    paths = data or (str(data_path("senteval")),)
    tasks = [read_task(path) for path in task_files(paths, names)]
    bars = terminal.Bars()
    report = evaluate_transfer(config, tasks, folds=folds, progress=bars)
    lines = measure_commands.report_lines(report, "accuracy × 100", _accuracy)
    terminal.show(report, lines)


def _accuracy(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a task; the deviation is over folds or of a test split."""
    titles = {"accuracy": "accuracy", "±": "deviation", "± over": "deviation_of",
              "largest class": "majority"}  # fmt: skip
    chosen = sorted(set(figures.get("chosen", ())))
    penalties = "–".join(f"{c:g}" for c in dict.fromkeys((*chosen[:1], *chosen[-1:])))
    return {title: figures.get(name) for title, name in titles.items()} | {"C": penalties}


if __name__ == "__main__":
    measure_commands.evaluate.add_command(transfer)
    sys.argv[1:1] = ["eval", "transfer"]
    main()
