"""``whiten-index eval``: scores of embeddings and their transforms on judged data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import click

from whiten_index.cli import terminal
from whiten_index.cli.schema_options import (
    config_option,
    given,
    json_option,
    schema_options,
    with_options,
)
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.measure.measure_options import EvalOptions, RetrievalOptions
from whiten_index.pipeline.build_options import TransformName
from whiten_index.whitening.transform_options import TransformShape

if TYPE_CHECKING:
    from whiten_index.evaluation.sts_sets import StsSet


def _setting_options(*without: str) -> Callable[[Any], Any]:
    """Return the options of the embeddings and their transforms."""
    return with_options(
        config_option,
        schema_options(EvalOptions, without=("seed", *without)),
        schema_options(EncoderConfig, without=without),
        click.option(
            "--whiten",
            type=click.Choice([name for name in get_args(TransformName) if name != "auto"]),
            help="The transform. [default: none; whitening with --k]",
        ),
        click.option(
            "--k",
            multiple=True,
            help="Width kept: a number, full, or a share of variance; repeated, all of them side "
            "by side. [default: a third of the embedding's width, at most 256]",
        ),
        schema_options(TransformShape),
        schema_options(EvalOptions, only=("seed",)),
        json_option,
    )


@click.group(name="eval")
def evaluate() -> None:
    """Evaluate embeddings and their transforms: sts, retrieval, transfer, geometry, layers.

    Without DATA the sets are read from the folder that WHITEN_INDEX_DATA names (but for those of
    retrieval, of which there are many). Correlations, accuracies and shares are times 100.
    """


def _splits(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Return set -> split of options ``SET=SPLIT``."""
    splits = {}
    for text in given:
        name, equals, split = text.partition("=")
        if not equals or not name or not split:
            raise click.BadParameter(f"{text!r} is no SET=SPLIT, such as SICK-R=test")
        splits[name] = split
    return splits


def _pair_options(default: str) -> Callable[[Any], Any]:
    """Return the arguments that name sets of pairs, and the splits of them."""
    return with_options(
        _DATA,
        click.option(
            "--set", "names", multiple=True, help="Only this set, such as STS12; repeatable."
        ),
        click.option(
            "--split",
            "splits",
            multiple=True,
            callback=_splits,
            help=f"SET=SPLIT, the split that is used, or all; repeatable. [default: {default}; all "
            "pairs of others]",
        ),
    )


_DATA = click.argument("data", nargs=-1)


def _encoder_line(report: Mapping[str, Any]) -> str:
    """Return the encoder that was evaluated, on one line."""
    facts = report["encoder"]
    layers = "+".join(map(str, facts["layers"]))
    return (
        f"{facts['model']}: {facts['pooling']} pooling of layer {layers}, at most "
        f"{facts['max_length']} tokens, {facts['dim']} dims"
    )


def _heading(run: Mapping[str, Any]) -> str:
    """Return the name of a space with its width and what it was fitted on."""
    setting = run["setting"]
    name, k = str(run["name"]), setting["transform"].get("k")
    if k is not None and not name.endswith(f"= {k}"):
        name += f" ({k})"
    if setting.get("fit") not in (None, "index"):
        name += f", fitted on {setting['fit']}"
    return name


def _read_pairs(
    data: Sequence[str],
    names: Sequence[str],
    splits: Mapping[str, str],
    *,
    unscored: bool = False,
) -> list[StsSet]:
    """Return the sets of the files named, or of the public ones, those called ``names``."""
    from whiten_index.evaluation.sts_sets import chosen_sets, read_sts
    from whiten_index.measure.eval_config import data_path

    paths = data or (str(data_path("sts/sts_raw.parquet")),)
    return chosen_sets(read_sts(paths, splits=splits, unscored=unscored), names)


@evaluate.command()
@_pair_options("STS-B=test")
@click.option(
    "--measure",
    type=click.Choice(["spearman", "pearson"]),
    default="spearman",
    show_default=True,
    help="What the table shows; --json has both.",
)
@_setting_options()
def sts(
    data: tuple[str, ...],
    names: tuple[str, ...],
    splits: Mapping[str, str],
    measure: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Correlate the cosines of sentence pairs with gold scores, in all three aggregations.

    DATA are files of pairs (.parquet, .jsonl, or .tsv with a header line: sentence1, sentence2,
    score; dataset, subset, split where they have them) or folders of such. A set's figure is of
    all its pairs together (all), the mean over its subsets (mean), and that weighted by their
    pairs (wmean); papers differ in which they print.
    """
    from whiten_index.measure.eval_config import EvalConfig
    from whiten_index.measure.evaluate_sts import evaluate_sts

    config = EvalConfig.from_options(given(options))
    sets = _read_pairs(data, names, splits)
    report = evaluate_sts(config, sets, progress=terminal.Bars(facts=not as_json))
    terminal.show(report, _sts_lines(report, measure), as_json=as_json)


def _sts_lines(report: Mapping[str, Any], measure: str) -> Iterator[str]:
    yield _encoder_line(report)
    dropped = {name: each["dropped"] for name, each in report["datasets"].items()}
    for name, count in dropped.items():
        if count:
            yield f"  note: {count:,} pairs of {name} have no score and are left out"
    runs = report["runs"]
    for run in runs:
        yield f"{measure} × 100, {_heading(run)}"
        rows: list[tuple[str, ...]] = [("", "pairs", "all", "mean", "wmean")]
        for name, each in run["datasets"].items():
            rows.append((name, f"{each['pairs']:,}", *map(_two, each[measure].values())))
        if len(run["datasets"]) > 1:
            rows.append(("mean of sets", "", *map(_two, run["average"][measure].values())))
        yield terminal.table(rows)


def _two(value: float | None, absent: str = "") -> str:
    return absent if value is None else f"{value:.2f}"


@evaluate.command()
@_pair_options("STS-B=test")
@click.option(
    "--token",
    type=click.Choice(["mean", "cls"]),
    default="mean",
    show_default=True,
    help="Pool the tokens of each layer by their mean, or take the first one.",
)
@click.option(
    "--most",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Combine at most this many layers.",
)
@click.option(
    "--aggregation",
    type=click.Choice(["all", "mean", "wmean"]),
    default="mean",
    show_default=True,
    help="Correlation that the tables show; --json has all three.",
)
# Layers are those of a model, and every one is tried.
@_setting_options("index", "store", "pooling", "layers")
def layers(
    data: tuple[str, ...],
    names: tuple[str, ...],
    splits: Mapping[str, str],
    token: str,
    most: int,
    aggregation: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Score every combination of a model's layers on sentence pairs, each text encoded once.

    DATA are files of pairs, as of sts. The embedding of a text is the mean of some layers'
    states, 0 the embedding layer; all combinations of up to --most of them are scored raw and,
    with --whiten or --k, in each transform, fitted for each combination and set.
    """
    from whiten_index.measure.eval_config import EvalConfig
    from whiten_index.measure.evaluate_layers import evaluate_layers

    config = EvalConfig.from_options(given(options))
    sets, sizes = _read_pairs(data, names, splits), range(1, most + 1)
    bars = terminal.Bars(facts=not as_json)
    report = evaluate_layers(config, sets, pooling=token, sizes=sizes, progress=bars)
    terminal.show(report, _layer_lines(report, aggregation), as_json=as_json)


def _layer_lines(report: Mapping[str, Any], how: str) -> Iterator[str]:
    encoder, count = report["encoder"], report["states"]
    yield (
        f"{encoder['model']}: {encoder['pooling']} pooling of {count} states, at most "
        f"{encoder['max_length']} tokens, {encoder['dim']} dims"
    )
    sets = list(report["runs"][0]["combinations"][0]["datasets"])
    of = f"mean of {', '.join(sets)}" if len(sets) > 1 else sets[0]
    for run in report["runs"]:
        yield f"spearman × 100, {how}, {of}: {_heading(run)}"
        cells = {
            tuple(cell["layers"]): cell["average"]["spearman"][how] for cell in run["combinations"]
        }
        alone = [_two(cells.get((i,)), "-") for i in range(count)]
        # Of single layers and pairs; one row where there are no pairs.
        pairs = [
            [_two(cells.get((min(i, j), max(i, j)) if i != j else (i,)), "-") for j in range(count)]
            for i in range(count)
        ]
        rows = list(enumerate(pairs)) if any(len(each) == 2 for each in cells) else [("", alone)]
        yield terminal.table([("layer", *range(count)), *((name, *row) for name, row in rows)])
        for size, best in run["best"][how].items():
            joined = "+".join(map(str, best["layers"]))
            layers = "layer" if size == "1" else f"{size} layers"
            yield f"  best {layers}: {joined}, {best['figure']:.2f}"


# Title of a column -> figure.
_FIGURES = {
    "alignment": "alignment",
    "uniformity": "uniformity",
    "IsoScore": "isoscore",
    "mean cosine": "mean_cosine",
    "effective rank": "effective_rank",
    "hubness": "hubness",
}


@evaluate.command()
@_pair_options("STS-B=dev without DATA, STS-B=test with it")
@click.option(
    "--positive-above",
    type=float,
    default=4.0,
    show_default=True,
    help="Alignment is over the pairs with a higher gold score; all, where there are no scores.",
)
@click.option(
    "--most-texts",
    type=click.IntRange(min=3),
    default=10_000,
    show_default=True,
    help="Texts measured at most; more are drawn from. The time grows with their square.",
)
@_setting_options()
def geometry(
    data: tuple[str, ...],
    names: tuple[str, ...],
    splits: Mapping[str, str],
    positive_above: float,
    most_texts: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure how embeddings fill their space, raw and transformed.

    DATA are files of sentence pairs, as of sts, scored or not; without DATA it is STS-B dev.
    Alignment is the mean squared distance of positive pairs, uniformity log E exp(-2‖u - v‖²),
    both on unit length; lower is better. IsoScore is 0 (one direction) to 1 (all even). The
    effective rank, 1 to the width, is how many directions are in use; hubness the skewness of how
    often a text is among another's neighbours, 0 where none is a hub. A transform is fitted on all
    splits of a set, which are encoded too.
    """
    from whiten_index.measure.eval_config import EvalConfig
    from whiten_index.measure.evaluate_geometry import evaluate_geometry

    config = EvalConfig.from_options(given(options))
    if not data:
        names, splits = names or ("STS-B",), {"STS-B": "dev", **splits}
    sets = _read_pairs(data, names, splits, unscored=True)
    bars = terminal.Bars(facts=not as_json)
    report = evaluate_geometry(
        config, sets, above=positive_above, most_texts=most_texts, progress=bars
    )
    terminal.show(report, _geometry_lines(report), as_json=as_json)


def _geometry_lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield _encoder_line(report)
    runs = report["runs"]
    for name, first in report["datasets"].items():
        measured = first["rows"] + first["zero_rows"]
        drawn = f" of {first['texts']:,}, drawn" if measured < first["texts"] else ""
        yield f"{name}: {measured:,} texts{drawn}, {first['positive_pairs']:,} positive pairs"
        if not first["positive_pairs"]:
            yield "  note: no pair is positive; --positive-above sets the gold score that makes one"
        if first["dropped"]:
            yield f"  note: {first['dropped']:,} pairs of {name} have no score and are left out"
        if first["zero_rows"]:
            yield f"  note: {first['zero_rows']:,} embeddings are zero and are left out"
        rows = [("", *_FIGURES)]
        for run in runs:
            values = [run["datasets"][name][figure] for figure in _FIGURES.values()]
            texts = ("-" if value is None else f"{value:.3f}" for value in values)
            rows.append((_heading(run), *texts))
        yield terminal.table(rows)


@evaluate.command()
@_DATA
@click.option("--set", "names", multiple=True, help="Only this task, such as mr; repeatable.")
@click.option(
    "--folds",
    type=click.IntRange(min=2),
    default=10,
    show_default=True,
    help="Of every cross-validation, outer and inner.",
)
@_setting_options()
def transfer(
    data: tuple[str, ...], names: tuple[str, ...], folds: int, as_json: bool, **options: Any
) -> None:
    """Score a linear classifier on frozen embeddings, as SentEval does, and RTE by the cosine.

    DATA are files of tasks (text, or sentence1 and sentence2; label; split) or folders of such;
    a task is called as its file. Split all is cross-validated; else C is chosen on dev or by
    folds of train, and test is scored. A label -1 in RTE, or all through a split, is a hidden one
    and its row is left out. Vectors keep their lengths, also where the model itself
    ends by normalising. No gain of whitening is to be expected here: a linear classifier can undo
    any invertible linear map.
    """
    from whiten_index.evaluation.transfer_tasks import read_task, task_files
    from whiten_index.measure.eval_config import EvalConfig, data_path
    from whiten_index.measure.evaluate_transfer import evaluate_transfer

    config = EvalConfig.from_options(given(options))
    paths = data or (str(data_path("senteval")),)
    tasks = [read_task(path) for path in task_files(paths, names)]
    bars = terminal.Bars(facts=not as_json)
    report = evaluate_transfer(config, tasks, folds=folds, progress=bars)
    terminal.show(report, _transfer_lines(report), as_json=as_json)


def _transfer_lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield _encoder_line(report)
    for name, each in report["datasets"].items():
        for lacking, count in each["dropped"].items():
            if count:
                yield f"  note: {count:,} rows of {name} have no {lacking} and are left out"
    for run in report["runs"]:
        yield f"accuracy × 100, {_heading(run)}"
        rows: list[tuple[str, ...]] = [
            ("", "tested", "accuracy", "±", "± over", "F1", "largest class", "C")
        ]
        for name, each in run["datasets"].items():
            counts, chosen = each["rows"], sorted(set(each.get("chosen", ())))
            tested = next(counts[split] for split in ("all", "test", "dev") if split in counts)
            points = (each["accuracy"], each["deviation"], each.get("f1"), each["majority"])
            accuracy, deviation, f1, majority = map(_two, points)
            ends = dict.fromkeys((*chosen[:1], *chosen[-1:]))
            rows.append((
                name, f"{tested:,}", accuracy, deviation, each["deviation_of"], f1, majority,
                "–".join(f"{c:g}" for c in ends),
            ))  # fmt: skip
        if mean := run["average"]:
            rows.append((f"mean of {len(mean['sets'])}", "", _two(mean["accuracy"]), *[""] * 5))
        yield terminal.table(rows)
        for name, each in run["datasets"].items():
            if "tuned_accuracy" in each:
                tuned = "" if each["tuned_threshold"] is None else (
                    f"; at {each['tuned_threshold']:.3f}, tuned on train, "
                    f"{each['tuned_accuracy']:.2f}"
                )  # fmt: skip
                yield f"  {name}: cosine ≥ {each['threshold']:g} is entailment{tuned}"
            if each.get("positive") is not None:
                yield f"  {name}: F1 is of the class {each['positive']}"
            for note in each["notes"]:
                yield f"  note: {name}: {note}"
    yield "± is the standard deviation over folds, or the binomial standard error of a test split"


# Count -> note where it is not 0.
_NOTES = {
    "relevant_documents_missing": "relevant documents are not in the corpus, and count as not "
    "found",
    "rows_skipped": "rows of the corpus could not be used and are not indexed",
    "queries_without_text": "judged queries have no text and are left out",
    "queries_not_in_run": "judged queries are not in the run, and count 0",
    "run_queries_not_judged": "queries of the run have no relevant document and are left out",
    "hits_of_self": "hits have the id of their own query and are left out, as BEIR does; "
    "--no-drop-self if the ids of queries and documents are not the same texts'",
}


@evaluate.command()
@_DATA
@schema_options(RetrievalOptions)
# A search encodes its corpus, and fits on it.
@_setting_options("fit", "fit_columns")
def retrieval(data: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Search judged queries exactly and judge what is found: nDCG, recall, MRR, MAP.

    DATA are folders in BEIR form: corpus, queries and qrels, each as Parquet, or corpus.jsonl,
    queries.jsonl and qrels/SPLIT.tsv. An index is built of each, whose transform is fitted on its
    corpus; or --index is searched, or --run is judged.
    """
    from whiten_index.measure.eval_config import RetrievalConfig
    from whiten_index.measure.evaluate_retrieval import evaluate_retrieval

    config = RetrievalConfig.from_options({**given(options), "sets": data})
    report = evaluate_retrieval(config, progress=terminal.Bars())
    terminal.show(report, _retrieval_lines(report, config.metrics), as_json=as_json)


def _retrieval_lines(report: Mapping[str, Any], metrics: tuple[str, ...]) -> Iterator[str]:
    if report["encoder"]:
        yield _encoder_line(report)
    runs = report["runs"]

    def table(found: Iterable[Mapping[str, Any]]) -> str:
        rows = [(run["name"], *map(_two, map(each.get, metrics)))
                for run, each in zip(runs, found, strict=True)]  # fmt: skip
        return terminal.table([("× 100", *metrics), *rows])

    for name, first in report["datasets"].items():
        counts = first["counts"]
        documents = f"{counts['documents']:,} documents, " if "documents" in counts else ""
        yield f"{name}: {documents}{counts['queries']:,} judged queries"
        for key, said in _NOTES.items():
            if most := max(run["datasets"][name]["counts"].get(key, 0) for run in runs):
                yield f"  note: {most:,} {said}"
        yield table(run["datasets"][name] for run in runs)
    if "average" in report:
        yield f"mean of {len(report['datasets'])} sets"
        yield table(run["average"] for run in runs)
