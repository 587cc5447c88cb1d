"""Runners: every item once and in order, in this process or in several; what fails is said."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from whiten_index import BuildConfig, encode_corpus, open_index
from whiten_index.encoding import chosen_devices
from whiten_index.errors import ConfigError, CorpusError, EncoderError
from whiten_index.pipeline.build import build_index
from whiten_index.runners import LocalRunner, ProcessRunner


@dataclass(frozen=True)
class Square:
    """Squares numbers; ``trouble`` says what to do at 7."""

    trouble: str = ""
    advance: Callable[[int], None] | None = None

    def telling(self, advance):
        return replace(self, advance=advance)

    def read(self, item):
        return item

    def prepare(self, item):
        return item

    def run(self, item):
        if item == 7 and self.trouble == "raise":
            raise CorpusError("seven is damaged")
        if item == 7 and self.trouble == "unpicklable":
            raise type("Local", (Exception,), {})("seven")
        if item == 7 and self.trouble == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.advance is not None:
            self.advance(1)
        return item**2, os.getpid()

    def finish(self, ran):
        return ran


@dataclass
class Diary:
    """Writes down what is done, in order."""

    done: list[str]
    advance: Callable[[int], None] | None = None

    def telling(self, advance):
        return replace(self, advance=advance)

    def read(self, item):
        self.done.append(f"read {item}")
        return item

    def prepare(self, item):
        return item

    def run(self, item):
        self.advance(1)
        return item

    def finish(self, ran):
        self.done.append(f"finish {ran}")
        return ran


def test_one_by_one_an_item_is_finished_before_the_next_is_read():
    diary, told = Diary([]), []
    assert list(LocalRunner(diary, one_by_one=True).map(range(3), told.append)) == [0, 1, 2]
    assert diary.done == [f"{what} {item}" for item in range(3) for what in ("read", "finish")]
    assert told == [1, 1, 1]


@pytest.mark.parametrize(
    ("budget", "at_a_time"), [("256MiB", True), ("2GiB", False), (None, False)]
)
def test_given_embeddings_are_read_one_shard_at_a_time_within_a_small_budget(
    tmp_path, write_parquet, monkeypatch, budget, at_a_time
):
    asked = []
    made = LocalRunner.__init__

    def spied(self, work, *, one_by_one=False):
        asked.append(one_by_one)
        made(self, work, one_by_one=one_by_one)

    monkeypatch.setattr(LocalRunner, "__init__", spied)
    rows = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(rows.ravel(), 4)
    corpus = write_parquet(tmp_path / "c.parquet", {"e": column})
    encode_corpus(
        BuildConfig(
            corpus=(str(corpus),), embedding_column="e", memory_budget=budget,
            store=str(tmp_path / "store"),
        )
    )  # fmt: skip
    assert asked == [at_a_time]


@pytest.mark.parametrize("count", [0, 1, 20])
def test_processes_do_every_item_once_and_in_order(count):
    told = []
    results = list(ProcessRunner([Square(), Square()]).map(range(count), told.append))
    assert [square for square, _ in results] == [i**2 for i in range(count)]
    assert sum(told) == count
    assert os.getpid() not in {pid for _, pid in results}
    assert multiprocessing.active_children() == []


def test_this_process_does_the_same():
    told = []
    results = list(LocalRunner(Square()).map(range(5), told.append))
    assert results == [(i**2, os.getpid()) for i in range(5)]
    assert told == [1] * 5


@pytest.mark.parametrize(
    ("trouble", "error", "message"),
    [
        ("raise", CorpusError, "seven is damaged"),
        ("unpicklable", RuntimeError, "seven"),
        ("die", EncoderError, "ended with status -9 .*run the same command again"),
    ],
)
def test_what_fails_in_a_process_is_said_and_no_process_stays(trouble, error, message):
    with pytest.raises(error, match=message):
        list(ProcessRunner([Square(trouble), Square(trouble)]).map(range(20)))
    assert multiprocessing.active_children() == []


UNGUARDED = """
from whiten_index.runners import ProcessRunner

class Nothing:
    def telling(self, advance):
        return self
    def read(self, item):
        return item
    prepare = run = finish = read

# More items than a pipe holds.
print(len(list(ProcessRunner([Nothing(), Nothing()]).map(range(20_000)))))
"""


def test_a_script_without_the_guard_is_told_of_it(tmp_path):
    (tmp_path / "script.py").write_text(UNGUARDED)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert "EncoderError: a worker process failed at its start, with status 1" in last
    assert last.endswith('start the build under: if __name__ == "__main__":')
    assert "killed" not in last


@dataclass(frozen=True)
class Chatty(Square):
    """Tells of progress for ever."""

    def run(self, item):
        while True:
            self.advance(1)
            time.sleep(0.02)


@dataclass(frozen=True)
class Doomed(Square):
    """Ends its process at its first item as ``trouble`` says, after it told of 5 rows."""

    def run(self, item):
        self.advance(5)
        time.sleep(0.3)
        if self.trouble == "exit":
            os._exit(3)
        if self.trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        atexit.register(os._exit, 3)
        raise CorpusError("the first is damaged")


@pytest.mark.parametrize(
    ("trouble", "error", "message"),
    [
        ("exit", EncoderError, "ended with status 3 before its work was done"),
        ("kill", EncoderError, "ended with status -9 .*killed"),
        ("raise and exit", CorpusError, "the first is damaged"),
    ],
)
def test_a_dead_process_is_noticed_while_another_talks(trouble, error, message):
    def advance(rows: int) -> None:
        # Long enough for the death to be seen before what was told last is taken.
        time.sleep(1.5 if rows == 5 else 0)

    with pytest.raises(error, match=message):
        list(ProcessRunner([Doomed(trouble), Chatty()]).map(range(20), advance))
    assert multiprocessing.active_children() == []


class Terminated:
    """Becomes work in the worker, which gets a signal of its process group on the way."""

    def __reduce__(self):
        return _terminated, ()


def _terminated() -> Square:
    os.kill(os.getpid(), signal.SIGTERM)
    return Square()


def test_a_process_that_starts_leaves_signals_to_its_parent():
    assert len(list(ProcessRunner([Terminated()]).map(range(3)))) == 3
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@dataclass(frozen=True)
class Stubborn(Square):
    """Does not hear that it should stop."""

    def run(self, item):
        self.advance(1)
        time.sleep(600)


def test_a_second_interruption_ends_even_processes_that_do_not_listen():
    def raise_interrupt(*_):
        raise KeyboardInterrupt

    def interrupt(rows: int) -> None:
        again.start()
        raise KeyboardInterrupt

    again = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, raise_interrupt)
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            list(ProcessRunner([Stubborn()]).map(range(20), interrupt))
    finally:
        again.join()
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - started < 50
    assert multiprocessing.active_children() == []


def test_an_interruption_ends_the_processes():
    def interrupt(rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(ProcessRunner([Square(), Square()]).map(range(20), interrupt))
    assert multiprocessing.active_children() == []


def _orphan(path: str) -> None:
    for _ in ProcessRunner([Slow(path)]).map(range(1000)):
        pass


@dataclass(frozen=True)
class Slow(Square):
    def run(self, item):
        time.sleep(0.05)
        Path(str(self.trouble), str(os.getpid())).touch()
        return item


def test_processes_whose_parent_is_killed_end_too(tmp_path):
    parent = multiprocessing.get_context("spawn").Process(target=_orphan, args=(str(tmp_path),))
    parent.start()
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.join()
    (worker,) = (int(path.name) for path in tmp_path.iterdir())
    while Path(f"/proc/{worker}").exists() and "Z" not in _state(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


# --------------------------------------------------------------------------- devices


def test_devices_are_named_one_by_one():
    assert chosen_devices("cpu") == ("cpu",)
    assert chosen_devices("cuda:0, cuda:1") == ("cuda:0", "cuda:1")


@pytest.mark.parametrize("asked", ["", "cpu,", "auto,cpu"])
def test_a_list_of_devices_with_a_hole_is_refused(asked):
    with pytest.raises(ConfigError, match=r"--device .* is not understood; use auto, cpu"):
        chosen_devices(asked)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tiny_words, write_parquet) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for part in range(3):
        texts = [" ".join(rng.choice(tiny_words, size=n)) for n in rng.integers(2, 20, 90)]
        table = pa.table({"id": [f"{part}-{i}" for i in range(90)], "text": texts})
        write_parquet(folder / f"{part}.parquet", table)
    return folder


def options(corpus: Path, model: Path, out: Path, **others) -> BuildConfig:
    return BuildConfig(
        corpus=(str(corpus),), text_columns=("text",), id_column="id", model=str(model),
        shard_rows=25, k=8, out=str(out), row_filter="text != 'x'", **others,
    )  # fmt: skip


def test_two_processes_make_the_same_store_and_resume_each_other(corpus, tiny_model, tmp_path):
    one = build_index(options(corpus, tiny_model, tmp_path / "one", device="cpu"))
    half = replace(options(corpus, tiny_model, tmp_path / "two", device="cpu"), limit=100)
    encode_corpus(half)
    two = build_index(options(corpus, tiny_model, tmp_path / "two", device="cpu,cpu"))
    assert (two.encoded.counts.reused, two.encoded.counts.encoded) == (100, 170)
    assert two.encoded.counts.tokens > 0
    # A file that was written a moment ago has no fingerprint yet.
    records = [
        replace(
            r.encoded.record,
            files=tuple(replace(f, fingerprint="") for f in r.encoded.record.files),
        )
        for r in (one, two)
    ]
    assert records[0] == records[1]
    for part in one.encoded.record.parts:
        np.testing.assert_allclose(
            two.encoded.store.embeddings(part.shard),
            one.encoded.store.embeddings(part.shard),
            atol=1e-3,
        )
    ids = [[hit.id for hit in open_index(r.out).search(["the old king"])[0]] for r in (one, two)]
    assert ids[0] == ids[1]


def test_a_damaged_row_stops_all_processes_with_its_own_error(tiny_model, tmp_path, write_parquet):
    vectors = [[0.0, 1.0], None, [1.0, 0.0]] * 10
    table = pa.table({"text": ["the cat"] * 29 + [None], "id": range(30), "e": vectors})
    write_parquet(tmp_path / "c.parquet", table)
    config = options(tmp_path / "c.parquet", tiny_model, tmp_path / "out", device="cpu,cpu")
    with pytest.raises(CorpusError, match="has no text in text"):
        encode_corpus(replace(config, on_bad_row="error", row_filter=None))
