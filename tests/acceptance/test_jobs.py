"""Job files and Python beside the command line, what an index tells, and what it exports."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

import pipelines.build_index
import whiten_index
from tests.acceptance.commands import done, run
from tests.acceptance.truth import MAX_LENGTH, SciFact, encode, unit
from tests.acceptance.vectors import COLUMNS, RandomCorpus, make_corpus, version_folder

K = 6
FILES = ("index.faiss", "documents.arrow", "whitening.safetensors")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> RandomCorpus:
    return make_corpus(tmp_path_factory.mktemp("jobs"), 400, 16, seed=2)


@pytest.fixture(scope="module")
def made(corpus: RandomCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index by the command line; not to be changed."""
    index = tmp_path_factory.mktemp("made") / "index"
    done(
        "build", corpus.corpus, *COLUMNS, "--keep", "year", "--filter", "lang == 'en'",
        "--whiten", "whitening", "--k", K, "--exponent", 0.5, "--out", index,
    )  # fmt: skip
    return index


@pytest.fixture
def job(corpus: RandomCorpus, tmp_path: Path) -> Path:
    """A job file of the same build, with another place for the index."""
    path = tmp_path / "job.toml"
    path.write_text(
        f"corpus = ['{corpus.corpus}']\n"
        'embedding-column = "embedding"\nid-column = "id"\nkeep = ["year"]\n'
        "filter = \"lang == 'en'\"\n"
        'whiten = "whitening"\nk = 6\nexponent = 0.5\n'
        f"out = '{tmp_path / 'index'}'\n"
    )
    return path


def require_same(one: Path, other: Path) -> None:
    """Compare the bytes of two indexes' published versions."""
    for name in FILES:
        mine, its = (version_folder(each) / name for each in (one, other))
        assert mine.read_bytes() == its.read_bytes(), name


def test_python_builds_the_index_of_the_command_line(
    made: Path, corpus: RandomCorpus, tmp_path: Path
) -> None:
    config = whiten_index.BuildConfig(
        corpus=str(corpus.corpus),  # type: ignore[arg-type]
        embedding_column="embedding",
        id_column="id",
        keep=["year"],  # type: ignore[arg-type]
        row_filter="lang == 'en'",
        whiten="whitening",
        k=K,
        exponent=0.5,
        out=str(tmp_path / "index"),
    )
    whiten_index.build_index(config)
    require_same(tmp_path / "index", made)


def test_paths_of_a_job_file_may_begin_at_home(
    corpus: RandomCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, job = tmp_path / "home", tmp_path / "job.toml"
    shutil.copytree(corpus.corpus.parent, home / "news")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    columns = 'embedding-column = "embedding"\nid-column = "id"'
    job.write_text(
        f'corpus = ["~/news/{corpus.corpus.name}"]\n{columns}\nout = "~/i"\nstore = "~/s"'
    )
    done("build", "--config", job)
    job.write_text(
        f'index = "~/i"\nqueries = "~/news/{corpus.corpus.name}"\n{columns}\nrun = "~/run.jsonl"'
    )
    done("search", "--config", job)
    job.write_text('index = "~/i"\nto = "~/v.parquet"')
    done("push", "--config", job)
    job.write_text('index = "~/i"\n[[push]]\nto = "~/v.parquet"')
    assert run("nightly", job).status == 0
    job.write_text('indexes = ["a=~/i", "b=~/nowhere"]')
    assert f"{home}/nowhere does not exist" in " ".join(run("serve", "--config", job).err.split())
    made = {"news", "i", "s", "run.jsonl", "v.parquet"}
    assert {each.name for each in home.iterdir() if not each.name.startswith(".")} == made
    assert {each.name for each in tmp_path.iterdir()} == {"home", "job.toml"}


def test_a_job_file_builds_the_index_of_the_options(made: Path, job: Path, tmp_path: Path) -> None:
    done("build", "--config", job)
    require_same(tmp_path / "index", made)


def test_options_override_a_job_file(job: Path, corpus: RandomCorpus, tmp_path: Path) -> None:
    done("build", "--config", job, "--k", 3, "--out", tmp_path / "other")
    assert not (tmp_path / "index").exists()
    vectors = whiten_index.QueryTransform.of(tmp_path / "other").reduce(corpus.rows[:2])
    assert vectors.shape == (2, 3)


def test_the_pipeline_does_the_job_with_lines_of_json(
    made: Path, job: Path, tmp_path: Path
) -> None:
    for last in ("published", "up_to_date"):
        ended = CliRunner().invoke(pipelines.build_index.main, [str(job)])
        assert ended.exit_code == 0, ended.output
        events = [json.loads(line) for line in ended.stdout.splitlines()]
        assert events[-1]["event"] == last
    require_same(tmp_path / "index", made)


def test_inspect_tells_counts_transform_and_spectrum(made: Path, corpus: RandomCorpus) -> None:
    report = json.loads(done("inspect", made, "--json"))
    rows = corpus.rows[corpus.languages == "en"].astype(np.float64)
    assert report["rows"] == len(rows)
    assert report["counts"]["read"] == len(corpus.rows)
    assert report["counts"]["skipped"] == {"filtered": len(corpus.rows) - len(rows)}
    values = np.linalg.eigvalsh(np.cov(rows.T))[::-1]
    found = report["whitening"]
    assert (found["dim"], found["k"], found["exponent"], found["center"]) == (16, K, 0.5, True)
    share = values[:K].sum() / values.sum()
    assert found["variance_kept"] == pytest.approx(share, rel=1e-4)
    for point in report["spectrum"]:
        k = point["k"]
        assert point["eigenvalue"] == pytest.approx(values[k - 1], rel=1e-3)
        assert point["variance_kept"] == pytest.approx(values[:k].sum() / values.sum(), rel=1e-4)


def test_inspect_tells_sizes_and_checksums_of_files(made: Path) -> None:
    report = json.loads(done("inspect", made, "--json"))
    folder = version_folder(made)
    assert report["version"] == folder.name
    assert set(report["files"]) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    for name, facts in report["files"].items():
        content = (folder / name).read_bytes()
        assert facts["bytes"] == len(content)
        assert facts["sha256"] == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("k", [None, 4])
def test_an_exported_matrix_reduces_as_the_index_does(
    k: int | None, made: Path, corpus: RandomCorpus, tmp_path: Path
) -> None:
    options = () if k is None else ("--k", k)
    path = tmp_path / "transform.safetensors"
    report = json.loads(done("export", made, path, *options, "--json"))
    tensors = load_file(path)
    vectors = unit(corpus.questions @ tensors["matrix"] + tensors["bias"])
    queries = whiten_index.QueryTransform.of(made, k=k)
    np.testing.assert_allclose(vectors, queries.reduce(corpus.questions), atol=1e-5)
    assert report["query_digest"] == queries.query_digest


@pytest.mark.parametrize("k", [None, 4])
def test_an_exported_query_half_needs_no_index(
    k: int | None, made: Path, corpus: RandomCorpus, tmp_path: Path
) -> None:
    options = () if k is None else ("--k", k)
    done("export", made, tmp_path / "half", "--as", "query", *options)
    loaded = whiten_index.QueryTransform.load(tmp_path / "half")
    expected = whiten_index.QueryTransform.of(made, k=k)
    found = loaded.reduce(corpus.questions)
    np.testing.assert_array_equal(found, expected.reduce(corpus.questions))
    assert loaded.query_digest == expected.query_digest


def test_an_exported_script_names_the_function_that_was_asked_for(
    made: Path, tmp_path: Path
) -> None:
    path = tmp_path / "reduce.sql"
    report = json.loads(
        done("export", made, path, "--name", "smaller", "--schema", "search", "--json")
    )
    script = path.read_text()
    assert "smaller" in script
    assert "search" in script
    assert report["query_digest"] in script


def test_an_encoder_gives_the_embeddings_of_transformers(scifact: SciFact) -> None:
    texts = scifact.query_texts()[:10]
    encoder = whiten_index.load_encoder("all-MiniLM-L6-v2", pooling="mean", max_length=MAX_LENGTH)
    found = encoder.encode(texts)
    np.testing.assert_allclose(unit(found), unit(encode(texts)), atol=1e-5)
    blocks = np.concatenate(list(encoder.stream([texts[:3], texts[3:4], texts[4:]])))
    np.testing.assert_allclose(blocks, found, atol=1e-6)


def test_encoding_alone_fills_a_store_for_later_builds(
    made: Path, corpus: RandomCorpus, tmp_path: Path
) -> None:
    store, index = tmp_path / "store", tmp_path / "index"
    done(
        "encode", corpus.corpus, *COLUMNS, "--keep", "year", "--filter", "lang == 'en'",
        "--store", store,
    )  # fmt: skip
    options = ("--whiten", "whitening", "--k", K, "--exponent", 0.5, "--out", index)
    done("build", "--store", store, *options)
    require_same(index, made)
