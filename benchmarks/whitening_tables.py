"""The README's tables of transforms: quality by exponent, and what choosing loses."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.results_file import read

Row = Mapping[str, Any]

_NAMES = {"scifact": "SciFact", "cranfield": "Cranfield", "cacm": "CACM"}
_MAIN = tuple(_NAMES)
_ASKED = "2 to 1, 1"
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
        best = max(row["by_exponent"].values())
        by_exponent = " | ".join(
            f"**{value:.2f}**" if value == best else f"{value:.2f}"
            for value in row["by_exponent"].values()
        )
        truncated = "" if row["truncated"] is None else f"{row['truncated']:.2f}"
        lines.append(
            f"| {_NAMES[row['set']]}, {layer} | {row['raw']:.2f} | {k} | {truncated} "
            f"| {by_exponent} | {row['not_centred']:.2f} |"
        )
    return "\n".join(lines)


def choice() -> str:
    """Return what each rule loses against the best of the grid, on average and at worst."""
    rows = read("choice")
    groups = (
        ("SciFact, Cranfield, CACM", [row for row in rows if row["set"] in _MAIN]),
        ("five BEIR extracts", [row for row in rows if row["set"] not in _MAIN]),
    )
    header = [f"{sets}, {layer}" for sets, found in groups if found for _, layer in _LAYERS]
    lines = [f"| nDCG@10 lost, mean (worst) | {' | '.join(header)} |", _rule(len(header) + 1)]
    for name, figure in _RULES:
        cells = [
            _lost([row for row in found if row["layer"] == layer], figure)
            for _, found in groups
            if found
            for layer, _ in _LAYERS
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def choice_by_set() -> str:
    """Return, for every set, layer and width, PCA, the choice and the best of the grid."""
    widths = sorted({row["k"] for row in read("choice")})
    lines = [
        f"| PCA → auto (best of the grid) | {' | '.join(f'k = {k}' for k in widths)} |",
        _rule(len(widths) + 1),
    ]
    cases: dict[tuple[str, str], list[str]] = {}
    for row in read("choice"):
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
    rows = [row for row in read("choice") if row["set"] in _MAIN]
    lines = [
        "| shown on | tuned on the two others | last layer: lost, mean (worst) | layer 1 "
        "| as built, last layer | as built, layer 1 | γ = .25 | γ = .5 |",
        _rule(8),
    ]
    for name in _MAIN:
        others = [row for row in rows if row["set"] != name]
        losses = {each: _mean_lost(others, _variant(each)) for each in rows[0]["variants"]}
        tuned = min(losses, key=losses.__getitem__)
        own = [row for row in rows if row["set"] == name]
        shown = [[row for row in own if row["layer"] == layer] for layer, _ in _LAYERS]
        last = shown[0]
        cells = [
            f"{tuned} errors",
            *(_lost(part, _variant(tuned)) for part in shown),
            *(_lost(part, _variant(_ASKED)) for part in shown),
            *(_lost(last, _constant(f"{exponent}, centred")) for exponent in (0.25, 0.5)),
        ]
        lines.append(f"| {_NAMES[name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def choice_cost() -> str:
    """Return how long choosing took beside the build."""
    lines = [
        "| | documents | encoding them | encoding the pieces | choosing among 18 |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in read("choice"):
        if row["k"] == 256:
            layer = dict(_LAYERS)[row["layer"]]
            lines.append(
                f"| {_NAMES.get(row['set'], row['set'])}, {layer} | {row['rows']:,} "
                f"| {row['build_seconds']:.0f} s | {row['encode_pieces_seconds']:.0f} s "
                f"({row['sample']:,}) | {row['choose_seconds']:.1f} s |"
            )
    return "\n".join(lines)


def _rule(columns: int) -> str:
    return "|---" * columns + "|"


def _constant(name: str) -> Callable[[Row], float]:
    return lambda row: float(row["constant"][name])


def _variant(name: str) -> Callable[[Row], float]:
    return lambda row: float(row["variants"][name])


_RULES: tuple[tuple[str, Callable[[Row], float]], ...] = (
    ("**auto**", lambda row: float(row["auto"])),
    ("mean and spectrum alone", lambda row: float(row["spectrum"])),
    ("γ = .25 always, centred", _constant("0.25, centred")),
    ("γ = .25 always, not centred", _constant("0.25, not centred")),
    ("γ = .5 always, centred", _constant("0.5, centred")),
    ("PCA always", lambda row: float(row["pca"])),
    ("whitening always", _constant("1.0, centred")),
)


def _mean_lost(rows: Sequence[Row], figure: Callable[[Row], float]) -> float:
    return statistics.mean(float(row["best"]) - figure(row) for row in rows)


def _lost(rows: Iterable[Row], figure: Callable[[Row], float]) -> str:
    lost = [row["best"] - figure(row) for row in rows]
    return f"{statistics.mean(lost):.2f} ({max(lost):.2f})"
