"""Commands that bring an index elsewhere: its transform to a file, its rows to a database."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from whiten_index.cli import terminal
from whiten_index.cli.schema_options import (
    PATH,
    GroupedCommand,
    GroupedOption,
    StrictCommand,
    json_option,
    pairs,
    plan_option,
    schema_options,
    verify_option,
)
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.errors import ConfigError
from whiten_index.options import flag_of
from whiten_index.vectordb.push_config import DATABASE, PushConfig

MATRIX, QUERY, MODEL, SQL = "matrix", "query", "sentence-transformers", "sql"
_ENDINGS = {".safetensors": MATRIX, ".sql": SQL}


@click.command(cls=StrictCommand)
@click.argument("index", type=PATH)
@click.argument("target", type=PATH)
@click.option(
    "--as",
    "form",
    type=click.Choice([MATRIX, QUERY, MODEL, SQL]),
    help="Of TARGET. [default: by its ending .safetensors or .sql]",
)
@click.option("--k", type=click.IntRange(min=1), help="Keep the first N numbers of each vector.")
@click.option("--model", help="The encoder, if no longer where it was (sentence-transformers).")
@schema_options(EncoderConfig, only=["trust_remote_code"])
@click.option("--name", help="Of the function (sql). [default: whiten]")
@click.option("--schema", help="That the function goes in (sql). [default: public]")
@click.option("--dtype", help="float32: returns a vector; float16: a halfvec (sql).")
@verify_option()
@json_option
def export(
    index: str,
    target: str,
    form: str | None,
    k: int | None,
    model: str | None,
    trust_remote_code: bool | None,
    verify: str,
    **of_sql: str | None,
) -> None:
    """Write the transform of INDEX to TARGET, in a form that needs no index.

    matrix: a file .safetensors of one matrix and bias in float32; a vector is embedding·matrix +
    bias, scaled to unit length unless the similarity is dot; embeddings are raw, as the encoder
    gives them.

    query: a small folder for QueryTransform.load: the transform and the identity of its encoder.

    sentence-transformers: a model folder that includes the encoder, so that
    SentenceTransformer(TARGET).encode gives whitened vectors without this package.

    sql: a script for PostgreSQL with pgvector that makes a function of raw embeddings; run it by
    psql -v ON_ERROR_STOP=1 -f TARGET.

    The query digest that is printed is the same for all forms, stands in each, and changes with the
    transform: after an update that fitted it again, export again.
    """
    form = _form_of(target, form)
    options = {name: value for name, value in of_sql.items() if value is not None}
    useless = [flag_of(name) for name in options if form != SQL]
    useless += ["--model"] * (model is not None and form != MODEL)
    if useless:
        raise ConfigError(f"an export as {form} takes no {', '.join(useless)}; leave it out")
    from whiten_index.search.query_transform import QueryTransform

    transform = QueryTransform.of(
        index, k=k, verify=verify, model=model, trust_remote_code=bool(trust_remote_code)
    )
    if form == MATRIX:
        affine = transform.whitening.export()
        affine.save(target, facts={"query_digest": transform.query_digest})
        names = ("normalize_input", "similarity")
        facts: dict[str, Any] = {name: getattr(affine, name) for name in names}
    elif form == QUERY:
        transform.save(target)
        spec, column = transform.spec, transform.encoder_facts.get("column")
        encoder = spec.model if spec else f"column {column}"
        facts = {"encoder": encoder, "fingerprint": transform.fingerprint}
    elif form == SQL:
        from whiten_index.integrations.sql import RUN, export_sql

        facts = export_sql(transform, target, **options)
        facts["run"] = f"{RUN} {shlex.quote(target)}"
    else:
        from whiten_index.integrations.sentence_transformers import export_model

        facts = export_model(transform, target)
    size = {"file": target, "dim": transform.dim, "k": transform.k}
    facts = {"form": form, **size, "query_digest": transform.query_digest, **facts}
    terminal.show(facts)


def _form_of(target: str, form: str | None) -> str:
    """Return the form given, or that of the target's ending; both must agree."""
    name, by_ending = Path(target).name, _ENDINGS.get(Path(target).suffix.lower())
    if form is None and by_ending is None:
        raise ConfigError(
            f"{name} does not tell what to export: end it in .safetensors for a matrix or in .sql, "
            f"or say --as {QUERY} or --as {MODEL} for a folder; whiten-index push writes vectors"
        )
    if form is not None and by_ending not in (None, form):
        raise ConfigError(
            f"{name} is the name of a {by_ending} file, and --as {form} is something else; give "
            f"another name, or leave out --as {form} for {by_ending}"
        )
    return form or str(by_ending)


@click.command(cls=GroupedCommand)
@click.argument("index", type=PATH)
@schema_options(PushConfig)
@click.option(
    "--option",
    "options",
    cls=GroupedOption,
    group=DATABASE,
    multiple=True,
    callback=pairs,
    metavar="NAME=VALUE",
    help="Of the database's index and load, such as m=16; may be repeated.",
)
@click.option("--status", is_flag=True, help="Print what is there, and whether INDEX fits it.")
@plan_option
@json_option
def push(options: dict[str, str], status: bool, plan: bool, **given: Any) -> None:
    """Bring a database to the published version of INDEX: rows, whitened vectors, kept columns.

    What the database has of an earlier version by the same transform is changed in place. Else a
    new table is filled, indexed, checked against brute force and swapped in in one step.
    Run it again to resume after an error. Passwords come from the
    variables that the database's client reads, never in the URL.
    """
    from whiten_index.vectordb.push import plan_push, push_index

    if plan and status:
        raise click.UsageError("--plan is of a push, and --status is none; leave one out")
    named = {name: value for name, value in given.items() if value is not None}
    config = PushConfig(**named, options=options)
    if plan:
        terminal.show(plan_push(config))
        return
    if status:
        _print_status(config)
        return
    report = push_index(config, progress=terminal.Bars()).to_json()
    lines = terminal.describe(
        report, "rows", "rows_before", "k", "dtype", "columns", "query_digest", "pushed", "resumed",
        "deleted", "why", "check", "seconds",
    )  # fmt: skip
    title = f"{report['target']} ({report['engine']}): version {report['version']}"
    terminal.show(report, (title, *lines))


def _print_status(config: PushConfig) -> None:
    from whiten_index import QueryTransform, pushed_version

    queries = QueryTransform.of(config.index, k=config.k)
    there = pushed_version(config.to, config.table, options=config.options)
    found: dict[str, Any] = {
        "version": None,
        "rows": 0,
        **({} if there is None else asdict(there)),
        "index_version": queries.version,
        "index_query_digest": queries.query_digest,
        "fits": there is not None and there.query_digest == queries.query_digest,
    }
    nothing = ["nothing is pushed under that name"] * (there is None)
    terminal.show(found, notes=nothing)
