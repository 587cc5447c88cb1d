"""The papers' tables on a tiny model: what runs, what does not and why, and that figures hold."""

import csv
import json
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from pipelines import reproduce_papers, train_whitenedcse
from pipelines.papers import models
from pipelines.papers.published import COLUMNS, read_published
from pipelines.papers.recipes import Kind, Measure, Recipe, Refusal
from pipelines.papers.settings import recipe_of
from pipelines.papers.transfer import transfer
from tests.helpers.bad_input import run as cli
from whiten_index import load_encoder
from whiten_index.cli import cli as command_line

YEAR = {"STS12": ("MSRpar", "MSRvid"), "STS13": ("FNWN", "OnWN")}
SPLIT = {"STSB": ("train", "dev", "test"), "SICKR": ("train", "test")}
PAIRS = 36
WB, BW, CSE = "WhiteningBERT", "BERT-whitening", "WhitenedCSE"
RAW, WHITE = "token=AVG, layer=L1+L12, whitening=F", "token=AVG, layer=L1+L12, whitening=T"
OURS, LI = "measured by the paper", "Published in (Li et al., 2020)"
STS = {"STS-B": 60.0, "SICK-R": 61.0, "STS12": 62.0, "STS13": 63.0, "Avg": 61.5}
# source, table, model, setting, metric, published figures
PUBLISHED: list[tuple[str, str, str, str, str, dict[str, float]]] = [
    (WB, "Table 1", "baseline", "SIF (GloVe+WR) (Arora et al., 2017)", "spearman", {"STS12": 56.2}),
    (WB, "Table 1", "BERT-base", "token=CLS, layer=L12, whitening=F", "spearman", STS),
    (WB, "Table 1", "BERT-base", RAW, "spearman", STS),
    (WB, "Table 1", "BERT-base", WHITE, "spearman", STS),
    (WB, "Table 2", "XLM-large", "token=AVG, layer=first+last, whitening=T", "spearman", STS),
    (WB, "Table 3", "GPT-3 (125M)", "RTE dev, threshold 0.5", "accuracy", {"RTE": 47.7}),
    (WB, "Table 3", "whiteningBERT (PLM=BERT)", "RTE dev, threshold 0.5", "accuracy", {"RTE": 52}),
    (BW, "Table 1", "BERTbase-first-last-avg", LI, "spearman", STS),
    (BW, "Table 1", "BERTbase-flow (target)", LI, "spearman", STS),
    (BW, "Table 1", "BERTbase-whitening-8 (target)", OURS, "spearman", {"STS12": 63.0}),
    (BW, "Table 1", "BERTlarge-whitening-384 (target)", OURS, "spearman", {"STS12": 64.0}),
    (BW, "Table 1", "BERTbase-whitening-8 (NLI)", OURS, "spearman", {"STS12": 61.0}),
    (CSE, "Table 1", "BERT _{base} (first-last avg.)", "", "spearman", {"STS12": 39.7}),
    (CSE, "Table 1", "SimCSE-BERT _{base}", "", "spearman", {"STS12": 68.4}),
    (CSE, "Table 2", "Avg. BERT embeddings", "", "accuracy", {"MR": 78, "TREC": 92, "Avg": 85}),
    (CSE, "Table 5", "BERT-base", "positives m=2", "spearman", {"Avg": 77.81}),
]  # fmt: skip


def write_published(path: Path, rows: list[Any] | None = None) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for *about, figures in PUBLISHED if rows is None else rows:
            writer.writerows([*about, name, value] for name, value in figures.items())
    return path


@dataclass
class Place:
    """Where a job reads and writes."""

    root: Path
    data: Path
    published: Path
    stand_in: Path

    def run(
        self, *options: Any, stand_in: bool = True, work: str = "work"
    ) -> tuple[int, list[Any]]:
        given = ["--published", self.published, "--data", self.data, "--work", self.root / work]
        given += ["--stand-in", self.stand_in] if stand_in else []
        arguments = [self.root / "out", *given, *options]
        done = CliRunner().invoke(reproduce_papers.main, list(map(str, arguments)))
        return done.exit_code, [json.loads(line) for line in done.stdout.splitlines()]

    def results(self) -> dict[str, Any]:
        text = (self.root / "out" / "papers.json").read_text()
        return json.loads(text, parse_constant=pytest.fail)  # NaN is no JSON


@pytest.fixture(scope="module")
def pairs(tiny_words) -> dict[str, list[Any]]:
    rng = np.random.default_rng(0)
    rows = []
    groups = [(name, subset, "test") for name, subsets in YEAR.items() for subset in subsets]
    groups += [(name, "", split) for name, splits in SPLIT.items() for split in splits]
    for dataset, subset, split in groups:
        for _ in range(PAIRS if subset != "MSRvid" else PAIRS // 2):
            first = list(rng.choice(tiny_words, 7))
            # Never all seven: cosines of 1 tie, and rounding then ranks them.
            same = int(rng.integers(0, 7))
            fresh = [word for word in tiny_words if word not in first]
            second = [*first[:same], *rng.choice(fresh, 7 - same)]
            score = same * 5 / 7 + rng.normal(0, 0.3)
            rows.append((dataset, subset, split, " ".join(first), " ".join(second), score))
    names = ("dataset", "subset", "split", "sentence1", "sentence2", "score")
    return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


@pytest.fixture(scope="module")
def place(tmp_path_factory, pairs, tiny_words, tiny_model) -> Place:
    root = tmp_path_factory.mktemp("papers")
    rng = np.random.default_rng(1)
    (root / "data" / "sts").mkdir(parents=True)
    (root / "data" / "senteval").mkdir()
    pq.write_table(pa.table(pairs), root / "data" / "sts" / "sts_raw.parquet")

    def texts(count: int) -> list[str]:
        return [" ".join(rng.choice(tiny_words, 5)) for _ in range(count)]

    tasks = {
        "mr": {"text": texts(40), "label": [0, 1] * 20, "split": ["all"] * 40},
        "trec": {"text": texts(60), "label": [0, 1, 2] * 20,
            "split": ["train"] * 45 + ["test"] * 15},
        "rte": {"sentence1": texts(60), "sentence2": texts(60), "label": [0, 1] * 30,
            "split": ["train"] * 40 + ["dev"] * 20},
    }  # fmt: skip
    for name, columns in tasks.items():
        pq.write_table(pa.table(columns), root / "data" / "senteval" / f"{name}.parquet")
    return Place(root, root / "data", write_published(root / "published.csv"), tiny_model)


@pytest.fixture(scope="module")
def whole(place) -> tuple[dict[str, Any], list[Any]]:
    """The results of a run over everything with a stand-in, and its log."""
    status, lines = place.run()
    assert (status, lines[-1]["event"]) == (0, "finished"), lines[-1]
    return place.results(), lines


@pytest.fixture
def unreported(monkeypatch):
    """Leave out the Markdown and the drawings, which other tests are of."""
    monkeypatch.setattr(reproduce_papers, "write_papers", lambda _, folder: folder)


def rows_of(results: dict[str, Any], source: str, table: str) -> dict[tuple[str, str], Any]:
    (found,) = [t for t in results["tables"] if (t["source"], t["table"]) == (source, table)]
    return {(row["model"], row["setting"]): row for row in found["rows"]}


@pytest.mark.parametrize(
    ("source", "table", "model", "dataset"),
    [
        (WB, "Table 1", "BERT-base", "STS13"),
        (BW, "Table 1", "BERTbase-whitening-8 (target)", "STS12"),
        (BW, "Table 1", "BERTlarge-whitening-384 (target)", "STS12"),
        (CSE, "Table 2", "Avg. BERT embeddings", "MR"),
    ],
)
def test_the_command_of_a_row_gives_its_figures(whole, source, table, model, dataset):
    rows = [row for (name, _), row in rows_of(whole[0], source, table).items() if name == model]
    assert rows
    for row in rows:
        program, *arguments = shlex.split(row["command"])
        main = {"whiten-index": command_line, "python": transfer}[program]
        ended = CliRunner().invoke(main, arguments[2 * (main is transfer) :])
        assert ended.exit_code == 0, ended.output
        printed = json.loads(ended.stdout)["datasets"]
        found = printed.get(dataset) or printed[dataset.lower()]
        by_set = row["figures"][dataset]
        if "spearman" in found:
            figures = {how: by_set[how] for how in ("all", "mean", "wmean")}
            assert found["spearman"] == pytest.approx(figures, abs=1e-3)
        else:
            assert found["accuracy"] == pytest.approx(by_set["ours"])


def test_rte_is_scored_by_the_cosine_on_dev(whole, place):
    (row,) = [
        row for row in rows_of(whole[0], WB, "Table 3").values() if row["status"] == "stand-in"
    ]
    task = pq.read_table(place.data / "senteval" / "rte.parquet").to_pydict()
    encoder = load_encoder(str(place.stand_in), pooling="first-last-avg", max_length=32)
    sides = [encoder.encode(task[name]).astype(float) for name in ("sentence1", "sentence2")]
    rows = np.concatenate(sides)
    values, vectors = np.linalg.eigh(np.cov(rows.T, ddof=0))
    kept = values > 1e-10 * values[-1]
    u, v = ((side - rows.mean(0)) @ vectors[:, kept] * values[kept] ** -0.5 for side in sides)
    cosines = (u * v).sum(1) / np.sqrt((u * u).sum(1) * (v * v).sum(1))
    dev = np.array(task["split"]) == "dev"
    right = (cosines >= 0.5) == (np.array(task["label"]) == 0)
    assert row["figures"]["RTE"]["ours"] == pytest.approx(100 * right[dev].mean())
    assert shlex.split(row["command"])[-2:] == ["--stand-in", str(place.stand_in)]


@pytest.fixture(scope="module")
def trained(place) -> Path:
    """Two seeds of a training, whose rows are of two tables of the paper."""
    (place.root / "sweep.toml").write_text(
        "seeds = [0, 1]\n[base]\nbatch_size = 8\nmax_steps = 2\neval_steps = 1\ngroups = 8\n"
        f'device = "cpu"\nmodel = "{place.stand_in}"\npooling = "mean"\n'
        '[[runs]]\ntable = "Table 5"\nname = "positives m=2"\n'
        '[[runs]]\ntable = "Table 1"\nname = "WhitenedCSE-BERT-base"\n'
    )
    texts = pq.read_table(place.data / "senteval" / "mr.parquet", columns=["text"])
    pq.write_table(texts, place.root / "sentences.parquet")
    rows = pq.read_table(place.data / "sts" / "sts_raw.parquet").to_pylist()
    named = [{**row, "dataset": "STS-B"} for row in rows if row["dataset"] == "STSB"]
    pq.write_table(pa.Table.from_pylist(named), place.root / "dev.parquet")
    out = place.root / "trained"
    arguments = [place.root / "sweep.toml", place.root / "sentences.parquet", "--out", out]
    arguments += ["--dev", place.root / "dev.parquet", "--keep-models"]
    done = CliRunner().invoke(train_whitenedcse.main, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return out


def test_rows_of_whitened_cse_run_with_what_was_trained_for_them(
    place, trained, unreported, tmp_path
):
    rows = [
        (CSE, "Table 5", "BERT-base", "positives m=2", "spearman", {"STS12": 77.0}),
        (CSE, "Table 5", "BERT-base", "positives m=5", "spearman", {"STS12": 77.0}),
        (CSE, "Table 1", "WhitenedCSE-BERT _{base}", "", "spearman", {"STS12": 74.0}),
        (CSE, "Table 2", "WhitenedCSE-BERT _{base}", "", "accuracy", {"MR": 80.0}),
    ]
    published = write_published(tmp_path / "published.csv", rows)
    status, lines = place.run("--trained", trained, "--published", published)
    assert (status, lines[-1]["rows"]) == (0, {"ran": 0, "stand-in": 3, "not run": 1})
    results = place.results()
    row = rows_of(results, CSE, "Table 5")[("BERT-base", "positives m=2")]
    done = [json.loads(line) for line in (trained / "results.jsonl").open()]
    best = max(done, key=lambda each: each["stsb_dev"])
    assert Path(row["ran_with"]) == trained / "models" / best["key"]
    assert row["why"].startswith(
        f"trained here from {place.stand_in}, and not from bert-base-uncased; "
    )
    (note,) = row["notes"]
    assert note.endswith(f"seed {best['options']['seed']}, the best of 2 seeds on STS-B dev")
    ended, out, error = cli(*shlex.split(row["command"])[1:])
    assert ended == 0, error
    figure = json.loads(out)["datasets"]["STS12"]["spearman"]["all"]
    assert row["figures"]["STS12"]["ours"] == pytest.approx(figure, abs=1e-3)
    other = rows_of(results, CSE, "Table 1")[("WhitenedCSE-BERT _{base}", "")]
    assert other["figures"]["STS12"]["ours"] == row["figures"]["STS12"]["ours"]
    task = rows_of(results, CSE, "Table 2")[("WhitenedCSE-BERT _{base}", "")]
    assert 0 <= task["figures"]["MR"]["ours"] <= 100


def test_word_vectors_run_the_rows_of_words(place, unreported, tiny_words, tmp_path):
    rng = np.random.default_rng(2)
    vectors, counts = tmp_path / "glove.txt", tmp_path / "counts.txt"
    lines = (" ".join([word, *map(str, rng.standard_normal(6))]) for word in tiny_words)
    vectors.write_text("\n".join(lines) + "\n")
    counts.write_text("".join(f"{word} {10 + i}\n" for i, word in enumerate(tiny_words)))
    options = ("--word-vectors", vectors, "--word-counts", counts, "--only", f"{WB}:Table 1")
    assert place.run(*options)[0] == 0
    row = next(iter(rows_of(place.results(), WB, "Table 1").values()))
    assert (row["status"], row["ran_with"]) == ("ran", str(vectors))
    assert "Pearson" in row["notes"][0]
    assert f"--word-vectors {vectors} --word-counts {counts}" in row["command"]
    assert -100 <= row["figures"]["STS12"]["ours"] <= 100


def test_the_tables_and_drawings_are_written(whole, place):
    page = Path(whole[1][-1]["report"])
    assert page == place.root / "out" / "papers.md"
    assert "XLM-large" in page.read_text()
    drawn = {path.stem for path in (page.parent / "figures").iterdir()}
    assert drawn == {figure["id"] for figure in whole[0]["figures"]}


@pytest.mark.data
def test_every_published_row_has_a_recipe_or_a_reason(data):
    path = data.parent / "reference" / "published_scores.csv"
    rows = read_published(path)
    found = {
        (row.source, row.table, row.model, row.setting, row.metric): recipe_of(row) for row in rows
    }
    unknown = [key for key, r in found.items() if isinstance(r, Refusal) and "no setting" in r.why]
    assert not unknown
    recipes = [r for r in found.values() if isinstance(r, Recipe)]
    counts = Counter(key[:2] for key, recipe in found.items() if isinstance(recipe, Recipe))
    # Counted by hand in the papers: all but baselines of other methods, flows and trained rows.
    assert counts.items() >= {
        (WB, "Table 1"): 22, (WB, "Table 2"): 48, (WB, "Table 3"): 1, (BW, "Table 1"): 15,
        (BW, "Table 2"): 16, (CSE, "Table 1"): 10, (CSE, "Table 2"): 7,
    }.items()  # fmt: skip
    assert {r.hub for r in recipes if r.kind is Kind.ENCODER} >= set(models.PRETRAINED.values())
    assert {r.setting.measure for r in recipes} == set(Measure)
    assert {r.setting.aggregation for r in recipes} <= {"all", "mean", "wmean"}
    assert all(r.hub is None for r in recipes if r.kind is Kind.WORDS)
