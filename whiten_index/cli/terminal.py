"""Terminal output: progress bars, tables, sizes in words."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from whiten_index.cli.signals import raise_if_interrupted
from whiten_index.cli.streams import cell, plain_json

_INDEX_PARTS = ("codes", "ids", "lists", "graph", "matrix", "codebooks", "centroids")
_RARE_COUNTS = {
    "passages": "passages",
    "out_of_memory": "batches halved for want of memory",
    "remade_shards": "damaged shards rebuilt",
    "float32_shards": "shards kept in float32",
}


class Bars:
    """Progress bars with rate and time left on a terminal; silent elsewhere.

    Attributes:
        facts: whether standard output is for people, and shows notes on the work.
    """

    def __init__(self, *, facts: bool = False) -> None:
        self.facts = facts
        self._bar: Any = None

    def start(self, stage: str, total: int) -> None:
        """Open a bar."""
        from tqdm import tqdm

        self._bar = tqdm(total=total, desc=stage, unit=" rows", unit_scale=True, disable=None)

    def advance(self, rows: int) -> None:
        """Move the bar."""
        self._bar.update(rows)
        raise_if_interrupted()

    def finish(self, stage: str, seconds: float) -> None:  # noqa: ARG002
        """Close the bar."""
        self._bar.close()

    def note(self, message: str) -> None:
        """Print a note next to the bars; warnings go to standard error."""
        warning = message.startswith("note:")
        if warning or self.facts:
            click.echo(cell(message), err=warning)


def in_words(size: float) -> str:
    """Return bytes as a short text, such as 1.5 MB (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError(size)


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number and its noun, such as 1 pack or 2 packs; the plural is by default with s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """Return seconds as a short text, such as 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def one_line(text: str, width: int = 100) -> str:
    """Return a text without line breaks and control characters, cut to ``width`` letters."""
    joined = cell(" ".join(text.split()))
    return joined if len(joined) <= width else joined[: width - 1] + "…"


def table(rows: Iterable[Sequence[object]], *, indent: str = "  ") -> str:
    """Return rows as aligned columns: the first to the left, the others to the right."""
    cells = [[cell(each) for each in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        indent
        + "  ".join(
            [
                row[0].ljust(widths[0]),
                *(each.rjust(w) for each, w in zip(row[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for row in cells
    )


def facts(rows: Sequence[tuple[str, str]], *, indent: str = "  ") -> str:
    """Return names and values as two columns, both to the left."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{indent}{name.ljust(width)}  {cell(value)}" for name, value in rows)


def count_rows(counts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the counts of an encode as table rows."""
    skipped = counts["skipped"]
    rows = [(name, f"{counts[name]:,}") for name in ("read", "encoded")]
    if repeated := counts.get("duplicates"):
        # Of rows cut into passages, the passages are the texts.
        texts = ("  different texts", counts["encoded"] - repeated)
        passages = ("  passages that repeat a text", repeated)
        shown, number = passages if counts.get("passages") else texts
        rows.append((shown, f"{number:,}"))
    rows += [(name, f"{counts[name]:,}") for name in ("reused", "truncated")]
    rows += [("skipped", f"{sum(skipped.values()):,}")]
    rows += [(f"  {reason}", f"{n:,}") for reason, n in skipped.items()]
    for name, shown in _RARE_COUNTS.items():
        if counts.get(name):
            rows.append((shown, f"{counts[name]:,}"))
    return rows


def done_anyhow(counts: Mapping[str, Any]) -> str:
    """Return the repairs of the store, when nothing was published."""
    lost = counted(counts["encoded"], "row") + " that the store had lost encoded again"
    remade = counted(counts.get("remade_shards", 0), "damaged shard") + " rebuilt"
    done = [lost] * bool(counts["encoded"]) + [remade] * bool(counts.get("remade_shards"))
    return " and ".join(done) or "nothing to do"


def stage_rows(seconds: Mapping[str, float], rows: Mapping[str, int]) -> list[tuple[str, str, str]]:
    """Return seconds and rows/s by stage as table rows; parts of a stage are indented.

    The parts run side by side, so that they sum up to more than their stage.
    """
    shown = []
    order = list(dict.fromkeys(stage.partition("/")[0] for stage in seconds))
    # A stage comes before its parts.
    for stage in sorted(
        seconds, key=lambda name: (order.index(name.partition("/")[0]), "/" in name)
    ):
        spent = seconds[stage]
        _, _, part = stage.rpartition("/")
        rate = f"{rows[stage] / spent:,.0f} rows/s" if rows.get(stage) and spent > 0 else ""
        shown.append((f"  {part}" if "/" in stage else stage, duration(spent), rate))
    return shown


def whitening_line(whitening: Mapping[str, Any]) -> str:
    """Return one line on the transform, with the options that only some kinds have."""
    condition = whitening["condition_number"]
    options = [
        f"{name.replace('_', ' ')} {whitening[name]}"
        for name in ("groups", "group_size", "seed", "estimator", "floor", "remove_top")
        if name in whitening
    ]
    if "shrinkage" in whitening:
        options.append(f"shrinkage {whitening['shrinkage']:.3g}")
    return ", ".join(
        [
            f"{whitening['kind']}, {whitening['dim']} -> {whitening['k']} dims",
            f"exponent {whitening['exponent']:g}",
            "centred" if whitening["center"] else "not centred",
            *options,
            f"rank {whitening['rank']}",
            f"condition number {'-' if condition is None else format(condition, '.3g')}",
            f"variance kept {whitening['variance_kept']:.1%}",
        ]
    )


def choice_lines(choice: Mapping[str, Any] | None) -> list[str]:
    """Return the choice of the transform and its reason; nothing if the user named it.

    The alternatives shown are those that the rule takes at each width, and PCA.
    """
    if choice is None:
        return []
    lines = [f"  chosen by {choice['rule']}: {choice['why']}"]
    shown = [
        row
        for row in choice["candidates"]
        if row["leads"] or (row["exponent"] == 0 and row["center"])
    ]
    if not shown:
        return lines
    header = ("", "k", "exponent", "centred", "score", "±")
    rows = [
        (
            "  *" if row["leads"] and _is_chosen(row, choice) else "",
            row["k"],
            f"{row['exponent']:g}",
            "yes" if row["center"] else "no",
            f"{row['score']:.3f}",
            f"{row['error']:.3f}",
        )
        for row in shown
    ]
    return [
        *lines,
        f"  scores: {choice['measure']}",
        "  ±: standard error of the difference to the best of that width; * chosen; all: --json",
        table([header, *rows]),
    ]


def geometry_rows(geometry: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the geometry of embeddings and vectors as table rows."""
    names = {
        "mean_cosine": "mean cosine of two rows",
        "isoscore": "IsoScore (1 is isotropic)",
        "effective_rank": "effective rank",
        "uniformity": "uniformity (lower is more even)",
        "hubness": "hubness (skew of 10-occurrence)",
    }
    rows = [
        (shown, f"{geometry['raw'][key]:.3f}", f"{geometry['vectors'][key]:.3f}")
        for key, shown in names.items()
    ]
    return [(f"on {geometry['raw']['rows']:,} rows", "embeddings", "vectors"), *rows]


def _is_chosen(row: Mapping[str, Any], choice: Mapping[str, Any]) -> bool:
    return all(row[key] == value for key, value in choice["chosen"].items())


def index_rows(parts: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the bytes of the parts of an index as table rows, without empty parts."""
    return [(f"  {name}", in_words(parts[name])) for name in _INDEX_PARTS if parts[name]]


def tuned_words(factory: Mapping[str, Any]) -> str:
    """Return the search settings of an index and its recall with them, if there are any."""
    tuned = factory.get("tuned") or {"parameters": {}, "recall": None}
    said = [f"{name} {value}" for name, value in tuned["parameters"].items()]
    if tuned["recall"] is not None:
        said.append(f"index recall {tuned['recall']:.3f} on {tuned['queries']:,} rows held out")
    if factory.get("rerank"):
        said.append(f"with the best {factory['rerank']} scored again")
    return "".join(f", {part}" for part in said)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on standard output; NaN and infinity, which JSON lacks, are null."""
    import json

    # Made as a whole first: half an object would be worse than none.
    text = json.dumps(_finite(value), ensure_ascii=False, default=str, allow_nan=False)
    sys.stdout.write(plain_json(text).encode(errors="replace").decode() + "\n")


def show(report: Mapping[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    """Print a report as one JSON object, or its lines for people."""
    if as_json:
        print_json(report)
        return
    for line in lines:
        click.echo(line)
