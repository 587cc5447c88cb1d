"""Shards that failed every time, as a user is told of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.corpus_helpers import open_corpus
from whiten_index.corpus import ParquetCorpus, Shard
from whiten_index.errors import CorpusError, SetAsideError
from whiten_index.pipeline.shard_workers import window_results
from whiten_index.runners import SetAside

ROWS, SHARD_ROWS = 100, 10


class Fails:
    """A runner for which a shard fails where ``why`` gives a reason."""

    def __init__(self, why: Callable[[Shard], BaseException | None]) -> None:
        self.why = why

    def map(
        self, items: Iterable[tuple[Shard, ...]], advance: Callable[[int], None] | None = None
    ) -> Iterator[Any]:
        for number, window in enumerate(items):
            found = [why for shard in window if (why := self.why(shard)) is not None]
            yield SetAside(number, window, found[0]) if found else "done"


# Shards end with their row groups, and within them.
@pytest.fixture(params=[20, 25])
def corpus(tmp_path: Path, write_parquet: Any, request: pytest.FixtureRequest) -> ParquetCorpus:
    for name in ("a.parquet", "b.parquet"):
        path = tmp_path / name
        write_parquet(path, {"text": [f"{n}" for n in range(ROWS)]}, row_group_size=request.param)
    return open_corpus(tmp_path, text_columns=("text",), shard_rows=SHARD_ROWS)


def told(corpus: ParquetCorpus, why: Callable[[Shard], BaseException | None]) -> SetAsideError:
    done = list[Shard]()
    windows = [corpus.shards[start : start + 3] for start in range(0, len(corpus.shards), 3)]
    results = window_results(corpus, Fails(why), windows, lambda _: None)
    with pytest.raises(SetAsideError) as raised:
        done.extend(shard for window, _ in results for shard in window)
    assert sorted(map(repr, done)) == sorted(
        repr(shard) for shard in corpus.shards if why(shard) is None
    )
    return raised.value


def test_a_file_that_is_gone_is_told_once(corpus: ParquetCorpus) -> None:
    error = told(corpus, lambda shard: CorpusError("it is gone") if shard.file else None)
    ((item),) = error.items
    many = sum(shard.file == 1 for shard in corpus.shards)
    assert many > 5
    assert item["shards"] == many
    assert item["why"] == "it is gone"
    last = corpus.shards[-1].spans[-1]
    assert item["name"].endswith(
        f"b.parquet, row group 0 row 0 to row group {last.row_group} row {last.stop - 1}"
    )
    assert str(error).startswith(f"{many} shards failed every time and were set aside (")


def test_neighbours_are_told_together_for_one_reason_only(corpus: ParquetCorpus) -> None:
    reasons = ["one", "two", "", "two", "two", "one", "", "one"]
    why = {
        repr(shard): CorpusError(text)
        for shard, text in zip(corpus.shards, reasons, strict=False)
        if text
    }
    error = told(corpus, lambda shard: why.get(repr(shard)))
    assert [(item["why"], item["shards"]) for item in error.items] == [
        ("one", 1), ("two", 1), ("two", 2), ("one", 1), ("one", 1)
    ]  # fmt: skip
    starts = [corpus.shards[place].spans[0] for place in (0, 1, 3, 5, 7)]
    for item, span in zip(error.items, starts, strict=True):
        assert f"a.parquet, row group {span.row_group} row {span.start} to" in item["name"]


def test_five_places_are_named_and_the_others_counted(corpus: ParquetCorpus) -> None:
    chosen = {repr(shard) for shard in corpus.shards[::2]}
    error = told(
        corpus, lambda shard: CorpusError("it is damaged") if repr(shard) in chosen else None
    )
    assert len(error.items) == len(chosen)
    assert f"; and {len(chosen) - 5} more places); all the others are done" in str(error)


def test_workers_that_died_are_a_reason(corpus: ParquetCorpus) -> None:
    class Dies(Fails):
        def map(self, items: Any, advance: Any = None) -> Iterator[Any]:
            for number, window in enumerate(items):
                yield SetAside(number, window, None) if number == 0 else "done"

    with pytest.raises(SetAsideError, match=r"1 shard failed .* its workers died"):
        list(window_results(corpus, Dies(lambda _: None), [corpus.shards[:1]], lambda _: None))
