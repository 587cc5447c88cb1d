"""The commands: parse, call one function, print."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whiten_index.cli import terminal
from whiten_index.cli.options import (
    config_option,
    corpus_options,
    device_option,
    encoder_options,
    json_option,
    threads_option,
    verify_option,
    whitening_options,
    with_options,
)

if TYPE_CHECKING:
    from whiten_index.search import Hit

corpus_argument = click.argument("corpus", nargs=-1)
plan_option = click.option(
    "--plan", is_flag=True, help="Only say what would be done, how long and how many bytes."
)


@click.command()
@corpus_argument
@config_option
@click.option("--out", help="Folder of the index.")
@click.option("--store", help="Folder of raw embeddings, shared by builds. [default: OUT/store]")
@with_options(corpus_options, encoder_options, whitening_options)
@plan_option
@json_option
def build(plan: bool, as_json: bool, **options: Any) -> None:
    """Turn a Parquet CORPUS (files, folders, globs, URIs) into a searchable whitened index.

    Without CORPUS the index is built from --store alone, and no encoder is needed.
    """
    if options["out"] is None:
        raise click.UsageError("say where the index goes: --out DIR")
    if plan:
        _print_plan(options, as_json=as_json)
        return
    from whiten_index.build import build_index
    from whiten_index.config import BuildConfig

    config = BuildConfig(**options)
    if not as_json:
        click.echo(f"raw embeddings: {config.store_path}")
    report = build_index(config, progress=terminal.Bars()).to_json()
    if as_json:
        terminal.print_json(report)
        return
    already = "already published, nothing to do" if report["up_to_date"] else "published"
    click.echo(f"{report['out']}: version {report['version']} {already}")
    _print_counts(report)
    _print_whitening(report)
    click.echo(f"index\n  {_faiss_facts(report)}")
    _print_bytes(report["bytes"])


@click.command()
@corpus_argument
@config_option
@click.option("--store", help="Folder of the raw embeddings; several corpora may share it.")
@with_options(corpus_options, encoder_options)
@plan_option
@json_option
def encode(plan: bool, as_json: bool, **options: Any) -> None:
    """Encode a Parquet CORPUS into a store of raw embeddings, to index later or elsewhere."""
    if not options["corpus"]:
        raise click.UsageError("name a corpus to encode: a Parquet file, folder, glob or URI")
    if options["store"] is None:
        raise click.UsageError("say where the embeddings go: --store DIR")
    if plan:
        _print_plan(options, as_json=as_json)
        return
    from whiten_index.config import BuildConfig
    from whiten_index.encode import encode_corpus

    report = encode_corpus(BuildConfig(**options), progress=terminal.Bars()).to_json()
    if as_json:
        terminal.print_json(report)
        return
    click.echo(f"{report['store']}: {report['rows']:,} embeddings of this corpus")
    _print_counts(report)
    _print_bytes(report["bytes"])


@click.command()
@click.argument("index", type=click.Path())
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--top-k", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--like", multiple=True, help="Neighbours of the document with this id.")
@click.option("--queries", type=click.Path(), help="Parquet file of queries; needs --run.")
@click.option("--text-column", "text_columns", multiple=True, help="Text of the queries.")
@click.option("--embedding-column", help="Raw embeddings of the queries.")
@click.option("--id-column", help="Ids of the queries.")
@click.option("--run", type=click.Path(), help="Write the rankings: .trec, .parquet or .jsonl.")
@click.option("--model", help="Where the index's own encoder is now, if it moved.")
@device_option
@threads_option
@verify_option
@json_option
def search(
    index: str,
    texts: tuple[str, ...],
    top_k: int,
    like: tuple[str, ...],
    queries: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Search INDEX for TEXT, for a file of --queries, or for documents --like another."""
    if sum(map(bool, (texts, like, queries))) != 1:
        raise click.UsageError("give one of: a text, --queries FILE, --like ID")
    if queries is None:
        names = ("run", "text_columns", "embedding_column", "id_column")
        unused = [f"--{name.replace('_', '-')}" for name in names if options[name]]
        if unused:
            raise click.UsageError(f"{' and '.join(unused)} needs --queries FILE")
    from whiten_index.search import open_index

    opening = {name: options[name] for name in ("model", "device", "threads", "verify")}
    opened = open_index(index, **opening)
    if queries is not None:
        _search_file(opened, queries, top_k, as_json=as_json, **options)
        return
    if like:
        found = [(name, opened.search_like(name, top_k=top_k)) for name in like]
    else:
        found = list(zip(texts, opened.search(texts, top_k=top_k), strict=True))
    if as_json:
        terminal.print_json({"results": [_result(query, hits) for query, hits in found]})
        return
    for query, hits in found:
        click.echo(query)
        for hit in hits:
            _print_hit(hit, passages=opened.grouped)


@click.command()
@click.argument("index", type=click.Path())
@click.option(
    "--plot", type=click.Path(), help="Draw spectrum, geometry and choice: .png, .svg or .pdf."
)
@verify_option
@json_option
def inspect(index: str, plot: str | None, verify: str, as_json: bool) -> None:
    """Show what is in INDEX: counts, transform and choice, geometry, spectrum, bytes."""
    from whiten_index.describe import describe_index, eigenvalues_of

    if plot is not None:
        from whiten_index.report import check_plot_path, draw_spectrum

        check_plot_path(Path(plot))
    fields = describe_index(index, verify=verify)
    if plot is not None:
        draw_spectrum(Path(plot), fields, eigenvalues_of(fields))
    if as_json:
        terminal.print_json(fields)
        return
    encoder = fields["encoder"]
    click.echo(f"{index}: version {fields['version']}, {fields['rows']:,} rows")
    click.echo(
        f"  made {fields['created']} from {', '.join(fields['corpus']['source']['sources'])}"
    )
    click.echo(f"  encoder {encoder.get('model') or encoder['column']} {_encoder_facts(encoder)}")
    click.echo(f"  {_faiss_facts(fields)}")
    _print_counts(fields)
    _print_whitening(fields)
    if fields.get("geometry"):
        click.echo("geometry")
        click.echo(terminal.table(terminal.geometry_rows(fields["geometry"])))
    spectrum = [
        (row["k"], f"{row['eigenvalue']:.3e}", f"{row['variance_kept']:.2%}")
        for row in fields["spectrum"]
    ]
    click.echo("spectrum")
    click.echo(terminal.table([("k", "eigenvalue", "variance kept"), *spectrum]))
    _print_bytes(fields["bytes"])
    chosen = {key: value for key, value in fields["config"].items() if value not in (None, [], "")}
    click.echo("config")
    click.echo(terminal.table((key, "", _one_line(str(value))) for key, value in chosen.items()))


@click.command()
@click.argument("index", type=click.Path())
@click.argument("file", type=click.Path())
@verify_option
@json_option
def export(index: str, file: str, verify: str, as_json: bool) -> None:
    """Write the transform of INDEX as one matrix and bias to FILE.safetensors, in float32.

    A vector is embedding·matrix + bias, scaled to unit length; embeddings are raw, as the encoder
    gives them.
    """
    from whiten_index.describe import export_transform

    facts = export_transform(index, file, verify=verify)
    if as_json:
        terminal.print_json(facts)
        return
    unit = "embeddings of unit length" if facts["normalize_input"] else "raw embeddings"
    click.echo(f"{file}: matrix {facts['dim']} x {facts['k']} and bias, for {unit}")
    click.echo(f"  relative error of vectors in float32 at most about {facts['error']:.1e}")


def _search_file(
    opened: Any,
    queries: str,
    top_k: int,
    *,
    as_json: bool,
    run: str | None,
    text_columns: tuple[str, ...],
    embedding_column: str | None,
    id_column: str | None,
    **_: Any,
) -> None:
    if run is None:
        raise click.UsageError("say where the rankings go: --run FILE.trec, .parquet or .jsonl")
    if not text_columns and embedding_column is None:
        raise click.UsageError("name the column of the queries: --text-column, --embedding-column")
    from whiten_index.corpus import CorpusConfig
    from whiten_index.run_file import check_run_path, write_run

    check_run_path(Path(run))
    config = CorpusConfig(
        sources=(queries,),
        text_columns=text_columns,
        embedding_column=embedding_column,
        id_column=id_column,
    )
    written = write_run(Path(run), opened.rank(config, top_k=top_k))
    if as_json:
        terminal.print_json({"run": run, "queries": written, "top_k": top_k})
    else:
        click.echo(f"{run}: top {top_k} of {written:,} queries")


def _print_plan(options: dict[str, Any], *, as_json: bool) -> None:
    from whiten_index.config import BuildConfig
    from whiten_index.plan import plan_build

    plan = plan_build(BuildConfig(**options), progress=terminal.Bars()).to_json()
    if as_json:
        terminal.print_json(plan)
        return
    rate = plan["rows_per_second"]
    settled = "=" if plan["k_settled"] else "≤"
    click.echo("plan (nothing was written)")
    rows = [
        ("shards", f"{plan['shards']:,}"),
        ("rows to read", f"{plan['read']:,}"),
        ("rows reused", f"{plan['reused']:,}"),
        ("rows to encode", f"{plan['to_encode']:,}"),
        ("encoding", "-" if rate is None else f"{terminal.duration(plan['seconds'])}"),
        ("  measured on a sample", "-" if rate is None else f"{rate:,.0f} rows/s"),
        ("raw embeddings", terminal.in_words(plan["raw_bytes"])),
        (f"reduced vectors, k {settled} {plan['k']}", terminal.in_words(plan["vector_bytes"])),
        ("FAISS", plan["factory"]),
        ("store", plan["store"]),
    ]
    click.echo(terminal.table(rows))


def _print_counts(report: Mapping[str, Any]) -> None:
    click.echo("rows")
    click.echo(terminal.table(terminal.count_rows(report["counts"])))
    for line in terminal.encoder_lines(report):
        click.echo(line)
    click.echo("time")
    click.echo(terminal.table(terminal.stage_rows(report["seconds"], report["stage_rows"])))


def _print_whitening(fields: Mapping[str, Any]) -> None:
    click.echo(f"whitening\n  {terminal.whitening_line(fields['whitening'])}")
    for line in terminal.choice_lines(fields.get("choice")):
        click.echo(line)


def _print_bytes(sizes: Mapping[str, int]) -> None:
    names = {
        "raw": "raw embeddings, as stored",
        "vectors": "reduced vectors",
        "index_file": "index.faiss",
        "documents_file": "documents",
    }
    click.echo("bytes")
    shown = [(name, terminal.in_words(sizes[key])) for key, name in names.items() if key in sizes]
    click.echo(terminal.table(shown))


def _result(query: str, hits: list[Hit]) -> dict[str, Any]:
    return {
        "query": query,
        "hits": [
            {"id": h.id, "score": h.score, "row": h.row, "columns": dict(h.columns)} for h in hits
        ],
    }


def _print_hit(hit: Hit, *, passages: bool) -> None:
    """Print score, id and kept columns on a line, and the passage found on another."""
    from whiten_index.batch import PASSAGE_COLUMNS, PASSAGE_END, PASSAGE_START, PASSAGE_TEXT

    columns, added = hit.columns, PASSAGE_COLUMNS if passages else ()
    kept = "  ".join(str(value) for name, value in columns.items() if name not in added)
    click.echo(f"  {hit.score:.4f}  {hit.id}  {_one_line(kept)}".rstrip())
    if passages:
        place = f"[{columns[PASSAGE_START]}:{columns[PASSAGE_END]}]"
        click.echo(f"          {place} {_one_line(columns[PASSAGE_TEXT])}")


def _encoder_facts(encoder: Mapping[str, Any]) -> str:
    if encoder["kind"] == "column":
        return f"(embedding column, {encoder['dim']} dims)"
    layers = ",".join(map(str, encoder["layers"]))
    return (
        f"({encoder['dim']} dims, {encoder['pooling']} of layer {layers}, "
        f"{encoder['max_length']} tokens, {encoder['dtype']})"
    )


def _faiss_facts(fields: Mapping[str, Any]) -> str:
    made_by = fields["made_by"]["faiss"]
    return (
        f"FAISS {fields['factory']['built']} (release {made_by['version']}, {made_by['variant']})"
    )


def _one_line(text: str, width: int = 100) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= width else joined[: width - 1] + "…"
