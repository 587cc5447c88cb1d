"""The papers' base models' rows by a stand-in: keeps what is shown of ``papers.json``.

Run ``python -m pipelines.reproduce_papers OUT --stand-in all-MiniLM-L6-v2``, then
``python -m benchmarks.papers OUT``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results_file import write

_AVERAGE = "Avg"
# One model of each kind; the stand-in's figures are the same for every other one.
_MODELS = (
    "BERT-base",
    "BERTbase-first-last-avg",
    "BERTbase-whitening (target)",
    "BERTbase-whitening-256 (target)",
    "SBERTbase-NLI-whitening-256 (target)",
    "BERT _{base} (first-last avg.)",
    "Avg. BERT embeddings",
    "BERT-[CLS]embedding",
    "whiteningBERT (PLM=BERT)",
)


def rows_of(papers: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield how many rows ran, then the rows that the documentation shows."""
    status = Counter(row["status"] for table in papers["tables"] for row in table["rows"])
    yield {"figure": "status", **status, "stand_in": papers["stand_in"]["model"]}
    for table in papers["tables"]:
        for row in table["rows"]:
            if row["model"] in _MODELS and row["status"] == "stand-in":
                named = {k: v for k, v in row["figures"].items() if k != _AVERAGE}
                published = [each["published"] for each in named.values()]
                yield {
                    "figure": "row",
                    "source": table["source"],
                    "table": table["table"],
                    "model": row["model"],
                    "setting": row["setting"],
                    "aggregation": row.get("aggregation"),
                    "ours": {name: each["ours"] for name, each in named.items()},
                    "published": sum(published) / len(published),
                }


def main(arguments: Sequence[str]) -> None:
    """Write ``benchmarks/results/papers_MiniLM.jsonl``."""
    papers = json.loads((Path(arguments[0]) / "papers.json").read_text(encoding="utf-8"))
    print(write("papers_MiniLM", rows_of(papers)))


if __name__ == "__main__":
    main(sys.argv[1:])
