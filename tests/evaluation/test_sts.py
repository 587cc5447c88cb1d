"""Sets of pairs: how they are read, and their figures against scipy."""

from unittest.mock import MagicMock

import numpy as np
import pytest

from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation import sts_sets
from whiten_index.evaluation.metrics import correlate, pair_cosines
from whiten_index.evaluation.sts_sets import chosen_sets, read_sts, require_ranked

Columns = dict[str, list]


def columns(n: int = 6, **more: list) -> Columns:
    return {
        "sentence1": [f"a {i}" for i in range(n)],
        "sentence2": [f"b {i}" for i in range(n)],
        "score": [float(i) for i in range(n)],
        **more,
    }


@pytest.mark.parametrize("measure", ["spearman", "pearson"])
def test_constant_predictions_have_no_correlation(measure):
    equal = np.full(4, 0.3) + np.array([0, 1, -1, 0]) * 1e-14  # what rounding makes of equal ones
    with pytest.raises(ConfigError, match=r"STS99: all 4 predicted similarities are 0\.3.* check"):
        correlate([1, 2, 3, 4], equal, ["x"] * 4, measure=measure, name="STS99")
    with pytest.raises(ConfigError, match="STS99, subset y: all 2 predicted similarities"):
        correlate([1, 2, 3, 4], [0.1, 0.2, 0.5, 0.5], list("xxyy"), measure=measure, name="STS99")


def test_cosines_of_pairs():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(9, 5)), rng.normal(size=(9, 5))
    a[3] = 0
    ours = pair_cosines(a, b)
    assert ours[3] == 0
    for row in (0, 1, 8):
        cosine = a[row] @ b[row] / np.linalg.norm(a[row]) / np.linalg.norm(b[row])
        assert ours[row] == pytest.approx(cosine, abs=1e-14)
    np.testing.assert_allclose(pair_cosines(a, 3 * a)[[0, 1, 2, 4]], 1, atol=1e-14)


def test_a_set_is_not_compared_with_each_other_one(write_parquet, tmp_path, monkeypatch):
    compared = MagicMock(wraps=sts_sets.key_of)
    monkeypatch.setattr(sts_sets, "key_of", compared)
    table = columns(400, dataset=[f"set {i // 2}" for i in range(400)])
    assert len(read_sts([write_parquet(tmp_path / "p.parquet", table)])) == 200
    assert compared.call_count <= 2_000


def test_sets_by_their_names(write_parquet, tmp_path):
    path = write_parquet(
        tmp_path / "p.parquet",
        columns(
            8,
            dataset=["STS12"] * 4 + ["stsb"] * 4,
            subset=["x", "x", "y", "y", "x", "x", "x", "x"],
            split=["test"] * 4 + ["train", "dev", "test", "test"],
        ),
    )
    first, second = read_sts([path])
    assert (first.name, first.averaged, first.scored.tolist()) == ("STS12", True, [True] * 4)
    assert (second.name, second.averaged) == ("STS-B", False)
    assert second.scored.tolist() == [False, False, True, True]
    (all_of_it,) = chosen_sets(read_sts([path], splits={"STSB": "all"}), ["sts-b"])
    assert all_of_it.scored.all()


def test_the_public_sets_have_their_official_sizes(data):
    sets = {each.name: each for each in read_sts([data / "sts" / "sts_raw.parquet"])}
    assert {name: int(each.scored.sum()) for name, each in sets.items()} == {
        "STS12": 3108, "STS13": 1500, "STS14": 3750, "STS15": 3000, "STS16": 1186,
        "STS-B": 1379, "SICK-R": 9927,
    }  # fmt: skip
    subsets = {name: len(set(each.subsets)) for name, each in sets.items() if each.averaged}
    assert subsets == {"STS12": 5, "STS13": 3, "STS14": 6, "STS15": 5, "STS16": 5}


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({"subset": list("xxxxxy")}, r"subset y, has 1 pair, which .* without its column subset"),
        (
            {"score": [1.0, 2.0, 3.0, 4.0, 4.0, 4.0], "subset": list("xxxyyy")},
            "p, subset y, has 3 pairs of equal score",
        ),
        ({"score": [2.0] * 6}, "p has 6 pairs of equal score"),
    ],
)
def test_gold_scores_that_rank_nothing_are_refused_early(write_parquet, tmp_path, table, match):
    sets = read_sts([write_parquet(tmp_path / "p.parquet", columns(**table))])
    with pytest.raises(CorpusError, match=match):
        require_ranked(sets)
