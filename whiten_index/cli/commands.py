"""Commands that make, update, search, serve and show an index."""

import logging
import math
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whiten_index.cli import terminal
from whiten_index.cli.schema_options import (
    PATH,
    GroupedCommand,
    GroupedOption,
    StrictCommand,
    config_option,
    given,
    json_option,
    plan_option,
    schema_options,
    verify_option,
)
from whiten_index.cli.signals import raise_if_interrupted
from whiten_index.cli.streams import PIPE_CLOSED
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.spec import recorded_spec
from whiten_index.errors import ConfigError, GateError, require_installed
from whiten_index.options import flag_of
from whiten_index.paths import cell, is_uri, shown
from whiten_index.pipeline.build_options import BuildOptions, EncodeOptions
from whiten_index.pipeline.update_config import MigrateConfig, UpdateConfig
from whiten_index.progress import Stages
from whiten_index.serving.serve_options import ServeOptions

if TYPE_CHECKING:
    from whiten_index.evaluation.trec_run import Ranking
    from whiten_index.pipeline.build_config import BuildConfig
    from whiten_index.pipeline.migrate import MigrateReport
    from whiten_index.pipeline.publish import BuildReport
    from whiten_index.pipeline.update import UpdateReport
    from whiten_index.search.search_index import Hit, SearchIndex

corpus_argument = click.argument("corpus", nargs=-1)
# Options of a file of queries.
_QUERIES = ("text_columns", "embedding_column", "id_column")


@click.command(cls=GroupedCommand)
@corpus_argument
@config_option
@schema_options(BuildOptions)
@plan_option
@json_option
def build(plan: bool, **options: Any) -> None:
    """Turn a Parquet CORPUS (files, folders, globs, URIs) into a searchable whitened index.

    Without CORPUS the index is built from --store alone, and no encoder is needed.
    """
    options = given(options)
    from whiten_index.pipeline.build_config import BuildConfig

    config = BuildConfig(**options)
    if plan:
        _show_plan(config)
        return
    from whiten_index.pipeline.build import build_index

    built = build_index(config, progress=terminal.Bars())
    terminal.show(built.to_json(), _report_lines(built))


@click.command(cls=GroupedCommand)
@click.argument("corpus", nargs=-1, required=True)
@config_option
@schema_options(EncodeOptions)
@plan_option
@json_option
def encode(plan: bool, **options: Any) -> None:
    """Encode a Parquet CORPUS into a store of raw embeddings, to index later or elsewhere."""
    from whiten_index.pipeline.build_config import BuildConfig

    config = BuildConfig(**given(options))
    if plan:
        _show_plan(config, indexed=False)
        return
    from whiten_index.pipeline.encode import encode_corpus

    terminal.show(encode_corpus(config, progress=terminal.Bars()).to_json())


@click.command(cls=GroupedCommand)
@click.argument("index", type=PATH)
@schema_options(MigrateConfig, without=("index",))
@plan_option
@json_option
def migrate(plan: bool, **options: Any) -> None:
    """Move INDEX to another embedding model, in one run or in many, while it is searched.

    Run again to continue. Roll back with: whiten-index rollback INDEX.
    """
    from whiten_index.pipeline.migrate import migrate_index, migration_target

    config = MigrateConfig(**given(options))
    if plan and config.give_up:
        raise click.UsageError("--plan is of a run, and --give-up is none; leave one out")
    if plan:
        _show_plan(migration_target(config)[1])
        return
    report = migrate_index(config, progress=terminal.Bars())
    terminal.show(report.to_json(), _migrate_lines(report))


def _migrate_lines(report: "MigrateReport") -> Iterator[str]:
    if report.given_up:
        yield f"{report.index}: the migration is given up, and version {report.version} answers"
        yield f"to remove what was encoded: whiten-index gc {shlex.quote(report.index)}"
        return
    yield f"{report.index}: {report.encoded:,} of {report.rows:,} rows are encoded by the new model"
    if (made := report.comparison) is not None:
        least, greatest = made["interval"]
        yield (
            f"{made['measure']} of {made['queries']:,} questions: {made['old']:.2f} with the old "
            f"model, {made['new']:.2f} with the new one ({least:+.2f} to {greatest:+.2f}, 95 %)"
        )
        for each in made["changed_most"]:
            yield f"  {each['old']:.0f} → {each['new']:.0f}: {shown(each['query'])}"
    if report.finished:
        yield f"version {report.version} published: the migration is finished"
    elif report.bridge is not None:
        yield (
            f"version {report.version} published: other rows are mapped, which find "
            f"{100 * report.bridge['agreement']:.0f} % of the ten nearest by the new model"
        )
    if not report.finished:
        yield "run the same command again to continue"


def _show_plan(config: "BuildConfig", *, indexed: bool = True) -> None:
    from whiten_index.pipeline.plan import plan_build

    plan = plan_build(config, progress=terminal.Bars())
    texts = config.embedding_column is None
    rows = _plan_rows(plan, texts=texts, indexed=indexed)
    lines = ("plan (nothing was written)", terminal.table(rows, indent="", numbers=False))
    terminal.show(plan, lines)


def _plan_rows(plan: Mapping[str, Any], *, texts: bool, indexed: bool) -> Iterator[tuple[str, str]]:
    """Yield a subject and what a build or an encode would do, in the words of its report."""
    todo = "to_encode" if texts else "to_store"
    counts = {"read": plan["read"], todo: plan["to_encode"], "reused": plan["reused"]}
    yield "rows", _counted(counts)
    if pieces := plan["cut_in_pieces"]:
        yield "pieces", f"of up to {pieces:,} documents are encoded, to choose the transform by"
    yield from _encoding_time(plan["seconds"], plan)
    words, k, dim = terminal.in_words, plan["k"], plan["dim"]
    if indexed:
        most = "" if plan["k_settled"] else " at most"
        yield (
            "transform",
            f"{dim} dimensions to {k}{most}" + (most and "; the build chooses how many"),
        )
        yield "index", f"{plan['factory']}: {plan['why']}"
        yield "size", f"{words(plan['index_bytes']['total'])}{most}, raw {words(plan['raw_bytes'])}"
    yield "store", f"{plan['store']} would have {words(plan['raw_bytes'])} of raw embeddings"


def _update_plan_rows(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    todo = "to_store" if plan["rows_per_second"] is None else "to_encode"
    yield "rows", _counted({**plan["rows"], todo: plan["to_encode"]})
    yield "files", _counted(plan["files"], read="to read", skipped="unchanged")
    yield from _encoding_time(plan["encode_seconds"], plan)
    if plan["up_to_date"]:
        yield "version", f"{plan['base']} is up to date"
        return
    yield "other work", f"about {terminal.duration(plan['other_seconds'])}"
    fits = {"auto": "fitted again if it drifted", "always": "fitted again", "never": "kept"}
    yield "transform", fits[plan["refit"]]
    for folder, size in plan["bytes"].items():
        if size:
            yield "disk", f"{terminal.in_words(size)} more in {folder}"
    yield "version", f"{plan['base']} would be replaced"


def _encoding_time(seconds: float | None, plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if seconds is not None:
        spent, rate = terminal.duration(seconds), plan["rows_per_second"]
        yield "encoding", f"about {spent} at {rate:,.1f} rows a second, measured on a sample"
    if plan["tokens"] is not None:
        cost = "" if plan["cost"] is None else f", which cost {plan['cost']:.4g}"
        yield "tokens", f"about {plan['tokens']:,}{cost}"


@click.command(cls=GroupedCommand)
@click.argument("index", type=PATH)
@corpus_argument
@config_option
@schema_options(UpdateConfig, without=("index",))
@click.option("--dry-run", is_flag=True, help="Only say what would be done, and how long it takes.")
@json_option
def update(dry_run: bool, **options: Any) -> None:
    """Bring INDEX up to date with its CORPUS; left out, the one that it was built from.

    Columns, filter, factory … stay as built; build again to change them. Known texts are not
    encoded again. The new version is published only where every gate passes, else kept aside (exit
    status 9). --dry-run ends with 9 too where a gate would refuse its rows or bytes, or the corpus
    is that of a version which was rolled back. With --json "refused" says why.
    """
    from whiten_index.pipeline.plan import plan_update
    from whiten_index.pipeline.update import update_index

    config = UpdateConfig(**given(options))
    if dry_run:
        said = plan_update(config, progress=terminal.Bars())
        rows = terminal.table(_update_plan_rows(said), indent="", numbers=False)
        terminal.show(said, ("plan (nothing was written)", rows))
        if said.get("refused"):
            raise GateError(f"nothing would be published: {said['refused']}")
        return
    try:
        report = update_index(config, progress=terminal.Bars())
    except GateError as error:
        found = {"candidate": error.candidate, "gates": error.gates} if error.gates else {}
        lines = terminal.describe({"gates": error.gates})
        terminal.show({"refused": str(error), **found}, lines)
        raise
    terminal.show(report.to_json(), _report_lines(report))


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
    help="File of queries: .jsonl (as BEIR's), .csv, .tsv, or .txt with one a line; or Parquet, "
    "which needs --text-column or --embedding-column.",
)
@click.option("--text-column", "text_columns", multiple=True, help="Text of the queries.")
@click.option("--embedding-column", help="Raw embeddings of the queries.")
@click.option("--id-column", help="Ids of the queries.")
@click.option("--run", type=PATH, help="Write the rankings to a file: .trec, .parquet or .jsonl.")
@schema_options(ServeOptions, only=("store", "rerank"))
@click.option(
    "--rerank-by",
    type=click.Choice(["vectors", "embeddings"]),
    help="By exact vectors of the index's transform, or without it. [default: vectors]",
)
@schema_options(
    ServeOptions,
    only=("mapped", "verify", "model", "trust_remote_code", "device", "backend", "threads"),
)
@schema_options(EncoderConfig, only=("base_url",))
@click.option(
    "--index-device",
    type=click.Choice(["auto", "cpu", "gpu"]),
    default="cpu",
    show_default=True,
    help="Where the index is searched; auto: a GPU that FAISS sees, if it takes this kind. "
    "With --filter, --like or --mapped it is the CPU.",
)
@json_option
def search(
    index: str,
    texts: tuple[str, ...],
    top_k: int,
    row_filter: str | None,
    like: tuple[str, ...],
    queries: str | None,
    run: str | None,
    **options: Any,
) -> None:
    """Search INDEX for TEXT, for a file of --queries, or for documents --like another."""
    if sum(map(bool, (texts, like, queries))) != 1:
        raise click.UsageError("give one of: a text, --queries FILE, --like ID")
    options = given(options)
    of_queries = {name: options.pop(name) for name in _QUERIES if name in options}
    if queries is None and (run or of_queries):
        flags = ["--run"] * bool(run) + [flag_of(name) for name in of_queries]
        raise click.UsageError(f"{' and '.join(flags)} needs --queries FILE")
    from whiten_index.artifacts.files import exists
    from whiten_index.evaluation.judgements import TEXT_ENDINGS
    from whiten_index.evaluation.trec_run import check_place, check_run_path, write_run
    from whiten_index.search.search_index import open_index

    if run is not None and queries is not None:
        if is_uri(run):
            raise ConfigError(f"--run writes a file of this machine, not at {run}")
        check_run_path(Path(run))
        check_place(Path(run))
        if exists(run) and exists(queries) and Path(run).samefile(queries):
            raise ConfigError(f"--run {run} is the file of the queries; name another file")
    opened = open_index(index, **options)
    if row_filter is not None and not opened.matches(row_filter):
        click.echo(f"no row passes --filter {shown(row_filter)}", err=True)
    how: dict[str, Any] = {"top_k": top_k, "row_filter": row_filter}
    if queries is not None:
        known, rankings = _ranked(opened, queries, how, **of_queries)
        if run is not None:
            with Stages(terminal.Bars()).stage("search", 0):
                written = write_run(Path(run), rankings)
            line = f"{run}: top {top_k} of {written:,} queries"
            terminal.show({"run": run, "queries": written, "top_k": top_k}, [line])
            return
        asked = {name: {"query_id": name, "query": text} for name, text in known.items()}
        found = [
            (asked.get(r.query_id, {"query_id": r.query_id}), r.read_hits())
            for r in rankings
            if r.read_hits
        ]
    elif like:
        found = [({"query": name}, opened.search_like(name, **how)) for name in like]
    else:
        if any(text.endswith((*TEXT_ENDINGS, ".parquet")) for text in texts):
            click.echo("note: a name is searched as a text; a file is --queries FILE", err=True)
        hits = opened.search(texts, **how)
        found = [({"query": text}, own) for text, own in zip(texts, hits, strict=True)]
    results = [{**query, "hits": [asdict(hit) for hit in hits]} for query, hits in found]
    terminal.show({"results": results}, _hit_lines(found, opened.grouped))


def _ranked(
    opened: "SearchIndex", queries: str, how: Mapping[str, Any], **columns: Any
) -> "tuple[Mapping[Any, str], Iterator[Ranking]]":
    """Return the texts of the queries as far as they are known, and their rankings."""
    from whiten_index.corpus.corpus_config import CorpusConfig
    from whiten_index.evaluation.judgements import TEXT_ENDINGS, read_queries

    if "embedding_column" in columns or not queries.endswith((*TEXT_ENDINGS, ".json")):
        return {}, opened.rank(CorpusConfig(sources=(queries,), **columns), **how)
    texts = read_queries(queries, numbered=True, **columns)
    embeddings = opened.encode(list(texts.values()))
    return texts, opened.rank_embeddings(list(texts), embeddings, **how)


def _hit_lines(
    found: "Sequence[tuple[Mapping[str, Any], Sequence[Hit]]]", passages: bool
) -> Iterator[str]:
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
        yield cell("  ".join(map(str, query.values())))
        for hit in hits:
            columns = hit.columns
            kept = " | ".join(f"{n}: {value}" for n, value in columns.items() if n not in added)
            start = f"  {hit.score:.4f}  {cell(hit.id)}  "
            yield (start + terminal.one_line(kept, max(width - len(start), 20))).rstrip()
            if passages:
                place = f"[{columns[PASSAGE_START]}:{columns[PASSAGE_END]}]"
                start = f"          {place} "
                yield start + terminal.one_line(columns[PASSAGE_TEXT], max(width - len(start), 20))


@click.command(cls=GroupedCommand)
@click.argument("indexes", nargs=-1, required=True, metavar="[NAME=]INDEX...")
@config_option
@schema_options(ServeOptions)
@click.option("--stdio", is_flag=True, help="Serve MCP over standard input and output, no HTTP.")
def serve(indexes: tuple[str, ...], stdio: bool, **options: Any) -> None:
    """Serve each INDEX over HTTP and MCP, and a page to search it, until SIGTERM or Ctrl-C.

    A new version answers as soon as it is published. An index is called by its folder's name
    unless it is given another, NAME=INDEX. INDEX may be the folder of one of its versions.
    """
    require_installed("fastapi", "uvicorn", "mcp", "prometheus_client", by="serve", extra="serve")
    chosen = ServeOptions(**given(options))
    from whiten_index.serving import server

    places = server.named(indexes)
    quiet = logging.WARNING if terminal.CHOSEN["quiet"] else logging.INFO
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("whiten_index.serving").setLevel(quiet)
    if stdio:
        try:
            server.serve_stdio(places, chosen)
        except BrokenPipeError:
            sys.exit(PIPE_CLOSED)
        return

    def ready(address: str) -> None:
        raise_if_interrupted()
        click.echo(f"{address}  (Ctrl-C stops the server)", err=True)

    server.serve(places, chosen, ready=ready)


@click.command()
@click.argument("index", type=PATH)
@verify_option()
@json_option
def inspect(index: str, verify: str) -> None:
    """Show what is in INDEX: counts, transform and choice, spectrum, bytes."""
    from whiten_index.versions.migration import migration_status
    from whiten_index.versions.retention import describe_index

    fields = describe_index(index, verify=verify)
    if (migration := migration_status(index)) is not None:
        fields["migration"] = migration
    terminal.show(fields, _version_lines(fields))


def _report_lines(report: "BuildReport | UpdateReport") -> Iterator[str]:
    """Yield what a build or an update did, in full with ``-v``, and how to search the index."""
    said, fields = report.to_json(), report.manifest
    rows = list[tuple[str, str]]()
    if terminal.CHOSEN["verbose"]:
        yield from _version_lines(said)
    else:
        done = "is up to date" if report.up_to_date else "published"
        rows += [*_summary(said, fields), ("version", f"{report.version} {done}")]
    asked = "--like ID" if recorded_spec(fields["encoder"]) is None else '"your question"'
    search = f"whiten-index search {shlex.quote(str(report.out))} {asked}"
    yield terminal.table([*rows, ("search it", search)], indent="", numbers=False)


def _summary(said: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a subject and its facts; ``said`` is of this run, ``fields`` are the manifest's."""
    counts, made, choice = dict(said["counts"]), fields["whitening"], said.get("choice")
    encoder, size, words = fields["encoder"], fields["bytes"], terminal.in_words
    own = {
        "encoded": "stored" if encoder["kind"] == "column" else "encoded",
        "truncated": f"cut to {encoder.get('max_length')} tokens",
    }
    changes = said["rows"] if "base" in said else {}
    skipped = {f"skipped ({reason})": count for reason, count in counts.pop("skipped").items()}
    yield "rows", _counted({**changes, **counts, **skipped}, **own)
    transform = f"{made['dim']} dimensions, as they are"
    if made["kind"] != "none":
        kind = "PCA" if made["kind"] == "whitening" and not made["exponent"] else made["kind"]
        transform = f"{made['dim']} dimensions to {made['k']} by {kind}"
        transform += f" with exponent {made['exponent']:g}" if made.get("exponent") else ""
        transform += "" if made["center"] else ", not centred"
        transform += f"; {made['variance_kept']:.0%} of the variance kept"
    transform += "; compared by dot product" if made["similarity"] == "dot" else ""
    yield "transform", transform
    yield from (("", reason["why"]) for reason in (choice, said.get("decision")) if reason)
    if choice and choice["raw_score"] is not None:
        rows = (row for row in choice["candidates"] if choice["chosen"].items() <= row.items())
        by = choice["measure"]
        if choice["rule"] == "pieces":
            by = f"how well pieces of {choice['sample']:,} texts find the rest of theirs, at best 1"
        score, of_raw = next(rows)["score"], choice["raw_score"]
        yield "quality", f"{score:.3f}, raw embeddings {of_raw:.3f}: {by}"
    if (share := (fields["quality"] or {}).get("agreement_at_10")) is not None:
        yield "agreement", f"{share:.0%} of the ten nearest by raw embeddings are found"
    yield "index", f"{fields['factory']['built']}: {fields['factory']['why']}"
    if (most := fields["factory"]["tuned"].get("p95_ms")) is not None:
        yield "", f"95 % of single searches answer in {most:.2f} ms, by one thread"
    index, raw, rows = size["index"], size["raw"], fields["rows"]
    fixed = index["matrix"] + index["codebooks"] + index["centroids"]
    grows = index["total"] - fixed
    why = f", {grows / rows:,.0f} bytes a row; raw {words(raw)}, {raw / rows:,.0f} bytes a row"
    if index["total"] >= raw:
        why = f", more than the raw embeddings ({words(raw)}): "
        if grows >= raw:
            why += f"{grows / rows:,.0f} bytes a row, and {raw / rows:,.0f} in the store"
        else:
            least = math.floor(fixed * rows / (raw - grows)) + 1
            why += f"{words(fixed)} are for the transform, less than raw from {least:,} rows"
    yield "size", words(index["total"]) + why
    then = "" if own["encoded"] == "stored" else "; the next build encodes only new texts"
    yield "store", f"{said['store']} has the raw embeddings{then}"


def _counted(counts: Mapping[str, int], **own: str) -> str:
    """Return counts in words, those of zero left out; ``own`` are names for this list alone."""
    names = {
        "total": "in all",
        "document": "changed in kept columns only",
        "reused": "found in the store",
        "duplicates": "identical to another text",
        **own,
    }
    return ", ".join(
        f"{number:,} {names.get(name, name.replace('_', ' '))}"
        for name, number in counts.items()
        if number and name not in terminal.FOR_MACHINES
    )


def _version_lines(report: Mapping[str, Any]) -> Iterator[str]:
    done = ""
    if "up_to_date" in report:
        done = " is up to date" if report["up_to_date"] else " published"
    yield f"{report.get('out', 'index')}: version {report['version']}{done}"
    if choice := report.get("choice"):
        leading = [row for row in choice["candidates"] if row["leads"]]
        most, k = max((row["score"] for row in leading), default=0.0), choice["chosen"]["k"]
        best = [
            {**row, "of_the_best": f"{row['score'] / most:.1%}", "chosen": row["k"] == k}
            for row in leading
        ]
        report = {**report, "choice": {**choice, "candidates": best}}
    yield from terminal.describe(
        report, "base", "created", "rows", "files", "counts", "corpus", "encoder",
        "migration",
        "runtimes", "whitening", "quality", "choice", "drift", "decision", "update", "gates",
        "certificate", "models",
        "factory", "spectrum", "seconds", "bytes", "config",
    )  # fmt: skip
