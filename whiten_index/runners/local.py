"""Work in four steps, and the runner that does it in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, Self, TypeVar

from whiten_index.artifacts.prefetch import overlapped

Item = TypeVar("Item", contravariant=True)
Done = TypeVar("Done", covariant=True)
AnyItem = TypeVar("AnyItem")
AnyDone = TypeVar("AnyDone")


class Work(Protocol[Item, Done]):
    """Work in four steps, so that those around the costly one can run beside it.

    Each step is called by one thread, for one item after the other, in their order.
    """

    def telling(self, advance: Callable[[int], None]) -> Self:
        """Return the same work that tells ``advance`` how many rows are done.

        It knows nothing of items that came to no end in a run before.
        """

    def read(self, item: Item) -> Any:
        """Fetch what the item names."""

    def prepare(self, read: Any) -> Any:
        """Do what comes before the costly step, such as tokenising."""

    def run(self, prepared: Any) -> Any:
        """Do what costs."""

    def finish(self, ran: Any) -> Done:
        """Do what comes after, such as writing."""


class Runner(Protocol):
    """Whoever does the work, once for each item."""

    def map(
        self, items: Iterable[Any], advance: Callable[[int], None] | None = None
    ) -> Iterator[Any]:
        """Yield what the work makes of every item, in the order of the items."""


class LocalRunner:
    """Does the work in this process, by turns or with the steps of several items side by side."""

    def __init__(self, work: Work[Any, Any], *, one_by_one: bool = False) -> None:
        """Take the work.

        Args:
            work: to do.
            one_by_one: finish an item before the next is read, so that memory holds one; else two
                are got ready ahead in other threads, and one is finished behind.
        """
        self._work, self._one_by_one = work, one_by_one

    def map(
        self, items: Iterable[AnyItem], advance: Callable[[int], None] | None = None
    ) -> Iterator[Any]:
        """Yield what the work makes of every item, in the order of the items.

        Args:
            items: drawn from in another thread, unless done one by one.
            advance: told how many rows are done, as they are, in the caller's thread.
        """
        work = self._work if advance is None else self._work.telling(advance)
        if self._one_by_one:
            return (work.finish(work.run(work.prepare(work.read(item)))) for item in items)
        return overlapped(
            items, read=work.read, prepare=work.prepare, work=work.run, finish=work.finish
        )
