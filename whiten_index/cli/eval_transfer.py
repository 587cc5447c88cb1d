"""``whiten-index eval transfer``: parse, evaluate, print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from whiten_index.cli import terminal
from whiten_index.cli.eval_commands import (
    encoder_line,
    eval_options,
    given,
    heading,
    print_report,
    with_options,
)


@click.command()
@click.argument("data", nargs=-1)
@click.option("--set", "names", multiple=True, help="Only this task, such as mr; repeatable.")
@click.option(
    "--folds",
    type=click.IntRange(min=2),
    default=10,
    show_default=True,
    help="Of every cross-validation, outer and inner.",
)
@with_options(*eval_options)
def transfer(
    data: tuple[str, ...], names: tuple[str, ...], folds: int, as_json: bool, **options: Any
) -> None:
    """Score a linear classifier on frozen embeddings, as SentEval does, and RTE by the cosine.

    DATA are files of tasks (text, or sentence1 and sentence2; label; split) or folders of such;
    a task is called as its file. Split all is cross-validated; else C is chosen on dev or by
    folds of train, and test is scored. A label -1 in RTE, or all through a split, is a hidden one
    and its row is left out. Vectors keep their lengths, also where the model itself
    ends by normalising. No gain of whitening is to be expected here: a linear classifier can undo
    any invertible linear map.
    """
    from whiten_index.evaluation.transfer_tasks import read_task, task_files
    from whiten_index.measure.eval_config import EvalConfig, data_path
    from whiten_index.measure.evaluate_transfer import evaluate_transfer

    config = EvalConfig.from_options(given(options))
    paths = data or (str(data_path("senteval")),)
    tasks = [read_task(path) for path in task_files(paths, names)]
    bars = terminal.Bars(facts=not as_json)
    report = evaluate_transfer(config, tasks, folds=folds, progress=bars)
    print_report(report, as_json=as_json, lines=[] if as_json else list(_lines(report)))


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield encoder_line(report)
    for name, each in report["datasets"].items():
        for lacking, count in each["dropped"].items():
            if count:
                yield f"  note: {count:,} rows of {name} have no {lacking} and are left out"
    for run in report.get("runs") or [report]:
        yield f"accuracy × 100, {heading(run)}"
        rows: list[tuple[str, ...]] = [
            ("", "tested", "accuracy", "±", "± over", "F1", "largest class", "C")
        ]
        rows += [_row(name, each) for name, each in run["datasets"].items()]
        if mean := run["average"]:
            rows.append((f"mean of {len(mean['sets'])}", "", _two(mean["accuracy"]), *[""] * 5))
        yield terminal.table(rows)
        for name, each in run["datasets"].items():
            if "tuned_accuracy" in each:
                tuned = "" if each["tuned_threshold"] is None else (
                    f"; at {each['tuned_threshold']:.3f}, tuned on train, "
                    f"{each['tuned_accuracy']:.2f}"
                )  # fmt: skip
                yield f"  {name}: cosine ≥ {each['threshold']:g} is entailment{tuned}"
            if each.get("positive") is not None:
                yield f"  {name}: F1 is of the class {each['positive']}"
            for note in each["notes"]:
                yield f"  note: {name}: {note}"
    yield "± is the standard deviation over folds, or the binomial standard error of a test split"


def _row(name: str, each: Mapping[str, Any]) -> tuple[str, ...]:
    rows = each["rows"]
    tested = next(rows[split] for split in ("all", "test", "dev") if split in rows)
    chosen = sorted(set(each.get("chosen", ())))
    return (
        name,
        f"{tested:,}",
        _two(each["accuracy"]),
        _two(each["deviation"]),
        each["deviation_of"],
        _two(each.get("f1")),
        _two(each["majority"]),
        "–".join(f"{c:g}" for c in dict.fromkeys((chosen[0], chosen[-1]))) if chosen else "",
    )


def _two(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
