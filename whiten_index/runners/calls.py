"""Calls of plain functions, here or on whichever worker is free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol


class Calls(Protocol):
    """Whoever calls functions; on other machines, function, items and results must pickle."""

    @property
    def elsewhere(self) -> bool:
        """Whether other processes do it, perhaps of other machines."""

    def map(
        self,
        function: Callable[[Any], Any],
        items: Iterable[Any],
        *,
        advance: Callable[[int], None] | None = None,
    ) -> Iterator[Any]:
        """Yield what the function makes of every item, in the order of the items.

        Args:
            function: of one item; its result depends on the item alone, so that it can be tried
                again.
            items: to call it with.
            advance: told 1 for every item that is done.
        """


class InThisProcess:
    """Calls in this process."""

    elsewhere = False

    def map(
        self,
        function: Callable[[Any], Any],
        items: Iterable[Any],
        *,
        advance: Callable[[int], None] | None = None,
    ) -> Iterator[Any]:
        """Yield what the function makes of every item, in the order of the items."""
        for item in items:
            result = function(item)
            if advance is not None:
                advance(1)
            yield result


@dataclass(frozen=True)
class Call:
    """A function as work of a runner."""

    function: Callable[[Any], Any]
    advance: Callable[[int], None] | None = None

    def telling(self, advance: Callable[[int], None]) -> Call:
        """Return the same work that tells ``advance``."""
        return replace(self, advance=advance)

    def read(self, item: Any) -> Any:
        """Return the item."""
        return item

    def prepare(self, read: Any) -> Any:
        """Return the item."""
        return read

    def run(self, prepared: Any) -> Any:
        """Call the function."""
        result = self.function(prepared)
        if self.advance is not None:
            self.advance(1)
        return result

    def finish(self, ran: Any) -> Any:
        """Return the result."""
        return ran
