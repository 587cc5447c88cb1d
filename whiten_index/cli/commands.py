"""Commands that make, update, search and show an index."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whiten_index.cli import terminal
from whiten_index.cli.log_lines import log_job
from whiten_index.cli.schema_options import (
    PATH,
    GroupedCommand,
    GroupedOption,
    StrictCommand,
    config_option,
    given,
    json_option,
    log_option,
    plan_option,
    schema_options,
    verify_option,
)
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.errors import ConfigError, GateError
from whiten_index.paths import cell, shown
from whiten_index.pipeline.build_options import BuildOptions, EncodeOptions
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.progress import Progress, Stages

if TYPE_CHECKING:
    from whiten_index.search.search_index import Hit, SearchIndex

corpus_argument = click.argument("corpus", nargs=-1)
# Options of a file of queries.
_QUERIES = ("run", "text_columns", "embedding_column", "id_column")


@click.command(cls=GroupedCommand)
@corpus_argument
@config_option
@schema_options(BuildOptions)
@plan_option
@log_option
@json_option
def build(plan: bool, log: bool, as_json: bool, **options: Any) -> None:
    """Turn a Parquet CORPUS (files, folders, globs, URIs) into a searchable whitened index.

    Without CORPUS the index is built from --store alone, and no encoder is needed.
    """
    options = given(options)
    if log and (plan or as_json):
        raise click.UsageError("--log prints the report as its last line; leave out --plan, --json")
    if plan:
        _show_plan(options, as_json=as_json)
        return
    from whiten_index.pipeline.build import build_index
    from whiten_index.pipeline.build_config import BuildConfig

    config = BuildConfig(**options)
    if log:
        log_job(lambda lines: build_index(config, progress=lines).to_json())
    if not as_json:
        click.echo(f"raw embeddings: {config.store_place}")
    report = build_index(config, progress=terminal.Bars(facts=not as_json)).to_json()
    terminal.show(report, _version_lines(report), as_json=as_json)


@click.command(cls=GroupedCommand)
@click.argument("corpus", nargs=-1, required=True)
@config_option
@schema_options(EncodeOptions)
@plan_option
@json_option
def encode(plan: bool, as_json: bool, **options: Any) -> None:
    """Encode a Parquet CORPUS into a store of raw embeddings, to index later or elsewhere."""
    options = given(options)
    if plan:
        _show_plan(options, as_json=as_json)
        return
    from whiten_index.pipeline.build_config import BuildConfig
    from whiten_index.pipeline.encode import encode_corpus

    report = encode_corpus(BuildConfig(**options), progress=terminal.Bars()).to_json()
    terminal.show(report, as_json=as_json)


def _show_plan(options: Mapping[str, Any], *, as_json: bool) -> None:
    from whiten_index.pipeline.build_config import BuildConfig
    from whiten_index.pipeline.plan import plan_build

    plan = plan_build(BuildConfig(**options), progress=terminal.Bars())
    lines = ("plan (nothing was written)", *terminal.describe(plan))
    terminal.show(plan, lines, as_json=as_json)


@click.command(cls=GroupedCommand)
@click.argument("index", type=PATH)
@corpus_argument
@config_option
@schema_options(UpdateConfig, without=("index",))
@log_option
@click.option("--dry-run", is_flag=True, help="Only say what would be done, and how long it takes.")
@json_option
def update(dry_run: bool, log: bool, as_json: bool, **options: Any) -> None:
    """Bring INDEX up to date with its CORPUS; left out, the one that it was built from.

    Rows are identified by id and text; known texts are not encoded again. The new version is
    published only where every gate passes, else kept aside (exit status 9). --dry-run ends with 9
    too where a gate would keep it back for its rows or bytes, or the corpus is that of a version
    which was rolled back. With --json what is refused says why in "refused".
    """
    if log and as_json:
        raise click.UsageError("--log prints the report as its last line; leave --json out")
    from whiten_index.pipeline.plan import plan_update
    from whiten_index.pipeline.update import update_index

    config = UpdateConfig(**given(options))
    job = (click.get_current_context().default_map or {}).get("index", config.index)
    if not config.corpus and job != config.index and config.index.endswith(".parquet"):
        raise click.UsageError(
            f"{config.index} stands where INDEX does, although the job file names {job}; write "
            f"INDEX before the corpus: {job} {config.index}"
        )

    def do(progress: Progress) -> dict[str, Any]:
        if dry_run:
            return plan_update(config, progress=progress)
        return update_index(config, progress=progress).to_json()

    if log:
        log_job(do, planned=dry_run)
    try:
        said = do(terminal.Bars(facts=not (as_json or dry_run)))
    except GateError as error:
        found = {"candidate": error.candidate, "gates": error.gates} if error.gates else {}
        lines = terminal.describe({"gates": error.gates})
        terminal.show({"refused": str(error), **found}, lines, as_json=as_json)
        raise
    if dry_run:
        title = f"plan (nothing was written), from version {said['base']}"
        lines = iter((title, *terminal.describe(said)))
    else:
        lines = _version_lines(said)
    terminal.show(said, lines, as_json=as_json)
    if said.get("refused"):
        raise GateError(f"nothing would be published: {said['refused']}")


@click.command(cls=StrictCommand)
@click.argument("index", type=PATH)
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--top-k", type=click.IntRange(min=1), default=10, show_default=True)
@click.option(
    "--filter",
    "row_filter",
    help="Only hits where this holds of id and kept columns, e.g. \"lang == 'en'\".",
)
@click.option("--like", multiple=True, help="Neighbours of the document with this id.")
@click.option(
    "--queries",
    cls=GroupedOption,
    needed=("like", "texts"),
    type=PATH,
    help="Parquet file of queries; needs --run, and --text-column or --embedding-column.",
)
@click.option("--text-column", "text_columns", multiple=True, help="Text of the queries.")
@click.option("--embedding-column", help="Raw embeddings of the queries.")
@click.option("--id-column", help="Ids of the queries.")
@click.option("--run", type=PATH, help="Write the rankings: .trec, .parquet or .jsonl.")
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
    options = given(options)
    of_queries = {name: options.pop(name) for name in _QUERIES if name in options}
    if queries is None and of_queries:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in of_queries)
        raise click.UsageError(f"{flags} needs --queries FILE")
    from whiten_index.search.search_index import open_index

    opened = open_index(index, **options)
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
    missing = ["--run FILE (.trec, .parquet or .jsonl)"] * (run is None)
    missing += ["--text-column or --embedding-column"] * (columns.keys() <= {"id_column"})
    if run is None or missing:
        raise click.UsageError(f"missing of a file of queries: {', '.join(missing)}")
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


@click.command()
@click.argument("index", type=PATH)
@click.option(
    "--plot", type=PATH, help="Draw spectrum, variance kept and choice: .png, .svg or .pdf."
)
@verify_option()
@json_option
def inspect(index: str, plot: str | None, verify: str, as_json: bool) -> None:
    """Show what is in INDEX: counts, transform and choice, geometry, spectrum, bytes."""
    from whiten_index.versions.retention import describe_index, eigenvalues_of

    if plot is not None:
        from whiten_index.measure.charts import check_plot_path, draw_spectrum

        check_plot_path(Path(plot))
    fields = describe_index(index, verify=verify)
    if plot is not None:
        draw_spectrum(Path(plot), fields, eigenvalues_of(fields))
    terminal.show(fields, _version_lines(fields), as_json=as_json)


def _version_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a report or a manifest says of a version."""
    done = ""
    if "up_to_date" in report:
        done = " is up to date" if report["up_to_date"] else " published"
    yield f"{report.get('out', 'index')}: version {report['version']}{done}"
    if choice := report.get("choice"):
        best = [row for row in choice["candidates"] if row["leads"]]
        report = {**report, "choice": {**choice, "candidates": best}}
    yield from terminal.describe(
        report, "base", "created", "rows", "files", "counts", "corpus", "encoder",
        "runtimes", "whitening", "quality", "choice", "drift", "decision", "update", "gates",
        "factory", "geometry", "spectrum", "seconds", "bytes", "config",
    )  # fmt: skip
