"""The command ``search``: parse, call one function, print."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whiten_index.cli import terminal
from whiten_index.cli.schema_options import json_option, schema_options, verify_option
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.errors import ConfigError
from whiten_index.paths import cell, shown
from whiten_index.progress import Stages

if TYPE_CHECKING:
    from whiten_index.search.search_index import Hit, SearchIndex

_QUERIES = ("run", "text_columns", "embedding_column", "id_column")


@click.command()
@click.argument("index", type=click.Path(readable=False))
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--top-k", type=click.IntRange(min=1), default=10, show_default=True)
@click.option(
    "--filter",
    "row_filter",
    help="Only hits where this holds of id and kept columns, e.g. \"lang == 'en'\".",
)
@click.option("--like", multiple=True, help="Neighbours of the document with this id.")
@click.option(
    "--queries", type=click.Path(readable=False), help="Parquet file of queries; needs --run."
)
@click.option("--text-column", "text_columns", multiple=True, help="Text of the queries.")
@click.option("--embedding-column", help="Raw embeddings of the queries.")
@click.option("--id-column", help="Ids of the queries.")
@click.option(
    "--run", type=click.Path(readable=False), help="Write the rankings: .trec, .parquet or .jsonl."
)
@click.option(
    "--rerank",
    type=click.IntRange(min=0),
    help="Rank N candidates (top-k at least) again by the raw embeddings in the store; 0 for "
    "none. [default: what the index was built for]",
)
@click.option(
    "--rerank-by",
    type=click.Choice(["vectors", "embeddings"]),
    help="By exact vectors of the index's transform, or without it. [default: vectors]",
)
@click.option("--store", help="Where the raw embeddings are now, if they moved.")
@click.option("--model", help="Where the index's own encoder is now, if it moved.")
@schema_options(EncoderConfig, only=("trust_remote_code", "device", "threads"))
@click.option(
    "--index-device",
    type=click.Choice(["auto", "cpu", "gpu"]),
    default="cpu",
    show_default=True,
    help="Where the index is searched; auto: a GPU that FAISS sees, if it takes this kind. "
    "With --filter, --like or --mapped it is the CPU.",
)
@click.option(
    "--mapped",
    is_flag=True,
    default=None,
    help="Read the index file as it is searched, not as a whole. [default: if its lists "
    "are in a file of their own]",
)
@verify_option()
@json_option
def search(
    index: str,
    texts: tuple[str, ...],
    top_k: int,
    row_filter: str | None,
    like: tuple[str, ...],
    queries: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Search INDEX for TEXT, for a file of --queries, or for documents --like another."""
    if sum(map(bool, (texts, like, queries))) != 1:
        raise click.UsageError("give one of: a text, --queries FILE, --like ID")
    given = {name: value for name, value in options.items() if value not in (None, ())}
    of_queries = {name: given.pop(name) for name in _QUERIES if name in given}
    if queries is None and of_queries:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in of_queries)
        raise click.UsageError(f"{flags} needs --queries FILE")
    from whiten_index.search.search_index import open_index

    opened = open_index(index, **given)
    if row_filter is not None and not opened.matches(row_filter):
        click.echo(f"no row passes --filter {shown(row_filter)}", err=True)
    how: dict[str, Any] = {"top_k": top_k, "row_filter": row_filter}
    if queries is not None:
        _search_file(opened, queries, how, as_json=as_json, **of_queries)
        return
    if like:
        found = [(name, opened.search_like(name, **how)) for name in like]
    else:
        found = list(zip(texts, opened.search(texts, **how), strict=True))
    results = [{"query": query, "hits": [asdict(hit) for hit in hits]} for query, hits in found]
    terminal.show({"results": results}, _hit_lines(found, opened.grouped), as_json=as_json)


def _search_file(
    opened: SearchIndex,
    queries: str,
    how: dict[str, Any],
    *,
    as_json: bool,
    run: str | None = None,
    **columns: Any,
) -> None:
    if run is None:
        raise click.UsageError("say where the rankings go: --run FILE.trec, .parquet or .jsonl")
    if columns.keys() <= {"id_column"}:
        raise click.UsageError("name the column of the queries: --text-column, --embedding-column")
    from whiten_index.artifacts.files import exists
    from whiten_index.corpus.corpus_config import CorpusConfig
    from whiten_index.evaluation.trec_run import check_place, check_run_path, write_run

    check_run_path(Path(run))
    check_place(Path(run))
    if exists(run) and exists(queries) and Path(run).samefile(queries):
        raise ConfigError(f"--run {run} is the file of the queries; name another file")
    config = CorpusConfig(sources=(queries,), **columns)
    with Stages(terminal.Bars()).stage("search", 0):
        written = write_run(Path(run), opened.rank(config, **how))
    line = f"{run}: top {how['top_k']} of {written:,} queries"
    report = {"run": run, "queries": written, "top_k": how["top_k"]}
    terminal.show(report, [line], as_json=as_json)


def _hit_lines(found: Sequence[tuple[str, Sequence[Hit]]], passages: bool) -> Iterator[str]:
    """Yield score, id and kept columns of each hit, and the passage found on another line."""
    from whiten_index.corpus.batches import (
        PASSAGE_COLUMNS,
        PASSAGE_END,
        PASSAGE_START,
        PASSAGE_TEXT,
    )

    added = PASSAGE_COLUMNS if passages else ()
    width = shutil.get_terminal_size((120, 24)).columns
    for query, hits in found:
        yield cell(query)
        for hit in hits:
            columns = hit.columns
            kept = "  ".join(f"{n}: {value}" for n, value in columns.items() if n not in added)
            start = f"  {hit.score:.4f}  {cell(hit.id)}  "
            yield (start + terminal.one_line(kept, max(width - len(start), 20))).rstrip()
            if passages:
                place = f"[{columns[PASSAGE_START]}:{columns[PASSAGE_END]}]"
                start = f"          {place} "
                yield start + terminal.one_line(columns[PASSAGE_TEXT], max(width - len(start), 20))
