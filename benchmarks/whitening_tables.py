"""Tables of transforms: quality by exponent, and what choosing loses."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.judged_sets import GROUPS
from benchmarks.results_file import read

Row = Mapping[str, Any]

_MAIN = ("scifact", "cranfield", "cacm")
_NAMES = {"scifact": "SciFact", "cranfield": "Cranfield", "cacm": "CACM", "lisa": "LISA"}
_ASKED = "2 to 1, 1"
_ABOVE_PCA, _OURS = "PCA, of auto", ("auto", "mean and spectrum")
_RULES = (
    "auto", "mean and spectrum alone", "mean and spectrum", "Spectral Tempering",
    "γ = .25 always, centred", "γ = .25 always, not centred", "γ = .5 always, centred",
    "γ = .5 always, not centred", "PCA always", "whitening always", _ABOVE_PCA,
)  # fmt: skip
_LAYERS: tuple[tuple[int | None, str], ...] = ((None, "last layer"), (1, "layer 1"))


def exponents() -> str:
    """Return the table of nDCG@10 by exponent."""
    lines = [
        "| corpus, mean of | raw | k | truncated | γ = 0 (PCA) | .25 | .5 | .75 | 1 "
        "| PCA, not centred |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in read("exponents"):
        layer = "last layer" if row["layer"] is None else f"layer {row['layer']}"
        k = f"full ({row['k']})" if row["full"] else str(row["k"])
        best = max(row["by_exponent"].values(), key=lambda each: each["mean"])
        cells = [
            ("", row["truncated"]),
            *(("**" if each is best else "", each) for each in row["by_exponent"].values()),
            ("", row["not_centred"]),
        ]
        shown = " | ".join(
            "" if each is None else f"{bold}{each['mean']:.2f}{bold} {_limits(each)}"
            for bold, each in cells
        )
        lines.append(f"| {_NAMES[row['set']]}, {layer} | {row['raw']:.2f} | {k} | {shown} |")
    return "\n".join(lines)


def choice() -> str:
    """Return what each rule loses of nDCG@10 against the best of the grid."""
    return _lost_by_rule("choice", "nDCG@10")


def _lost_by_rule(name: str, measure: str) -> str:
    """Return the mean loss of each rule with its interval, and the worst."""
    rows = [row for row in read(name) if "group" not in row and row["k"] is not None]
    columns = [row for row in read(name) if "group" in row]
    header = [f"{each['group']}, {dict(_LAYERS)[each['layer']]}" for each in columns]
    lines = [
        f"| {measure} lost: mean (95 % interval), worst | {' | '.join(header)} |",
        _rule(len(header) + 1),
    ]
    for rule in (each for each in _RULES if each in columns[0]["lost"]):
        cells = []
        for column in columns:
            sets = GROUPS.get(column["group"])
            values = [
                row["lost"][rule] for row in rows
                if row["layer"] == column["layer"] and (sets is None or row["set"] in sets)
            ]  # fmt: skip
            mean, worst, (low, high) = statistics.mean(values), max(values), column["lost"][rule]
            if rule == _ABOVE_PCA:
                mean, worst, low, high = -mean, min(-each for each in values), -high, -low
            cells.append(f"{mean:.2f} ({low:.2f} to {high:.2f}), {worst:.2f}")
        shown = {_ABOVE_PCA: "auto above PCA: mean, least"}.get(rule, rule)
        shown = f"**{rule}**" if rule in _OURS else shown
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    return "\n".join(lines)


def choice_of_width() -> str:
    """Return what is chosen where the width is left open as well."""
    lines = [
        "| | all 384, as they are | best of the grid at k = 256 | auto | chosen |",
        "|---|---:|---:|---:|---|",
    ]
    for row in read("choice"):
        if "k" in row and row["k"] is None:
            chosen, layer = row["chosen"], dict(_LAYERS)[row["layer"]]
            mean = "" if chosen["center"] else ", μ kept"
            lines.append(
                f"| {_NAMES.get(row['set'], row['set'])}, {layer} | {row['raw']:.1f} "
                f"| {row['best_at_widest']:.1f} | {row['auto']:.1f} "
                f"| k = {chosen['k']}, γ = {chosen['exponent']:g}{mean} |"
            )
    return "\n".join(lines)


def choice_by_set() -> str:
    """Return, for every set, layer and width, PCA, the choice and the best of the grid."""
    widths = sorted({row["k"] for row in _given_widths()})
    lines = [
        f"| PCA → auto (best of the grid) | {' | '.join(f'k = {k}' for k in widths)} |",
        _rule(len(widths) + 1),
    ]
    cases: dict[tuple[str, str], list[str]] = {}
    for row in _given_widths():
        layer = dict(_LAYERS)[row["layer"]]
        chosen = f"γ {row['chosen']['exponent']:g}{'' if row['chosen']['center'] else ', μ kept'}"
        cases.setdefault((row["set"], layer), []).append(
            f"{row['pca']:.1f} → {row['auto']:.1f} ({row['best']:.1f}); {chosen}"
        )
    for (name, layer), cells in cases.items():
        lines.append(f"| {_NAMES.get(name, name)}, {layer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def choice_left_out() -> str:
    """Return what is lost on each set by a rule tuned on the two others."""
    rows = [row for row in _given_widths() if row["set"] in _MAIN]
    lines = [
        "| shown on | tuned on the two others | last layer: lost, mean (worst) | layer 1 "
        "| as built: last layer | layer 1 | γ = .25: last layer | layer 1 "
        "| γ = .5: last layer | layer 1 |",
        _rule(10),
    ]
    for name in _MAIN:
        others = [row for row in rows if row["set"] != name]
        losses = {each: statistics.mean(_lost(others, each)) for each in rows[0]["variants"]}
        tuned = min(losses, key=losses.__getitem__)
        own = [row for row in rows if row["set"] == name]
        shown = [[row for row in own if row["layer"] == layer] for layer, _ in _LAYERS]
        cells = [
            f"{tuned} errors",
            *(_mean_and_worst(_lost(part, each)) for each in (tuned, _ASKED) for part in shown),
            *(
                _mean_and_worst([row["lost"][f"γ = {exponent} always, centred"] for row in part])
                for exponent in (".25", ".5")
                for part in shown
            ),
        ]
        lines.append(f"| {_NAMES[name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def short_texts() -> str:
    """Return what each rule loses on single sentences."""
    return _lost_by_rule("short_texts", "Spearman × 100")


def _limits(row: Mapping[str, Any]) -> str:
    low, high = row["interval"]
    return f"({low:+.1f} to {high:+.1f})"


def _given_widths() -> list[Row]:
    """Return the results where k was given."""
    return [row for row in read("choice") if row.get("k")]


def _rule(columns: int) -> str:
    return "|---" * columns + "|"


def _lost(rows: Iterable[Row], variant: str) -> list[float]:
    """Return what a variant of the rule loses against the best of the grid."""
    return [float(row["best"]) - float(row["variants"][variant]) for row in rows]


def _mean_and_worst(lost: Sequence[float]) -> str:
    return f"{statistics.mean(lost):.2f} ({max(lost):.2f})"


_SHOWN_SHARES = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)


def migration() -> str:
    """Return nDCG@10 in the course of a migration, by the share of rows that are encoded."""
    rows = read("migration")
    shares = " | ".join(f"{share:.0%}" for share in _SHOWN_SHARES)
    lines = [f"| from → to | | {shares} |", "|---|---|" + "---:|" * len(_SHOWN_SHARES)]
    pairs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["share"] in _SHOWN_SHARES:
            pairs.setdefault((row["old"], row["new"]), []).append(row)
    for (old, new), each in pairs.items():
        had, gets = each[0]["old_ndcg"], each[-1]["ndcg"]
        cells = {
            f"{old} → {new} | nDCG@10": [f"{row['ndcg']:.1f}" for row in each],
            f"{had:.1f} → {gets:.1f} | less the old": [_span(row["less_old"]) for row in each],
            " | % of the new": [_percentages(row["of_new_interval"]) for row in each],
        }
        lines += [f"| {first} | {' | '.join(rest)} |" for first, rest in cells.items()]
    below = sum(row["less_least"][1] < 0 for row in rows)
    lines += [
        "",
        f"Of {len(rows)} points, {below} are below both the old model and 0 %, by more than",
    ]
    return "\n".join([*lines, "the interval of the difference to the lower of these."])


def migration_transform() -> str:
    """Return nDCG@10 of bridged versions by their transform, by the share of encoded rows."""
    shares = " | ".join(f"{share:.0%}" for share in _SHOWN_SHARES)
    lines = [f"| from → to | γ of | | {shares} |", "|---|---|---|" + "---:|" * len(_SHOWN_SHARES)]
    found: dict[str, list[str]] = {}
    for row in read("migration_transform"):
        centred = "centred" if row["center"] else "not centred"
        kind = f"the {row['by']} model: {row['exponent']:g} | {centred}"
        span = "" if row["center"] else f" ({_span(row['less_first'])})"
        cells = found.setdefault(f"{row['old']} → {row['new']} | {kind}", [])
        cells.append(f"{row['ndcg']:.1f}{span}")
    lines += [f"| {first} | {' | '.join(cells)} |" for first, cells in found.items()]
    return "\n".join(lines)


def _percentages(interval: Sequence[float]) -> str:
    low, high = interval
    return f"{100 * low:.0f} to {100 * high:.0f}"


def model_comparison() -> str:
    """Return the differences of models by judged queries and by sentences."""
    lines = [
        "| corpus, from → to | nDCG@10 of judged queries | MRR of sentences |", _rule(3),
    ]  # fmt: skip
    for row in read("model_comparison"):
        cells = [
            f"{row[kind]['old']:.1f} → {row[kind]['new']:.1f} ({_span(row[kind]['interval'])})"
            for kind in ("judged", "sentences")
        ]
        lines.append(f"| {_NAMES[row['set']]}, {row['old']} → {row['new']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _span(interval: Sequence[float]) -> str:
    low, high = interval
    return f"{low:+.1f} to {high:+.1f}"
