"""``whiten-index export``: parse, call one function, print."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from whiten_index.cli import terminal
from whiten_index.cli.schema_options import json_option, schema_options, verify_option
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.errors import ConfigError

MATRIX, QUERY, MODEL, SQL = "matrix", "query", "sentence-transformers", "sql"
_ENDINGS = {".safetensors": MATRIX, ".sql": SQL}


@click.command()
@click.argument("index", type=click.Path(readable=False))
@click.argument("target", type=click.Path(readable=False))
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
    as_json: bool,
    **of_sql: str | None,
) -> None:
    """Write the transform of INDEX to TARGET, in a form that needs no index.

    matrix: a file .safetensors of one matrix and bias in float32; a vector is embedding·matrix +
    bias, scaled to unit length; embeddings are raw, as the encoder gives them.

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
    useless = [f"--{name.replace('_', '-')}" for name in options if form != SQL]
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
        facts: dict[str, object] = {"normalize_input": affine.normalize_input}
        facts["error"] = affine.error
    elif form == QUERY:
        transform.save(target)
        spec, column = transform.spec, transform.encoder_facts.get("column")
        facts = {"encoder": spec.model if spec else f"column {column}"}
        facts["fingerprint"] = transform.fingerprint
    elif form == SQL:
        from whiten_index.integrations.sql import RUN, export_sql

        facts = export_sql(transform, target, **options)
        facts["run"] = f"{RUN} {shlex.quote(target)}"
    else:
        from whiten_index.integrations.sentence_transformers import export_model

        facts = export_model(transform, target)
    size = {"file": target, "dim": transform.dim, "k": transform.k}
    facts = {"form": form, **size, **facts, "query_digest": transform.query_digest}
    terminal.show(facts, terminal.describe(facts), as_json=as_json)


def _form_of(target: str, form: str | None) -> str:
    """Return the form given, or that of the target's ending; both must agree."""
    name, by_ending = Path(target).name, _ENDINGS.get(Path(target).suffix.lower())
    if form is None and by_ending is None:
        raise ConfigError(
            f"{name} does not tell what to export: end it in .safetensors for a matrix or in .sql, "
            f"or say --as {QUERY} or --as {MODEL} for a folder"
        )
    if form is not None and by_ending not in (None, form):
        raise ConfigError(
            f"{name} is the name of a {by_ending} file, and --as {form} is something else; give "
            f"another name, or leave out --as {form} for {by_ending}"
        )
    return form or str(by_ending)
