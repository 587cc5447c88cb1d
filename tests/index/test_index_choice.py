"""The rule that chooses the index: within its budget, the most precise, and told in words."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import builds
from tests.helpers.builds import write_rows
from whiten_index import open_index
from whiten_index.errors import ConfigError
from whiten_index.index.choice import CODECS, IndexPlan, choose_factory
from whiten_index.index.factory import inner_index
from whiten_index.options import parse_bytes
from whiten_index.pipeline.build import BuildReport

DIM, K, ROWS = 32, 16, 1_200


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
        order = [codec.factory for codec in CODECS]
        precisions.append((-graph if target >= 0.99 else 0, order.index(code)))
        # Of 6 bits, lists leave too little.
        alone = order[: 4 if rows == 50_000 else 3 if target < 0.99 else 2]
        assert (choice.rerank is None) == (code in alone)
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
    def choose(k: int, within: int = budget) -> IndexPlan:
        return choose_factory("auto", rows=rows, dim=384, k=k, budget=within)

    with pytest.raises(ConfigError) as caught:
        choose(width)
    found = re.search(r"a budget of ([\d.]+\w+),", str(caught.value))
    assert found is not None
    choose(width, parse_bytes(found[1]))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30), ("512MB", 512_000_000), ("1.5 kib", 1_536), ("7", 7), (9, 9),
        ("2k", 2_000), ("3 TiB", 3 << 40), ("10B", 10), ("0.5M", 500_000),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "c.parquet"
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((ROWS, DIM)) * np.linspace(2, 0.5, DIM)).astype(np.float32)
    write_rows(path, rows)
    return path


def build(corpus: Path, out: Path, **more: Any) -> BuildReport:
    given = {"whiten": "pca", "k": K, "store": str(corpus.parent / "store"), **more}
    return builds.build(out, str(corpus), **given)


@pytest.mark.parametrize(
    ("budget", "built", "reranked"),
    [
        (None, "Flat", False),
        ("100KB", "Flat", False),
        ("50KB", "SQfp16", False),
        ("30KB", "SQ8", False),
        ("15KB", "SQtqmse4", True),
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


FEW = "cannot train '{}' on 1200 rows: it learns {} centroids .*fewer lists"
SMALL = "holds no index of 1,200|made in memory.*or lists"


@pytest.mark.parametrize(("setting", "said"), [
    *(
        ({"factory": factory}, FEW.format(factory, least))
        for factory, least in {"IVF2000,Flat": 2000, "PQ4x12": 4096, "IVF4,PQ4x11": 2048}.items()
    ),
    *(
        ({"memory_budget": "5KB", **more}, SMALL)
        for more in ({}, {"k": None}, {"whiten": "auto", "k": None}, {"factory": "HNSW32"},
                     {"factory": "Flat"}, {"factory": "SQ8"})
    ),
])  # fmt: skip
def test_no_index_is_refused_before_encoding(
    tmp_path: Path, corpus: Path, setting: dict[str, Any], said: str
) -> None:
    store = tmp_path / "store"
    with pytest.raises(ConfigError, match=said):
        build(corpus, tmp_path / "out", store=str(store), **setting)
    assert not list(store.glob("*/segments/*"))


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


@pytest.mark.parametrize("factory", ["SQ8,RFlat", "PQ8x4,Refine(SQ8)", "IVF4,SQ8,RFlat", "NSG8"])
def test_refinements_and_other_graphs_are_refused(factory: str) -> None:
    with pytest.raises(ConfigError, match="use HNSW32, or score candidates again from the store"):
        inner_index(factory, 16)
