"""The tables and lists of facts of a report, as text cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whiten_index.report import words
from whiten_index.report.advice import Advice
from whiten_index.report.compare import per_row, raw_p50
from whiten_index.report.fronts import front, measured
from whiten_index.report.records import Point, Sweep
from whiten_index.report.words import NDCG, Measure

TEXT, NAME, WRAP, NUMBER = "text", "text name", "text wrap", ""
Facts = list[tuple[str, str]]


@dataclass(frozen=True)
class Column:
    """A column's name, and whether it holds text, running text or numbers."""

    name: str
    kind: str = NUMBER


@dataclass(frozen=True)
class Row:
    """The cells of a row, and how it stands out."""

    cells: tuple[str, ...]
    kind: str = ""


@dataclass(frozen=True)
class Table:
    """A table of text."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


# Name of the column, its kind, and the cell of a point.
_Cell = Callable[[Point], str]
_COLUMNS: tuple[tuple[str, str, _Cell], ...] = (
    ("setting", NAME, words.short),
    ("γ", NUMBER, lambda p: _own(p, "" if p.exponent is None else f"{p.exponent:g}")),
    ("bytes a row", NUMBER, lambda p: words.number(p.per_row)),
    ("fixed bytes", NUMBER, lambda p: words.number(p.fixed)),
    ("re-rank bytes a row", NUMBER, lambda p: words.number(p.rerank_bytes)),
    ("nDCG@10", NUMBER, lambda p: NDCG.text(p.ndcg)),
    ("recall@100", NUMBER, lambda p: NDCG.text(p.recall)),
    ("MRR@10", NUMBER, lambda p: NDCG.text(p.mrr)),
    ("agreement@10", NUMBER, lambda p: words.share(p.agreement)),
    ("index recall@10", NUMBER, lambda p: words.share(p.index_recall)),
    ("query p50", NUMBER, lambda p: words.milliseconds(p.p50)),
    ("p95", NUMBER, lambda p: words.milliseconds(p.p95)),
    ("p99", NUMBER, lambda p: words.milliseconds(p.p99)),
    ("queries/s in batches", NUMBER, lambda p: words.number(p.throughput)),
    ("build", NUMBER, lambda p: words.seconds(p.build_seconds)),
    ("tuned to", TEXT, lambda p: words.parameters(p) or words.ABSENT),
    ("centred", TEXT, lambda p: _own(p, {True: "yes", False: "no", None: ""}[p.center])),
    ("device", TEXT, lambda p: words.ABSENT if p.device == "cpu" else p.device),
    ("factory", TEXT, lambda p: p.factory or words.ABSENT),
)


def _own(point: Point, text: str) -> str:
    """Return a fact of a fitted transform; of other vectors it means nothing."""
    return text if text and point.family == "ours" else words.ABSENT


def facts(sweep: Sweep) -> Facts:
    """Return what was swept, on what and when, as far as it is known."""
    dataset, header = sweep.dataset, sweep.header
    machine = header.get("machine")
    machine = machine if isinstance(machine, dict) else {}
    judged = any(point.ndcg is not None for point in sweep.points)
    queries = dataset.get("queries")
    threads = sorted({point.threads for point in sweep.points if point.threads})
    pairs = (
        ("rows", words.number(sweep.rows) if sweep.rows is not None else None),
        ("dimensions", dataset.get("dim")),
        ("encoder", dataset.get("encoder")),
        ("queries", f"{queries:,}{_held_out(dataset)}" if isinstance(queries, int) else queries),
        ("judgements", "yes" if judged else "none"),
        ("raw embeddings, float32", _total(sweep.raw_bytes, 0.0, sweep.rows)),
        ("points", f"{len(sweep.points):,}"),
        ("machine", _machine(machine)),
        ("threads of a search", ", ".join(map(str, threads))),
        ("versions", _versions(header.get("versions"))),
        ("commit", _commit(header.get("commit"))),
        ("measured", str(header.get("time") or "")[:16].replace("T", " ")),
    )
    return [(name, str(value)) for name, value in pairs if value not in (None, "", words.ABSENT)]


def _held_out(dataset: Mapping[str, Any]) -> str:
    return ", rows held out" if dataset.get("held_out") else ""


def _machine(machine: Mapping[str, Any]) -> str:
    parts = [str(machine.get("processor") or "")]
    if cores := machine.get("cores"):
        parts.append("1 core" if cores == 1 else f"{cores} cores")
    parts.append(str(machine.get("gpu") or ""))
    return ", ".join(filter(None, parts))


def _commit(commit: Any) -> str:
    """Return the start of a commit, and whether the checkout differed from it."""
    name, dash, state = str(commit or "").partition("-")
    return f"{name[:12]}{dash}{state}"


def _versions(versions: Any) -> str:
    if not isinstance(versions, dict):
        return ""
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _total(row: float | None, fixed: float | None, rows: int | None) -> str:
    if row is None or rows is None:
        return words.ABSENT
    return words.size(row * rows + (fixed or 0.0))


def card_facts(sweep: Sweep, point: Point) -> Facts:
    """Return the figures of a point that was picked, with the raw embeddings' beside them."""
    raw = sweep.raw
    made: Facts = []
    if exponent := words.exponent_text(point):
        made.append(("transform", exponent))
    if point.per_row is not None:
        less = ""
        if sweep.raw_bytes and point.per_row <= 0.95 * sweep.raw_bytes:
            less = f" ({words.times(sweep.raw_bytes, point.per_row)}× less)"
        made.append(("bytes a row", words.number(point.per_row) + less))
        made.append(("whole index", _total(point.per_row, point.fixed, sweep.rows)))
    if point.rerank_bytes is not None:
        made.append(("re-rank bytes a row", words.number(point.rerank_bytes)))
    if point.ndcg is not None:
        change = (
            "" if raw is None or raw.ndcg is None else f" ({NDCG.change(point.ndcg, raw.ndcg)})"
        )
        made.append(("nDCG@10", NDCG.text(point.ndcg) + change))
    if point.recall is not None:
        change = (
            ""
            if raw is None or raw.recall is None
            else f" ({NDCG.change(point.recall, raw.recall)})"
        )
        made.append(("recall@100", NDCG.text(point.recall) + change))
    if point.p50 is not None:
        against = _against(point.p50, raw_p50(sweep, point))
        made.append(("query p50", words.milliseconds(point.p50) + against))
    made.append(("index recall@10", words.share(point.index_recall)))
    made.append(("agreement@10", words.share(point.agreement)))
    return [(name, value) for name, value in made if value != words.ABSENT]


def _against(p50: float, raw: float | None) -> str:
    """Return how much faster or slower than the raw embeddings; nothing where it is as fast."""
    if not raw or p50 <= 0:
        return ""
    if p50 <= 0.95 * raw:
        return f" ({words.times(raw, p50)}× faster)"
    return f" ({words.times(p50, raw)}× slower)" if p50 >= 1.05 * raw else ""


def budgets(sweep: Sweep, advice: Advice) -> Table | None:
    """Return the best point for each number of bytes a row, our own beside another's."""
    if not advice.budgets:
        return None
    measure, change = advice.measure, advice.measure is NDCG and sweep.raw is not None
    columns = [Column("at most, bytes a row", NAME), Column("setting", TEXT), Column("bytes a row"),
               Column(measure.name)]  # fmt: skip
    columns += [Column("against raw")] if change else []
    columns += [Column("query p50"), Column("fixed bytes")]
    rows = []
    for budget in advice.budgets:
        limit = words.number(budget.limit)
        own = [(f"{limit}, fitted only", budget.own)] if budget.own else []
        for name, point in [(limit, budget.best), *own]:
            cells = [name, words.short(point), words.number(point.per_row),
                     measure.text(measure.of(point))]  # fmt: skip
            cells += [_change(sweep, point)] if change else []
            cells += [words.milliseconds(point.p50), words.number(point.fixed)]
            rows.append(Row(tuple(cells)))
    return Table(tuple(columns), tuple(rows))


def _change(sweep: Sweep, point: Point) -> str:
    raw = sweep.raw
    if raw is None or raw.ndcg is None or point.ndcg is None:
        return words.ABSENT
    return NDCG.change(point.ndcg, raw.ndcg)


def leading(points: Sequence[Point], measure: Measure) -> Table:
    """Return the points of a front under the numbers they have in the drawing."""
    columns = (Column("no.", TEXT), Column("setting", TEXT), Column("bytes a row"),
               Column(measure.name), Column("query p50"), Column("index recall@10"))  # fmt: skip
    rows = tuple(
        Row((str(number), words.short(p), words.number(p.per_row), measure.text(measure.of(p)),
             words.milliseconds(p.p50), words.share(p.index_recall)))
        for number, p in enumerate(points, 1)
    )  # fmt: skip
    return Table(columns, rows)


def points(sweep: Sweep, measure: Measure) -> Table | None:
    """Return every point with every figure; columns that no point fills are left out."""
    if not sweep.points:
        return None
    order = sorted(sweep.points, key=lambda p: (
        p.per_row if p.per_row is not None else float("inf"), -(measure.of(p) or 0.0)))  # fmt: skip
    plain = [point for point in sweep.points if not point.candidates]
    best = {point.key for point in front(plain, per_row, measure.of)}
    cells = [[cell(point) for _, _, cell in _COLUMNS] for point in order]
    columns = [Column(name, kind) for name, kind, _ in _COLUMNS]
    filled = [
        place for place in range(len(columns)) if any(r[place] != words.ABSENT for r in cells)
    ]
    rows = tuple(
        Row(tuple(row[place] for place in filled),
            "raw" if point.is_raw else "front" if point.key in best else "")
        for point, row in zip(order, cells, strict=True)
    )  # fmt: skip
    return Table(tuple(columns[place] for place in filled), rows)


def note(sweep: Sweep) -> str:
    """Say how to read the table of all points."""
    text = "Bold names are on the front of bytes."
    if sweep.raw is not None:
        text += " The grey row is exact search of the raw embeddings."
    if any(point.build_seconds is not None for point in sweep.points):
        text += (
            " Build seconds count projecting, training and adding; training samples are the "
            "sweep's own, smaller than a build's."
        )
    if len({point.threads for point in measured(sweep.points, lambda p: p.p50)}) > 1:
        text += " Latencies were taken with different numbers of threads: do not compare them all."
    return text


def skipped(sweep: Sweep) -> Table | None:
    """Return the settings that were not measured, by their reason."""
    if not sweep.skipped:
        return None
    reasons: dict[str, list[str]] = {}
    for entry in sweep.skipped:
        name = entry.key if entry.point is None else words.short(entry.point)
        reasons.setdefault(entry.why, []).append(name)
    rows = tuple(Row(("; ".join(settings), why)) for why, settings in reasons.items())
    return Table((Column("setting", WRAP), Column("why", WRAP)), rows)
