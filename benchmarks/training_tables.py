"""Tables of training: what it comes to, how it goes, what whitening costs a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.results_file import RESULTS, read
from pipelines.training_tables import mean_losses

Row = Mapping[str, Any]
STARTS = {"random": "random BERT", "minilm": "MiniLM", "minilm_cls": "MiniLM, [CLS]"}
_CURVES = ("stsb_dev", "alignment", "uniformity")


def quality() -> str:
    """Return the table of losses and STS-B dev, over seeds."""
    lines = [
        "| from | training | steps | loss, first steps → last | STS-B dev before | best checkpoint "
        "| change |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for title, found in measured():
        for name, rows in _by_name(found).items():
            first, last = mean_losses(rows)
            before, best = ([row[key] for row in rows] for key in ("stsb_dev_before", "stsb_dev"))
            change = [after - start for start, after in zip(before, best, strict=True)]
            lines.append(
                f"| {title} | {name} | {rows[0]['steps']} | {first:.2g} → {last:.2g} "
                f"| {_spread(before)} | {_spread(best)} | {_spread(change, '+.2f')} |"
            )
    return "\n".join(lines)


def curves() -> str:
    """Return the table of STS-B dev, alignment and uniformity by step: means over the seeds."""
    lines = [
        "| from | training | step | STS-B dev | alignment | uniformity |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for title, found in measured():
        for name, rows in _by_name(found).items():
            for step, means in means_by_step(rows):
                lines.append(
                    f"| {title} | {name} | {step} | {means['stsb_dev']:.2f} "
                    f"| {means['alignment']:.3f} | {means['uniformity']:.3f} |"
                )
    return "\n".join(lines)


def steps() -> str:
    """Return the table of a step's time with whitening and without."""
    lines = [
        "| device | model | a step of 64 sentences in 4 views | ms | of SimCSE's, paired |",
        "|---|---|---|---:|---:|",
    ]
    for row in _of_devices("training_steps"):
        lines.append(
            f"| {row['device']} | {row['model']} | {row['name']} | {row['step_ms']:,.0f} "
            f"| {row['ratio']:.3f} |"
        )
    return "\n".join(lines)


def maps() -> str:
    """Return the table of what whitening alone costs, by map."""
    rows = _of_devices("training_maps")
    kinds = list(dict.fromkeys(row["map"] for row in rows))
    lines = [
        f"| device | channels a group | {' | '.join(kinds)} |",
        f"|---|---:|{'---:|' * len(kinds)}",
    ]
    for place in dict.fromkeys((row["device"], row["groups"]) for row in rows):
        own = {row["map"]: row for row in rows if (row["device"], row["groups"]) == place}
        cells = " | ".join(_map_cell(own[kind]) for kind in kinds)
        lines.append(f"| {place[0]} | {own[kinds[0]]['group_size']} | {cells} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "training": quality,
    "training_curves": curves,
    "training_steps": steps,
    "training_maps": maps,
}


def measured() -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the results from each start that has some, by its title."""
    names = {title: f"training_{start}_cpu" for start, title in STARTS.items()}
    there = {title: name for title, name in names.items() if (RESULTS / f"{name}.jsonl").exists()}
    return [(title, read(name)) for title, name in there.items()]


def means_by_step(rows: Sequence[Row]) -> list[tuple[int, dict[str, float]]]:
    """Return the evaluations of one training over its seeds, by step."""
    found = dict[int, list[Row]]()
    for row in rows:
        for each in row["curves"]:
            if _CURVES[0] in each:
                found.setdefault(int(each["step"]), []).append(each)
    return [
        (step, {name: statistics.mean(each[name] for each in same) for name in _CURVES})
        for step, same in sorted(found.items())
    ]


def _by_name(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {
        name: [row for row in rows if row["name"] == name]
        for name in dict.fromkeys(row["name"] for row in rows)
    }


def _of_devices(name: str) -> list[dict[str, Any]]:
    files = sorted(path.stem for path in RESULTS.glob(f"{name}_*.jsonl"))
    return [row for file in files for row in read(file)]


def _map_cell(row: Row) -> str:
    if "error" in row:
        return "–"
    return f"{row['ms']:.1f} ms ({row['covariance_off']:.0e})"


def _spread(values: Sequence[float], form: str = ".2f") -> str:
    return f"{statistics.mean(values):{form}} ± {statistics.stdev(values):.2f}"
