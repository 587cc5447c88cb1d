"""What a sweep was asked to measure and has no record of yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from whiten_index.report.records import Point, Sweep

# Transform, k, codec, index, candidates ranked again.
_Setting = tuple[str, int, str, str, int]
_COARSE = ("pq", "rabitq", "sq4")


def awaited(sweep: Sweep) -> list[int]:
    """Return the widths at which a setting asked for is neither measured nor skipped.

    Baselines are left aside: they come first.
    """
    skipped = [entry.point for entry in sweep.skipped if entry.point is not None]
    known = Counter(map(_setting, (*sweep.points, *skipped)))
    asked = Counter(_asked(sweep.settings))
    return sorted({setting[1] for setting, count in asked.items() if known[setting] < count})


def _setting(point: Point) -> _Setting:
    return (point.transform, point.k, point.codec, point.index, point.candidates or 0)


def _asked(settings: Mapping[str, Any]) -> Iterator[_Setting]:
    """Yield what a sweep lays out: graphs for the first codec at the two middle widths alone."""
    lists = [settings.get(name) for name in ("k", "transforms", "codecs", "indexes")]
    widths, wishes, codecs, indexes = (one if isinstance(one, list) else [] for one in lists)
    middle = widths[max(len(widths) - 1, 0) // 2 :][:2]
    again = settings.get("rerank") or 0
    for k, wish, codec in product(widths, wishes, codecs):
        transform = str(wish).partition(":")[0]
        for index in indexes:
            if index != "hnsw" or (k in middle and codec == codecs[0]):
                yield transform, k, codec, index, 0
        if again and "flat" in indexes and codec.startswith(_COARSE):
            yield transform, k, codec, "flat", again
