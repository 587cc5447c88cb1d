"""The documents' tables, made from the raw results; ``--check`` fails where the two differ.

Run ``python -m benchmarks.tables`` after a benchmark. It also makes the notebooks of tutorials.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import (
    cluster_tables,
    evaluation_tables,
    nightly_tables,
    sinks_tables,
    sweep_tables,
    training_tables,
    whitening_tables,
)
from benchmarks.results_file import RESULTS, read, require_sources, source, used

_ROOT = Path(__file__).parents[1]
DOCUMENTS = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
# Notebook -> its tutorial.
NOTEBOOKS = {
    _ROOT / f"docs/notebooks/{name.replace('-', '_')}.ipynb": _ROOT / f"docs/tutorials/{name}.md"
    for name in ("first-index", "another-model")
}
_MARK = r"<!-- table (\w+) -->"


def store_dtype() -> str:
    """Return the table of what float16 costs."""
    lines = [
        "| vectors | k | least cosine with float32 | top-10 overlap with float32 |",
        "|---|---:|---:|---:|",
    ]
    for row in read("store_dtype"):
        k = "384 (all)" if row["k"] is None else row["k"]
        lines.append(
            f"| {row['setting']} | {k} | {row['cosine_min']:.8f} | {row['top10_overlap']:.4f} |"
        )
    return "\n".join(lines)


def digest_lookup() -> str:
    """Return the table of what it takes to know the rows of a store."""
    lines = [
        "| rows in the store | made, CPU time | memory | lookups a second of CPU |",
        "|---:|---:|---:|---:|",
    ]
    for row in read("digest_lookup"):
        rates = [row["lookups"] / spent / 1e6 for spent in row["find_cpu_seconds"]]
        lines.append(
            f"| {row['rows']:,} | {row['build_cpu_seconds']:.1f} s "
            f"| {row['resident_bytes'] / 1e6:.0f} MB "
            f"| {min(rates):.1f} to {max(rates):.1f} million |"
        )
    return "\n".join(lines)


def faults() -> str:
    """Return the table of faults of the system that were tried, a line for each kind."""
    rows = read("faults")
    lines = [
        "| fault | commands | operations | of these tried | harmful |",
        "|---|---:|---:|---:|---:|",
    ]
    names = sorted({row["fault"] for row in rows})
    kinds = [[row for row in rows if row["fault"] == name] for name in names]
    for some in [*kinds, rows]:
        cells = [f"{sum(row[name] for row in some):,}" for name in ("of", "points", "harmful")]
        name = "**all**" if some is rows else some[0]["fault"]
        commands = len({row["flow"] for row in some})
        lines.append(f"| {name} | {commands} | {' | '.join(cells)} |")
    return "\n".join(lines)


def memory() -> str:
    """Return the table of peak memory."""
    lines = ["| rows of one row group | peak memory |", "|---:|---:|"]
    for row in read("memory"):
        lines.append(f"| {row['rows']:,} | {row['peak_rss_mb']:,.0f} MiB |")
    return "\n".join(lines)


def encoding() -> str:
    """Return two tables for each device, model and precision that was measured."""
    names = sorted(path.stem for path in RESULTS.glob("encoding_*.jsonl"))
    return "\n\n".join(_encoding_of(read(name)) for name in names)


def _encoding_of(rows: list[dict[str, Any]]) -> str:
    setup = next(row for row in rows if row["figure"] == "setup")
    memory = {row["contender"]: row for row in rows if row["figure"] == "memory"}
    lines = [
        f"{_encoding_caption(setup)}",
        "",
        "| | sentences/s | tokens/s | share of matrix peak | padding | peak memory |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in (row for row in rows if row["figure"] == "contender"):
        peak = memory.get(row["contender"])
        batches = f", batches of {row['batch_size']}" if "batch_size" in row else ""
        lines.append(
            f"| {row['contender']}{batches} | {row['sentences_per_second']:,.0f} "
            f"| {row['tokens_per_second']:,.0f} | {_percent(row['share_of_peak'])} "
            f"| {_percent(row['padding_share'])} "
            f"| {'–' if peak is None else format(peak['peak_mib'], ',.0f') + ' MiB'} |"
        )
    lines += ["", "| | CPU time | wall time |", "|---|---:|---:|"]
    lines += _ratio_lines(rows)
    cosines = [row for row in rows if row["figure"] == "cosine" and row["dtype"] == "float32"]
    if cosines:
        least = min(row["least"] for row in cosines)
        lines += ["", f"Least cosine between both libraries' embeddings in float32: {least:.7f}."]
    return "\n".join(lines)


def _ratio_lines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each ratio: its name, then by CPU time and by wall time."""
    ratios: dict[str, dict[str, str]] = {}
    for row in (row for row in rows if row["figure"] == "ratio"):
        spread = f"{row['median']:.2f} ({row['least']:.2f}–{row['greatest']:.2f})"
        ratios.setdefault(row["name"], {})[row["clock"]] = spread
    return [
        f"| {name} | {clocks.get('cpu', '–')} | {clocks.get('wall', '–')} |"
        for name, clocks in ratios.items()
    ]


def processors() -> str:
    """Return the tables of what was measured on each processor."""
    return "\n\n".join(
        _processor(read(path.stem)) for path in sorted(RESULTS.glob("processors_*.jsonl"))
    )


def _processor(rows: list[dict[str, Any]]) -> str:
    by_figure: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_figure.setdefault(row["figure"], []).append(row)
    setup = by_figure["setup"][0]
    found = ", ".join(
        f"{row['library']} {row['dtype']} {row['flops'] / 1e9:,.0f}" for row in by_figure["product"]
    )
    queries = {row["contender"]: row for row in by_figure["query"]}
    lines = [
        f"{setup['instructions']}, threads: {setup['threads']}. Square products "
        f"of 2,048, GFLOP/s: {found}.",
        "",
        "| | texts | texts/s | × | neighbours | one query, ms (p99) |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in by_figure["encoding"]:
        query = queries[row["contender"]]
        lines.append(
            f"| {row['contender']} | {row['texts']} | {row['per_second']:,.0f} "
            f"| {row['speed']:.2f} ({row['least']:.2f}–{row['greatest']:.2f}) "
            f"| {row['neighbours']:.4f} | {query['p50']:.1f} ({query['p99']:.1f}) |"
        )
    return "\n".join(lines)


def precisions() -> str:
    """Return the table of what fewer bits cost in retrieval."""
    rows = read("precisions")
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    lines = [f"| nDCG@10 | queries | {' | '.join(dtypes)} |", "|---|" + "---:|" * (1 + len(dtypes))]
    for name in dict.fromkeys(row["set"] for row in rows):
        exact, *narrow = (row for row in rows if row["set"] == name)
        cells = [f"{exact['ndcg']:.2f}"] + [
            f"{row['ndcg']:.2f} ({row['low']:+.2f} to {row['high']:+.2f})" for row in narrow
        ]
        lines.append(f"| {name} | {exact['queries']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def moments() -> str:
    """Return the tables of how fast moments are taken and how exact they are."""
    rows = read("moments")
    setup = next(row for row in rows if row["figure"] == "setup")
    errors = {row["contender"]: row for row in rows if row["figure"] == "accuracy"}
    threads = max(pool["num_threads"] for pool in setup["blas"])
    lines = [
        f"{setup['rows']:,} rows of {setup['dims']} dims in {setup['dtype']}, threads: {threads}, "
        f"rounds: {setup['rounds']}.",
        "",
        "| | rows/s | GFLOP/s (2 n d²) | error, mean 100 × spread |",
        "|---|---:|---:|---:|",
    ]
    for row in (row for row in rows if row["figure"] == "contender"):
        error = errors.get(row["contender"])
        lines.append(
            f"| {row['contender']} | {row['rows_per_second']:,.0f} "
            f"| {row['gigaflops_as_gemm']:,.1f} "
            f"| {'–' if error is None else format(error['frobenius_error'], '.0e')} |"
        )
    return "\n".join(
        [*lines, "", "| | CPU time | wall time |", "|---|---:|---:|", *_ratio_lines(rows)]
    )


def _encoding_caption(setup: Mapping[str, Any]) -> str:
    model = Path(setup["model"]).name
    cores = f"{setup['threads']} cores" if setup["device"] == "cpu" else setup["device_name"]
    trial = "" if setup["enough_texts"] else " **A trial, too small to judge by.**"
    return (
        f"{model}, {setup['dtype']}, {cores}: {setup['texts']:,} texts "
        f"({setup['abstracts']:,} abstracts, the rest sentences; {setup['tokens']:,} tokens, at "
        f"most {setup['max_length']} a text), rounds: {setup['rounds']}.{trial}"
    )


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


TABLES: dict[str, Callable[[], str]] = {
    "exponents": whitening_tables.exponents,
    "choice": whitening_tables.choice,
    "migration": whitening_tables.migration,
    "migration_transform": whitening_tables.migration_transform,
    "model_comparison": whitening_tables.model_comparison,
    "choice_of_width": whitening_tables.choice_of_width,
    "choice_by_set": whitening_tables.choice_by_set,
    "choice_left_out": whitening_tables.choice_left_out,
    "short_texts": whitening_tables.short_texts,
    "sts": evaluation_tables.sts,
    "sts_fits": evaluation_tables.sts_fits,
    "static_models": evaluation_tables.static_models,
    "api": evaluation_tables.api,
    "transfer": evaluation_tables.transfer,
    "geometry": evaluation_tables.geometry,
    "papers": evaluation_tables.papers,
    "sweep": sweep_tables.first,
    "small_codes": sweep_tables.small_codes,
    "drift": nightly_tables.drift,
    "night": nightly_tables.night,
    "nights": nightly_tables.nights,
    "bucket_night": nightly_tables.bucket_night,
    "stable_ids": nightly_tables.stable_ids,
    "readers": nightly_tables.readers,
    "sinks": sinks_tables.sinks,
    "sinks_files": sinks_tables.sinks_files,
    "qdrant_folder": sinks_tables.qdrant_folder,
    "database_codes": sinks_tables.database_codes,
    "faults": faults,
    "growth": sweep_tables.growth,
    "serving": sweep_tables.serving,
    "serving_soak": sweep_tables.serving_soak,
    "exact_search": sweep_tables.exact_search,
    "graph_peers": sweep_tables.graph_peers,
    "gpu_index": sweep_tables.gpu_index,
    "store_dtype": store_dtype,
    "digest_lookup": digest_lookup,
    "memory": memory,
    "encoding": encoding,
    "precisions": precisions,
    "processors": processors,
    "moments": moments,
    **cluster_tables.TABLES,
    **training_tables.TABLES,
}


def filled(text: str) -> str:
    """Return a document's text with each table that it has a mark for made anew.

    Raises:
        SystemExit: a mark names no table, or a table's results are not there.
    """
    above = ""
    for name in re.findall(_MARK, text):
        if name not in TABLES:
            raise SystemExit(f"there is no table {name}; known are {', '.join(TABLES)}")
        try:
            table, sources = _made(TABLES[name])
        except FileNotFoundError as error:
            raise SystemExit(
                f"table {name} needs {error.filename}, which is not there: run its benchmark, or "
                "take the mark out of the document"
            ) from error
        runs = "- the same runs as above" if sources == above and "\n" in sources else sources
        text, found = _with(text, name, f"{table}\n\n{runs}")
        above = sources
        if found != 1:
            raise SystemExit(f"a document has {found} places for table {name}; it needs one")
    return text


def _made(table: Callable[[], str]) -> tuple[str, str]:
    """Return a table, and the runs whose results it was made from, a line each."""
    used.clear()
    made = table()
    return made, "\n".join(f"- {source(name)}" for name in dict.fromkeys(used))


def _with(text: str, name: str, made: str) -> tuple[str, int]:
    escaped = made.replace("\\", "\\\\")
    pattern = rf"(<!-- table {name} -->\n).*?(<!-- end -->)"
    return re.subn(pattern, rf"\g<1>{escaped}\n\g<2>", text, flags=re.DOTALL)


def notebook(tutorial: str) -> str:
    """Return a tutorial as a notebook without outputs: its shell and Python blocks are cells."""
    own_line = re.sub(r"(?m)^This page is also.*\n", "", tutorial)
    cells = list[dict[str, Any]]()
    kind: dict[str, Any]
    for part in re.split(r"(?ms)^(```(?:sh|python|text)\n.*?^```\n)", own_line):
        language, _, code = part.removesuffix("```\n").partition("\n")
        if language in ("```sh", "```python"):
            source = code if language == "```python" else f"%%sh\n{code}"
            kind = {"cell_type": "code", "execution_count": None, "outputs": []}
        elif part.strip() and language != "```text":
            source, kind = part, {"cell_type": "markdown"}
        else:
            continue
        lines = source.strip("\n").splitlines(keepends=True)
        cells.append({**kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": lines})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    """Fill the tables, or with ``--check`` only compare; return the exit status."""
    require_sources()
    texts = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    if missing := TABLES.keys() - {name for t in texts.values() for name in re.findall(_MARK, t)}:
        raise SystemExit(f"no document has a place for {', '.join(sorted(missing))}")
    same = True
    made_of = {path: filled(text) for path, text in texts.items()}
    for path, tutorial in NOTEBOOKS.items():
        texts[path] = path.read_text(encoding="utf-8")
        made_of[path] = notebook(tutorial.read_text(encoding="utf-8"))
    for path, text in texts.items():
        made = made_of[path]
        same = same and made == text
        if "--check" not in arguments:
            path.write_text(made, encoding="utf-8")
    return 0 if same or "--check" not in arguments else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
