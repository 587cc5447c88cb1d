"""Commands that measure settings side by side, train an encoder, and score on judged data."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

import click

from whiten_index.cli import terminal
from whiten_index.cli.schema_options import (
    PATH,
    GroupedCommand,
    config_option,
    given,
    json_option,
    pairs,
    plan_option,
    schema_options,
    with_options,
)
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.errors import named
from whiten_index.measure.measure_options import EvalOptions, RetrievalOptions, SweepOptions
from whiten_index.pipeline.build_options import EncodeOptions, TransformName
from whiten_index.training.training_config import TrainingConfig
from whiten_index.whitening.whitening_config import TransformShape

if TYPE_CHECKING:
    from whiten_index.evaluation.sts_sets import StsSet
    from whiten_index.measure.eval_config import EvalConfig


@click.command(cls=GroupedCommand)
@click.argument("corpus", nargs=-1)
@config_option
@schema_options(SweepOptions)
@schema_options(EncodeOptions, without=("store",))
@plan_option
@json_option
def sweep(plan: bool, **options: Any) -> None:
    """Measure widths, transforms, codecs and indexes side by side on a CORPUS; recommend one.

    With --queries and --qrels their judgements measure quality. Otherwise rows are held out of the
    indexes, and agreement with exact search of the raw embeddings is measured. Points that are in
    the results already are not measured again.
    """
    from whiten_index.measure.results import read_runs, recommend, titles
    from whiten_index.measure.sweep_config import SweepConfig
    from whiten_index.measure.sweep_report import require_own_reports, write_report
    from whiten_index.measure.sweep_run import plan_sweep, run_sweep

    config = SweepConfig(**given(options))
    if plan:
        found = plan_sweep(config, progress=terminal.Bars())
        terminal.show(found, ("plan (nothing was written)", *_plan_lines(found)))
        return
    require_own_reports(str(config.out))
    done = run_sweep(config, progress=terminal.Bars())
    report = write_report(str(config.out))
    said = {**done.to_json(), "report": named(report)}
    runs = read_runs(done.results)
    swept = [runs[run] for run in dict.fromkeys(said["runs"])]
    said["recommended"] = {
        name: {"why": advice.reason, "command": advice.command or None}
        for name, advice in zip(titles(swept).values(), map(recommend, swept), strict=True)
    }
    plain = "a page with charts needs: pip install 'whiten-index[plot]', then whiten-index report"
    notes = [f"{plain} {config.out}"] if report.suffix == ".md" else []
    facts = terminal.describe({**said, "skipped": None})
    terminal.show(said, [*facts, *_left_out(said)], notes=notes)


def _plan_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    names = {"ours": "of this package", "faiss": "of FAISS alone", "truncate": "truncated"}
    families = (f"{points:,} {names.get(n, n)}" for n, points in plan["by_family"].items())
    rows = [("rows", f"{plan['rows']:,}, of which {plan['to_encode']:,} are not in the store")]
    if seconds := plan["encode_seconds"]:
        rows.append(("encoding", f"about {terminal.duration(seconds)}"))
    rows.append(("settings", f"{plan['points']:,} to measure: {', '.join(families)}"))
    yield terminal.table(rows, indent="", numbers=False)
    yield from _left_out(plan)


def _left_out(said: Mapping[str, Any]) -> list[str]:
    from whiten_index.measure.results import by_reason

    return [f"left out: {line}" for line in by_reason(said["skipped"])]


@click.command()
@click.argument("folder", type=PATH)
def report(folder: str) -> None:
    """Rebuild the report of a sweep from FOLDER/results.jsonl alone; FOLDER may be a URI."""
    from whiten_index.measure.sweep_report import write_report

    click.echo(named(write_report(folder)))


@click.command(cls=GroupedCommand)
@click.argument("corpus", nargs=-1, required=True)
@click.option("--out", required=True, type=PATH, help="Folder of the model.")
@click.option(
    "--dev",
    type=PATH,
    help="File or folder with STS-B, whose dev split says which checkpoint is best.",
)
@schema_options(TrainingConfig)
@json_option
def train(corpus: tuple[str, ...], out: str, dev: str | None, **options: Any) -> None:
    """Train an encoder on the sentences of CORPUS, with contrast and group whitening.

    OUT becomes a folder that build --model and sentence-transformers load. Run the same command
    again to resume an interrupted training.
    """
    from whiten_index.training.train import train_encoder

    config = TrainingConfig(corpus=corpus, out=out, **given(options))
    terminal.show(train_encoder(config, pairs=dev, progress=terminal.Bars()).to_json())


def setting_options(*without: str) -> Callable[[Any], Any]:
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
    """Evaluate embeddings and their transforms: sts, retrieval, geometry.

    Correlations and shares are times 100.
    """


_pair_options: Callable[[Any], Any] = with_options(
    click.argument("data", nargs=-1, required=True),
    click.option("--set", "names", multiple=True, help="Only this set, such as STS12; repeatable."),
    click.option(
        "--split",
        "splits",
        multiple=True,
        callback=pairs,
        metavar="SET=SPLIT",
        help="The split that is used, or all; repeatable. [default: STS-B=test; all pairs of "
        "others]",
    ),
)
Figures = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def report_lines(report: Mapping[str, Any], title: str, figures: Figures) -> Iterator[str]:
    """Yield the encoder, the cells by ``figures`` of each set and space, the counts of each set."""
    # A run that is judged has no encoder.
    if facts := report["encoder"]:
        layers, how = "+".join(map(str, facts.get("layers", ["each"]))), ""
        if "pooling" in facts:
            how = f"{facts['pooling']} pooling of layer {layers}, "
            how += f"at most {facts['max_length']} tokens, "
        yield f"{facts['model']}: {how}{facts['dim']} dims"
    runs, names = report["runs"], list(report["datasets"])
    scored = {name: [run["datasets"][name] for run in runs] for name in names}
    if report.get("average") and len(names) > 1:
        scored["mean of sets"] = [run["average"] for run in runs]
    heads = list(figures(scored[names[0]][0]))
    rows = [(title, *heads)]
    for name, found in scored.items():
        rows.append((name, *[""] * len(heads)))
        for run, each in zip(runs, found, strict=True):
            cells = ("" if (n := figures(each).get(head)) is None else n for head in heads)
            shown = (f"{n:.2f}" if isinstance(n, float) else str(n) for n in cells)
            rows.append((f"  {_heading(run)}", *shown))
    yield terminal.table(rows)
    for name in names:
        counts: dict[str, int] = {}
        for key, count in (pair for each in scored[name] for pair in _counts(each)):
            counts[key] = max(count, counts.get(key, 0))
        yield from terminal.describe({name: counts})
        notes = (note for each in scored[name] for note in each.get("notes", ()))
        yield from (f"  note: {name}: {note}" for note in dict.fromkeys(notes))


def _heading(run: Mapping[str, Any]) -> str:
    """Return the name of a space with its width and what it was fitted on."""
    setting = run["setting"]
    name, k = str(run["name"]), setting.get("transform", {}).get("k")
    if k is not None and not name.endswith(f"= {k}"):
        name += f" ({k})"
    if setting.get("fit") not in (None, "index"):
        name += f", fitted on {setting['fit']}"
    return name


def _counts(figures: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, int]]:
    for name, value in figures.items():
        if isinstance(value, Mapping) and name != "subsets":
            yield from _counts(value, "" if name == "counts" else f"{name} ")
        elif type(value) is int:
            yield f"{above}{name}", value


def _config_and_pairs(
    options: dict[str, Any], *, unscored: bool = False
) -> "tuple[EvalConfig, list[StsSet]]":
    from whiten_index.evaluation.sts_sets import chosen_sets, read_sts
    from whiten_index.measure.eval_config import EvalConfig

    data, names, splits = (options.pop(each) for each in ("data", "names", "splits"))
    config = EvalConfig.from_options(given(options))
    return config, chosen_sets(read_sts(data, splits=splits, unscored=unscored), names)


@evaluate.command()
@_pair_options
@setting_options()
def sts(**options: Any) -> None:
    """Correlate the cosines of sentence pairs with gold scores, in all three aggregations.

    DATA are files of pairs (.parquet, .jsonl, or .tsv with a header line: sentence1, sentence2,
    score; dataset, subset, split where they have them) or folders of such. A set's figure is of
    all its pairs together (all), the mean over its subsets (mean), and that weighted by their
    pairs (wmean); papers differ in which they print. --json has Pearson's correlations too.
    """
    from whiten_index.measure.evaluate_sts import evaluate_sts

    config, sets = _config_and_pairs(options)
    report = evaluate_sts(config, sets, progress=terminal.Bars())
    terminal.show(report, report_lines(report, "spearman × 100", _correlations))


def _correlations(figures: Mapping[str, Any]) -> dict[str, Any]:
    interval = "{:.2f} to {:.2f}".format(*figures["interval"]) if "interval" in figures else None
    return {**figures["spearman"], "all, 95 %": interval}


@evaluate.command()
@_pair_options
@setting_options()
def geometry(**options: Any) -> None:
    """Measure how embeddings fill their space, raw and transformed.

    DATA are files of sentence pairs, as of sts, scored or not.
    Alignment is the mean squared distance of pairs with a score above 4, or of all without
    scores, uniformity log E exp(-2‖u - v‖²), both on unit length; lower is better. IsoScore is 0
    (one direction) to 1 (all even). The effective rank, 1 to the width, is how many directions
    are in use. 10,000 texts are measured at most, drawn from more. Transforms are fitted on all
    splits.
    """
    from whiten_index.measure.evaluate_sts import evaluate_geometry

    config, sets = _config_and_pairs(options, unscored=True)
    report = evaluate_geometry(config, sets, progress=terminal.Bars())
    terminal.show(report, report_lines(report, "", _shape))


def _shape(figures: Mapping[str, Any]) -> dict[str, str]:
    titles = {"alignment": "alignment", "uniformity": "uniformity", "IsoScore": "isoscore",
              "mean cosine": "mean_cosine", "effective rank": "effective_rank"}  # fmt: skip
    values = {title: figures[name] for title, name in titles.items()}
    return {title: "-" if each is None else f"{each:.3f}" for title, each in values.items()}


@evaluate.command()
@click.argument("data", nargs=-1)
@schema_options(RetrievalOptions)
# A search encodes its corpus, and fits on it.
@setting_options("fit")
def retrieval(data: tuple[str, ...], **options: Any) -> None:
    """Search judged queries exactly and judge what is found: nDCG, recall, MRR, MAP.

    DATA are folders in BEIR form: corpus, queries and qrels, each as Parquet, or corpus.jsonl,
    queries.jsonl and qrels/SPLIT.tsv. An index is built of each, whose transform is fitted on its
    corpus. Or --index is searched and judged by --queries and --qrels, or --run by --qrels. Judged
    are the split test of a folder, and all of a file, unless --qrels-split names another.
    """
    from whiten_index.measure.eval_config import RetrievalConfig
    from whiten_index.measure.evaluate_retrieval import evaluate_retrieval

    config = RetrievalConfig.from_options({**given(options), "sets": data})
    report = evaluate_retrieval(config, progress=terminal.Bars())

    def cells(each: Mapping[str, Any]) -> dict[str, Any]:
        limits = each.get("intervals", {})
        return {
            name: "{:.2f} ({:.2f} to {:.2f})".format(each[name], *limits[name])
            if name in limits
            else each.get(name)
            for name in config.metrics
        }

    terminal.show(report, report_lines(report, "× 100 (95 % interval)", cells))
