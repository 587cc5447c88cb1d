"""Three stages side by side: what comes before and after the work never holds it up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
Worked = TypeVar("Worked")
Done = TypeVar("Done")


def overlapped(
    items: Iterable[Item],
    *,
    prepare: Callable[[Item], Prepared],
    work: Callable[[Prepared], Worked],
    finish: Callable[[Worked], Done],
) -> Iterator[Done]:
    """Yield ``finish(work(prepare(item)))`` for every item, in the order of the items.

    ``prepare`` runs one item ahead in a thread of its own and ``finish`` one behind in another,
    while ``work`` runs in the caller's thread. At most four items exist at a time. When one stage
    raises, or the caller stops asking, what was worked on is still finished.

    Args:
        items: drawn from in the thread of ``prepare``.
        prepare: called for one item after the other.
        work: likewise.
        finish: likewise.
    """
    source = iter(items)

    def draw() -> tuple[Prepared] | None:
        for item in source:
            return (prepare(item),)
        return None

    finishing: deque[Future[Done]] = deque()
    with ThreadPoolExecutor(1, "prepare") as ahead, ThreadPoolExecutor(1, "finish") as behind:
        coming = ahead.submit(draw)
        while (prepared := coming.result()) is not None:
            coming = ahead.submit(draw)
            while finishing and (finishing[0].done() or len(finishing) > 1):
                yield finishing.popleft().result()
            finishing.append(behind.submit(finish, work(prepared[0])))
            del prepared
        while finishing:
            yield finishing.popleft().result()
