"""Items in blocks, and stages side by side, so that no stage holds up the work."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar

Item = TypeVar("Item")
Read = TypeVar("Read")
Prepared = TypeVar("Prepared")
Worked = TypeVar("Worked")
Done = TypeVar("Done")


def blocks(items: Any, size: int) -> Iterator[Any]:
    """Yield the items of a list or an array in order, ``size`` at a time."""
    for first in range(0, len(items), size):
        yield items[first : first + size]


def overlapped(
    items: Iterable[Item],
    *,
    read: Callable[[Item], Read],
    prepare: Callable[[Read], Prepared],
    work: Callable[[Prepared], Worked],
    finish: Callable[[Worked], Done],
    stop: Callable[[Worked], None] = lambda _: None,
) -> Iterator[Done]:
    """Yield ``finish(work(prepare(read(item))))`` for every item, in the order of the items.

    ``work`` runs in the caller's thread, each other stage in a thread each: ``prepare`` one item
    ahead of it, ``read`` one more, ``finish`` one behind. At most five items exist at a time. When
    one stage raises, or the caller stops asking, items already worked on are still finished;
    ``stop`` is called with each before, so that none of them waits long.
    """
    with (
        closing(ahead(items, read)) as all_read,
        closing(ahead(all_read, prepare)) as all_prepared,
        ThreadPoolExecutor(1, "finish") as behind,
    ):
        worked: deque[Worked] = deque()
        finishing: deque[Future[Done]] = deque()

        def first() -> Done:
            done = finishing.popleft().result()
            worked.popleft()
            return done

        try:
            for prepared in all_prepared:
                while finishing and (finishing[0].done() or len(finishing) > 1):
                    yield first()
                worked.append(work(prepared))
                finishing.append(behind.submit(finish, worked[-1]))
                del prepared
            while finishing:
                yield first()
        except BaseException:
            for each in worked:
                stop(each)
            raise


def ahead(items: Iterable[Item], call: Callable[[Item], Done]) -> Generator[Done, None, None]:
    """Yield ``call(item)`` for every item, in order, each made one ahead in another thread."""
    source = iter(items)

    def draw() -> tuple[Done] | None:
        for item in source:
            return (call(item),)
        return None

    with ThreadPoolExecutor(1, "ahead") as thread:
        coming = thread.submit(draw)
        while (made := coming.result()) is not None:
            coming = thread.submit(draw)
            yield made[0]
            del made
