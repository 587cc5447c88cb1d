"""Evaluating pairs, by correlation and geometry: against numpy, scipy and public figures."""

import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.stats

from tests.helpers.bad_input import run, succeed
from whiten_index import (
    EvalConfig,
    Moments,
    Whitening,
    WhiteningConfig,
    evaluate_sts,
    load_encoder,
    read_sts,
)
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.errors import ConfigError
from whiten_index.evaluation.geometry_scores import alignment, geometry
from whiten_index.evaluation.sts_sets import chosen_sets
from whiten_index.progress import Progress
from whiten_index.whitening.whitening_config import Kind


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, write_parquet, tiny_words) -> Path:
    """60 pairs that share 0 to 5 of 6 words, the gold score being how many."""
    rng = np.random.default_rng(3)
    first, second, score = [], [], []
    for _ in range(60):
        words = rng.choice(tiny_words, 12, replace=False)
        shared = int(rng.integers(6))
        first.append(" ".join(words[:6]))
        second.append(" ".join([*words[:shared], *words[6 : 12 - shared]]))
        score.append(float(shared))
    return write_parquet(
        tmp_path_factory.mktemp("pairs") / "mine.parquet",
        {
            "sentence1": first,
            "sentence2": second,
            "score": score,
            "subset": ["x"] * 20 + ["y"] * 40,
        },
    )


def whitened(target: np.ndarray, k: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and W = U Λ^(-1/2), by the singular values of the covariance."""
    u, s, _ = np.linalg.svd(np.cov(target.T))
    rank = int((s > 1e-10 * s[0]).sum())
    return target.mean(0), u[:, : k or rank] / np.sqrt(s[: k or rank])


# Public MTEB scores of all-MiniLM-L6-v2, and SICK-R's test split by its own.
PUBLIC = {
    "STS12": 72.37, "STS13": 80.60, "STS14": 75.59, "STS15": 85.39, "STS16": 78.99,
    "STS-B": 82.03, "SICK-R": 77.58,
}  # fmt: skip


@pytest.mark.figures
@pytest.mark.timeout(1200)
def test_the_seven_sets_have_their_public_figures(data):
    config = EvalConfig(encoder=EncoderConfig(pooling="mean", max_length=256))
    report = evaluate_sts(config, read_sts([data / "sts" / "sts_raw.parquet"]))
    found = {name: each["spearman"]["all"] for name, each in report["datasets"].items()}
    assert found == pytest.approx(PUBLIC, abs=0.02)
    sets = read_sts([data / "sts" / "sts_raw.parquet"], splits={"SICK-R": "test"})
    sick = evaluate_sts(config, chosen_sets(sets, ["SICK-R"]))["datasets"]["SICK-R"]
    assert sick["spearman"]["all"] == pytest.approx(77.15, abs=0.02)


@pytest.fixture(scope="module")
def repeated(pairs, tmp_path_factory, write_parquet) -> Path:
    """The pairs, twenty of them five times, so that their sentences weigh more."""
    table = pq.read_table(pairs).to_pydict()
    columns = {name: values + values[:20] * 4 for name, values in table.items()}
    return write_parquet(tmp_path_factory.mktemp("repeated") / "mine.parquet", columns)


@pytest.mark.parametrize("fit", ["target", "target-distinct"])
@pytest.mark.parametrize("unit", [False, True])
def test_fits_by_numpy(repeated, tiny_model, fit, unit):
    """Repeated rows are repeated, or taken once; then unit length, then whitening."""
    table = pq.read_table(repeated).to_pydict()
    texts = table["sentence1"] + table["sentence2"]
    x = load_encoder(str(tiny_model)).encode(texts).astype(np.float64)
    rows = x if fit == "target" else x[[texts.index(text) for text in dict.fromkeys(texts)]]
    if unit:
        x, rows = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (x, rows))
    mean, w = whitened(rows, 8)
    z = (x - mean) @ w
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    n = len(x) // 2
    cosines = (z[:n] * z[n:]).sum(1)
    options = {"model": str(tiny_model), "k": ("8",), "fit": fit}
    options |= {"normalize_input": unit}
    found = evaluate_sts(EvalConfig.from_options(options), read_sts([repeated]))
    pearson = 100 * scipy.stats.pearsonr(table["score"], cosines).statistic
    assert found["datasets"]["mine"]["pearson"]["all"] == pytest.approx(pearson, abs=1e-3)


def test_embeddings_are_kept_and_damaged_ones_encoded_again(
    pairs, tiny_model, tmp_path, monkeypatch
):
    config = EvalConfig(
        encoder=EncoderConfig(model=str(tiny_model)),
        transforms=(WhiteningConfig(k=6),),
        store=str(tmp_path / "store"),
    )
    first = evaluate_sts(config, read_sts([pairs]))
    (kept,) = (tmp_path / "store").rglob("*.safetensors")
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-9] + bytes(9))
    assert evaluate_sts(config, read_sts([pairs]))["datasets"] == first["datasets"]
    assert kept.read_bytes() == whole
    monkeypatch.setattr("whiten_index.encoding.encoder.Encoder.stream", None)
    assert evaluate_sts(config, read_sts([pairs]))["datasets"] == first["datasets"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_embeddings_that_are_no_numbers_have_no_figure(pairs, value):
    class Broken:
        def embed(self, texts):
            return np.eye(len(texts), 8) + np.where(np.arange(len(texts))[:, None] % 9, 0, value)

        def facts(self):
            return {"dim": 8}

    with pytest.raises(ConfigError, match="NaN or infinity"):
        evaluate_sts(EvalConfig(), read_sts([pairs]), embedder=Broken())


@pytest.mark.parametrize(("fit", "splits"), [(None, ["test"]), ("target", ["test", "train"])])
def test_pairs_of_other_splits_are_encoded_only_to_fit_on(
    pairs, tiny_model, tmp_path, write_parquet, fit, splits
):
    table = pq.read_table(pairs).to_pydict()
    named = {"dataset": ["stsb"] * 60, "split": ["test"] * 20 + ["train"] * 40}
    path = write_parquet(tmp_path / "sets.parquet", {**table, **named})
    options = {"model": str(tiny_model)} | ({} if fit is None else {"fit": fit, "k": ("8",)})
    watcher = Mock(spec=Progress)
    config = EvalConfig.from_options(options)
    report = evaluate_sts(config, read_sts([path]), progress=watcher)
    assert report["datasets"]["STS-B"]["pairs"] == 20
    rows = [i for i in range(60) if named["split"][i] in splits]
    wanted = {table[side][i] for side in ("sentence1", "sentence2") for i in rows}
    stages = [call.args for call in watcher.start.call_args_list]
    assert sum(total for stage, total in stages if stage == "encode") == len(wanted)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--layers", "1,7"), 2, "layer 7 does not exist"),
        (("--k", "33"), 2, "--k 33 is more than the 32 dims"),
        (("--k", "nonsense"), 2, "--k nonsense is not understood"),
        (("--whiten", "none", "--k", "3"), 2, "leave out --k"),
        (("--fit", "target-scored"), 2, "add --whiten whitening"),
        (("--fit", "no.parquet", "--k", "3"), 3, "no.parquet cannot be fitted on"),
        (("--fit", "targets", "--k", "3"), 3, "--fit takes target, target-distinct"),
        (("--set", "STS12"), 2, "there is no set STS12; the sets are mine"),
        (("--split", "mine"), 2, "takes NAME=VALUE"),
        (("--index", "nowhere", "--dtype", "bfloat16"), 2, "each say what to evaluate"),
        (("--index", "nowhere"), 5, "nowhere does not exist"),
    ],
)
def test_bad_input_ends_with_a_sentence(pairs, tiny_model, arguments, code, message):
    status, out, err = run("eval", "sts", pairs, "--model", tiny_model, *arguments)
    assert (status, out) == (code, "")
    assert message in " ".join(err.split())


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
def split_pairs(tmp_path_factory, columns):
    path = tmp_path_factory.mktemp("pairs") / "pairs.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def measured(path, tiny_model, *arguments):
    out = succeed("eval", "geometry", path, *MODEL, tiny_model, *arguments, "--json")
    return json.loads(out)


def encode(tiny_model, texts):
    return load_encoder(str(tiny_model), pooling="mean").encode(texts).astype(float)


def test_alignment_is_of_the_pairs_above_the_score_and_the_rest_of_all_texts(
    split_pairs, columns, tiny_model
):
    found = measured(split_pairs, tiny_model, "--split", "STSB=dev")["datasets"]["STS-B"]
    dev = [i for i in range(PAIRS) if columns["split"][i] == "dev"]
    high = [i for i in dev if columns["score"][i] > 4]
    first, second = columns["sentence1"], columns["sentence2"]
    u, v = (encode(tiny_model, [side[i] for i in high]) for side in (first, second))
    assert found["alignment"] == pytest.approx(alignment(u, v), rel=1e-5)
    assert (found["positive_pairs"], found["pairs"]) == (len(high), len(dev))
    texts = dict.fromkeys([*(first[i] for i in dev), *(second[i] for i in dev)])
    expected = geometry(encode(tiny_model, list(texts)))
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_transforms_are_shown_beside_the_raw_embeddings(split_pairs, columns, tiny_model):
    report = measured(split_pairs, tiny_model, "--split", "STSB=dev", "--k", 8, "--k", 4)
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
