"""Answer of a sweep inside a database: at equal bytes, codes of raw vectors, or fewer dims."""

from dataclasses import dataclass

from whiten_index.measure.results import COLUMNS, LATENCY, PER_ROW, Measured, Sweep, command_of

# Bytes of a row, in the form that searches read first.
BUDGETS = (64, 128, 256, 512)
WAYS = ("raw, the database's code", "fewer dims, plain numbers", "fewer dims and a code")


@dataclass(frozen=True)
class Answer:
    """Best points of at most so many bytes a row, one of each way, and the best of all."""

    budget: int
    ways: tuple[Measured | None, ...]
    best: Measured
    command: str


def answers(sweep: Sweep, measure: str) -> list[Answer]:
    """Return an answer for each number of bytes; none of a sweep outside databases.

    ``measure`` is the figure that is compared.
    """
    found = list[Answer]()
    for budget in BUDGETS if sweep.header.get("database") else ():
        near = [p for p in sweep.points if (p.number(PER_ROW) or budget + 1) <= budget]
        ways = tuple(
            max(some, key=lambda p: _rank(p, measure), default=None)
            for some in ([p for p in near if _way(p) == way] for way in WAYS)
        )
        known = [point for point in ways if point is not None]
        if known:
            best = max(known, key=lambda p: _rank(p, measure))
            found.append(Answer(budget, ways, best, command_of(sweep, best)))
    return found


def _way(point: Measured) -> str:
    if point.text("family") == "raw":
        return WAYS[0]
    return WAYS[2] if point.record.get("coded") else WAYS[1]


def _rank(point: Measured, measure: str) -> tuple[float, float]:
    """Return what the best point has the most of: the figure, then speed."""
    return round(point.number(measure) or 0.0, 4), -(point.number(LATENCY) or 0.0)


def cell(point: Measured | None, measure: str) -> str:
    """Return a point as a cell of the answer: figure with interval, name, bytes and latency."""
    if point is None:
        return "–"
    text, limits = COLUMNS[measure][1], point.limits(measure)
    figure = text(point.number(measure) or 0.0)
    figure += f" ({' to '.join(map(text, limits))})" if limits else ""
    beside = []
    for path, words in ((PER_ROW, "code"), ("bytes.index", "index"), ("bytes.table", "table")):
        if (value := point.number(path)) is not None:
            beside.append(f"{words} {value:,.0f}")
    shown = f"{', '.join(beside)} bytes"
    if (price := point.number("dollars")) is not None:
        shown += f"; ${COLUMNS['dollars'][1](price)} a month per million rows"
    if (slow := point.number(LATENCY)) is not None:
        shown += f"; {COLUMNS[LATENCY][1](slow)}"
    return f"{figure}: {point.name}; {shown}"
