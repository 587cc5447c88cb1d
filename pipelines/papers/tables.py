"""The rows of the papers' tables computed, each with the published figures beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipelines.papers.bench import Bench
from pipelines.papers.commands import Files, command_of
from pipelines.papers.encoders import Model
from pipelines.papers.published import AVERAGE, Row
from pipelines.papers.recipes import AGGREGATION, NLI, SEVEN, Kind, Measure, Recipe, Refusal
from whiten_index.cli.log_lines import log
from whiten_index.errors import StorageError, WhitenIndexError
from whiten_index.evaluation.metrics import AGGREGATIONS

RAN, STAND_IN, NOT_RUN = "ran", "stand-in", "not run"
_TITLES = {
    ("BERT-whitening", "Table 1"): "models without training on judged or NLI sentences",
    ("BERT-whitening", "Table 2"): "models trained on NLI",
    ("WhiteningBERT", "Table 1"): "tokens, layers and whitening of four models",
    ("WhiteningBERT", "Table 2"): "first and last layer of pretrained models, raw and whitened",
    ("WhiteningBERT", "Table 3"): "entailment (RTE dev) by a threshold on the cosine",
    ("WhitenedCSE", "Table 1"): "semantic textual similarity",
    ("WhitenedCSE", "Table 2"): "transfer tasks",
    ("WhitenedCSE", "Table 3"): "kinds of whitening in training",
    ("WhitenedCSE", "Table 4"): "sizes of groups in training",
    ("WhitenedCSE", "Table 5"): "number of positives in training",
    ("WhitenedCSE", "Table 6"): "parts of the method in training",
}
Figures = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Planned:
    """What is to be done for a row.

    Attributes:
        recipe: None where nothing here computes it.
        model: what runs it; None for word vectors, or where nothing does.
        why: of a stand-in, or why nothing runs it.
        status: one of ``RAN``, ``STAND_IN``, ``NOT_RUN``.
    """

    recipe: Recipe | None
    model: Model | None
    why: str | None
    status: str


def plan_row(bench: Bench, row: Row) -> Planned:
    """Return what is to be done for a row, with the models and files that are at hand."""
    recipe = bench.recipe(row)
    if isinstance(recipe, Refusal):
        return Planned(None, None, recipe.why, NOT_RUN)
    lacking = _lacking(recipe, bench.files)
    if recipe.kind is Kind.WORDS:
        return Planned(recipe, None, lacking, NOT_RUN if lacking else RAN)
    model = bench.encoders.of(recipe)
    if isinstance(model, str):
        why = f"{model}; and {lacking}" if lacking else model
        return Planned(recipe, None, why, NOT_RUN)
    if lacking:
        return Planned(recipe, None, lacking, NOT_RUN)
    if recipe.kind is Kind.TRAINED:
        model = replace(model, once=True)
    if recipe.instead is not None:
        model = replace(model, stands_in=True, why=recipe.instead)
    return Planned(recipe, model, model.why, STAND_IN if model.stands_in else RAN)


def tables_of(
    bench: Bench, rows: Sequence[Row], *, done: Callable[[list[dict[str, Any]]], object]
) -> list[dict[str, Any]]:
    """Compute the rows, table after table.

    Args:
        bench: computes them.
        rows: of the tables.
        done: told of the tables so far, after each.

    Returns:
        JSON values, a table each.

    Raises:
        StorageError: the disk cannot be written. Other errors are those of a row, which is then not
            run.
    """
    grouped: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row.source, row.table, row.metric), []).append(row)
    tables: list[dict[str, Any]] = []
    for (source, table, metric), members in grouped.items():
        datasets = dict.fromkeys(name for row in members for name in row.figures)
        tables.append(
            {
                "source": source,
                "table": table,
                "title": _TITLES.get((source, table), ""),
                "aggregation": AGGREGATION.get(source) if metric == "spearman" else None,
                "metric": metric,
                "datasets": list(datasets),
                "rows": [_row(bench, row) for row in members],
            }
        )
        done(tables)
    return tables


def unrun(tables: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """Yield the rows that did not run, and why."""
    for table in tables:
        for row in table["rows"]:
            if row["status"] == NOT_RUN:
                place = {"source": table["source"], "table": table["table"]}
                yield {**place, **{name: row[name] for name in ("model", "setting", "why")}}


def _row(bench: Bench, row: Row) -> dict[str, Any]:
    planned = plan_row(bench, row)
    computed: Figures = {}
    if planned.recipe is not None and planned.status != NOT_RUN:
        planned, computed = _computed(bench, row, planned)
    log(
        "row",
        source=row.source,
        table=row.table,
        model=row.model,
        setting=row.setting,
        status=planned.status,
        ran_with=_ran_with(bench, planned),
        why=planned.why,
    )
    return {
        "model": row.model,
        "setting": row.setting,
        "status": planned.status,
        "why": planned.why,
        **_facts(bench, row, planned),
        "figures": _beside(row, computed, planned.recipe),
    }


def _computed(bench: Bench, row: Row, planned: Planned) -> tuple[Planned, Figures]:
    """Return the figures; a model that cannot be used after all gives way to the stand-in."""
    assert planned.recipe is not None
    try:
        names = row.names or SEVEN
        found = bench.figures(planned.recipe.setting, planned.model, names)
        planned = _without(planned, [name for name in names if name not in found])
        # A row without any figure did not run, whatever could have computed it.
        return (planned if found else replace(planned, status=NOT_RUN)), found
    except StorageError:
        raise
    except Exception as error:
        # Whatever goes wrong with one model or setting, the other rows still count.
        known = isinstance(error, WhitenIndexError)
        why = str(error) if known else f"{type(error).__name__}: {error}"
    model = planned.model
    if model is not None and not model.stands_in and not bench.encoders.usable(model):
        again = plan_row(bench, row)
        if again.status == STAND_IN:
            return _computed(bench, row, again)
    return Planned(planned.recipe, None, why, NOT_RUN), {}


def _without(planned: Planned, missing: Sequence[str]) -> Planned:
    """Return the plan of a row, which says what sets of it the data lack."""
    if not missing:
        return planned
    why = f"the data have no {', '.join(missing)}; add what is missing, or name another --data"
    return replace(planned, why=why if planned.why is None else f"{planned.why}; {why}")


def _facts(bench: Bench, row: Row, planned: Planned) -> dict[str, Any]:
    recipe, model = planned.recipe, planned.model
    facts: dict[str, Any] = dict.fromkeys(("hub", "ran_with", "layers", "command", "aggregation"))
    facts["notes"] = []
    if recipe is None:
        return facts
    setting = recipe.setting
    if recipe.kind is not Kind.WORDS:
        facts["layers"] = None if model is None else model.numbers(setting.layers)
    notes = list(recipe.notes)
    if model is not None and setting.k is not None and model.width(setting.k) != setting.k:
        notes.append(f"k = {setting.k} is as wide as {model.name} or wider: all directions kept")
    facts |= {
        "hub": recipe.hub,
        "ran_with": _ran_with(bench, planned),
        "command": command_of(recipe, model, row.names, bench.files, bench.data),
        "aggregation": setting.aggregation if setting.measure is Measure.STS else None,
        "notes": notes,
    }
    if (model is None or model.stands_in) and recipe.instead is None:
        own = command_of(recipe, None, row.names, bench.files, bench.data)
        facts["command_of_own"] = own
    return facts


def _ran_with(bench: Bench, planned: Planned) -> str | None:
    if planned.recipe is None or planned.status == NOT_RUN:
        return None
    return bench.files.word_vectors if planned.model is None else planned.model.name


def _beside(row: Row, computed: Figures, recipe: Recipe | None) -> dict[str, dict[str, Any]]:
    """Return, for each set of a row, the published figure and ours."""
    sts = recipe is not None and recipe.setting.measure is Measure.STS
    shown: dict[str, dict[str, Any]] = {}
    for name, published in row.figures.items():
        if name == AVERAGE:
            ours = _average(computed, row.names or SEVEN, AGGREGATIONS if sts else ("ours",))
        else:
            ours = dict(computed.get(name, {}))
        if sts and recipe is not None and ours:
            ours["ours"] = ours[recipe.setting.aggregation]
        value = ours.get("ours")
        shown[name] = {
            "published": published,
            **ours,
            "ours": value,
            "difference": None if value is None else value - published,
        }
    return shown


def _average(computed: Figures, names: Sequence[str], kinds: Sequence[str]) -> dict[str, Any]:
    """Return the mean over the sets; nothing where one of them is missing."""
    if not set(names) <= set(computed):
        return {}
    return {kind: float(np.mean([computed[name][kind] for name in names])) for kind in kinds}


def _lacking(recipe: Recipe, files: Files) -> str | None:
    """Return what the user would have to give for a row, None where nothing is missing."""
    setting = recipe.setting
    if setting.fit == NLI and files.nli is None:
        return "the whitening is fitted on NLI; give the sentences with --nli"
    if setting.measure is Measure.RETRIEVAL and files.quora is None:
        return (
            "the set is Quora's, in the split of the published search; give it in BEIR's form with "
            "--quora"
        )
    if recipe.kind is Kind.WORDS and files.word_vectors is None:
        return "the rows of GloVe need its vectors; give glove.840B.300d with --word-vectors"
    if recipe.setting.sif and files.word_counts is None:
        return "SIF weighs words by their counts; give them with --word-counts"
    return None
