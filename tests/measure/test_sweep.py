"""Sweeps: grid, results file, and figures against brute force."""

import json
import shlex
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from tests.helpers.bad_input import fails, succeed
from tests.helpers.builds import cosines, write_rows
from tests.measure.sweep_records import lines_of, points_of
from whiten_index import open_index
from whiten_index.artifacts.lock import only_writer
from whiten_index.errors import ArtifactError, BusyError, ConfigError, CorpusError, StorageError
from whiten_index.measure.results import command_of, line_of, read_sweeps
from whiten_index.measure.sweep_config import SweepConfig, grid
from whiten_index.measure.sweep_run import run_sweep
from whiten_index.progress import Progress

ROWS, DIM, HELD = 700, 24, 60


@pytest.fixture(scope="module")
def embeddings() -> np.ndarray:
    """Return clustered rows whose mean is far from 0, as those of encoders."""
    rng = np.random.default_rng(3)
    centres = 2 * rng.normal(size=(12, DIM)) * np.linspace(2, 0.2, DIM)
    rows = centres[rng.integers(12, size=ROWS)] + rng.normal(size=(ROWS, DIM)) + 1
    return rows.astype(np.float32)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, embeddings) -> str:
    path = tmp_path_factory.mktemp("sweep") / "vectors.parquet"
    return write_rows(path, embeddings, id=[f"d{i}" for i in range(ROWS)])


def options(corpus: str, out: Path, **more) -> dict:
    return {
        "corpus": [corpus], "embedding_column": "embedding", "store_dtype": "float32",
        "id_column": "id", "out": str(out), "sample": HELD, "threads": 1, **more,
    }  # fmt: skip


FEW = {"widths": "8", "transforms": "pca", "codecs": "fp32", "indexes": "flat", "baselines": False}


def config_of(**more):
    return SweepConfig(**{"corpus": ["c.parquet"], "text_columns": ["t"], "out": "o", **more})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"transforms": "pca,zca"}, r"--transforms 'zca' is unknown; use auto, pca, whitening"),
        ({"transforms": "pca:0.5"}, r"'pca:0.5' is unknown; .* an exponent .* whitening:0.25"),
        ({"transforms": "whitening:x"}, r"'whitening:x' is unknown"),
        ({"transforms": ""}, r"--transforms is empty"),
        ({"codecs": "fp32,sq7"}, r"--codecs 'sq7' is unknown; use fp32, .* pqN for N bytes"),
        ({"codecs": "sq8,sq8"}, r"--codecs names something twice"),
        ({"indexes": "flat,tree"}, r"--indexes 'tree' is unknown; use flat, ivf, hnsw"),
        ({"widths": "64,x"}, r"--k 'x' is no width"),
        ({"widths": "0"}, r"--k '0' is no width"),
        ({"target_recall": 1.5},
            r"--target-recall takes a value less than or equal to 1; 1.5 was given"),
        ({"rerank": 5}, r"--rerank 5 is fewer than the 10 hits"),
        ({"queries": "q.parquet"}, r"--qrels is missing"),
        ({"qrels_split": "test"}, r"--qrels-split test needs --qrels"),
        ({"out": ""}, r"say where results and report go: --out DIR"),
        ({"wings": 2}, r"wings is unknown"),
        ({"k": 2}, r"k is unknown; in Python its name is widths"),
        ({"whiten": "pca"}, r"whiten is unknown"),
    ],
)  # fmt: skip
def test_a_wish_that_cannot_be_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        config_of(**given)


def test_a_corpus_without_a_name_of_its_own_has_that_of_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"corpus/": tmp_path.name, "news/*.parquet": "news", "news/corpus.parquet": "news"}
    assert {each: config_of(corpus=[each]).dataset_name for each in names} == names


def test_any_of_equal_neighbours_counts_as_found(tmp_path):
    # Each row seven times: which of them an index gives first is its own affair.
    rows = np.tile(np.random.default_rng(0).normal(size=(100, DIM)).astype(np.float32), (7, 1))
    path = write_rows(tmp_path / "c.parquet", rows)
    wishes = {**FEW, "widths": str(DIM), "sample": 40, "baselines": True}
    run_sweep(SweepConfig(**options(path, tmp_path / "out", **wishes)))
    points = {key: p for key, p in points_of(tmp_path / "out").items() if "/fp32/flat" in key}
    assert {point["index_recall@10"] for point in points.values()} == {1}
    assert points[f"raw/none/k{DIM}/fp32/flat"]["agreement@10"] == 1


def test_the_grid_holds_every_combination_once_and_graphs_at_the_middle_widths():
    points, skipped = grid(config_of(baselines=False), dim=384, rank=381, rows=100_000)
    keys = [point.key for point in points]
    assert len(keys) == len(set(keys))
    assert not skipped
    plain = [point for point in points if not point.rerank]
    # 4 widths × 4 transforms × 4 codecs × {flat, ivf}, and graphs of one codec at two widths.
    assert Counter(point.index for point in plain) == {"flat": 64, "ivf": 64, "hnsw": 8}
    assert {p.k for p in plain if p.index == "hnsw"} == {64, 128}
    again = [point for point in points if point.rerank]
    assert {(p.codec, p.index, p.rerank) for p in again} == {
        ("pq", "flat", 100), ("pq", "ivf", 100),
    }  # fmt: skip


def test_a_job_file_gives_defaults_that_flags_override(corpus, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(
        f"corpus = {json.dumps(corpus)}\nembedding_column = 'embedding'\nid-column = 'id'\n"
        f"out = {json.dumps(str(tmp_path / 'out'))}\nk = [4, 8]\ntransforms = 'pca'\n"
        "codecs = ['fp32']\nindexes = ['flat']\nbaselines = false\nrerank = 0\nwhiten = 'pca'\n"
    )

    def planned(*flags: str) -> int:
        return json.loads(succeed("sweep", "--config", job, *flags, "--plan", "--json"))["points"]

    assert planned() == 2
    assert not (tmp_path / "out").exists()
    assert planned("--k", "4,8,16", "--codecs", "fp32,sq8") == 6
    assert planned("--k", "4", "--k", "8", "--k", "16", "--codecs", "fp32") == 3
    job.write_text(job.read_text().replace("k = [4, 8]", "k = 4"))
    assert planned() == 1
    for text, message in (
        (job.read_text().replace("k = 4", "k = 4.5"), "--k"),
        (job.read_text() + "wings = 2\n", "wings is unknown; known are address, backend"),
        (
            "corpus = 'c'\nout = 'o'\nembedding_column = 'v'\ntransforms = 3\n",
            "--transforms takes a list; 3 was given",
        ),
    ):
        job.write_text(text)
        fails(2, message, "sweep", "--config", job, "--plan")


def test_fewer_rows_held_out_than_asked_for_are_reported(tmp_path, corpus):
    watcher = Mock(spec=Progress)
    given = {**options(corpus, tmp_path, **FEW), "sample": 500}
    assert run_sweep(SweepConfig(**given), progress=watcher).dataset["queries"] == ROWS // 5
    assert f"{ROWS // 5} rows are held out as queries" in str(watcher.note.call_args_list)


def test_what_width_or_rank_forbids_is_skipped_with_the_reason():
    config = config_of(widths="30,50,60", transforms="pca,truncate", codecs="fp32,pq,pq16")
    points, skipped = grid(config, dim=56, rank=40, rows=10_000)
    why = {point.key: reason for point, reason in skipped.items()}
    assert why["ours/pca/k50/fp32/flat"] == "k = 50 is above the 40 directions of the embeddings"
    assert why["truncate/truncate/k60/fp32/flat"] == "k = 60 is above the 56 dims of the embeddings"
    assert "a k that 4 divides" in why["ours/pca/k30/pq/flat"]
    assert "no multiple" in why["ours/pca/k30/pq16/flat"]
    measured = {point.key for point in points}
    assert {"ours/pca/k30/fp32/flat", "truncate/truncate/k50/fp32/ivf"} <= measured
    assert not measured & why.keys()


def test_raw_embeddings_are_measured_in_every_codec_and_size_of_ours():
    config = config_of(widths="32,64", codecs="fp32,sq6,PRQ8x2x4")
    points, _ = grid(config, dim=384, rank=381, rows=9_000)
    raw = {point.codec for point in points if point.family == "raw"}
    # 32 and 64 dims in 1 byte each, and in a quarter of that.
    assert {"fp32", "sq6", "PRQ8x2x4", "pq8", "pq16", "pq32", "pq64"} <= raw


def nearest(rows: np.ndarray, queries: np.ndarray) -> np.ndarray:
    return np.argsort(-cosines(queries, rows), axis=1, kind="stable")[:, :10]


def shared_of(ours: np.ndarray, theirs: np.ndarray) -> float:
    return np.mean([len(set(a) & set(b)) / 10 for a, b in zip(ours, theirs, strict=True)])


def test_figures_are_those_of_brute_force(tmp_path, corpus, embeddings):
    wishes = {"widths": "8,16", "transforms": "pca,whitening:0.5,truncate", "codecs": "fp32,sq8"}
    report = run_sweep(SweepConfig(**options(corpus, tmp_path, **wishes)))
    assert report.measured == len(points_of(tmp_path))
    assert not (tmp_path / ".sweep-work").exists()
    header = lines_of(tmp_path)[0]
    assert (header["type"], header["run"]) == ("sweep", report.runs[0])
    facts = header["dataset"]
    assert (facts["rows"], facts["dim"], facts["queries"]) == (ROWS - HELD, DIM, HELD)
    assert facts["raw_bytes_per_row"] == 4 * DIM
    held = np.sort(np.random.default_rng(0).choice(ROWS, HELD, replace=False))
    kept = np.delete(embeddings, held, axis=0).astype(np.float64)
    queries = embeddings[held].astype(np.float64)
    mean, (values, vectors) = kept.mean(axis=0), np.linalg.eigh(np.cov(kept.T))
    values, vectors = values[::-1], vectors[:, ::-1]
    np.testing.assert_allclose(header["spectrum"]["eigenvalues"], values, rtol=1e-9)
    raw, points = nearest(kept, queries), points_of(tmp_path)
    for k in (8, 16):
        maps = {
            "ours/pca": lambda x, k=k: (x - mean) @ vectors[:, :k],
            "ours/whitening:0.5": lambda x, k=k: (
                ((x - mean) @ vectors[:, :k]) * values[:k] ** -0.25
            ),
            "truncate/truncate": lambda x, k=k: x[:, :k],
        }
        for name, transform in maps.items():
            point = points[f"{name}/k{k}/fp32/flat"]
            found = nearest(transform(kept), transform(queries))
            assert point["agreement@10"] == pytest.approx(shared_of(found, raw), abs=0.004)
            assert point["index_recall@10"] == pytest.approx(1, abs=0.004)
            assert point["bytes"]["per_row"] == 4 * k
            assert point["bytes"]["codes"] == 4 * k * (ROWS - HELD)
            assert points[f"{name}/k{k}/sq8/flat"]["bytes"]["per_row"] == k
            assert 0.9 < points[f"{name}/k{k}/sq8/flat"]["index_recall@10"] <= 1
            assert points[f"{name}/k{k}/fp32/ivf"]["index_recall@10"] > 0.85
    base = points[f"raw/none/k{DIM}/fp32/flat"]
    assert base["agreement@10"] == base["index_recall@10"] == 1
    assert base["bytes"]["per_row"] == 4 * DIM
    # FAISS's PCA is the same map, but for its sample and its float32.
    assert points["faiss/faiss-pca/k16/fp32/flat"]["agreement@10"] == pytest.approx(
        points["ours/pca/k16/fp32/flat"]["agreement@10"], abs=0.02
    )
    whitened = [((x - mean) @ vectors[:, :16]) * values[:16] ** -0.5 for x in (kept, queries)]
    assert points["faiss/faiss-pcaw/k16/fp32/flat"]["agreement@10"] == pytest.approx(
        shared_of(nearest(*whitened), raw), abs=0.02
    )
    for point in points.values():
        assert point["quality"] is None
        latency, seconds = point["latency_ms"], point["seconds"]
        assert latency["p50"] <= latency["p95"] <= latency["p99"]
        assert point["throughput"]["batch"] == HELD
        parts = [seconds[part] for part in ("train", "add", "tune")]
        assert seconds["total"] == pytest.approx(sum(parts))


def test_ranked_again_by_exact_vectors_is_as_good_as_the_exact_index(tmp_path, corpus):
    wishes = {"widths": "16", "transforms": "pca", "codecs": "fp32,pq4,EDEN1", "baselines": False}
    run_sweep(SweepConfig(**options(corpus, tmp_path, indexes="flat,ivf", rerank=200, **wishes)))
    points = points_of(tmp_path)
    for codec in ("pq4", "EDEN1"):
        lists, best = (points[f"ours/pca/k16/{codec}/ivf{again}"] for again in ("", "/rerank200"))
        assert lists["agreement@10"] < best["agreement@10"]
        # A row number and its share of the lists' lengths lie next to each code.
        assert lists["bytes"]["per_row"] > points[f"ours/pca/k16/{codec}/flat"]["bytes"]["per_row"]
    exact, coarse = points["ours/pca/k16/fp32/flat"], points["ours/pca/k16/pq4/flat"]
    again = points["ours/pca/k16/pq4/flat/rerank200"]
    assert coarse["agreement@10"] < again["agreement@10"]
    assert again["agreement@10"] == pytest.approx(exact["agreement@10"], abs=0.01)
    assert again["rerank"] == {"candidates": 200, "from": "store", "bytes_per_row": 4 * DIM}
    assert again["bytes"]["per_row"] == coarse["bytes"]["per_row"] == 4


def test_the_commands_of_a_point_can_be_run(tmp_path, corpus, monkeypatch):
    wishes = {**FEW, "codecs": "pq4", "rerank": 200, "seed": 3, "similarity": "dot"}
    run_sweep(SweepConfig(**options(corpus, tmp_path / "out", **wishes)))
    (sweep,) = read_sweeps(tmp_path / "out" / "results.jsonl")
    (point,) = (each for each in sweep.points if each.candidates)
    build, search = command_of(sweep, point).split(" && ")
    monkeypatch.chdir(tmp_path)
    for command in (build, search.replace(" ID", " d0")):
        succeed(*shlex.split(command)[1:])
    config = open_index("INDEX").bundle.manifest["config"]
    assert (config["seed"], config["similarity"]) == (3, "dot")


def test_what_was_skipped_for_a_moment_is_tried_again(tmp_path, corpus, monkeypatch):
    config = SweepConfig(**options(corpus, tmp_path, **{**FEW, "codecs": "fp32,sq8"}))
    full = Mock(side_effect=MemoryError)
    monkeypatch.setattr("whiten_index.measure.trial.build_faiss_index", full)
    first = run_sweep(config)
    assert first.skipped["ours/pca/k8/fp32/flat"] == "the memory does not hold it"
    assert run_sweep(config).skipped == first.skipped
    records = [line for line in lines_of(tmp_path) if line["type"] == "skipped"]
    assert len(records) == len(first.skipped)
    monkeypatch.undo()
    again = run_sweep(config)
    assert (again.skipped, again.measured + first.measured) == ({}, 2)


def test_a_transform_that_cannot_be_does_not_keep_others_from_being_measured(tmp_path, corpus):
    given = options(corpus, tmp_path, **FEW)
    given |= {"widths": "22", "transforms": "all-but-the-top,pca"}
    report = run_sweep(SweepConfig(**given))
    assert set(points_of(tmp_path)) >= {"ours/pca/k22/fp32/flat"}
    for key, why in report.skipped.items():
        assert key.startswith("ours/all-but-the-top")
        assert "k" in why


def test_more_points_join_their_run_and_other_settings_start_another(tmp_path, corpus):
    given = options(corpus, tmp_path, **FEW)
    first = run_sweep(SweepConfig(**given))
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"type": "point", "run')  # as where a sweep was killed in mid-line
    watcher = Mock(spec=Progress)
    more = run_sweep(SweepConfig(**{**given, "widths": "4,8,16"}), progress=watcher)
    assert (more.runs, more.measured, more.found) == (first.runs, 2, 1)
    assert {"make indexes 1 to 1 of 2", "measure 2 to 2 of 2"} <= {
        call.args[0] for call in watcher.start.call_args_list
    }
    other = run_sweep(SweepConfig(**{**given, "seed": 1}), progress=watcher)
    assert (other.runs != first.runs, other.measured, other.found) == (True, 1, 0)
    assert "holds 1 other run" in str(watcher.note.call_args_list)
    # Its points have a score by pieces where there are texts, and these have none.
    auto = run_sweep(SweepConfig(**{**given, "transforms": "auto"}))
    assert (auto.runs != first.runs, auto.measured, auto.found) == (True, 1, 0)
    runs = Counter(line["run"] for line in lines_of(tmp_path) if line["type"] == "point")
    assert runs == {first.runs[0]: 3, other.runs[0]: 1, auto.runs[0]: 1}


def test_a_tiny_corpus_is_refused(tmp_path):
    corpus = write_rows(tmp_path / "tiny.parquet", np.eye(8, dtype="f4"))
    with pytest.raises(CorpusError, match="8 rows are too few to compare indexes on"):
        run_sweep(SweepConfig(**options(corpus, tmp_path / "out", widths="4")))


def test_a_full_disk_is_an_error_of_the_system(tmp_path, corpus, monkeypatch):
    full = Mock(side_effect=StorageError("the disk is full"))
    monkeypatch.setattr("whiten_index.index.faiss_build.write_index", full)
    with pytest.raises(StorageError, match="the disk is full"):
        run_sweep(SweepConfig(**options(corpus, tmp_path, widths="8")))
    assert not (tmp_path / ".sweep-work").exists()


@pytest.mark.parametrize(
    "data", [b"notes of mine", b'{"type": "Feature"}', line_of({"type": "point", "k": "wide"})]
)
def test_results_of_others_stay_as_they_are(tmp_path, corpus, data):
    (tmp_path / "results.jsonl").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"is damaged|a field of another type"):
        run_sweep(SweepConfig(**options(corpus, tmp_path, widths="8")))
    assert (tmp_path / "results.jsonl").read_bytes() == data


def test_a_second_sweep_into_the_same_folder_waits_its_turn(tmp_path, corpus):
    config = SweepConfig(**options(corpus, tmp_path, widths="8"))
    with only_writer(tmp_path, what="sweep"), pytest.raises(BusyError, match="is being written"):
        run_sweep(config)


def test_a_codec_by_the_name_that_faiss_has_for_it(tmp_path, corpus) -> None:
    given = options(corpus, tmp_path / "o", **{**FEW, "codecs": "fp32,SQ8,PRQ2x2x4,Nonsense"})
    found = run_sweep(SweepConfig(**given))
    points = points_of(tmp_path / "o")
    assert points["ours/pca/k8/SQ8/flat"]["factory"] == "SQ8"
    # Two bytes of codes and four of the norm.
    assert points["ours/pca/k8/PRQ2x2x4/flat"]["bytes"]["per_row"] < 8
    assert "FAISS cannot make 'Nonsense'" in found.skipped["ours/pca/k8/Nonsense/flat"]
