"""The documents of an index: rows of its file, however it was written."""

from __future__ import annotations

import pyarrow as pa
import pytest

from whiten_index.index import Documents, write_documents


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (2, 5), (3, 4), (9, 10), (4, 99), (5, 5)])
def test_ids_of_some_rows_whatever_the_batches(tmp_path, start, stop):
    tables = [pa.table({"id": pa.array(range(a, b))}) for a, b in ((0, 3), (3, 4), (4, 10))]
    write_documents(tmp_path / "d.arrow", tables)
    found = Documents(tmp_path / "d.arrow").id_column(start, stop)
    assert found.to_pylist() == list(range(start, min(stop, 10)))
