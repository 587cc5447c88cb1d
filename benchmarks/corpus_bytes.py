"""How many bytes a row of text has in a Parquet file, from the footers of the evaluation data.

Run ``python -m benchmarks.corpus_bytes``; it needs ``WHITEN_INDEX_DATA``.
"""

from __future__ import annotations

import pyarrow.parquet as pq

from benchmarks.results_file import data_folder, write

FILES = (
    "sentences/wikinews_en.parquet",
    "sentences/wikipedia_en.parquet",
    "retrieval/scifact/corpus.parquet",
)


def main() -> None:
    """Look at each file and write what was found."""
    rows = []
    for name in FILES:
        path = data_folder() / name
        footer = pq.read_metadata(path)
        rows.append({"file": name, "rows": footer.num_rows, "bytes": path.stat().st_size})
    print(write("corpus_bytes", rows))


if __name__ == "__main__":
    main()
