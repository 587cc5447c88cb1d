"""Tables made from the results of sweeps, and of what is timed beside them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.results_file import read

# Settings of the small codes in the README.
_FIRST = (
    "raw embeddings, exact",
    "auto, k = 256, 8 bits",
    "auto, k = 128, 8 bits",
    "auto, k = 256, PQ64",
    "truncated, k = 128, 8 bits",
)


def first() -> str:
    """Return bytes, quality and latency of five settings on SciFact."""
    rows = {row["setting"]: row for row in read("small_codes")}
    lines = [
        "| SciFact | bytes a row | nDCG@10 | difference, 95 % interval | ms a query |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in _FIRST:
        row = rows[name]
        lines.append(
            f"| {name} | {row['bytes_per_row']:,.0f} | {_mean(row)} | "
            f"{'' if name == _FIRST[0] else _difference(row)} | {row['latency_ms']['p50']:.2f} |"
        )
    return "\n".join(lines)


def small_codes() -> str:
    """Return the quality of every setting, in bold where none of as few bytes is better.

    Settings that are ranked again read the store too, and are left out of that.
    """
    lines = [
        "| SciFact, exhaustive search | bytes a row | fixed bytes | nDCG@10 | lost or gained, "
        "95 % interval | ms a query |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    rows = sorted(read("small_codes"), key=lambda row: (-row["bytes_per_row"], row["mean"]))
    best, front = 0.0, set[str]()
    for row in reversed(rows):
        if "re-ranked" not in row["setting"] and row["mean"] > best:
            best = row["mean"]
            front.add(row["setting"])
    for row in rows:
        name = f"**{row['setting']}**" if row["setting"] in front else row["setting"]
        lines.append(
            f"| {name} | {row['bytes_per_row']:,.0f} | {row['fixed_bytes']:,} "
            f"| {_mean(row)} | {_difference(row)} | {row['latency_ms']['p50']:.2f} |"
        )
    return "\n".join(lines)


def _mean(row: Mapping[str, Any]) -> str:
    """Return a mean over seeds with its deviation, where seeds matter."""
    return f"{row['mean']:.2f}" + (f" ± {row['deviation']:.2f}" if row["deviation"] else "")


def _difference(row: Mapping[str, Any]) -> str:
    """Return the difference to raw embeddings, with its interval over the queries."""
    low, high = row["interval"]
    return f"{row['difference']:+.2f} ({low:+.2f} to {high:+.2f})"


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


def gpu_index() -> str:
    """Return what a GPU spares in building an index and in searching it by many queries."""
    rows = read("gpu_index")
    one = rows[0]
    lines = [
        f"{one['rows']:,} clustered rows of {one['k']} dims; {one['queries']:,} queries at once, "
        "ten nearest.",
        "",
        "| index | made and searched on | training, s | adding, s | queries a second | recall@10 |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        stages = row["stages"]
        lines.append(
            f"| {row['factory']} | {row['device_name']} | {stages.get('train', 0):.2f} "
            f"| {stages['project and add']:.2f} | {row['queries_per_second']:,.0f} "
            f"| {row['recall@10']:.3f} |"
        )
    return "\n".join(lines)


def graph_peers() -> str:
    """Return the latency of graphs and lists at equal recalls, beside other libraries."""
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


def serving() -> str:
    """Return the server's speed beside that of the library in process, and the soak."""
    rows = read("serving")
    latency, *rates = rows
    ours, library = ([each[who] for each in latency["rounds"]] for who in ("server", "library"))
    half, most = (
        statistics.median(a[key] - b[key] for a, b in zip(ours, library, strict=True))
        for key in ("p50_ms", "p99_ms")
    )
    lines = [
        f"{latency['rows']:,} sentences of Wikinews, MiniLM, k = 128, {latency['factory']}; 12 "
        f"words a query. One client's text takes {_middle(ours, 'p50_ms'):.1f} ms (p99 "
        f"{_middle(ours, 'p99_ms'):.1f}), and {_middle(library, 'p50_ms'):.1f} ms (p99 "
        f"{_middle(library, 'p99_ms'):.1f}) by a call of the library: {half:+.1f} ms (p99 "
        f"{most:+.1f}).",
        "",
        "| queries a second | server | in process | ratio (least to greatest) |",
        "|---|---:|---:|---:|",
    ]
    for row in rates:
        many = 64 if row["what"].startswith("64 embeddings") else 1
        pairs = [(many * each["server"]["rate"], each["library"]) for each in row["rounds"]]
        ratios = sorted(a / b for a, b in pairs)
        lines.append(
            f"| {row['what']} | {statistics.median(a for a, _ in pairs):,.0f} "
            f"| {statistics.median(b for _, b in pairs):,.0f} "
            f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
        )
    return "\n".join(lines)


def serving_soak() -> str:
    """Return what a server did while versions came and went."""
    (row,) = read("serving_soak")
    return (
        f"{row['clients']} clients for {row['seconds'] / 60:.0f} minutes, {row['published']} "
        f"versions published: {row['requests']:,} requests, {row['errors']} errors, "
        f"{row['mixed']} mixed answers of {row['versions_seen']} versions, memory "
        f"{row['memory_first_mb']:.0f} MB in the beginning and {row['memory_last_mb']:.0f} MB in "
        "the end."
    )


def _middle(each: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.median(one[key] for one in each)


def exact_search() -> str:
    """Return the speed of exact search beside numpy's bare products."""
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
