"""Tables of nightly updates: what a night costs, what it keeps, when it refits."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.results_file import read

Row = Mapping[str, Any]


def night() -> str:
    """Return the table of one night of texts."""
    rows = {row["what"]: row for row in read("nightly_night") if row["figure"] == "night"}
    build = rows["build"]
    lines = [
        "| 50,000 Wikinews sentences, MiniLM | rows encoded | seconds | of the build | CPU seconds "
        "| of the build |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    names = {
        "build": "build",
        "update": "update, transform kept",
        "refit": "update once more, transform fitted again",
    }
    for what, words in names.items():
        row = rows[what]
        wall, cpu = row["wall_seconds"], row["cpu_seconds"]
        lines.append(
            f"| {words} | {row['report']['counts']['encoded']:,} | {wall:.1f} "
            f"| {_share(wall, build['wall_seconds'])} | {cpu:.1f} "
            f"| {_share(cpu, build['cpu_seconds'])} |"
        )
    (equal,) = (row for row in read("nightly_night") if row["figure"] == "equal")
    return "\n".join([*lines, "", _equal(equal)])


def nights() -> str:
    """Return the table of thirty nights of embeddings."""
    found = read("nightly_nights")
    rows = [row for row in found if row["figure"] == "nights"]
    updates = [row for row in rows if row["what"] == "update"]
    lines = [
        "| 237,766 rows from a column of embeddings | seconds | transform | drift, nats per "
        "dimension |",
        "|---|---:|---|---:|",
    ]
    shown = [("build", rows[0])]
    shown += [(f"night {row['night']}", row) for row in updates if row["night"] in (1, 10, 20, 30)]
    shown += [
        ("fitted again", next(row for row in rows if row["what"] == "refit")),
        ("fresh build", next(row for row in rows if row["what"] == "fresh build")),
    ]
    for name, row in shown:
        decision = row["report"].get("decision") or {}
        drift = row["report"].get("drift") or {}
        kl = drift.get("kl_per_dim")
        lines.append(
            f"| {name} | {row['wall_seconds']:.1f} | {decision.get('whitening', 'fit')} "
            f"| {'' if kl is None else format(kl, '.2g')} |"
        )
    (equal,) = (row for row in found if row["figure"] == "equal after nights")
    before, after = (row for row in found if row["figure"] == "store")
    sizes = [
        f"{sum(v['bytes'] for v in row.values() if isinstance(v, dict)) / 1e6:,.0f} MB"
        for row in (before, after)
    ]
    kept = f"The store: {sizes[0]} after the nights, {sizes[1]} after `prune`, `gc` and `compact`."
    return "\n".join([*lines, "", _equal(equal), kept])


def drift() -> str:
    """Return the table of drift on real text."""
    lines = [
        "| Wikinews, and of Wikipedia | transform | KL, nats per dimension | by chance "
        "| mean moved by, in σ | variance kept, could be kept | decision "
        "| neighbours that keep and refit share | of new text |",
        "|---|---|---:|---:|---:|---|---|---:|---:|",
    ]
    for row in read("drift"):
        if row["figure"] != "wikipedia added" or not row["share"]:
            continue
        new = row["agreement_new"]
        lines.append(
            f"| {row['share']:.0%} | {row['setting']} | {row['kl_per_dim']:.2g} "
            f"| {row['noise_kl']:.2g} | {row['mean_shift']:.3f} "
            f"| {row['variance_kept']:.2%}, {row['variance_possible']:.2%} "
            f"| {row['decision']['whitening']} | {row['agreement']:.1%} "
            f"| {'' if new is None else format(new, '.1%')} |"
        )
    return "\n".join(lines)


def readers() -> str:
    """Return one sentence on readers while versions are published."""
    (row,) = read("readers")
    searches = sum(reader["searches"] for reader in row["readers"])
    return (
        f"{len(row['readers'])} readers in processes of their own, {row['rows']:,} rows of "
        f"{row['dim']} dims, while {row['published']} versions were built, published and pruned to "
        f"the last two: {searches:,} searches, {row['searches_per_second']:,.0f} a second, no "
        "error, no answer that mixed two versions."
    )


def _equal(row: Row) -> str:
    ids = "the same ids in the same order" if row["same_ids_in_order"] else "OTHER IDS"
    return (
        f"Fitted again, it equals a build from scratch: {row['rows']:,} rows, {ids}, least cosine "
        f"of a vector {row['least_cosine']:.7f}, covariances {row['covariance_apart']:.1g} apart "
        f"(Frobenius, relative; {row['covariance_from_recomputed']:.1g} from the rows' own)."
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}"


def bucket_night() -> str:
    """Return the table of what a night moves to and from a bucket."""
    lines = [
        "| | put there, MB | sent, MB | sent / put | received, MB |",
        "|---|---:|---:|---:|---:|",
    ]
    names = {
        ("build", "one"): "build",
        ("night", "one"): "night, on the same machine",
        ("night", "another"): "night, on a machine with an empty cache",
    }
    for row in read("bucket_night"):
        sent, put = row["sent"], row["new_bytes"]
        lines.append(
            f"| {names[row['what'], row['machine']]} | {put / 1e6:.1f} | {sent / 1e6:.1f} "
            f"| {sent / put:.3f} | {row['received'] / 1e6:.1f} |"
        )
    return "\n".join(lines)


def stable_ids() -> str:
    """Return the table of an update by ids in FAISS and of one that copies codes."""
    lines = ["| index | by ids, CPU seconds | codes copied, CPU seconds |", "|---|---:|---:|"]
    found: dict[str, dict[str, Row]] = {}
    for row in read("stable_ids"):
        found.setdefault(row["index"], {})[row["way"]] = row
    for index, ways in found.items():
        assert all(row["codes_kept"] for row in ways.values())
        lines.append(f"| `{index}` | {_median(ways['by_ids'])} | {_median(ways['by_copies'])} |")
    return "\n".join(lines)


def _median(row: Row) -> str:
    return f"{statistics.median(row['cpu_seconds']):.3f}"
