"""Tables of evaluation: STS, what transforms are fitted on, transfer tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.results_file import read

Row = Mapping[str, Any]
_SETS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
_LAYERS = {(-1,): "last layer", (1,): "layer 1"}
_FITS = ("target", "target-distinct", "target-scored")
_AGGREGATIONS = ("all", "mean", "wmean")


def sts() -> str:
    """Return the table of raw embeddings beside the public figures."""
    (row,) = (row for row in _sts_rows() if row["public"] is not None)
    public = row["public"]
    datasets = {name: row["datasets"][name] for name in _SETS}
    header = " | ".join(datasets)
    lines = [
        f"| Spearman × 100 | {header} |",
        "|---|" + "---:|" * len(datasets),
        "| public (MTEB) | " + " | ".join(f"{public[name]:.2f}" for name in datasets) + " |",
    ]
    for how in _AGGREGATIONS:
        found = " | ".join(f"{each['spearman'][how]:.2f}" for each in datasets.values())
        lines.append(f"| ours, {how} | {found} |")
    intervals = ("{:.1f} to {:.1f}".format(*each["interval"]) for each in datasets.values())
    lines.append(f"| all, 95 % interval | {' | '.join(intervals)} |")
    return "\n".join(lines)


def sts_fits() -> str:
    """Return the table of transforms by what they are fitted on, mean over the seven sets."""
    rows = _sts_rows()
    lines = [
        "| mean of seven sets, all / mean | raw | "
        + " | ".join(f"fit {name}" for name in _FITS)
        + " |",
        "|---|---:|---:|---:|---:|",
    ]
    for layers, shown in _LAYERS.items():
        own = [row for row in rows if tuple(row["layers"]) == layers]
        (raw,) = (row for row in own if row["fit"] is None)
        for name in dict.fromkeys(row["name"] for row in own if row["fit"] is not None):
            fits = {row["fit"]: row for row in own if row["name"] == name}
            cells = [_average(raw), *(_average(fits[fit]) for fit in _FITS)]
            lines.append(f"| {shown}, {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def transfer() -> str:
    """Return the table of transfer tasks, beside scikit-learn's own search."""
    rows = read("transfer_MiniLM")
    raw = {row["set"]: row for row in rows if "transform" in row["setting"] and _is_raw(row)}
    whitened = {row["set"]: row for row in rows if not _is_raw(row)}
    lines = [
        "| accuracy × 100 | ours | deviation | scikit-learn's LogisticRegressionCV | whitened, "
        "k = 256 |",
        "|---|---:|---|---:|---:|",
    ]
    for name, row in raw.items():
        beside = row.get("reference")
        spread = f"{row['deviation']:.2f}, {row['deviation_of']}" if "deviation" in row else "–"
        lines.append(
            f"| {_TASKS.get(name, name.upper())} | {row['accuracy']:.2f} | {spread} "
            f"| {'–' if not beside else format(beside['accuracy'], '.2f')} "
            f"| {whitened[name]['accuracy']:.2f} |"
        )
    return "\n".join(lines)


def geometry() -> str:
    """Return the table of alignment, uniformity and the rest on STS-B dev."""
    lines = [
        "| MiniLM, STS-B dev | alignment | uniformity | mean cosine | IsoScore | effective rank |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in read("geometry_MiniLM"):
        names = ("alignment", "uniformity", "mean_cosine", "isoscore")
        cells = [f"{row[name]:.3f}" for name in names]
        cells.append(f"{row['effective_rank']:.0f}")
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def papers() -> str:
    """Return the base models' rows beside the stand-in's, and how many rows ran."""
    (status,) = (row for row in read("papers_MiniLM") if row["figure"] == "status")
    lines = [
        "| row | setting | aggregation | published | the stand-in |",
        "|---|---|---|---:|---:|",
    ]
    for row in (row for row in read("papers_MiniLM") if row["figure"] == "row"):
        ours = list(row["ours"].values())
        lines.append(
            f"| {row['source']}, {row['table']}: {row['model']} | {row['setting'] or '–'} "
            f"| {row['aggregation'] or 'accuracy'} | {row['published']:.2f} "
            f"| {sum(ours) / len(ours):.2f} |"
        )
    ran = status["stand-in"] + status.get("ran", 0)
    return "\n".join(
        [
            *lines,
            "",
            f"Means over each row's sets. {ran} of {ran + status['not run']} rows were computed, "
            f"with {status['stand_in']} in every model's place.",
        ]
    )


_TASKS = {"sst2": "SST-2", "sst5": "SST-5", "mean": "mean of seven", "rte": "RTE, cosine ≥ 0.5"}


def _is_raw(row: Row) -> bool:
    return bool(row["setting"]["transform"]["kind"] == "none")


def _sts_rows() -> list[Row]:
    return [row for row in read("sts_MiniLM") if row["figure"] == "sts"]


def _average(row: Row) -> str:
    figures = row["average"]["spearman"]
    return f"{figures['all']:.2f} / {figures['mean']:.2f}"


def static_models() -> str:
    """Return quality and speed of a static model beside the Transformer that it was made from."""
    rows = read("static_models")
    rates = {row["model"]: row["texts_a_second"] for row in rows if "texts_a_second" in row}
    lines = [
        "| | texts a second | γ | STS | SciFact, nDCG@10 | less raw |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in (row for row in rows if "ndcg" in row):
        gamma = "raw" if row["exponent"] is None else f"{row['exponent']:g}"
        low, high = row["interval"]
        less = "" if gamma == "raw" else f"{row['difference']:+.2f} ({low:+.2f} to {high:+.2f})"
        lines.append(
            f"| {row['model']} | {rates[row['model']]:,.0f} | {gamma} | {row['sts']:.2f} "
            f"| {row['ndcg']:.2f} | {less} |"
        )
    return "\n".join(lines)


def api() -> str:
    """Return texts a second of a model behind an API, beside what its limits allow."""
    lines = [
        "| texts a request, requests at once | limit, texts a second | measured | share "
        "| share of the client alone |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in read("api"):
        rate, most = row["texts_a_second"], row["limit"]
        lines.append(
            f"| {row['texts_at_once']}, {row['requests_at_once']} | {most:,.0f} | {rate:,.0f} "
            f"| {rate / most:.2f} | {row['client_alone'] / most:.2f} |"
        )
    return "\n".join(lines)
