"""A bound on the latency next to a target of recall: both are kept, or nothing is published."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.bad_input import succeed
from tests.helpers.builds import build, random_rows, write_rows
from whiten_index import BuildConfig, UpdateConfig, build_index, open_index, update_index
from whiten_index.errors import ConfigError, GateError
from whiten_index.pipeline.build import BuildReport
from whiten_index.progress import Progress

ROWS = 1_200
LISTS = "IVF136,Flat"


class Clock(Progress):
    """A clock by which each search of the n-th index timed takes the n-th of some milliseconds."""

    def __init__(self, *milliseconds: float) -> None:
        self.left, self.step, self.now = [*milliseconds], 0.0, 0.0
        self.notes = list[str]()

    def start(self, stage: str, total: int) -> None:
        if stage == "time searches":
            self.step = self.left.pop(0) / 1000

    def note(self, message: str) -> None:
        self.notes.append(message)

    def perf_counter(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_rows(tmp_path / "c.parquet", random_rows(rows=ROWS))


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(*milliseconds: float) -> Clock:
        clock = Clock(*milliseconds)
        monkeypatch.setattr("whiten_index.pipeline.publish.time", clock)
        return clock

    return use


def build_by(clock: Clock, out: Path, corpus: str, **options: Any) -> BuildReport:
    return build_index(
        BuildConfig(
            corpus=corpus, out=str(out), embedding_column="embedding", id_column="id",
            **{"k": 6, "whiten": "whitening", **options},
        ),
        progress=clock,
    )  # fmt: skip


def test_an_index_within_the_bound_is_published_with_its_latency(
    tmp_path: Path, corpus: str
) -> None:
    options = ("--embedding-column", "embedding", "--id-column", "id", "--k", "6")
    printed = succeed("build", corpus, *options, "--max-latency", "1000s", "--out", tmp_path / "o")
    assert "95 % of single searches answer in " in printed
    fields = open_index(tmp_path / "o").bundle.manifest
    assert fields["factory"]["built"] == "Flat"
    assert 0 < fields["factory"]["tuned"]["p95_ms"] < 1_000_000
    assert fields["config"]["max_latency"] == "1000s"


def test_a_bound_that_no_kind_keeps_publishes_nothing(tmp_path: Path, corpus: str) -> None:
    with pytest.raises(GateError, match=r"--target-recall 0.95 and --max-latency 0.001us") as error:
        build(tmp_path / "o", corpus, max_latency="0.001us")
    message = str(error.value)
    # Every kind that could keep it was made, in the order of their speed.
    kinds = [
        "Flat is too slow (recall 1, p95 ",
        f"{LISTS} is too slow (recall 0.9",
        "HNSW32 is too",
    ]
    assert [message.index(kind) for kind in kinds] == sorted(message.index(kind) for kind in kinds)
    assert not (tmp_path / "o" / "CURRENT").exists()
    assert not list((tmp_path / "o").glob("versions/*"))
    # What was encoded is kept.
    assert build(tmp_path / "o", corpus).encoded.counts.reused == ROWS


def test_auto_moves_to_lists_where_exact_search_is_too_slow(
    tmp_path: Path, corpus: str, clocked: Any
) -> None:
    clock = clocked(10.0, 1.0)
    factory = build_by(clock, tmp_path / "o", corpus, max_latency="5ms").manifest["factory"]
    assert (factory["asked"], factory["built"]) == ("auto", LISTS)
    assert factory["why"] == "Flat is too slow (recall 1, p95 10.00 ms)"
    assert factory["tuned"]["reached"]
    assert factory["tuned"]["recall"] >= 0.95
    assert factory["tuned"]["p95_ms"] == pytest.approx(1.0)
    assert f"Flat is too slow (recall 1, p95 10.00 ms); {LISTS} is tried" in clock.notes[0]
    rows = random_rows(rows=ROWS)[:20]
    found = open_index(tmp_path / "o").search_embeddings(rows, top_k=1)
    assert [hits[0].row for hits in found] == [*range(20)]


def test_a_graph_takes_the_place_of_lists_on_disk(tmp_path: Path, clocked: Any) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(rows=2_000, dim=256))
    # Lists are mapped within this budget, a graph is not.
    more = {"memory_budget": "2700KB", "k": 256, "whiten": "pca", "max_latency": "5ms"}
    report = build_by(clocked(10.0, 9.0, 1.0), tmp_path / "o", corpus, **more)
    assert report.manifest["factory"]["built"] == "HNSW32_SQ8"
    assert not report.manifest["factory"]["mapped"]
    assert not list(tmp_path.rglob("*.ivfdata"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"factory": "IVF16,Flat"}, r"kept: IVF16,Flat is too slow \(recall .*, p95 10.00 ms\); b"),
        ({"factory": "PQ3x4", "max_latency": "20ms"},
         r"kept: PQ3x4 finds too few neighbours \(recall 0\.\d*, p95 10.00 ms\); build"),
    ],
)  # fmt: skip
def test_a_kind_that_was_named_stays_or_is_refused(
    tmp_path: Path, corpus: str, clocked: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(GateError, match=said):
        build_by(clocked(10.0), tmp_path / "o", corpus, **{"max_latency": "5ms", **options})


def test_an_update_keeps_the_kind_and_the_bound(tmp_path: Path, corpus: str, clocked: Any) -> None:
    out = tmp_path / "o"
    build_by(clocked(10.0, 1.0), out, corpus, max_latency="5ms")
    config = UpdateConfig(index=str(out), refit="never")
    write_rows(Path(corpus), random_rows(rows=ROWS + 8))
    kept = update_index(config, progress=clocked(2.0))
    assert kept.update["decision"]["index"] == "keep"
    assert kept.manifest["factory"]["built"] == LISTS
    assert kept.manifest["factory"]["tuned"]["p95_ms"] == pytest.approx(2.0)
    # Lists that have become too slow give way to a graph.
    write_rows(Path(corpus), random_rows(rows=ROWS + 16))
    faster = update_index(config, progress=clocked(9.0, 3.0))
    assert faster.manifest["factory"]["built"] == "HNSW32"
    decision = faster.update["decision"]
    assert decision["index"] == "train"
    assert decision["index_why"].startswith(f"{LISTS} is too slow (recall 0.96")
    assert decision["index_why"].endswith("p95 9.00 ms)")
    # Where that is too slow as well, the version before stays.
    write_rows(Path(corpus), random_rows(rows=ROWS + 24))
    with pytest.raises(GateError, match=r"kept: HNSW32 is too slow"):
        update_index(config, progress=clocked(9.0))
    assert open_index(out).bundle.version == faster.version


def test_only_a_bound_that_is_given_makes_another_version(
    tmp_path: Path, corpus: str, clocked: Any
) -> None:
    clock = clocked(1.0)
    plain, again = (build_by(clock, tmp_path / "o", corpus) for _ in range(2))
    assert again.up_to_date
    assert len(clock.left) == 1
    assert plain.manifest["factory"]["tuned"]["p95_ms"] is None
    bound = build_by(clock, tmp_path / "o", corpus, max_latency="5ms")
    assert not bound.up_to_date
    # It is found by another writing of the same bound, and not timed again.
    assert build_by(clock, tmp_path / "o", corpus, max_latency="5.0 ms").up_to_date


@pytest.mark.parametrize("given", ["5", "fast", "0ms", "", "-1s", "1h", "1e3s", "ms"])
def test_what_is_no_time_is_refused(tmp_path: Path, given: str) -> None:
    with pytest.raises(ConfigError, match=r"--max-latency .* is no time; write .* ms or s"):
        BuildConfig(corpus="c.parquet", out=str(tmp_path / "o"), max_latency=given)


def test_a_faster_kind_beyond_the_memory_of_the_machine_takes_a_smaller_code(monkeypatch):
    def memory(name: str) -> int:
        return 4096 if name == "SC_PAGE_SIZE" else int(16.2e9) // 4096

    config = BuildConfig(corpus="c.parquet", embedding_column="e", out="o", max_latency="5ms")
    every = config.index_plan(rows=5_000_000, dim=768, k=768)
    monkeypatch.setattr("os.sysconf", memory)
    plan = config.index_plan(rows=5_000_000, dim=768, k=768)
    assert [each.built for each in every.faster] == ["HNSW32"]
    assert plan.built == every.built
    assert [each.built for each in plan.faster] == ["HNSW32_SQfp16"]
