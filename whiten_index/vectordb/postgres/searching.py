"""The nearest rows of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from psycopg import sql

from whiten_index.corpus.batches import ID
from whiten_index.vectordb.database_writer import VECTOR, Metric, Neighbours, VectorDtype
from whiten_index.vectordb.postgres.naming import beside_values
from whiten_index.vectordb.postgres.register import Entry
from whiten_index.vectordb.postgres.rows import TYPES
from whiten_index.vectordb.row_checks import padded_scores

# pgvector's operators: one less the cosine, and the inner product's negative.
_OPERATORS = {Metric.COSINE: ("<=>", 1.0), Metric.INNER_PRODUCT: ("<#>", 0.0)}


def search(
    connection: Any,
    table: sql.Composable,
    entry: Entry,
    vectors: NDArray[np.float32],
    top_k: int,
    *,
    settings: Mapping[str, str],
    extension: str,
) -> Neighbours:
    """Return the nearest rows of queries (q, k).

    Args:
        connection: to the database.
        table: to search.
        entry: says what it holds.
        vectors: the queries.
        top_k: rows of each.
        settings: of the server, for these queries alone.
        extension: schema that pgvector is installed in.
    """
    sign, most = _OPERATORS[entry.metric]
    type_ = sql.Identifier(extension, TYPES[VectorDtype(entry.pushed.dtype)])
    distance = sql.SQL("{} OPERATOR({}.{}) %(query)s::{}").format(
        sql.Identifier(VECTOR), beside_values(connection, sql.Identifier(extension)),
        sql.SQL(sign), beside_values(connection, type_),
    )  # fmt: skip
    query = sql.SQL("SELECT {}, {} FROM {} ORDER BY {} LIMIT %(top_k)s").format(
        sql.Identifier(ID), distance, beside_values(connection, table), distance
    )
    ids = list[list[str | int]]()
    scores = list[list[float]]()
    # Taken back at the end, so that no setting outlives it, in another transaction either.
    with connection.transaction(force_rollback=True):
        for name, value in settings.items():
            connection.execute("SELECT set_config(%s, %s, true)", [name, value])
        for vector in vectors.tolist():
            told = "[" + ",".join(map(repr, vector)) + "]"
            found = connection.execute(query, {"query": told, "top_k": top_k}).fetchall()
            # A vector of zeros has no cosine, here or with any other: it comes last, if at all.
            near = [(name, far) for name, far in found if far == far]
            ids.append([name for name, _ in near])
            scores.append([most - far for _, far in near])
    return Neighbours(ids, padded_scores(scores, top_k))
