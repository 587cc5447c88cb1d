"""One process per device: every item once, failures raised, no process left behind."""

import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

from tests.distributed.squares import Square, squares
from whiten_index import BuildConfig, build_index, encode_corpus, open_index
from whiten_index.distributed import executors
from whiten_index.distributed.executors import ProcessExecutor, SerialExecutor
from whiten_index.encoding.encoder_config import chosen_devices
from whiten_index.errors import ConfigError, CorpusError, EncoderError

TWO = ("cpu", "cpu")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.parametrize("executor", [SerialExecutor(), ProcessExecutor(TWO)])
def test_every_item_is_done_once(tmp_path: Path, count: int, executor: Any) -> None:
    rows: list[int] = []
    work = Square(tmp_path / "log")
    results = list(executor.map_unordered(work, range(count), rows.append))
    assert squares(results) == [n**2 for n in range(count)]
    assert sum(rows) == sum(range(count))
    assert sorted(work.log_of("end")) == list(range(count))
    here = {pid == os.getpid() for _, (_, pid) in results}
    assert here <= {not executor.remote}
    assert multiprocessing.active_children() == []


def test_one_by_one_an_item_is_finished_before_the_next_is_begun(tmp_path: Path) -> None:
    work = Square(tmp_path / "log")
    list(SerialExecutor(one_by_one=True).map_unordered(work, range(3)))
    steps = [line.split()[:2] for line in work.log.read_text().splitlines()]
    assert steps == [[what, str(item)] for item in range(3) for what in ("begin", "end")]


@pytest.mark.parametrize(
    ("trouble", "error", "message"),
    [
        ("raise", CorpusError, "7 is damaged"),
        ("unpicklable", RuntimeError, "7 is damaged"),
        ("die", EncoderError, "was killed, .*run the same command again"),
    ],
)
def test_a_failure_in_a_process_is_raised_and_no_process_stays(
    tmp_path: Path, trouble: str, error: type[Exception], message: str
) -> None:
    work = Square(tmp_path / "log", trouble=((7, trouble),))
    with pytest.raises(error, match=message):
        list(ProcessExecutor(TWO).map_unordered(work, range(20)))
    assert multiprocessing.active_children() == []


def test_a_process_that_died_with_the_lock_of_the_events_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "_SECONDS_TO_FINISH", 3600)
    work = Square(tmp_path / "log", trouble=((0, "exit"),), seconds=1)

    def take_nothing_before_the_death(rows: int) -> None:
        while len(multiprocessing.active_children()) == len(TWO):
            time.sleep(0.01)

    with pytest.raises(EncoderError, match=r"ended with status 3; .*run the same command again"):
        list(ProcessExecutor(TWO).map_unordered(work, range(2), take_nothing_before_the_death))
    assert multiprocessing.active_children() == []


def test_an_interruption_ends_the_processes(tmp_path: Path) -> None:
    work = Square(tmp_path / "log", seconds=0.2)
    interrupt = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        list(ProcessExecutor(TWO).map_unordered(work, range(200), interrupt))
    assert multiprocessing.active_children() == []
    assert len(work.log_of("begin")) < 50


UNGUARDED = """
from pathlib import Path
from tests.distributed.squares import Square
from whiten_index.distributed.executors import ProcessExecutor

# More items than a pipe holds.
print(len(list(ProcessExecutor(["cpu", "cpu"]).map_unordered(Square(Path("log")), range(20_000)))))
"""


def test_a_script_without_the_guard_is_told_of_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "EncoderError: a worker process failed at its start with status 1" in last
    assert 'start the build under: if __name__ == "__main__":' in last


def _orphan(log: str) -> None:
    list(ProcessExecutor(["cpu"]).map_unordered(Square(Path(log), seconds=0.05), range(1000)))


def test_processes_whose_parent_is_killed_end_too(tmp_path: Path) -> None:
    work = Square(tmp_path / "log")
    parent = multiprocessing.get_context("spawn").Process(target=_orphan, args=(str(work.log),))
    parent.start()
    deadline = time.monotonic() + 60
    while not work.workers():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.join()
    (worker,) = work.workers()
    while Path(f"/proc/{worker}").exists() and _state(worker) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_devices_are_named_one_by_one() -> None:
    assert chosen_devices("cpu") == ("cpu",)
    assert chosen_devices("cuda:0, cuda:1") == ("cuda:0", "cuda:1")


@pytest.mark.parametrize("asked", ["", "cpu,", "auto,cpu"])
def test_a_list_of_devices_with_a_hole_is_refused(asked: str) -> None:
    with pytest.raises(ConfigError, match=r"--device .* is not understood; use auto, cpu"):
        chosen_devices(asked)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tiny_words: Any, write_parquet: Any) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for part in range(3):
        texts = [" ".join(rng.choice(tiny_words, size=n)) for n in rng.integers(2, 20, 90)]
        table = pa.table({"id": [f"{part}-{i}" for i in range(90)], "text": texts})
        write_parquet(folder / f"{part}.parquet", table)
    return folder


def options(corpus: Path, model: Path, out: Path, **others: Any) -> BuildConfig:
    return BuildConfig(
        corpus=(str(corpus),), text_columns=("text",), id_column="id", model=str(model),
        shard_rows=25, k=8, out=str(out), **others,
    )  # fmt: skip


def test_two_processes_make_the_same_store_and_resume_each_other(
    corpus: Path, tiny_model: Path, tmp_path: Path
) -> None:
    one = build_index(options(corpus, tiny_model, tmp_path / "one", device="cpu"))
    half = replace(options(corpus, tiny_model, tmp_path / "two", device="cpu"), limit=100)
    encode_corpus(half)
    two = build_index(options(corpus, tiny_model, tmp_path / "two", device="cpu,cpu"))
    assert (two.encoded.counts.reused, two.encoded.counts.encoded) == (100, 170)
    assert [p.digests for p in one.encoded.record.parts] == [
        p.digests for p in two.encoded.record.parts
    ]
    for part in one.encoded.record.parts:
        np.testing.assert_allclose(
            two.encoded.store.embeddings(part)[:], one.encoded.store.embeddings(part)[:], atol=1e-3
        )
    ids = [[hit.id for hit in open_index(r.out).search(["the old king"])[0]] for r in (one, two)]
    assert ids[0] == ids[1]
