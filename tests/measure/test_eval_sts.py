"""Evaluating pairs: against numpy and scipy, against public figures, from the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import scipy.stats
from click.testing import CliRunner

from whiten_index.cli import cli
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.evaluation.sts_sets import chosen_sets, read_sts
from whiten_index.measure.eval_config import EvalConfig
from whiten_index.measure.evaluate_sts import evaluate_sts


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, ["eval", "sts", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


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


# ------------------------------------------------------ from the definition, another way


def hidden_states(folder: Path, texts: list[str], layers: tuple[int, ...]) -> np.ndarray:
    """Return the token means of the SUM of layers by transformers itself, a batch at a time."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    out = []
    for start in range(0, len(texts), 64):
        inputs = tokenizer(
            texts[start : start + 64],
            padding=True,
            truncation=True,
            max_length=256,
            return_tensors="pt",
        )
        with torch.inference_mode():
            states = model(**inputs, output_hidden_states=True).hidden_states
        total = sum(states[layer] for layer in layers)
        mask = inputs["attention_mask"].unsqueeze(-1)
        out.append(((total * mask).sum(1) / mask.sum(1)).double().numpy())
    return np.concatenate(out)


def whitened(target: np.ndarray, k: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and W = U Λ^(-1/2), by the singular values of the covariance."""
    u, s, _ = np.linalg.svd(np.cov(target.T))
    rank = int((s > 1e-10 * s[0]).sum())
    return target.mean(0), u[:, : k or rank] / np.sqrt(s[: k or rank])


@pytest.fixture(scope="module")
def by_hand(data) -> tuple[dict[str, list], dict[tuple[int, ...], np.ndarray]]:
    """STS16's pairs and their embeddings, first sides first: layers 1 + 6 and the last."""
    from whiten_index.encoding.models import find_model

    table = pq.read_table(data / "sts" / "sts_raw.parquet").to_pydict()
    rows = [i for i, name in enumerate(table["dataset"]) if name == "STS16"]
    columns = {name: [values[i] for i in rows] for name, values in table.items()}
    texts = columns["sentence1"] + columns["sentence2"]
    folder = find_model("all-MiniLM-L6-v2").path
    return columns, {layers: hidden_states(folder, texts, layers) for layers in ((1, 6), (6,))}


@pytest.mark.slow
@pytest.mark.parametrize("layers", [(1, 6), (6,)])
@pytest.mark.parametrize("k", [None, 256, 128])
def test_whitening_from_the_definition_gives_the_same_figures(data, by_hand, layers, k, sts_store):
    columns, embeddings = by_hand
    x = embeddings[layers]
    mean, w = whitened(x, k)
    z = (x - mean) @ w
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    n = len(x) // 2
    cosines, gold = (z[:n] * z[n:]).sum(1), np.array(columns["score"])
    subsets = np.array(columns["subset"])
    groups = [subsets == name for name in dict.fromkeys(subsets)]
    each = [scipy.stats.spearmanr(gold[g], cosines[g]).statistic for g in groups]
    sizes = [g.sum() for g in groups]
    truth = {
        "all": 100 * scipy.stats.spearmanr(gold, cosines).statistic,
        "mean": 100 * np.mean(each),
        "wmean": 100 * np.average(each, weights=sizes),
    }
    options = {"pooling": "mean", "max_length": 256, "layers": layers, "k": (k or "full",)}
    config = EvalConfig.from_options({**options, "whiten": "whitening", "store": str(sts_store)})
    sets = chosen_sets(read_sts([data / "sts" / "sts_raw.parquet"]), ["STS16"])
    found = evaluate_sts(config, sets)["datasets"]["STS16"]
    assert found["spearman"] == pytest.approx(truth, abs=0.01)
    pearson = 100 * scipy.stats.pearsonr(gold, cosines).statistic
    assert found["pearson"]["all"] == pytest.approx(pearson, abs=0.01)


@pytest.fixture(scope="module")
def sts_store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sts-store")


# Public MTEB scores of all-MiniLM-L6-v2, and SICK-R's test split by its own.
PUBLIC = {
    "STS12": 72.37, "STS13": 80.60, "STS14": 75.59, "STS15": 85.39, "STS16": 78.99,
    "STS-B": 82.03, "SICK-R": 77.58,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_seven_sets_have_their_public_figures(data):
    encoder = EncoderConfig(pooling="mean", max_length=256)
    report = evaluate_sts(EvalConfig(encoder=encoder), read_sts([data / "sts" / "sts_raw.parquet"]))
    found = {name: each["spearman"]["all"] for name, each in report["datasets"].items()}
    assert found == pytest.approx(PUBLIC, abs=0.02)
    assert report["datasets"]["SICK-R"]["splits"]["test"] == pytest.approx(77.15, abs=0.02)


# ------------------------------------------------------------------------ the flow


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
    from whiten_index import Encoder

    x = Encoder.load(str(tiny_model)).encode(texts).astype(np.float64)
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


# ------------------------------------------------------------------ the command line


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
        (("--k", "3", "--fit-column", "x"), 2, "add --fit FILE"),
        (("--set", "STS12"), 2, "there is no set STS12; the sets are mine"),
        (("--split", "mine"), 2, "no SET=SPLIT"),
        (("--index", "nowhere", "--dtype", "bfloat16"), 2, "each say what to evaluate"),
        (("--index", "nowhere"), 5, "nowhere does not exist"),
    ],
)
def test_bad_input_ends_with_a_sentence(pairs, tiny_model, arguments, code, message):
    status, out, err = run(pairs, "--model", tiny_model, *arguments)
    assert (status, out) == (code, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err
