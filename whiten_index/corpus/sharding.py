"""Shards of a corpus, planned from the footers of its files by a pure function."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

SHARD_ROWS = 16_384
SHARD_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of one row group, and the uncompressed bytes of the columns that will be read."""

    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """Rows ``start`` to ``stop`` (exclusive) of one row group."""

    row_group: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A run of rows of one file: the unit of work, resume, reuse and distribution."""

    file: int  # position of the file in the corpus
    spans: tuple[Span, ...]  # its rows, in order
    # Uncompressed size of these rows by the footers' averages.
    bytes: int = field(default=0, compare=False)

    @property
    def rows(self) -> int:
        """Rows spanned, before any is skipped."""
        return sum(span.stop - span.start for span in self.spans)


def plan_shards(
    footers: Sequence[Sequence[RowGroup]],
    *,
    shard_rows: int = SHARD_ROWS,
    shard_bytes: int = SHARD_BYTES,
    limit: int | None = None,
) -> list[Shard]:
    """Cut the files into shards.

    A shard holds up to ``shard_rows`` rows, or fewer if these would pass ``shard_bytes`` by the
    footers' average. It joins small row groups, splits large ones and ends with its file, so that
    a change in one file moves no shard of another. ``limit`` plans only the first so many rows.
    """
    shards: list[Shard] = []
    left = sum(group.rows for groups in footers for group in groups) if limit is None else limit
    for file, groups in enumerate(footers):
        planned = list(_shards_of_file(file, groups, left, shard_rows, shard_bytes))
        left -= sum(shard.rows for shard in planned)
        shards += planned
    return shards


def _shards_of_file(
    file: int, groups: Sequence[RowGroup], left: int, shard_rows: int, shard_bytes: int
) -> Iterator[Shard]:
    """Yield the shards of the first ``left`` rows of a file, each filled to at most 1."""
    spans: list[Span] = []
    filled = size = 0.0
    for index, group in enumerate(groups):
        rows = min(group.rows, left)
        left -= rows
        row_bytes = group.bytes / max(group.rows, 1)
        share = max(1 / shard_rows, row_bytes / shard_bytes)
        start = 0
        while start < rows:
            # The epsilon keeps three spans of a third one shard.
            fit = int((1 - filled) / share + 1e-9)
            if fit < 1 and spans:
                yield Shard(file, tuple(spans), round(size))
                spans, filled, size = [], 0.0, 0.0
                continue
            stop = min(rows, start + max(fit, 1))
            spans.append(Span(index, start, stop))
            filled += (stop - start) * share
            size += (stop - start) * row_bytes
            start = stop
    if spans:
        yield Shard(file, tuple(spans), round(size))


def plan_windows(shards: Sequence[Shard], *, rows: int) -> list[tuple[Shard, ...]]:
    """Join neighbouring small shards, so that many small files are encoded as well as a large one.

    A window has at most ``rows`` rows and ``SHARD_BYTES`` uncompressed bytes, unless one shard
    has more.
    """
    windows: list[list[Shard]] = []
    held_rows = held_bytes = 0
    for shard in shards:
        held_rows, held_bytes = held_rows + shard.rows, held_bytes + shard.bytes
        if not windows or held_rows > rows or held_bytes > SHARD_BYTES:
            windows.append([])
            held_rows, held_bytes = shard.rows, shard.bytes
        windows[-1].append(shard)
    return [tuple(window) for window in windows]
