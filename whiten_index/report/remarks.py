"""Sentences on points: what they save, what beats them, what the sweep cannot tell."""

from __future__ import annotations

from collections.abc import Sequence

from whiten_index.report import words
from whiten_index.report.awaited import awaited
from whiten_index.report.compare import TOLERANCE, best_in, p50, raw_p50, steady
from whiten_index.report.fronts import measured
from whiten_index.report.records import Point, Sweep
from whiten_index.report.words import AGREEMENT, NDCG, Measure

NOTABLE_FIXED = 0.25  # share of an index's bytes from which its fixed part is pointed out


def on_bytes(sweep: Sweep, point: Point) -> str:
    """Say how many bytes a row takes, and how many the raw embeddings take."""
    if point.per_row is None:
        return "its bytes were not measured"
    text = f"a row takes {words.number(point.per_row)} bytes"
    if not sweep.raw_bytes:
        return text
    text += f" instead of {words.number(sweep.raw_bytes)}"
    if 0 < point.per_row <= 0.95 * sweep.raw_bytes:
        return f"{text} ({words.times(sweep.raw_bytes, point.per_row)} times less)"
    if point.per_row >= 1.05 * sweep.raw_bytes:
        return f"{text} ({words.times(point.per_row, sweep.raw_bytes)} times more)"
    return text


def on_speed(sweep: Sweep, point: Point) -> str:
    """Say how long a query takes, and how long among the raw embeddings; may be empty."""
    if not point.p50:
        return ""
    text = f"; a query takes {words.milliseconds(point.p50)}"
    raw = raw_p50(sweep, point)
    if not raw:
        return text
    text += f" instead of {words.milliseconds(raw)}"
    if point.p50 <= 0.95 * raw:
        text += f" ({words.times(raw, point.p50)} times faster)"
    elif point.p50 >= 1.05 * raw:
        text += f" ({words.times(point.p50, raw)} times slower)"
    return text


def on_rivals(
    others: Sequence[Point], chosen: Point, measure: Measure, reference: float
) -> list[str]:
    """Compare a point with what takes as few bytes a row without this package."""
    if chosen.per_row is None or chosen.candidates:
        return []
    lines = []
    if chosen.family != "ours":
        own = best_in(others, chosen.per_row, measure, {"ours"})
        text = "This is not a transform fitted to the corpus. "
        if own is not None:
            text += "The best of those in as few bytes a row is "
            text += f"{words.full(own)}: {_worth(own, measure, reference)}."
        elif any(point.family == "ours" for point in others):
            text += "None of those takes as few bytes a row."
        else:
            text += "None of those was measured."
        lines.append(text)
    families = [name for name in ("raw", "truncate", "faiss") if name != chosen.family]
    found = [best_in(others, chosen.per_row, measure, {family}) for family in families]
    known = sorted(measured([p for p in found if p is not None], measure.of),
                   key=lambda p: -(measure.of(p) or 0.0))  # fmt: skip
    rivals = [f"{words.short(p)} {_worth(p, measure, reference)}" for p in known]
    if rivals:
        lines.append(
            f"Alternatives in {words.number(chosen.per_row)} bytes a row or less, by "
            f"{measure.name}, against {measure.text(measure.of(chosen))}: {'; '.join(rivals)}."
        )
    return lines


def _worth(point: Point, measure: Measure, reference: float) -> str:
    value = measure.of(point) or 0.0
    if measure is AGREEMENT:
        return measure.text(value)
    return f"{measure.text(value)} ({measure.change(value, reference)})"


def on_recall(sweep: Sweep, point: Point) -> list[str]:
    """Point out a loss of recall@100 that nDCG@10, which sees ten hits, does not show."""
    raw = sweep.raw
    if raw is None or raw.recall is None or point.recall is None:
        return []
    if NDCG.difference(point.recall, raw.recall) >= -100 * TOLERANCE - 1e-9:
        return []
    return [
        f"Recall@100 of the recommended setting is {NDCG.text(point.recall)} against "
        f"{NDCG.text(raw.recall)} raw ({NDCG.change(point.recall, raw.recall)} points). "
        "nDCG@10 sees the first ten hits only: where many hits are read or ranked again, choose a "
        "wider k by recall@100 in the table."
    ]


def on_fixed(sweep: Sweep, point: Point) -> list[str]:
    """Point out bytes that do not grow with rows, where they are much of the index."""
    if point.fixed is None or point.per_row is None or not sweep.rows:
        return []
    total = point.fixed + point.per_row * sweep.rows
    if total <= 0 or point.fixed < NOTABLE_FIXED * total:
        return []
    return [
        f"Of the {words.size(total)} that the recommended index takes on this corpus, "
        f"{words.size(point.fixed)} are fixed: matrix, codebooks and centroids, which do not grow "
        "with rows and weigh less on a larger corpus."
    ]


def on_the_state(sweep: Sweep) -> list[str]:
    """Say what keeps the figures from being whole: an unfinished sweep, judgements of no use."""
    lines = []
    if widths := awaited(sweep):
        lines.append(
            "The sweep is not finished, so all this stands on a part of it: at k = "
            f"{', '.join(map(str, widths))} not every setting asked for was measured yet. Start "
            "it again and it goes on."
        )
    missing = sweep.dataset.get("relevant_documents_missing")
    if isinstance(missing, int) and missing > 0:
        lines.append(
            f"{missing:,} of the judged documents are not in the corpus, which lowers every figure "
            "of quality alike."
        )
    without = sweep.dataset.get("judged_queries_without_text")
    if isinstance(without, int) and without > 0:
        lines.append(f"{without:,} of the judged queries have no text and were left out.")
    return lines


def on_the_unmeasured(sweep: Sweep) -> list[str]:
    """Say what the sweep cannot tell, by what its points lack."""
    points = sweep.points
    if not points:
        return []
    gpus = "" if any(point.device == "gpu" for point in points) else "GPUs, "
    return [
        *_about_quality(sweep),
        *_about_settings(sweep),
        *_about_latency(sweep),
        f"Other machines, {gpus}filtered search and searches at the same time.",
    ]


def _about_quality(sweep: Sweep) -> list[str]:
    judged = bool(measured(sweep.points, NDCG.of))
    lines = []
    if not judged:
        lines.append("Quality: there were no judgements.")
    else:
        lines.append(
            "Whether small differences are chance: the records hold means over queries, not "
            "their spread."
        )
    if sweep.raw is None:
        lines.append("The raw embeddings: nothing is compared with their quality or latency.")
    elif judged and sweep.raw.ndcg is None:
        lines.append("The quality of the raw embeddings: nothing is compared with it.")
    return lines


def _about_settings(sweep: Sweep) -> list[str]:
    ours = [point for point in sweep.points if point.family == "ours"]
    widths = sorted({point.k for point in ours})
    lines = []
    if not ours:
        lines.append("Transforms fitted to the corpus.")
    if len(widths) == 1:
        lines.append(f"Other widths: only k = {widths[0]} was measured.")
    for name, label in (("flat", "exact search (Flat)"), ("ivf", "IVF"), ("hnsw", "HNSW")):
        at = sorted({point.k for point in ours if point.index == name})
        if ours and not at:
            lines.append(f"Fitted transforms in {label}.")
        elif len(at) < len(widths):
            lines.append(f"{label} at other widths than k = {', '.join(map(str, at))}.")
    if not any(point.family == "faiss" for point in sweep.points):
        lines.append("FAISS's own PCA.")
    if sweep.skipped:
        one = len(sweep.skipped) == 1
        lines.append(
            f"{len(sweep.skipped)} setting{' that was' if one else 's that were'} skipped, listed "
            f"above with {'its reason' if one else 'their reasons'}."
        )
    return lines


def _about_latency(sweep: Sweep) -> list[str]:
    missing = len(sweep.points) - len(measured(sweep.points, p50))
    if missing == len(sweep.points):
        return ["Latency."]
    if busy := sum(not steady(point) for point in sweep.points):
        return [
            f"Latency of {busy} of the {len(sweep.points)} points: the machine was busy, and their "
            "times differed from round to round. Sweep again on a quiet machine."
        ]
    return [f"Latency of {missing} of the {len(sweep.points)} points."] if missing else []
