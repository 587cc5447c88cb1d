"""README tables made from the results of sweeps, and of what is timed beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.results_file import RESULTS, read

Points = Mapping[str, Mapping[str, Any]]
# What the first table shows: name and key of a point.
_FIRST = (
    ("raw embeddings, exact", "raw/none/k384/fp32/flat"),
    ("auto, k = 256, 8 bits", "ours/auto/k256/sq8/flat"),
    ("auto, k = 128, 8 bits", "ours/auto/k128/sq8/flat"),
    ("auto, k = 256, product codes", "ours/auto/k256/pq/flat"),
    ("the same, 100 re-ranked from the store", "ours/auto/k256/pq/flat/rerank100"),
    ("auto, k = 128, product codes", "ours/auto/k128/pq/flat"),
    ("the same, 100 re-ranked from the store", "ours/auto/k128/pq/flat/rerank100"),
    ("raw embeddings, product codes", "raw/none/k384/pq64/flat"),
    ("FAISS's PCA, k = 128, 8 bits", "faiss/faiss-pca/k128/sq8/flat"),
    ("truncated, k = 128, 8 bits", "truncate/truncate/k128/sq8/flat"),
)
_FAMILIES = {"ours": "fitted", "raw": "raw", "faiss": "FAISS's PCA", "truncate": "truncated"}
_SIZES = (128, 96, 64, 48, 32, 24, 16)


def points_of(name: str) -> dict[str, dict[str, Any]]:
    """Return the points of a stored sweep by their keys, those of its last run."""
    rows = read(f"sweep_{name}")
    last = next(row["run"] for row in reversed(rows) if row["type"] == "point")
    return {row["key"]: row for row in rows if row["type"] == "point" and row["run"] == last}


def first() -> str:
    """Return the table of k against bytes, latency and quality on SciFact."""
    points = points_of("scifact")
    raw = points["raw/none/k384/fp32/flat"]
    lines = [
        "| SciFact, all-MiniLM-L6-v2 | bytes a row | × smaller | nDCG@10 | recall@100 "
        "| ms a query |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, key in _FIRST:
        point = points[key]
        size = point["bytes"]["per_row"]
        lines.append(
            f"| {name} | {size:,.0f} | {raw['bytes']['per_row'] / size:.0f} "
            f"| {_points(point, 'ndcg@10')} | {_points(point, 'recall@100')} "
            f"| {point['latency_ms']['p50']:.2f} |"
        )
    return "\n".join(lines)


def small_codes() -> str:
    """Return the best nDCG@10 for each number of bytes a row, ours and what else there is."""
    points = points_of("scifact")
    raw = points["raw/none/k384/fp32/flat"]
    best = _points(raw, "ndcg@10")
    lines = [
        f"| bytes a row, at most | of raw's 1,536 | fitted, nDCG@10 (raw {best}) | lost | which "
        "| fixed bytes | best of raw, FAISS's PCA, truncated |",
        "|---:|---:|---:|---:|---|---:|---|",
    ]
    exact = [p for p in points.values() if p["rerank"] is None and p["index"] == "flat"]
    for size in _SIZES:
        ours = _best(exact, size, ("ours",))
        if ours is None:
            continue
        other = _best(exact, size, ("raw", "faiss", "truncate"))
        beside = "–" if other is None else f"{_points(other, 'ndcg@10')}, {_called(other)}"
        lost = 100 * (raw["quality"]["ndcg@10"] - ours["quality"]["ndcg@10"])
        lines.append(
            f"| {size} | {raw['bytes']['per_row'] / size:.0f} × fewer | {_points(ours, 'ndcg@10')} "
            f"| {lost:.2f} | {_called(ours)} | {ours['bytes']['fixed']:,} "
            f"| {beside} |"
        )
    return "\n".join(lines)


def structures() -> str:
    """Return bytes, latency and recall of each structure and codec on Wikinews."""
    return _structures("wikinews", "Wikinews, PCA, k = 128", dim=384)


def million() -> str:
    """Return the same of a million synthetic embeddings."""
    return _structures("million", "A million of 768 dims, PCA, k = 128", dim=768)


def _structures(name: str, title: str, *, dim: int) -> str:
    points = points_of(name)
    lines = [
        f"| {title} | bytes a row | built in s | ms a query, p50 | p95 | queries/s "
        "| index recall@10 | agreement@10 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    wanted = [(f"raw/none/k{dim}/fp32/{index}", f"raw, {index}, fp32") for index in ("flat", "ivf")]
    for index in ("flat", "ivf", "hnsw"):
        for codec in ("fp32", "fp16", "sq8", "pq"):
            wanted.append((f"ours/pca/k128/{codec}/{index}", f"{index}, {codec}"))
    for key, called in wanted:
        if (point := points.get(key)) is not None:
            lines.append(
                f"| {called} | {point['bytes']['per_row']:,.0f} | {point['seconds']['total']:,.1f} "
                f"| {point['latency_ms']['p50']:.2f} | {point['latency_ms']['p95']:.2f} "
                f"| {point['throughput']['queries_per_second']:,.0f} "
                f"| {point['index_recall@10']:.3f} | {point['agreement@10']:.3f} |"
            )
    return "\n".join(lines)


def seconds() -> str:
    """Return how long the sweeps took, and the memory they held."""
    lines = [
        "| sweep | rows | points | seconds | CPU seconds | most memory |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in read("sweep_seconds"):
        peak = f"{row['peak_bytes'] / 2**30:.1f} GiB" if "peak_bytes" in row else "–"
        lines.append(
            f"| {row['sweep']} | {row['rows']:,} | {row['measured']:,} | {row['seconds']:,.0f} "
            f"| {row['cpu_seconds']:,.0f} | {peak} |"
        )
    return "\n".join(lines)


def growth() -> str:
    """Return time, bytes and memory of builds of ever more rows."""
    lines = [
        "| index | rows | µs a row, all of the build | µs a row, without reading | bytes a row "
        "| MiB held, beside the process |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(read("growth"), key=lambda row: (row["kind"], row["rows"])):
        n, held = row["rows"], (row["anonymous_peak"] - row["anonymous_before"]) / 2**20
        built = row["factory"]["built"]
        rest = row["seconds"] - row["stages"]["encode"] - row["stages"]["check ids"]
        lines.append(
            f"| {built} | {n:,} | {1e6 * row['seconds'] / n:.1f} | {1e6 * rest / n:.1f} "
            f"| {row['bytes']['index_file'] / n:.1f} | {held:.0f} |"
        )
    return "\n".join(lines)


def graph_peers() -> str:
    """Return the latency of graphs and lists at equal recalls, beside other libraries."""
    if not (RESULTS / "graph_peers.jsonl").exists():
        return "Not measured yet."
    rows = read("graph_peers")
    first_row = rows[0]
    lines = [
        f"{first_row['rows']:,} Wikinews vectors of {first_row['k']} dims, one thread.",
        "",
        "| | effort | recall@10 | ms a query, p50 | p95 | p99 | of the quicker peer | built in s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for target in sorted({row["target"] for row in rows}):
        same = [row for row in rows if row["target"] == target]
        peer = min(row["p50_ms"] for row in same if row["contender"].startswith(("hnsw", "use")))
        lines.append(f"| **recall@10 of {target:g}** | | | | | | | |")
        for row in same:
            ((name, effort),) = row["effort"].items()
            lines.append(
                f"| {row['contender']} | {name} {effort} | {row['recall@10']:.3f} "
                f"| {row['p50_ms']:.3f} | {row['p95_ms']:.3f} | {row['p99_ms']:.3f} "
                f"| {row['p50_ms'] / peer:.2f} × | {row['build_seconds']:,.0f} |"
            )
    return "\n".join(lines)


def exact_search() -> str:
    """Return the speed of exact search beside numpy's bare products."""
    if not (RESULTS / "exact_search.jsonl").exists():
        return "Not measured yet."
    rows = read("exact_search")
    lines = [
        f"{rows[0]['rows']:,} float32 rows, the ten nearest, threads: {rows[0]['threads']}. Speed "
        "of exact search over numpy's product of the same arrays alone, median of rounds (least, "
        "greatest).",
        "",
        "| dims | one query | three queries | batch of 1,000 |",
        "|---:|---:|---:|---:|",
    ]
    for dim in sorted({row["dim"] for row in rows}):
        cells = [
            f"{row['ratio']:.2f} ({row['least']:.2f}–{row['greatest']:.2f})"
            for row in rows
            if row["dim"] == dim
        ]
        lines.append(f"| {dim} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _best(
    points: Iterable[Mapping[str, Any]], size: int, families: tuple[str, ...]
) -> Mapping[str, Any] | None:
    fitting = [p for p in points if p["family"] in families and p["bytes"]["per_row"] <= size]
    return max(fitting, key=lambda p: p["quality"]["ndcg@10"], default=None)


def _called(point: Mapping[str, Any]) -> str:
    """Return what a point is, in a few words."""
    gamma = point["exponent"]
    transform = point["transform"]
    named = f", γ = {gamma:g}" if gamma and transform in ("auto", "whitening") else ""
    who = transform if point["family"] == "ours" else _FAMILIES[point["family"]]
    return f"{who}{named}, k = {point['k']}, {point['factory'].rpartition(',')[2]}"


def _points(point: Mapping[str, Any], metric: str) -> str:
    return f"{100 * point['quality'][metric]:.2f}"
