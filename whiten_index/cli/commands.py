"""The commands: parse, call one function, print."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whiten_index.cli import terminal
from whiten_index.cli.schema_options import (
    GroupedCommand,
    config_option,
    given,
    json_option,
    log_option,
    plan_option,
    schema_options,
    verify_option,
)
from whiten_index.cli.update_command import update_lines
from whiten_index.pipeline.build_options import BuildOptions, EncodeOptions

if TYPE_CHECKING:
    from whiten_index.pipeline.build_config import BuildConfig

corpus_argument = click.argument("corpus", nargs=-1)


@click.command(cls=GroupedCommand)
@corpus_argument
@config_option
@schema_options(BuildOptions)
@plan_option
@log_option
@json_option
def build(plan: bool, log: str | None, as_json: bool, **options: Any) -> None:
    """Turn a Parquet CORPUS (files, folders, globs, URIs) into a searchable whitened index.

    Without CORPUS the index is built from --store alone, and no encoder is needed.
    """
    options = given(options)
    if "out" not in options:
        raise click.UsageError("say where the index goes: --out DIR")
    if log is not None and (plan or as_json):
        raise click.UsageError("--log prints the report as its last line; leave out --plan, --json")
    if plan:
        _print_plan(options, as_json=as_json)
        return
    from whiten_index.pipeline.build import build_index
    from whiten_index.pipeline.build_config import BuildConfig

    config = BuildConfig(**options)
    if log is not None:
        _build_logged(config, log)
        return
    if not as_json:
        click.echo(f"raw embeddings: {config.store_place}")
    report = build_index(config, progress=terminal.Bars(facts=not as_json)).to_json()
    if as_json:
        terminal.print_json(report)
        return
    already = "published"
    if report["up_to_date"]:
        already = f"already published, {terminal.done_anyhow(report['counts'])}"
    click.echo(f"{report['out']}: version {report['version']} {already}")
    _print_counts(report)
    _print_whitening(report)
    click.echo(f"index\n  {_faiss_facts(report)}")
    _print_bytes(report["bytes"])


def _build_logged(config: BuildConfig, form: str) -> None:
    from whiten_index.cli.log_lines import Ending, LogLines, run_job
    from whiten_index.pipeline.build import build_index

    lines = LogLines(form)

    def work() -> Ending:
        report = build_index(config, progress=lines)
        return Ending("up_to_date" if report.up_to_date else "published", report.to_json())

    click.get_current_context().exit(run_job(work, kept="shards", lines=lines))


@click.command(cls=GroupedCommand)
@corpus_argument
@config_option
@schema_options(EncodeOptions)
@plan_option
@json_option
def encode(plan: bool, as_json: bool, **options: Any) -> None:
    """Encode a Parquet CORPUS into a store of raw embeddings, to index later or elsewhere."""
    options = given(options)
    if "corpus" not in options:
        raise click.UsageError("name a corpus to encode: a Parquet file, folder, glob or URI")
    if "store" not in options:
        raise click.UsageError("say where the embeddings go: --store DIR")
    if plan:
        _print_plan(options, as_json=as_json)
        return
    from whiten_index.pipeline.build_config import BuildConfig
    from whiten_index.pipeline.encode import encode_corpus

    report = encode_corpus(BuildConfig(**options), progress=terminal.Bars()).to_json()
    if as_json:
        terminal.print_json(report)
        return
    click.echo(f"{report['store']}: {report['rows']:,} embeddings of this corpus")
    _print_counts(report)
    _print_bytes(report["bytes"])


@click.command()
@click.argument("index", type=click.Path(readable=False))
@click.option(
    "--plot",
    type=click.Path(readable=False),
    help="Draw spectrum, geometry and choice: .png, .svg or .pdf.",
)
@verify_option
@json_option
def inspect(index: str, plot: str | None, verify: str, as_json: bool) -> None:
    """Show what is in INDEX: counts, transform and choice, geometry, spectrum, bytes."""
    from whiten_index.versions.retention import describe_index, eigenvalues_of

    if plot is not None:
        from whiten_index.measure.spectrum_plot import check_plot_path, draw_spectrum

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
    for each in fields["runtimes"]:
        versions = ", ".join(f"{n} {each[n]}" for n in ("torch", "transformers", "tokenizers"))
        click.echo(f"  encoded by {versions}, inputs {each['inputs']}")
    click.echo(f"  {_faiss_facts(fields)}")
    _print_counts(fields)
    _print_whitening(fields)
    for line in update_lines(fields):
        click.echo(line)
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
    click.echo(
        terminal.table((key, "", terminal.one_line(str(value))) for key, value in chosen.items())
    )


def _print_plan(options: dict[str, Any], *, as_json: bool) -> None:
    from whiten_index.pipeline.build_config import BuildConfig
    from whiten_index.pipeline.plan import plan_build

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
        ("index, as expected", terminal.in_words(plan["index_bytes"]["total"])),
        *terminal.index_rows(plan["index_bytes"]),
        ("FAISS", plan["factory"]),
        ("store", plan["store"]),
    ]
    click.echo(terminal.table(rows))
    click.echo(f"  {plan['factory']}: {plan['why']}")


def _print_counts(report: Mapping[str, Any]) -> None:
    click.echo("rows")
    click.echo(terminal.table(terminal.count_rows(report["counts"])))
    click.echo("time")
    click.echo(terminal.table(terminal.stage_rows(report["seconds"], report["stage_rows"])))


def _print_whitening(fields: Mapping[str, Any]) -> None:
    click.echo(f"whitening\n  {terminal.whitening_line(fields['whitening'])}")
    for line in terminal.choice_lines(fields.get("choice")):
        click.echo(line)


def _print_bytes(sizes: Mapping[str, Any]) -> None:
    names = {
        "raw": "raw embeddings, as stored",
        "vectors": "reduced vectors",
        "index_file": "index.faiss",
        "documents_file": "documents",
    }
    click.echo("bytes")
    shown = [(name, terminal.in_words(sizes[key])) for key, name in names.items() if key in sizes]
    split = terminal.index_rows(sizes["index"]) if "index" in sizes else []
    place = [name for name, _ in shown].index("index.faiss") + 1 if split else 0
    click.echo(terminal.table([*shown[:place], *split, *shown[place:]]))


def _encoder_facts(encoder: Mapping[str, Any]) -> str:
    if encoder["kind"] == "column":
        return f"(embedding column, {encoder['dim']} dims)"
    layers = ",".join(map(str, encoder["layers"]))
    return (
        f"({encoder['dim']} dims, {encoder['pooling']} of layer {layers}, "
        f"{encoder['max_length']} tokens, {encoder['dtype']})"
    )


def _faiss_facts(fields: Mapping[str, Any]) -> str:
    made_by, factory = fields["made_by"]["faiss"], fields["factory"]
    facts = [f"release {made_by['version']}", str(made_by["variant"])]
    where = "; read from its file as it is searched" if factory.get("mapped") else ""
    return f"FAISS {factory['built']} ({', '.join(facts)}){terminal.tuned_words(factory)}{where}"
