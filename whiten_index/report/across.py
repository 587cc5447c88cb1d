"""Several sweeps in one report: each at a glance, and the setting that serves them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whiten_index.report import words
from whiten_index.report.advice import advise
from whiten_index.report.compare import TOLERANCE, has_raw, per_row, reference_of, within
from whiten_index.report.fronts import measured
from whiten_index.report.records import Point, Sweep
from whiten_index.report.tables import NAME, TEXT, Column, Row, Table
from whiten_index.report.words import NDCG


@dataclass(frozen=True)
class Across:
    """What several sweeps say together."""

    text: str
    table: Table


def compare(sweeps: Sequence[Sweep]) -> Across | None:
    """Return the comparison of several sweeps, or None of one."""
    if len(sweeps) < 2:
        return None
    return Across(_common(sweeps), _table(sweeps))


def title(sweep: Sweep, sweeps: Sequence[Sweep]) -> str:
    """Return the dataset's name, with what tells it from others of the same name."""
    same = [other for other in sweeps if other.name == sweep.name]
    if len(same) == 1:
        return sweep.name
    when = str(sweep.header.get("time") or "")[:16].replace("T", " ")
    times = [str(other.header.get("time") or "")[:16] for other in same]
    told = when if when and len(set(times)) == len(times) else f"run {sweep.run}"
    return f"{sweep.name}, {told}"


def _setting(point: Point) -> tuple[object, ...]:
    """Return what a caller asks for; γ and centring, which auto chooses by corpus, are left out."""
    return (point.family, words.transform(point), point.k, point.codec, point.index)


def _common(sweeps: Sequence[Sweep]) -> str:
    judged = [sweep for sweep in sweeps if has_raw(sweep)]
    if len({sweep.name for sweep in judged}) < 2:
        return (
            "Each dataset has its own recommendation. One for all of them needs judgements and the "
            "raw embeddings on two datasets at least."
        )
    near = [
        {_setting(p): p for p in measured(sweep.points, per_row)
         if not p.is_raw and not p.candidates and within(p, reference_of(sweep, NDCG))}
        for sweep in judged
    ]  # fmt: skip
    shared = set(near[0]).intersection(*near[1:])
    names = _list([sweep.name for sweep in judged])
    if not shared:
        return (
            f"No one setting stays within {100 * TOLERANCE:g} points of raw nDCG@10 on {names}: "
            "choose for each dataset."
        )
    widest = {setting: max(found[setting].per_row or 0.0 for found in near) for setting in shared}
    chosen = min(shared, key=lambda setting: (widest[setting], str(setting)))
    said = [
        f"{NDCG.text(found[chosen].ndcg)} against {NDCG.text(reference_of(sweep, NDCG))} on "
        f"{sweep.name}"
        for found, sweep in zip(near, judged, strict=True)
    ]
    return (
        f"The smallest setting within {100 * TOLERANCE:g} points of raw on each of {names} is "
        f"{words.short(near[0][chosen])}, with {words.number(widest[chosen])} bytes a row at "
        f"most: nDCG@10 {_list(said)}."
    )


def _table(sweeps: Sequence[Sweep]) -> Table:
    columns = (Column("dataset", NAME), Column("rows"), Column("recommended", TEXT),
               Column("bytes a row (raw)"), Column("measure", TEXT), Column("its value (raw)"),
               Column("query p50 (raw)"))  # fmt: skip
    rows = []
    for sweep in sweeps:
        advice = advise(sweep)
        point = advice.picks[0].point if advice.picks else None
        raw, measure = sweep.raw, advice.measure
        value, time = (measure.of(raw), raw.p50) if raw else (None, None)
        cells = [title(sweep, sweeps), words.number(sweep.rows)]
        if point is None:
            cells += [words.ABSENT] * 5
        else:
            cells += [
                words.short(point),
                f"{words.number(point.per_row)} ({words.number(sweep.raw_bytes)})",
                measure.name,
                f"{measure.text(measure.of(point))} ({measure.text(value)})",
                f"{words.milliseconds(point.p50)} ({words.milliseconds(time)})",
            ]
        rows.append(Row(tuple(cells)))
    return Table(columns, tuple(rows))


def _list(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
