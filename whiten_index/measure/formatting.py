"""Text forms of figures and settings: bytes, milliseconds, shares, names of points."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from whiten_index.index.choice import TARGET_RECALL
from whiten_index.measure.results import Measured

ABSENT = "–"
_TRANSFORMS = {
    "pca": "PCA", "truncate": "truncation", "none": "raw", "faiss-pca": "FAISS PCA",
    "faiss-pcaw": "FAISS PCAW",
}  # fmt: skip
_INDEXES = {"flat": "", "ivf": "IVF", "hnsw": "HNSW"}
_UPPER = ("sq", "pq")
_NAMED = 3  # points of one reason that are named one by one


def number(value: float | None) -> str:
    """Return a count with thousands separators, and one decimal unless it is whole."""
    if value is None:
        return ABSENT
    whole = value >= 1000 or abs(value - round(value)) < 0.05
    return f"{value:,.0f}" if whole else f"{value:,.1f}"


def decimal(value: float | None) -> str:
    """Return a number with up to three significant digits."""
    return ABSENT if value is None else f"{value:.3g}"


def share(value: float | None) -> str:
    """Return a share of 1 as a percentage. Less than all of it never reads 100 %."""
    if value is None:
        return ABSENT
    text = f"{100 * value:.1f}%"
    return "99.9%" if value < 1 and text == "100.0%" else text


def hundredths(value: float | None) -> str:
    """Return a quality of 0 to 1 in hundredths."""
    return ABSENT if value is None else f"{100 * value:.2f}"


def milliseconds(value: float | None) -> str:
    """Return a time with three significant digits."""
    if value is None:
        return ABSENT
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{decimals}f}\u00a0ms"


def seconds(value: float | None) -> str:
    """Return a time of work."""
    if value is None:
        return ABSENT
    return f"{value:,.0f}\u00a0s" if value >= 100 else f"{value:.2g}\u00a0s"


def point_name(point: Measured) -> str:
    """Return a short name of a point, such as ``auto k=64 SQ8 IVF``."""
    transform, codec, index = map(point.text, ("transform", "codec", "index"))
    exponent = point.number("exponent")
    name = _TRANSFORMS.get(transform, transform)
    if transform == "whitening" and exponent not in (None, 1.0):
        name += f" γ={exponent:g}"
    parts = (
        name,
        "" if transform == "none" else f"k={point.k}",
        codec.upper() if codec.startswith(_UPPER) else codec,
        _INDEXES.get(index, index),
        f"+ {point.candidates} re-ranked" if point.candidates else "",
    )
    return " ".join(filter(None, parts))


def build_options(point: Measured, target_recall: float | None) -> str:
    """Return the options of ``whiten-index build`` that make a point; empty if none do."""
    transform, factory = point.text("transform"), point.text("factory")
    exponent, center = point.number("exponent"), point.record.get("center")
    if point.text("family") == "faiss" or not factory:
        return ""
    options = ["--whiten", transform]
    if transform in ("auto", "pca", "whitening") and exponent is not None:
        options = ["--whiten", "whitening" if exponent else "pca"]
        options += ["--exponent", f"{exponent:g}"] if exponent else []
        if center is not None:
            options.append("--center" if center else "--no-center")
    options += [] if transform == "none" else ["--k", str(point.k)]
    options += ["--factory", factory]
    if point.text("index") != "flat" and target_recall not in (None, TARGET_RECALL):
        options += ["--target-recall", f"{target_recall:g}"]
    return shlex.join(options)


def by_reason(skipped: Mapping[str, str]) -> list[str]:
    """Return a line for each reason: the points skipped for it, or their number if many."""
    reasons: dict[str, list[str]] = {}
    for key, why in skipped.items():
        reasons.setdefault(why, []).append(key)
    return [
        f"{', '.join(keys) if len(keys) <= _NAMED else f'{len(keys)} points'}: {why}"
        for why, keys in reasons.items()
    ]
