"""The command ``search``: parse, call one function, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whiten_index.cli import terminal
from whiten_index.cli.schema_options import (
    json_option,
    schema_options,
    verify_option,
    with_options,
)
from whiten_index.cli.streams import cell
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.paths import shown

if TYPE_CHECKING:
    from whiten_index.search.search_index import Hit, SearchIndex

_OPENING = (
    "model", "trust_remote_code", "device", "threads", "verify", "mapped", "rerank", "rerank_by",
    "store", "index_device",
)  # fmt: skip
_QUERIES = ("run", "text_columns", "embedding_column", "id_column")

what_options = [
    click.option("--top-k", type=click.IntRange(min=1), default=10, show_default=True),
    click.option(
        "--filter",
        "row_filter",
        help="Only hits where this holds of id and kept columns, e.g. \"lang == 'en'\".",
    ),
    click.option("--like", multiple=True, help="Neighbours of the document with this id."),
    click.option(
        "--queries", type=click.Path(readable=False), help="Parquet file of queries; needs --run."
    ),
    click.option("--text-column", "text_columns", multiple=True, help="Text of the queries."),
    click.option("--embedding-column", help="Raw embeddings of the queries."),
    click.option("--id-column", help="Ids of the queries."),
    click.option(
        "--run",
        type=click.Path(readable=False),
        help="Write the rankings: .trec, .parquet or .jsonl.",
    ),
]
how_options = [
    click.option(
        "--rerank",
        type=click.IntRange(min=0),
        help="Rank N candidates (top-k at least) again by the raw embeddings in the store; 0 for "
        "none. [default: what the index was built for]",
    ),
    click.option(
        "--rerank-by",
        type=click.Choice(["vectors", "embeddings"]),
        help="By exact vectors of the index's transform, or without it. [default: vectors]",
    ),
    click.option("--store", help="Where the raw embeddings are now, if they moved."),
    click.option("--model", help="Where the index's own encoder is now, if it moved."),
    schema_options(EncoderConfig, only=("trust_remote_code", "device", "threads")),
    click.option(
        "--index-device",
        type=click.Choice(["auto", "cpu", "gpu"]),
        default="cpu",
        show_default=True,
        help="Where the index is searched; auto: a GPU that FAISS sees, if it takes this kind. "
        "With --filter, --like or --mapped it is the CPU.",
    ),
    click.option(
        "--mapped",
        is_flag=True,
        default=None,
        help="Read the index file as it is searched, not as a whole. [default: if its lists "
        "are in a file of their own]",
    ),
    verify_option,
    json_option,
]


@click.command()
@click.argument("index", type=click.Path(readable=False))
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@with_options(*what_options, *how_options)
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
    if queries is None:
        unused = [f"--{name.replace('_', '-')}" for name in _QUERIES if options[name]]
        if unused:
            raise click.UsageError(f"{' and '.join(unused)} needs --queries FILE")
    from whiten_index.search.search_index import open_index

    opened = open_index(
        index, **{name: options[name] for name in _OPENING if options[name] is not None}
    )
    if row_filter is not None and not opened.matches(row_filter):
        click.echo(f"no row passes --filter {shown(row_filter)}", err=True)
    how: dict[str, Any] = {"top_k": top_k, "row_filter": row_filter}
    if queries is not None:
        asked = {name: options[name] for name in _QUERIES}
        _search_file(opened, queries, how, as_json=as_json, **asked)
        return
    if like:
        found = [(name, opened.search_like(name, **how)) for name in like]
    else:
        found = list(zip(texts, opened.search(texts, **how), strict=True))
    if as_json:
        terminal.print_json({"results": [_result(query, hits) for query, hits in found]})
        return
    for query, hits in found:
        click.echo(cell(query))
        for hit in hits:
            _print_hit(hit, passages=opened.grouped)


def _search_file(
    opened: SearchIndex,
    queries: str,
    how: dict[str, Any],
    *,
    as_json: bool,
    run: str | None,
    text_columns: tuple[str, ...],
    embedding_column: str | None,
    id_column: str | None,
) -> None:
    if run is None:
        raise click.UsageError("say where the rankings go: --run FILE.trec, .parquet or .jsonl")
    if not text_columns and embedding_column is None:
        raise click.UsageError("name the column of the queries: --text-column, --embedding-column")
    from whiten_index.corpus.corpus_config import CorpusConfig
    from whiten_index.evaluation.trec_run import check_place, check_run_path, write_run

    check_run_path(Path(run))
    check_place(Path(run))
    config = CorpusConfig(
        sources=(queries,),
        text_columns=text_columns,
        embedding_column=embedding_column,
        id_column=id_column,
    )
    written = write_run(Path(run), opened.rank(config, **how))
    if as_json:
        terminal.print_json({"run": run, "queries": written, "top_k": how["top_k"]})
    else:
        click.echo(f"{run}: top {how['top_k']} of {written:,} queries")


def _result(query: str, hits: list[Hit]) -> dict[str, Any]:
    return {
        "query": query,
        "hits": [
            {"id": h.id, "score": h.score, "row": h.row, "columns": dict(h.columns)} for h in hits
        ],
    }


def _print_hit(hit: Hit, *, passages: bool) -> None:
    """Print score, id and kept columns on a line, and the passage found on another."""
    from whiten_index.corpus.batches import (
        PASSAGE_COLUMNS,
        PASSAGE_END,
        PASSAGE_START,
        PASSAGE_TEXT,
    )

    columns, added = hit.columns, PASSAGE_COLUMNS if passages else ()
    kept = "  ".join(str(value) for name, value in columns.items() if name not in added)
    click.echo(f"  {hit.score:.4f}  {cell(hit.id)}  {terminal.one_line(kept)}".rstrip())
    if passages:
        place = f"[{columns[PASSAGE_START]}:{columns[PASSAGE_END]}]"
        click.echo(f"          {place} {terminal.one_line(columns[PASSAGE_TEXT])}")
