"""Answer of a sweep inside a database: at equal bytes, codes of raw vectors, or fewer dims."""

from collections.abc import Sequence
from dataclasses import dataclass

from whiten_index.measure.results import (
    ABSENT,
    COLUMNS,
    LATENCY,
    PER_ROW,
    Measured,
    Sweep,
    cell_of,
    command_of,
)

_CODE, _STORED = "bytes of code", "bytes of table and index"
# Bytes of a row: of the form that searches read first, and of all that is stored.
_BUDGETS = {_CODE: (64, 128, 256, 512), _STORED: (512, 1024, 2048)}
WAYS = ("raw, the database's code", "fewer dims, plain numbers", "fewer dims and a code")


@dataclass(frozen=True)
class Answer:
    """Best points of at most so many bytes a row, one of each way, and the best of all."""

    budget: str  # such as 64 bytes of code
    ways: tuple[Measured | None, ...]
    best: Measured
    command: str


def answers(sweep: Sweep, measure: str) -> list[Answer]:
    """Return an answer for each number of bytes a row; none of a sweep outside databases.

    ``measure`` is the figure that is compared.
    """
    found = list[Answer]()
    if not sweep.header.get("database"):
        return found
    for what, budget in ((what, number) for what, some in _BUDGETS.items() for number in some):
        near = [p for p in sweep.points if 0 < _bytes(p, what) <= budget]
        ways = tuple(_best([p for p in near if _way(p) == way], measure) for way in WAYS)
        known = [point for point in ways if point is not None]
        if known:
            best = _best(known, measure) or known[0]
            found.append(Answer(f"{budget:,} {what}", ways, best, command_of(sweep, best)))
    return found


def _bytes(point: Measured, what: str) -> float:
    """Return bytes of a row, 0 where they are not known."""
    if what == _CODE:
        return point.number(PER_ROW) or 0.0
    index, table = point.number("bytes.index"), point.number("bytes.table")
    return 0.0 if index is None or table is None else index + table


def _way(point: Measured) -> str:
    if point.text("family") == "raw":
        return WAYS[0]
    return WAYS[2] if point.record.get("coded") else WAYS[1]


def _best(points: Sequence[Measured], measure: str) -> Measured | None:
    """Return the point with the most of a figure, of equal ones the fastest."""
    ranked = [
        (-round(point.number(measure) or 0.0, 4), point.number(LATENCY) or 0.0, place)
        for place, point in enumerate(points)
    ]
    return points[min(ranked)[2]] if ranked else None


def cell(point: Measured | None, measure: str) -> str:
    """Return a point as a cell of the answer: figure with interval, name, bytes and latency."""
    if point is None:
        return ABSENT
    beside = []
    for path, words in ((PER_ROW, "code"), ("bytes.index", "index"), ("bytes.table", "table")):
        if (value := point.number(path)) is not None:
            beside.append(f"{words} {value:,.0f}")
    shown = f"{', '.join(beside)} bytes"
    if (price := point.number("dollars")) is not None:
        shown += f"; ${COLUMNS['dollars'][1](price)} a month per million rows"
    if (slow := point.number(LATENCY)) is not None:
        shown += f"; {COLUMNS[LATENCY][1](slow)}"
    return f"{cell_of(point, measure)}: {point.name}; {shown}"
