"""Judged queries: their texts and judgements read together, and checked against each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from whiten_index.errors import CorpusError
from whiten_index.labels.readers import qrels_splits, read_qrels, read_queries

_SHOWN = 2


@dataclass(frozen=True, eq=False)
class JudgedQueries:
    """Queries with their texts and what answers them.

    Attributes:
        source: file of the judgements, for messages.
        texts: query id -> text, of the judged queries in their order.
        qrels: query id -> document id -> grade, of the same queries.
        left_out: judged queries that have no text.
        splits: of the judgements, where several are used together.
    """

    source: str
    texts: Mapping[str, str]
    qrels: Mapping[str, Mapping[str, int]]
    left_out: int
    splits: tuple[str, ...] = ()

    def missing(self, names: Collection[str]) -> int:
        """Return how many relevant documents a corpus lacks.

        Args:
            names: document of each of its rows.

        Raises:
            CorpusError: it lacks all of them.
        """
        self.require_any(names)
        relevant = self._relevant()
        return len(relevant.keys() - set(names))

    def require_any(self, names: Iterable[str]) -> None:
        """Make sure that a corpus has a relevant document; its names are read up to the first.

        Args:
            names: document of each of its rows.

        Raises:
            CorpusError: it has none.
        """
        relevant = self._relevant()
        first: list[str] = []
        for name in names:
            if name in relevant:
                return
            if len(first) < _SHOWN:
                first.append(name)
        found = f"ids such as {some(first)}" if first else "none"
        raise CorpusError(
            f"{self.source} names no document of the corpus: it judges {some(relevant)}, and the "
            f"corpus has {found}; check --id-column and --filter"
        )

    def _relevant(self) -> dict[str, None]:
        """Return the documents that answer a query, as they come."""
        return {
            document: None
            for grades in self.qrels.values()
            for document, grade in grades.items()
            if grade > 0
        }


def read_judged(
    queries: str | Path, qrels: str | Path, *, split: str | None = None
) -> JudgedQueries:
    """Read queries and judgements; queries without a relevant document or a text are left out.

    Args:
        queries: see ``read_queries``.
        qrels: see ``read_qrels``.
        split: keep only the judgements whose column ``split`` says so.

    Raises:
        ConfigError: a file has an unknown ending, or there is no such split.
        CorpusError: a file cannot be used, or the two have no query in common.
    """
    every = read_queries(queries)
    judgements = read_qrels(qrels, split=split)
    relevant = {
        query: grades
        for query, grades in judgements.items()
        if any(grade > 0 for grade in grades.values())
    }
    texts = {query: every[query] for query in relevant if query in every}
    if not texts:
        raise CorpusError(
            f"no query of {qrels} is in {queries}: the judgements name {some(relevant)}, the "
            f"queries are {some(every)}; give files that belong together"
        )
    splits = qrels_splits(qrels) if split is None else ()
    return JudgedQueries(
        source=str(qrels),
        texts=texts,
        qrels={query: relevant[query] for query in texts},
        left_out=len(relevant) - len(texts),
        splits=splits if len(splits) > 1 else (),
    )


def some(names: Iterable[str]) -> str:
    """Return two of some names as errors show them."""
    return " and ".join(repr(name) for name, _ in zip(names, range(_SHOWN), strict=False))
