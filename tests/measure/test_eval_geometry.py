"""``eval geometry``: pairs through a tiny encoder, checked by the measures on its embeddings."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.bad_input import succeed
from whiten_index import Moments, Whitening, load_encoder
from whiten_index.evaluation.geometry_scores import alignment, geometry
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig

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
    out = succeed("eval", "geometry", path, *MODEL, tiny_model, *arguments, "--json")
    return json.loads(out)


def encode(tiny_model, texts):
    return load_encoder(str(tiny_model), pooling="mean").encode(texts).astype(float)


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
    expected = geometry(encode(tiny_model, list(texts)))
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
    assert found["isoscore"] == pytest.approx(geometry(cloud)["isoscore"], rel=1e-3)
    assert found["isoscore"] > report["datasets"]["STS-B"]["isoscore"]
