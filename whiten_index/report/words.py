"""How figures and settings read: bytes, milliseconds, shares, names of transforms and codecs."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from whiten_index.index import TARGET_RECALL
from whiten_index.report.records import Point

ABSENT = "–"
TRANSFORMS = {
    "auto": "auto",
    "pca": "PCA",
    "whitening": "whitening",
    "truncate": "truncation",
    "none": "raw",
    "faiss-pca": "FAISS PCA",
    "faiss-pcaw": "FAISS PCAW",
}
_IN_FULL = {
    "auto": "the transform that auto chose",
    "pca": "PCA",
    "whitening": "whitening",
    "truncate": "the first coordinates",
    "none": "raw embeddings",
    "faiss-pca": "FAISS's own PCA",
    "faiss-pcaw": "FAISS's own PCA with whitening",
}
_CODECS = {
    "fp32": "fp32", "fp16": "fp16", "sq8": "SQ8", "sq6": "SQ6", "sq4": "SQ4", "pq": "PQ",
    "pqfs": "PQ fast-scan", "rabitq": "RaBitQ",
}  # fmt: skip
_INDEXES = {"flat": "Flat", "ivf": "IVF", "hnsw": "HNSW", "nsg": "NSG"}


@dataclass(frozen=True)
class Measure:
    """The figure by which points are compared: quality by judgements, else agreement.

    Attributes:
        decimals: with which it is shown, in hundredths of the whole.
    """

    name: str
    of: Callable[[Point], float | None]
    decimals: int
    unit: str = ""

    def text(self, value: float | None) -> str:
        """Return ``value`` (0 to 1) in hundredths."""
        if value is None:
            return ABSENT
        if self.unit:
            return share(value, self.decimals)
        return f"{100 * value:.{self.decimals}f}"

    def difference(self, value: float, reference: float) -> float:
        """Return ``value`` less ``reference`` in points, hundredths of the whole.

        Of the two figures as they are shown, so that a reader who subtracts finds the same.
        """
        shown = [round(100 * figure, self.decimals) for figure in (value, reference)]
        return round(shown[0] - shown[1], self.decimals)

    def change(self, value: float, reference: float) -> str:
        """Return the difference with its sign."""
        return signed(self.difference(value, reference), self.decimals)


NDCG = Measure("nDCG@10", lambda point: point.ndcg, 2)
AGREEMENT = Measure("agreement@10", lambda point: point.agreement, 1, "%")


def signed(value: float, decimals: int) -> str:
    """Return a number with its sign, a real minus, and ± where it rounds to nothing."""
    text = f"{abs(value):.{decimals}f}"
    if not text.strip("0."):
        return f"±{text}"
    return f"{'+' if value > 0 else '−'}{text}"


def share(value: float | None, decimals: int = 1) -> str:
    """Return a share of the whole as a percentage; what falls short of all of it never reads 100.

    The last digit is cut, not rounded, between 99 and 100 percent.
    """
    if value is None:
        return ABSENT
    text = f"{100 * value:.{decimals}f}"
    if value < 1 and float(text) >= 100:
        text = f"{100 - 10.0**-decimals:.{decimals}f}"
    return f"{text}%"


def size(value: float | None) -> str:
    """Return bytes in a unit that leaves three digits, in thousands."""
    if value is None:
        return ABSENT
    for unit, power in (("GB", 9), ("MB", 6)):
        if value >= 0.9995 * 10**power:
            return f"{value / 10**power:.3g}\u00a0{unit}"
    return f"{value / 1000:,.0f}\u00a0KB" if value >= 10_000 else f"{number(value)}\u00a0B"


def number(value: float | None) -> str:
    """Return a count with thousands apart, and one decimal where it is no whole number."""
    if value is None:
        return ABSENT
    whole = f"{value:,.0f}"
    return whole if value >= 1000 or abs(value - round(value)) < 0.05 else f"{value:,.1f}"


def milliseconds(value: float | None) -> str:
    """Return a time of search with three digits."""
    if value is None:
        return ABSENT
    if value >= 100:
        return f"{value:,.0f}\u00a0ms"
    return f"{value:.{1 if value >= 10 else 2 if value >= 1 else 3}f}\u00a0ms"


def seconds(value: float | None) -> str:
    """Return a time of work."""
    if value is None:
        return ABSENT
    return f"{value:,.0f}\u00a0s" if value >= 100 else f"{value:.2g}\u00a0s"


def times(larger: float, smaller: float) -> str:
    """Return how many times one figure is in another: 24, 3.1."""
    ratio = larger / smaller
    return f"{ratio:,.0f}" if ratio >= 9.95 else f"{ratio:.1f}"


def codec(point: Point) -> str:
    """Return the codec's name as its users write it: rabitq2 has 2 bits, pq96 has 96 bytes."""
    if point.codec.startswith("rabitq") and point.codec[6:].isdigit():
        return f"RaBitQ {point.codec[6:]}-bit"
    if point.codec.startswith("pq") and point.codec[2:].isdigit():
        return point.codec.upper()
    return _CODECS.get(point.codec, point.codec)


def index(point: Point) -> str:
    """Return the name of the index's structure."""
    return _INDEXES.get(point.index, point.index)


def transform(point: Point) -> str:
    """Return the short name of the transform, with an exponent that a user gave it."""
    name = TRANSFORMS.get(point.transform, point.transform)
    soft = point.transform == "whitening" and point.exponent not in (None, 1.0)
    return f"{name} γ={point.exponent:g}" if soft else name


def short(point: Point) -> str:
    """Name a point in a drawing: auto k=64 SQ8 IVF."""
    width = "" if point.transform == "none" else f" k={point.k}"
    structure = "" if point.index == "flat" else f" {index(point)}"
    again = f" + {point.candidates} re-ranked" if point.candidates else ""
    return f"{transform(point)}{width} {codec(point)}{structure}{again}"


def full(point: Point) -> str:
    """Name a point in a sentence, with all that sets it apart."""
    name = _IN_FULL.get(point.transform, point.transform)
    facts = [] if point.transform == "none" else [f"k = {point.k}"]
    if exponent := exponent_text(point):
        facts.append(exponent)
    where = f" ({', '.join(facts)})" if facts else ""
    again = f", the best {point.candidates} ranked again from the store" if point.candidates else ""
    structure = index(point)
    article = "a" if structure == "Flat" else "an"
    return f"{name}{where} in {codec(point)} with {article} {structure} index{again}"


def exponent_text(point: Point) -> str:
    """Return γ and the centring, as far as they are known and mean something."""
    if point.family != "ours":
        return ""
    facts = [] if point.exponent is None else [f"γ = {point.exponent:g}"]
    if point.center is not None:
        facts.append("centred" if point.center else "not centred")
    return ", ".join(facts)


def parameters(point: Point) -> str:
    """Return the search parameters that were tuned."""
    return ", ".join(f"{name} {value}" for name, value in point.parameters.items())


def command(point: Point, target_recall: float | None) -> tuple[str, ...]:
    """Return the options of ``whiten-index build`` that make this point; none where none do.

    Args:
        point: to make.
        target_recall: what lists and graphs are tuned to; None where it is not known.
    """
    if point.family == "faiss" or point.factory is None:
        return ()
    options: list[tuple[str, ...]]
    if point.transform in ("auto", "pca", "whitening") and point.exponent is not None:
        options = [("--whiten", "pca" if point.exponent == 0 else "whitening")]
        options += [] if point.exponent == 0 else [("--exponent", f"{point.exponent:g}")]
        options += (
            [] if point.center is None else [("--center" if point.center else "--no-center",)]
        )
    else:
        options = [("--whiten", point.transform)]
    options += [] if point.transform == "none" else [("--k", str(point.k))]
    options += [("--factory", point.factory)]
    if point.index != "flat" and target_recall not in (None, TARGET_RECALL):
        options += [("--target-recall", f"{target_recall:g}")]
    return tuple(shlex.join(option) for option in options)
