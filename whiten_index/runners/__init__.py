"""Map a given callable over shards; a runner knows no work, only who does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Done = TypeVar("Done")


class Runner(Protocol):
    """Whoever calls the work, once for each shard."""

    def map(self, work: Callable[[Item], Done], items: Iterable[Item]) -> Iterator[Done]:
        """Yield ``work(item)`` for every item, in the order of the items."""


class LocalRunner:
    """Does the work in this process, one shard after the other."""

    def map(self, work: Callable[[Item], Done], items: Iterable[Item]) -> Iterator[Done]:
        """Yield ``work(item)`` for every item, in the order of the items."""
        return map(work, items)
