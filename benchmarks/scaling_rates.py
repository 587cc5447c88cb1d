"""The rates that the cost model of a cluster stands on, each with where it comes from.

What we measured is read from ``results/``; what others published is a constant with its source, and
marked so wherever it is shown. Results of ``benchmarks.cluster`` are read here too, and here alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from benchmarks.results_file import RESULTS, read

SHARD_ROWS = 16_384
_ENCODING = "encoding_cpu_all-MiniLM-L6-v2_float32"
_GIB, _MIB = 1 << 30, 1 << 20
# Rows that a build holds out of the training sample to tune with.
HELD_OUT = 1_000


@dataclass(frozen=True)
class Figure:
    """A number, and where it comes from.

    Attributes:
        value: the number.
        words: what it is, with its unit.
        source: the results file, or the page it was published on.
        measured: whether by us.
    """

    value: float
    words: str
    source: str
    measured: bool = True


GPU_ROWS = Figure(
    14_200,
    "rows/s encoded, one V100",
    "sentences/s of all-MiniLM-L6-v2, of unstated length, https://github.com/UKPLab/"
    "sentence-transformers/blob/0027ac07936af6c7a3f047ecb4c2f70684db5cd0/docs/_static/html/"
    "models_en_sentence_embeddings.html, also shown on sbert.net",
    measured=False,
)
_EFS = "https://docs.aws.amazon.com/efs/latest/ug/performance.html (Regional, Elastic; least)"
DISK_READ = Figure(20 * _GIB, "bytes/s read from one EFS", _EFS, measured=False)
DISK_WRITE = Figure(1 * _GIB, "bytes/s written to one EFS", _EFS, measured=False)
CLIENT = Figure(
    500 * _MIB,
    "bytes/s of one machine at an EFS",
    "https://docs.aws.amazon.com/efs/latest/ug/performance.html (Provisioned and Bursting; Elastic "
    "has 1,500 MiB/s)",
    measured=False,
)
BUCKET_WRITES = Figure(
    3_500,
    "objects/s written below one prefix of S3",
    "https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html",
    measured=False,
)


@dataclass(frozen=True)
class Rates:
    """What was measured; ``None`` where ``benchmarks.cluster`` has not been run.

    All times are those of two cores unless their words say otherwise.
    """

    cpu_rows: Figure
    tokens_a_row: Figure
    tokenise_rows: Figure
    read_row: Figure
    store_row: Figure
    moments_rows: Figure
    load_seconds: Figure
    check_row: Figure
    fit_seconds: Figure
    code_row: Figure
    code_row_list: Figure
    train_pairs: Figure
    exact_row: Figure
    publish_bytes: Figure
    corpus_row: Figure
    stored_row: Figure
    index_extra_row: Figure
    documents_row: Figure
    worker_mib: Figure
    coder_mib: Figure
    process_mib: Figure
    overhead: Figure | None = None
    join_bytes: Figure | None = None
    driver_shard: Figure | None = None
    driver_mib: Figure | None = None

    @classmethod
    def read(cls) -> Rates:
        """Read all of them from the stored results."""
        return cls(**_of_encoding(), **_of_builds(), **_of_growth(), **_of_cluster())

    def feeding(self) -> float:
        """Return the share of two cores that keeps one GPU of the published speed busy."""
        a_row = 1 / self.tokenise_rows.value + 1 / self.moments_rows.value
        # Reading and storing were timed on one thread.
        a_row += (self.read_row.value + self.store_row.value) / 2
        return GPU_ROWS.value * a_row

    def figures(self) -> list[Figure]:
        """Return what is known, measured first."""
        found = [getattr(self, field.name) for field in fields(self)]
        published = [GPU_ROWS, DISK_READ, DISK_WRITE, CLIENT, BUCKET_WRITES]
        return [figure for figure in found if figure is not None] + published


def _the(rows: Sequence[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    return next(row for row in rows if all(row.get(n) == v for n, v in wanted.items()))


def _of_encoding() -> dict[str, Figure]:
    rows = read(_ENCODING)
    setup = _the(rows, figure="setup")
    ours = _the(rows, figure="contender", contender="ours, stream")
    tokeniser = _the(rows, figure="contender", contender="tokeniser alone")
    memory = _the(rows, figure="memory", contender="ours, stream")
    a_row = setup["tokens"] / setup["texts"]
    moments = _the(read("moments"), contender="ours, float64", figure="contender")
    return {
        "cpu_rows": Figure(
            ours["tokens_per_second"] / a_row, "rows/s encoded, two cores", _ENCODING
        ),
        "tokens_a_row": Figure(a_row, "tokens a row", _ENCODING),
        "tokenise_rows": Figure(
            tokeniser["tokens_per_second"] / a_row, "rows/s tokenised, two cores", _ENCODING
        ),
        "moments_rows": Figure(
            moments["rows_per_second"], "rows/s of 768 dims added to moments, two cores", "moments"
        ),
        "worker_mib": Figure(
            memory["peak_mib"], "MiB of a process that encodes on a CPU", _ENCODING
        ),
    }


def _of_builds() -> dict[str, Figure]:
    night = _the(read("nightly_night"), figure="night", what="build")["report"]
    nights = read("nightly_nights")
    columns = _the(nights, figure="nights", what="build")["report"]
    store = _the(nights, figure="store", when="after upkeep")
    held = sum(each["bytes"] for each in store.values() if isinstance(each, dict))
    wikinews = _the(read("corpus_bytes"), file="sentences/wikinews_en.parquet")
    tokens = night["counts"]["tokens"] / night["rows"]
    a_row = _of_encoding()["tokens_a_row"].value
    seconds = night["seconds"]
    return {
        "read_row": Figure(seconds["encode/read"] / night["rows"], "s a row read", "nightly_night"),
        "store_row": Figure(
            columns["seconds"]["encode/store"] / columns["rows"], "s a row stored", "nightly_nights"
        ),
        "load_seconds": Figure(
            seconds["encode/load encoder"], "s to load the encoder", "nightly_night"
        ),
        "corpus_row": Figure(
            wikinews["bytes"] / wikinews["rows"] / tokens * a_row,
            "bytes a row of text (zstd), by its tokens",
            "corpus_bytes",
        ),
        "stored_row": Figure(
            held / columns["rows"], "bytes a row in the store, 384 dims", "nightly_nights"
        ),
    }


def _of_growth() -> dict[str, Figure]:
    """Return what the largest build with lists took, and how coding grows with the lists."""
    rows = sorted((row for row in read("growth") if row["kind"] == "IVF"), key=_rows)
    last = rows[-1]
    stages, bytes_ = last["stages"], last["bytes"]
    lists = [_lists(row) for row in rows]
    code = [row["stages"]["project and add"] / row["rows"] for row in rows]
    a_list, fixed = statistics.linear_regression(lists, code)
    budget = last["factory"]["memory_budget"]
    points = min(last["rows"] - HELD_OUT, 256 * lists[-1], budget // 4 // (4 * last["k"]))
    held = max(row["anonymous_peak"] - row["anonymous_before"] for row in rows)
    return {
        "check_row": Figure(stages["check ids"] / last["rows"], "s a row, ids checked", "growth"),
        "fit_seconds": Figure(
            stages["fit"] + stages.get("diagnose", 0.0) + stages["tune"],
            "s to fit, diagnose and tune, 768 dims, a million rows",
            "growth",
        ),
        "code_row": Figure(fixed, "s a row projected and written", "growth"),
        "code_row_list": Figure(a_list, "s a row and list, to find its list", "growth"),
        "train_pairs": Figure(
            points * lists[-1] / stages["train"], "rows × lists/s trained", "growth"
        ),
        "exact_row": Figure(
            stages["exact neighbours"] / last["rows"],
            "s a row, exact neighbours of 1,000 held out",
            "growth",
        ),
        "publish_bytes": Figure(
            (bytes_["index_file"] + bytes_["documents_file"]) / stages["publish"],
            "bytes/s published with their checksums",
            "growth",
        ),
        "index_extra_row": Figure(
            (bytes_["index"]["ids"] + bytes_["index"]["lists"]) / last["rows"],
            "bytes a row in the index beside codes",
            "growth",
        ),
        "documents_row": Figure(
            bytes_["documents_file"] / last["rows"],
            "bytes a row of documents, an id alone",
            "growth",
        ),
        "coder_mib": Figure(held / _MIB, "MiB held beside the process, budget 256 MiB", "growth"),
        "process_mib": Figure(last["anonymous_before"] / _MIB, "MiB of the process", "growth"),
    }


def _rows(row: dict[str, Any]) -> int:
    return int(row["rows"])


def _lists(row: dict[str, Any]) -> int:
    return int(str(row["factory"]["built"]).removeprefix("IVF").partition(",")[0])


def _of_cluster() -> dict[str, Figure]:
    """Return what ``benchmarks.cluster`` measured, without what is not there yet."""
    found: dict[str, Figure] = {}
    if ratios := [row["ratio"] for row in _if_there("cluster_overhead")]:
        found["overhead"] = Figure(
            statistics.median(ratios),
            "time on a cluster of one machine / local",
            "cluster_overhead",
        )
    for row in _if_there("cluster_equal"):
        if {"join_seconds", "index_bytes"} <= row.keys():
            found["join_bytes"] = Figure(
                row["index_bytes"] / row["join_seconds"], "bytes/s joined", "cluster_equal"
            )
    for row in sorted(_if_there("cluster_empty"), key=lambda row: int(row["shards"])):
        found["driver_shard"] = Figure(
            row["seconds"] / row["shards"], "s of the driver a shard", "cluster_empty"
        )
        found["driver_mib"] = Figure(
            row["driver_mib"], f"MiB of the driver at {row['shards']:,} shards", "cluster_empty"
        )
    return found


def _if_there(name: str) -> list[dict[str, Any]]:
    return read(name) if (RESULTS / f"{name}.jsonl").exists() else []
