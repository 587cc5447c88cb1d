"""``whiten-index eval retrieval``: parse, evaluate, print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from whiten_index.cli import terminal
from whiten_index.cli.eval_commands import (
    encoder_line,
    given,
    print_report,
    search_options,
    with_options,
)

# What is counted -> what is said of it where it is not 0.
_NOTES = {
    "relevant_documents_missing": "relevant documents are not in the corpus, and count as not "
    "found",
    "rows_skipped": "rows of the corpus could not be used and are not indexed",
    "queries_without_text": "judged queries have no text and are left out",
    "queries_not_in_run": "judged queries are not in the run, and count 0",
    "run_queries_not_judged": "queries of the run have no relevant document and are left out",
    "hits_of_self": "hits have the id of their own query and are left out, as BEIR does; "
    "--keep-self if the ids of queries and documents are not the same texts'",
}


@click.command()
@click.argument("data", nargs=-1)
@click.option("--corpus", multiple=True, help="Or the files of one set: documents as Parquet, ")
@click.option("--queries", help="its queries (.parquet or .jsonl: id and text),")
@click.option("--qrels", help="and judgements (.parquet, .tsv, or TREC's .qrels, .txt).")
@click.option(
    "--qrels-split", help="Which judgements. [default: test in folders, all of a file named]"
)
@click.option(
    "--text-column",
    "text_columns",
    multiple=True,
    help="Text of the documents; may be repeated. [default: title and text]",
)
@click.option("--id-column", help="Their ids. [default: id, or _id]")
@click.option("--filter", "row_filter", help="Only documents where this holds.")
@click.option("--factory", help="FAISS factory string. [default: Flat]")
@click.option("--run", help="Judge this run: .trec, .run, .txt, .parquet or .jsonl.")
@click.option(
    "--run-out", help="Write the rankings: a file as of --run, or a folder for several settings."
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    help="ndcg@N, recall@N, mrr@N or map@N; may be repeated. [default: ndcg@10, recall@100, "
    "mrr@10, map@100]",
)
@click.option(
    "--drop-self/--keep-self",
    default=None,
    help="Leave out hits with the query's own id, as BEIR does. [default: yes, unless the "
    "judgements call such a hit relevant]",
)
@with_options(*search_options)
def retrieval(data: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Search judged queries exactly and judge what is found: nDCG, recall, MRR, MAP.

    DATA are folders in BEIR form: corpus, queries and qrels, each as Parquet, or corpus.jsonl,
    queries.jsonl and qrels/SPLIT.tsv. An index is built of each, whose transform is fitted on its
    corpus; or --index is searched, or --run is judged.
    """
    from whiten_index.measure.evaluate_retrieval import evaluate_retrieval
    from whiten_index.measure.retrieval_config import RetrievalConfig

    config = RetrievalConfig.from_options({**given(options), "sets": data})
    report = evaluate_retrieval(config, progress=terminal.Bars())
    lines = [] if as_json else list(_lines(report, config.metrics))
    print_report(report, as_json=as_json, lines=lines)


def _lines(report: Mapping[str, Any], metrics: tuple[str, ...]) -> Iterator[str]:
    if report["encoder"]:
        yield encoder_line(report)
    runs = report.get("runs") or [report]
    for name in report["datasets"]:
        yield from _set_lines(name, runs, metrics)
    if "average" in report:
        yield f"mean of {len(report['datasets'])} sets"
        yield _table([(run["name"], run["average"]) for run in runs], metrics)


def _set_lines(name: str, runs: list[Mapping[str, Any]], metrics: tuple[str, ...]) -> Iterator[str]:
    counts = runs[0]["datasets"][name]["counts"]
    documents = f"{counts['documents']:,} documents, " if "documents" in counts else ""
    yield f"{name}: {documents}{counts['queries']:,} judged queries"
    for key, said in _NOTES.items():
        most = max(run["datasets"][name]["counts"].get(key, 0) for run in runs)
        if most:
            yield f"  note: {most:,} {said}"
    yield _table([(run["name"], run["datasets"][name]) for run in runs], metrics)


def _table(rows: list[tuple[str, Mapping[str, Any]]], metrics: tuple[str, ...]) -> str:
    figures = [(name, *(f"{found[metric]:.2f}" for metric in metrics)) for name, found in rows]
    return terminal.table([("× 100", *metrics), *figures])
