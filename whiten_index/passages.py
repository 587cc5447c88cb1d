"""From the texts of a shard to their passages: one row each, which says where it comes from."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from whiten_index.batch import (
    PASSAGE,
    PASSAGE_END,
    PASSAGE_START,
    PASSAGE_TEXT,
    TextBatch,
)
from whiten_index.encoding import PassageSplitter


def split_batch(batch: TextBatch, splitter: PassageSplitter) -> TextBatch:
    """Return the passages of a batch, those of a document one after the other.

    Args:
        batch: n texts of documents.
        splitter: cuts them.

    Returns:
        A batch of m >= n texts. Its documents repeat the id and the kept columns and add
        ``PASSAGE_COLUMNS``; ``read`` and ``skipped`` stay counts of the corpus's rows.
    """
    spans = splitter.split(batch.texts)
    flat = [span for found in spans for span in found]
    counts = np.array([len(found) for found in spans], dtype=np.int64)
    source = np.repeat(np.arange(len(batch)), counts)
    texts = [batch.texts[row][start:end] for row, (start, end) in zip(source, flat, strict=True)]
    columns = {
        PASSAGE: pa.array([number for found in spans for number in range(len(found))], pa.int32()),
        PASSAGE_START: pa.array([start for start, _ in flat], pa.int32()),
        PASSAGE_END: pa.array([end for _, end in flat], pa.int32()),
        PASSAGE_TEXT: pa.array(texts, pa.large_string()),
    }
    documents = batch.documents.take(pa.array(source))
    for name, values in columns.items():
        documents = documents.append_column(name, values)
    return TextBatch(documents, texts, batch.read, batch.skipped)
