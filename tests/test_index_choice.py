"""The rule that chooses the index: within its budget, the most precise, and told in words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from whiten_index import BuildConfig, build_index, open_index
from whiten_index.assemble import IndexPlan
from whiten_index.assemble.examination import below_target
from whiten_index.build import BuildReport
from whiten_index.cli import cli
from whiten_index.errors import ConfigError
from whiten_index.index import (
    FactoryChoice,
    OperatingPoint,
    choose_factory,
    expected_bytes,
    inner_index,
    nprobe,
    parse_bytes,
)
from whiten_index.index.choice import CODECS, in_units, structure_of
from whiten_index.plan import plan_build
from whiten_index.publish import index_note

DIM, K, ROWS = 32, 16, 1_200


# ---------------------------------------------------------------------------------------- the rule


@pytest.mark.parametrize(
    ("rows", "target", "structure"),
    [
        (1, 0.95, "flat"),
        (200_000, 0.999, "flat"),
        (200_001, 0.95, "ivf"),
        (200_001, 0.989, "ivf"),
        (200_001, 0.99, "hnsw"),
    ],
)
def test_the_table_of_structures(rows: int, target: float, structure: str) -> None:
    assert structure_of(rows=rows, target_recall=target) == structure


@pytest.mark.parametrize(
    ("rows", "target", "built"),
    [
        (100, 0.95, "Flat"),
        (200_000, 0.99, "Flat"),
        (237_766, 0.95, "IVF1948,Flat"),
        (237_766, 0.99, "HNSW32"),
    ],
)
def test_without_a_budget_vectors_stay_float32(rows: int, target: float, built: str) -> None:
    choice = choose_factory("auto", rows=rows, dim=384, k=128, target_recall=target)
    assert (choice.built, choice.rerank) == (built, None)
    assert choice.expected == expected_bytes(built, rows=rows, dim=384, k=128)


@pytest.mark.parametrize(("rows", "target"), [(50_000, 0.95), (500_000, 0.95), (500_000, 0.99)])
def test_more_budget_is_spent_on_precision_and_never_exceeded(rows: int, target: float) -> None:
    least = error_budget(rows, target)
    precisions = []
    for budget in np.geomspace(least, 4 * 4 * 256 * rows, 30):
        choice = choose_factory(
            "auto", rows=rows, dim=384, k=256, budget=int(budget) + 1, target_recall=target
        )
        assert choice.expected.total <= budget + 1
        graph = "HNSW" in choice.built
        code = re.split("[,_]", choice.built)[-1]
        code = "Flat" if code == "HNSW32" else code
        order = [codec.over(256) for codec in CODECS]
        precisions.append((-graph if target >= 0.99 else 0, order.index(code)))
        assert (choice.rerank is not None) == (code in order[3:])
    assert precisions == sorted(precisions, reverse=True)
    assert len(set(precisions)) >= 5


def error_budget(rows: int, target: float) -> int:
    """Return the least budget, as the error names it."""
    with pytest.raises(ConfigError, match="holds no index") as caught:
        choose_factory("auto", rows=rows, dim=384, k=256, budget=1_000, target_recall=target)
    found = re.search(r"the least takes ([\d,]+) bytes", str(caught.value))
    assert found is not None
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize(
    ("rows", "width", "budget"),
    [(100_000, 256, 2_000_000), (3_000, 21, 30_000), (100_000, 33, 800_000)],
)
def test_what_the_error_names_fits(rows: int, width: int, budget: int) -> None:
    def choose(k: int, within: int = budget) -> FactoryChoice:
        return choose_factory("auto", rows=rows, dim=384, k=k, budget=within)

    with pytest.raises(ConfigError) as caught:
        choose(width)
    found = re.search(r"--k (\d+), or a budget of ([\d.]+\w+),", str(caught.value))
    assert found is not None
    assert choose(int(found[1])).expected.total <= budget
    for wider in range(int(found[1]) + 1, width):
        with pytest.raises(ConfigError):
            choose(wider)
    choose(width, parse_bytes(found[2]))


def test_where_no_width_fits_none_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_factory("auto", rows=100_000, dim=384, k=256, budget=100)
    assert "--k" not in str(caught.value)


def test_an_odd_width_has_no_product_codes() -> None:
    choice = choose_factory("auto", rows=10_000, dim=64, k=33, budget=200_000)
    assert choice.built == "RaBitQ"


def test_a_factory_that_is_named_is_taken() -> None:
    choice = choose_factory("IVF64,SQ8", rows=5_183, dim=384, k=128)
    assert (choice.asked, choice.built, choice.rerank) == ("IVF64,SQ8", "IVF64,SQ8", None)
    assert "named" in choice.why


def test_lists_whose_centroids_alone_exceed_the_budget_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"bytes of centroids .*fewer lists, or a budget of"):
        choose_factory("IVF200000,SQ8", rows=10**6, dim=384, k=128, budget=10**7)


# ----------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30), ("512MB", 512_000_000), ("1.5 kib", 1_536), ("7", 7), (9, 9),
        ("2k", 2_000), ("3 TiB", 3 << 40), ("10B", 10), ("0.5M", 500_000),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "0", "4 XB", "1e9", "0.1", "four", "1,000", -5, "9" * 400, "9e9GB"]
)
def test_what_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(ConfigError, match=r"--memory-budget '.*' is no size; .*4GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("size", [1, 999, 10_000, 123_456, 10**7 + 1, 3 * 10**9, 10**13])
def test_sizes_in_words_are_no_less(size: int) -> None:
    assert size <= parse_bytes(in_units(size)) <= 1.02 * size


# ---------------------------------------------------------------------------------------- builds


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "c.parquet"
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((ROWS, DIM)) * np.linspace(2, 0.5, DIM)).astype(np.float32)
    pq.write_table(pa.table({"id": np.arange(ROWS), "embedding": list(rows)}), path)
    return path


def config(corpus: Path, out: Path, **more: Any) -> BuildConfig:
    return BuildConfig(
        corpus=(str(corpus),), embedding_column="embedding", id_column="id", out=str(out),
        **{"whiten": "pca", "k": K, "store": str(corpus.parent / "store"), **more},
    )  # fmt: skip


class Notes:
    """Keeps what a build tells, in its order."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def start(self, stage: str, total: int) -> None:
        self.heard.append(stage)

    def advance(self, rows: int) -> None:
        pass

    def finish(self, stage: str, seconds: float) -> None:
        pass

    def note(self, message: str) -> None:
        self.heard.append(message)


def build(corpus: Path, out: Path, **more: Any) -> BuildReport:
    return build_index(config(corpus, out, **more))


@pytest.mark.parametrize(
    ("budget", "built", "reranked"),
    [
        (None, "Flat", False),
        ("100KB", "Flat", False),
        ("50KB", "SQfp16", False),
        ("30KB", "SQ8", False),
        ("15KB", "PQ8x4fs", True),
    ],
)
def test_auto_builds_what_fits_and_keeps_why(
    tmp_path: Path, corpus: Path, budget: str | None, built: str, reranked: bool
) -> None:
    fields = build(corpus, tmp_path / "out", memory_budget=budget).manifest
    factory, sizes = fields["factory"], fields["bytes"]
    assert (factory["asked"], factory["built"]) == ("auto", built)
    assert (factory["rerank"] is not None) == reranked
    assert factory["expected_bytes"] == sizes["index"]
    assert budget is None or sizes["index"]["total"] <= parse_bytes(budget)
    assert "1,200 rows" in factory["why"]
    assert len(open_index(str(tmp_path / "out")).bundle) == ROWS


def test_the_choice_is_told_before_the_work(tmp_path: Path, corpus: Path) -> None:
    watcher = Notes()
    build_index(config(corpus, tmp_path / "out", memory_budget="30KB"), progress=watcher)
    told = next(note for note in watcher.heard if note.startswith("index SQ8: "))
    assert watcher.heard.index(told) < watcher.heard.index("train")
    choice = choose_factory("auto", rows=ROWS, dim=DIM, k=K, budget=30_000)
    assert told == index_note(choice)
    assert f"{choice.expected.total:,} bytes expected (codes 19,200, matrix" in told


@pytest.mark.parametrize(
    ("limit", "factory", "told"),
    [
        (9, "HNSW8", "9 rows are too few to hold any out"),
        (40, "IVF40,Flat", "it learns from every row; fewer lists leave some"),
        (40, "IVF4,Flat", None),
        (40, "Flat", None),
    ],
)
def test_what_cannot_be_set_to_the_recall_asked_for_is_told(
    tmp_path: Path, corpus: Path, limit: int, factory: str, told: str | None
) -> None:
    watcher = Notes()
    build_index(
        config(corpus, tmp_path / "out", factory=factory, limit=limit, k=2, whiten="pca"),
        progress=watcher,
    )
    notes = [note for note in watcher.heard if "is not set to --target-recall" in note]
    assert len(notes) == (told is not None)
    assert told is None or told in notes[0]


def test_a_plan_tells_the_same(tmp_path: Path, corpus: Path) -> None:
    plan = plan_build(config(corpus, tmp_path / "out", memory_budget="30KB"))
    choice = choose_factory("auto", rows=ROWS, dim=DIM, k=K, budget=30_000)
    assert (plan.factory, plan.why, plan.rerank) == (choice.built, choice.why, None)
    assert plan.index_bytes == choice.expected.to_json()
    assert not (tmp_path / "out" / "versions").exists()
    with pytest.raises(ConfigError, match="holds no index of 1,200 vectors"):
        plan_build(config(corpus, tmp_path / "out", memory_budget="1KB"))


def test_rows_held_out_are_not_trained_on(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whiten_index.assemble import examination

    drawn: list[Any] = []
    real = examination.draw_rows

    def spy(*arguments: Any) -> Any:
        drawn.append(real(*arguments))
        return drawn[-1]

    monkeypatch.setattr(examination, "draw_rows", spy)
    tuned = build(corpus, tmp_path / "out", factory="IVF16,SQ8").manifest["factory"]["tuned"]
    ((sample, held_out),) = drawn
    assert not {*sample.tolist()} & {*held_out.tolist()}
    assert len(sample) + len(held_out) == ROWS
    assert len(held_out) == ROWS // 10
    assert tuned["queries"] == len(held_out)
    assert tuned["reached"]
    assert tuned["recall"] >= 0.95


def test_a_higher_target_looks_into_more_lists_and_is_another_version(
    tmp_path: Path, corpus: Path
) -> None:
    found = [
        build(corpus, tmp_path / "out", factory="IVF32,Flat", target_recall=target)
        for target in (0.5, 0.99, 0.99)
    ]
    low, high, again = (report.manifest["factory"]["nprobe"] for report in found)
    assert low < high == again
    assert found[0].version != found[1].version == found[2].version
    index = open_index(str(tmp_path / "out")).bundle.index
    assert nprobe(index) == high


def test_a_target_means_nothing_to_exact_search(tmp_path: Path, corpus: Path) -> None:
    first = build(corpus, tmp_path / "out", factory="Flat", target_recall=0.9)
    second = build(corpus, tmp_path / "out", factory="Flat", target_recall=0.99)
    assert second.up_to_date
    assert first.version == second.version
    assert first.manifest["factory"]["tuned"]["recall"] is None


def test_a_codec_below_the_target_is_noted(tmp_path: Path, corpus: Path) -> None:
    watcher = Notes()
    build_index(config(corpus, tmp_path / "out", factory="PQ4x4"), progress=watcher)
    told = next(note for note in watcher.heard if note.startswith("note: PQ4x4 finds"))
    assert re.search(r"below --target-recall 0.95 \(\d+ vectors held out\).*--rerank.*SQ8", told)


@pytest.mark.parametrize(("budget", "advised"), [(None, True), (15_000, False)])
def test_what_is_scored_again_already_is_not_told_to_be(budget: int | None, advised: bool) -> None:
    choice = choose_factory("auto", rows=ROWS, dim=DIM, k=K, budget=budget)
    point = OperatingPoint(recall=0.5, target=0.95, queries=9)
    told = below_target(IndexPlan(choice, seed=0), point)
    assert "50.0% of the exact neighbours" in told
    assert ("scoring candidates again" in told) == advised


@pytest.mark.parametrize(
    ("factory", "least"), [("IVF2000,Flat", 2_000), ("PQ4x12", 4_096), ("IVF4,PQ4x11", 2_048)]
)
def test_too_few_rows_to_train_are_told_before_encoding(
    tmp_path: Path, corpus: Path, factory: str, least: int
) -> None:
    store = tmp_path / "store"
    told = rf"cannot train '{factory}' on 1200 rows: it learns {least} centroids .*fewer lists"
    with pytest.raises(ConfigError, match=told):
        build(corpus, tmp_path / "out", factory=factory, store=str(store))
    assert not list(store.glob("*/shards/*"))


def test_training_on_few_rows_is_noted_and_faiss_is_silent(
    tmp_path: Path, corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    watcher = Notes()
    build_index(config(corpus, tmp_path / "out", factory="PQ4"), progress=watcher)
    assert any("codes of 256 values are learned from 1080 rows" in note for note in watcher.heard)
    assert "WARNING" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"target_recall": 0.0}, "--target-recall takes a share"),
        ({"target_recall": 1.5}, "--target-recall takes a share"),
        ({"target_recall": float("nan")}, "--target-recall takes a share"),
        ({"memory_budget": "much"}, "--memory-budget 'much' is no size"),
        ({"memory_budget": 0}, "--memory-budget '0' is no size"),
        ({"index_device": "tpu"}, "--index-device 'tpu' is unknown; use auto, cpu, gpu"),
    ],
)
def test_settings_are_checked_at_once(corpus: Path, setting: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config(corpus, Path("out"), **setting)


# ------------------------------------------------------------------------- budgets before encoding


def shards_of(store: Path) -> list[Path]:
    return list(store.glob("*/shards/*"))


@pytest.mark.parametrize(
    "setting",
    [{}, {"k": None}, {"whiten": "auto", "k": None}, {"factory": "HNSW32"}],
    ids=["k named", "k by default", "k chosen", "factory named"],
)
def test_a_budget_that_nothing_fits_is_told_before_encoding(
    tmp_path: Path, corpus: Path, setting: dict[str, Any]
) -> None:
    store = tmp_path / "store"
    with pytest.raises(ConfigError, match=r"holds no index of 1,200 vectors|made in memory"):
        build(corpus, tmp_path / "out", memory_budget="5KB", store=str(store), **setting)
    assert shards_of(store) == []


def test_rows_that_a_filter_may_leave_out_are_not_counted_before_they_are_read(
    tmp_path: Path, corpus: Path
) -> None:
    settled = {"memory_budget": "5KB", "store": str(tmp_path / "store")}
    fields = build(corpus, tmp_path / "out", row_filter="id < 50", **settled).manifest
    assert fields["rows"] == 50
    with pytest.raises(ConfigError, match="holds no index of 1,190 vectors"):
        build(corpus, tmp_path / "out", row_filter="id >= 10", **settled)
    assert len(shards_of(tmp_path / "store")) > 1


def test_a_plan_takes_the_widest_that_fits_where_k_is_chosen(tmp_path: Path, corpus: Path) -> None:
    # 1,200 rows: binary codes of 32 dims and the transforms take some 19 KB.
    settled = {"whiten": "auto", "k": None, "memory_budget": "17KB"}
    plan = plan_build(config(corpus, tmp_path / "out", **settled))
    assert (plan.k, plan.k_settled) == (16, False)
    assert plan.index_bytes["total"] <= 17_000
    built = build(corpus, tmp_path / "out", **settled).manifest
    assert built["factory"]["built"] == plan.factory
    assert plan_build(config(corpus, tmp_path / "out", whiten="auto", k=None)).k == DIM


def test_a_plan_takes_a_share_of_variance_as_what_may_fit(tmp_path: Path, corpus: Path) -> None:
    plan = plan_build(config(corpus, tmp_path / "out", k=0.5, memory_budget="17KB"))
    assert (plan.k, plan.k_settled) == (16, False)
    assert plan_build(config(corpus, tmp_path / "out", k=0.5, memory_budget="1MB")).k == DIM


# ------------------------------------------------------------------------------ recall of the codec


@pytest.mark.parametrize(
    ("budget", "target", "codec", "reranked"),
    [
        ("100KB", 1.0, "Flat", False),
        ("50KB", 0.999, "SQfp16", False),
        ("50KB", 1.0, "SQfp16", True),
        ("30KB", 0.99, "SQ8", False),
        ("30KB", 0.995, "SQ8", True),
    ],
)
def test_a_codec_below_the_recall_asked_for_has_its_candidates_scored_again(
    budget: str, target: float, codec: str, reranked: bool
) -> None:
    choice = choose_factory(
        "auto", rows=ROWS, dim=DIM, k=K, budget=parse_bytes(budget), target_recall=target
    )
    assert choice.built == codec
    assert choice.rerank == (50 if reranked else None)
    assert ("scored again from the store as its own scores find" in choice.why) == reranked
    assert choice.expected_recall is not None
    assert choice.expected_recall >= target


def test_candidates_of_a_precise_codec_are_tuned_and_used(tmp_path: Path, corpus: Path) -> None:
    report = build(corpus, tmp_path / "out", memory_budget="30KB", target_recall=1.0)
    factory = report.manifest["factory"]
    assert (factory["built"], factory["rerank"]) == ("SQ8", 20)
    assert (factory["tuned"]["recall"], factory["tuned"]["reached"]) == (1.0, True)
    opened = open_index(str(tmp_path / "out"))
    assert opened.reranker is not None
    assert opened.reranker.candidates == 20


def test_the_help_tells_what_auto_does() -> None:
    told = " ".join(CliRunner().invoke(cli, ["build", "--help"]).stdout.split())
    assert "exact search up to 200,000 rows, then lists (IVF), or a graph (HNSW)" in told
    assert "--target-recall of 0.99 or more" in told


def test_an_index_larger_than_the_machine_is_refused_without_a_budget() -> None:
    for factory in ("HNSW100000000", "Flat", "auto"):
        rows = 3_000 if factory.startswith("HNSW") else 10**12
        with pytest.raises(ConfigError, match=r"bytes of memory, and this machine has .*budget"):
            choose_factory(factory, rows=rows, dim=32, k=16)


@pytest.mark.parametrize(
    "refined", ["PQ8x4fs", "PQ8x4,RFlat", "IVF16,Flat", "RaBitQfs", "NSG8", "PCA8,SQ8", "HNSW8"]
)
def test_refining_by_what_compares_no_single_rows_is_refused(refined: str) -> None:
    with pytest.raises(ConfigError, match=r"refine by codes, such as RFlat|transform of its own"):
        inner_index(f"PQ8x4,Refine({refined})", 16)
    assert inner_index("PQ8x4,Refine(SQ8)", 16) is not None
