"""``eval geometry``: pairs through a tiny encoder, checked by the measures on its embeddings."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.bad_input_helpers import CORPUS, OPTIONS, assert_one_error, run
from whiten_index import Encoder, Moments, Whitening
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluate.geometry import read_geometry_sets
from whiten_index.evaluation import Geometry, alignment
from whiten_index.whitening import Kind, WhiteningConfig

PAIRS = 40
MODEL = ("--pooling", "mean", "--model")


@pytest.fixture(scope="module")
def columns(tiny_words):
    rng = np.random.default_rng(0)
    first, second = ([" ".join(rng.choice(tiny_words, 6)) for _ in range(PAIRS)] for _ in "ab")
    return {
        "sentence1": first,
        "sentence2": second,
        "score": np.arange(PAIRS) % 6,
        "dataset": ["STSB"] * PAIRS,
        "split": np.where(np.arange(PAIRS) % 2, "dev", "test"),
    }


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, columns):
    path = tmp_path_factory.mktemp("pairs") / "pairs.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def measured(path, tiny_model, *arguments):
    status, out, error = run("eval", "geometry", path, *MODEL, tiny_model, *arguments, "--json")
    assert status == 0, error
    return json.loads(out)


def encode(tiny_model, texts):
    return Encoder.load(str(tiny_model), pooling="mean").encode(texts).astype(float)


def test_alignment_is_of_the_pairs_above_the_score_and_the_rest_of_all_texts(
    pairs, columns, tiny_model
):
    found = measured(pairs, tiny_model, "--split", "STSB=dev")["datasets"]["STS-B"]
    dev = [i for i in range(PAIRS) if columns["split"][i] == "dev"]
    high = [i for i in dev if columns["score"][i] > 4]
    first, second = columns["sentence1"], columns["sentence2"]
    u, v = (encode(tiny_model, [side[i] for i in high]) for side in (first, second))
    assert found["alignment"] == pytest.approx(alignment(u, v), rel=1e-5)
    assert (found["positive_pairs"], found["pairs"]) == (len(high), len(dev))
    texts = dict.fromkeys([*(first[i] for i in dev), *(second[i] for i in dev)])
    expected = Geometry.of(encode(tiny_model, list(texts))).to_json()
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_transforms_are_shown_beside_the_raw_embeddings(pairs, columns, tiny_model):
    report = measured(pairs, tiny_model, "--split", "STSB=dev", "--k", 8, "--k", 4)
    names = [run["name"] for run in report["runs"]]
    assert names == ["raw", "whitening, k = 8", "whitening, k = 4"]
    assert report["datasets"] == report["runs"][0]["datasets"]
    # The target is every sentence of the set, those of other splits too.
    both = encode(tiny_model, [*columns["sentence1"], *columns["sentence2"]])
    whitening = Whitening.fit(Moments.of(both), WhiteningConfig(kind=Kind.WHITENING, k=8))
    dev = columns["split"] == "dev"
    texts = [*np.array(columns["sentence1"])[dev], *np.array(columns["sentence2"])[dev]]
    cloud = whitening.apply(encode(tiny_model, list(dict.fromkeys(texts))))
    found = report["runs"][1]["datasets"]["STS-B"]
    assert found["isoscore"] == pytest.approx(Geometry.of(cloud).isoscore, rel=1e-3)
    assert found["isoscore"] > report["datasets"]["STS-B"]["isoscore"]


def test_pairs_without_scores_are_all_positive(tmp_path, columns, tiny_model):
    path = tmp_path / "plain.parquet"
    pq.write_table(
        pa.table({"query": columns["sentence1"], "document": columns["sentence2"]}), path
    )
    found = measured(path, tiny_model)["datasets"]["plain"]
    u, v = (encode(tiny_model, columns[f"sentence{side}"]) for side in (1, 2))
    assert (found["positive_pairs"], found["dropped"]) == (PAIRS, 0)
    assert found["alignment"] == pytest.approx(alignment(u, v), rel=1e-5)


@pytest.fixture
def plain(tmp_path, columns):
    """Pairs without scores, in two splits."""
    path = tmp_path / "plain.parquet"
    names = ("sentence1", "sentence2", "split")
    pq.write_table(pa.table({name: columns[name] for name in names}), path)
    return path


def test_a_split_of_pairs_without_scores_is_measured_and_the_fit_is_of_all(
    plain, columns, tiny_model
):
    report = measured(plain, tiny_model, "--split", "plain=dev", "--k", 8)
    found = report["datasets"]["plain"]
    dev = [i for i in range(PAIRS) if columns["split"][i] == "dev"]
    sides = columns["sentence1"], columns["sentence2"]
    u, v = (encode(tiny_model, [side[i] for i in dev]) for side in sides)
    assert (found["pairs"], found["positive_pairs"], found["texts"]) == (20, 20, 40)
    assert found["alignment"] == pytest.approx(alignment(u, v), rel=1e-5)
    both = encode(tiny_model, [*sides[0], *sides[1]])
    whitening = Whitening.fit(Moments.of(both), WhiteningConfig(kind=Kind.WHITENING, k=8))
    whitened = report["runs"][1]["datasets"]["plain"]
    expected = alignment(whitening.apply(u), whitening.apply(v))
    assert whitened["alignment"] == pytest.approx(expected, rel=1e-3)
    assert measured(plain, tiny_model, "--split", "plain=all")["datasets"]["plain"]["pairs"] == 40


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("plain=none", "plain.parquet has no pairs of plain in split 'none'; its splits are dev"),
        ("bare=dev", "bare.tsv has no column split; do not ask for split 'dev' of bare"),
        ("other=dev", "--split names other, and the sets are plain, bare"),
    ],
)
def test_a_split_that_pairs_without_scores_lack_is_refused(
    plain, columns, tiny_model, wanted, message
):
    bare = plain.parent / "bare.tsv"
    lines = [f"{a}\t{b}" for a, b in zip(columns["sentence1"], columns["sentence2"], strict=True)]
    bare.write_text("\n".join(["sentence1\tsentence2", *lines]) + "\n")
    status, _, error = run(
        "eval", "geometry", plain, bare, *MODEL, tiny_model, "--split", wanted
    )  # fmt: skip
    assert status == OPTIONS
    assert_one_error(error, match=message)


def test_a_folder_may_hold_pairs_with_and_without_scores(pairs, plain, tmp_path, tiny_model):
    (folder := tmp_path / "both").mkdir()
    for file in (plain, pairs):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "README.md").write_text("no pairs")
    found = measured(folder, tiny_model, "--split", "plain=dev")
    assert found["datasets"] == measured(
        plain, tiny_model, pairs, "--split", "plain=dev"
    )["datasets"]  # fmt: skip
    assert list(found["datasets"]) == ["plain", "STS-B"]
    (folder / pairs.name).unlink()
    (each,) = read_geometry_sets([folder])
    assert (each.name, len(each.first)) == ("plain", PAIRS)
    (folder / plain.name).unlink()
    with pytest.raises(CorpusError, match=r"both holds no \.parquet, \.jsonl or \.tsv file"):
        read_geometry_sets([folder])


@pytest.mark.parametrize("above", ["nan", "inf", "-inf"])
def test_a_score_that_is_no_number_is_refused(pairs, tiny_model, above):
    status, _, error = run(
        "eval", "geometry", pairs, *MODEL, tiny_model, f"--positive-above={above}"
    )
    assert status == OPTIONS
    assert_one_error(error, match=f"score above {above}; give a number such as 4")


def test_a_set_that_has_no_geometry_is_named(plain, tmp_path, tiny_model):
    few = tmp_path / "few.tsv"
    few.write_text("sentence1\tsentence2\nthe cat\ta dog\na dog\tthe cat\n")
    status, _, error = run("eval", "geometry", plain, few, *MODEL, tiny_model)
    assert status == CORPUS
    assert_one_error(error, match="few has 2 distinct texts to measure; geometry needs 3 or more")
    vectors, texts = tmp_path / "v.txt", tmp_path / "unlike.tsv"
    vectors.write_text("cat 1 2\ndog 2 1\n")
    texts.write_text("sentence1\tsentence2\ncat\tdog\nbird\tfish\n")
    status, _, error = run("eval", "geometry", texts, "--word-vectors", vectors)
    assert status == OPTIONS
    assert_one_error(error, match="unlike, raw: .*needs 3 rows that are not zero, and there are 2")


def test_sets_are_chosen_among_pairs_with_and_without_scores(pairs, plain):
    for names, expected in (
        ((), ["plain", "STS-B"]),
        (("Plain",), ["plain"]),
        (("stsb",), ["STS-B"]),
        (("STSB", "plain"), ["STS-B", "plain"]),
    ):
        found = read_geometry_sets([pairs, plain], names=names, splits={"STS-B": "dev"})
        assert [each.name for each in found] == expected
    with pytest.raises(ConfigError, match="there is no set x; the sets are plain, STS-B"):
        read_geometry_sets([pairs, plain], names=["x"], splits={"STS-B": "dev"})


def test_sets_of_one_name_are_refused(pairs, plain, tmp_path):
    (tmp_path / "other").mkdir()
    again = tmp_path / "other" / "plain.parquet"
    again.write_bytes(plain.read_bytes())
    stsb = tmp_path / "stsb.parquet"
    stsb.write_bytes(plain.read_bytes())
    for paths, name in (
        ([plain, again], "plain"),
        ([plain, plain], "plain"),
        ([pairs, stsb], "STS-B"),
    ):
        with pytest.raises(CorpusError, match=f"two files hold a set called {name}; rename one"):
            read_geometry_sets(paths)


def test_pairs_that_lack_a_score_among_others_are_told(tmp_path, columns, tiny_model):
    scores = [None if i < 3 else float(i % 6) for i in range(PAIRS)]
    path = tmp_path / "some.parquet"
    names = ("sentence1", "sentence2")
    pq.write_table(pa.table({**{name: columns[name] for name in names}, "score": scores}), path)
    found = measured(path, tiny_model)["datasets"]["some"]
    assert (found["dropped"], found["pairs"]) == (3, PAIRS - 3)
    status, out, _ = run("eval", "geometry", path, *MODEL, tiny_model)
    assert status == 0
    assert "note: 3 pairs of some have no score and are left out" in out


def test_no_pair_above_the_score_leaves_alignment_out(pairs, tiny_model):
    found = measured(pairs, tiny_model, "--positive-above", 5)["datasets"]["STS-B"]
    assert found["alignment"] is None
    assert found["positive_pairs"] == 0
    status, out, _ = run("eval", "geometry", pairs, *MODEL, tiny_model, "--positive-above", 5)
    assert status == 0
    assert "0 positive pairs" in out


def test_texts_beyond_the_most_are_drawn_and_it_is_said(pairs, tiny_model):
    found = measured(pairs, tiny_model, "--most-texts", 20)["datasets"]["STS-B"]
    assert (found["rows"], found["texts"]) == (20, 40)
    status, out, _ = run("eval", "geometry", pairs, *MODEL, tiny_model, "--most-texts", 20)
    assert status == 0
    assert "STS-B: 20 texts of 40, drawn" in out


def test_a_split_that_is_not_there_is_refused(pairs, tiny_model):
    status, _, error = run("eval", "geometry", pairs, *MODEL, tiny_model, "--split", "STS-B=none")
    assert status == OPTIONS
    assert_one_error(error, match="no scored pairs of STS-B in split 'none'")


@pytest.mark.data
def test_without_data_it_is_the_dev_split_of_sts_b(data):
    (found,) = read_geometry_sets(
        [data / "sts" / "sts_raw.parquet"], names=["STS-B"], splits={"STS-B": "dev"}
    )
    assert len(found.first) == 1_500
    assert len(found.task) == 2 * 8_628
    assert 0 < found.positive.sum() < 750
