"""A build that dies by SIGKILL and is run again ends as if nothing had happened.

This file is the child too: run as a program, it runs the real job under a watch that numbers its
moments (each write of a file's name, each fsync, each step that it reports) and kills the process
at one of them. A file that is just being fsynced loses its second half first, as in a
power cut. The product knows nothing of it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[2]
PHASES = {"encode": "encode", "fit": "index", "publish": "publish"}  # first stage -> phase
CLOSING = {"published", "up_to_date", "interrupted", "failed"}
CHANGES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.chmod", "os.truncate"}
OPENS_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT
PACED_SECONDS = 2.0
ROWS, ROWS_A_FILE, ROWS_A_SHARD = 1200, 400, 100
OPENING, ANY = "open", "any"


# The child: moments, and the one at which it dies.


@dataclass
class Watch:
    """Numbers the moments of each phase, and dies at one or slows down at all of a phase."""

    out: str
    phase: str
    nth: int = 0
    pace: float = 0.0

    def __post_init__(self) -> None:
        self.now = OPENING
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()

    def install(self) -> None:
        from pipelines import build_index

        lines, fsync = build_index.LogLines, os.fsync
        start, advance = lines.start, lines.advance

        def started(log: Any, stage: str, total: int) -> None:
            start(log, stage, total)
            self.now = PHASES.get(stage, self.now)
            self.moment()

        def advanced(log: Any, rows: int) -> None:
            advance(log, rows)
            self.moment()

        def fsynced(descriptor: Any) -> None:
            self.moment(fsyncing=descriptor)
            fsync(descriptor)

        lines.start, lines.advance, os.fsync = started, advanced, fsynced
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        opens = event == "open" and int(arguments[2] or 0) & OPENS_TO_WRITE
        if (opens or event in CHANGES) and str(arguments[0]).startswith(self.out):
            self.moment()

    def moment(self, fsyncing: Any = None) -> None:
        # Shards are read, encoded and written in threads of their own.
        with self.lock:
            self.counts[self.now] += 1
            self.counts[ANY] += 1
            if self.phase not in (self.now, ANY):
                return
            last = self.counts[self.phase] == self.nth
        time.sleep(self.pace)
        if last:
            if fsyncing is not None:
                _lose_half(fsyncing)
            os.kill(os.getpid(), signal.SIGKILL)


def _lose_half(descriptor: Any) -> None:
    number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
    path = Path(f"/proc/self/fd/{number}")
    if path.is_file():
        os.truncate(path, path.stat().st_size // 2)


def child(job: str, out: str, phase: str, nth: str, pace: str) -> int:
    """Run a job under watch, and say at the end how many moments it had."""
    from pipelines import build_index

    watch = Watch(out, phase, int(nth), float(pace))
    watch.install()
    status = build_index.run(Path(job))
    print(json.dumps({"event": "moments", **watch.counts}))
    return status


def sweep(folder: str) -> int:
    """Kill a small build at every third moment, each time in a fork, and run it again.

    ``folder`` holds ``job.toml``, in which <out> stands for the index, and the folder ``before``,
    an index that the build replaces. Prints a line a moment.
    """
    import faiss  # noqa: F401 (loaded once, for all forks)

    from pipelines import build_index
    from whiten_index.search.search_index import open_index

    def in_fork(work: Callable[[], int]) -> int:
        if pid := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1)
        os._exit(work())

    def watched() -> int:
        Watch(str(out), ANY, nth).install()
        return build_index.run(job)

    def plain() -> int:
        return build_index.run(job)

    def opened() -> int:
        log.write_text(open_index(out).bundle.version)
        return 0

    template, nth, status = Path(folder, "job.toml").read_text(), 0, -signal.SIGKILL
    while status == -signal.SIGKILL:
        nth += 3
        out, job, log = (Path(folder, f"{nth}{end}") for end in ("", ".toml", ".log"))
        shutil.copytree(Path(folder, "before"), out)
        job.write_text(template.replace("<out>", str(out)))
        status = in_fork(watched)
        found = {"nth": nth, "status": status, "died": events(log.read_text())}
        found["finished"] = finished_shards(out)
        found["published"] = log.read_text() if in_fork(opened) == 0 else None
        found["again"] = in_fork(plain) if status else None
        print(json.dumps({**found, "events": events(log.read_text())}), flush=True)
    return 0


def events(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def started(lines: list[dict[str, Any]]) -> list[str]:
    return [line["stage"] for line in lines if line["event"] == "stage_started"]


def phase_of(lines: list[dict[str, Any]]) -> str:
    """Return the phase in which the lines of a job end."""
    return [OPENING, *(PHASES[stage] for stage in started(lines) if stage in PHASES)][-1]


def finished_shards(out: Path) -> dict[str, list[int]]:
    """Return shard -> [rows, modification time, inode] of those that have their manifest."""
    found = {}
    for path in sorted(out.glob("store/*/segments/*/manifest.json")):
        if not path.parent.name.startswith(".tmp-"):
            rows = json.loads(path.read_text())["segment"]["rows"]
            status = path.stat()
            found[path.parent.name] = [rows, status.st_mtime_ns, status.st_ino]
    return found


def vectors(out: Path) -> tuple[list[Any], np.ndarray]:
    """Return the ids of a published index and its vectors, both in the order of the rows."""
    import faiss

    from whiten_index import open_index

    bundle = open_index(out).bundle
    inner = faiss.downcast_index(bundle.index.index)
    if isinstance(inner, faiss.IndexIVF):
        inner.make_direct_map()
    rows = range(len(bundle))
    return bundle.documents.ids(rows), inner.reconstruct_n(0, len(bundle))


def search(out: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and rows of the hits of fixed queries."""
    from whiten_index import open_index

    bundle = open_index(out).bundle
    return bundle.search(np.random.default_rng(0).normal(size=(20, bundle.dim)), 10)


def assert_same_index(out: Path, undisturbed: Path) -> None:
    ids, found = vectors(out)
    wanted_ids, wanted = vectors(undisturbed)
    assert ids == wanted_ids
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    assert np.all((found * wanted).sum(axis=1) / lengths >= 0.99999)
    scores, rows = search(out)
    wanted_scores, wanted_rows = search(undisturbed)
    # Batches of another size give embeddings that round to another float16 now and then, which
    # may exchange two neighbours at the same distance.
    np.testing.assert_allclose(scores, wanted_scores, atol=1e-4)
    assert (rows == wanted_rows).mean() >= 0.98


def assert_taken_up(
    out: Path, finished: dict[str, list[int]], closing: dict[str, Any], corpus_shards: set[str]
) -> None:
    """Check that what was finished when the build died was used, as it was."""
    assert closing["event"] in ("published", "up_to_date"), closing
    after = finished_shards(out)
    assert {name: after[name] for name in finished} == finished
    done = sum(rows for name, (rows, *_) in finished.items() if name in corpus_shards)
    counts = closing["counts"]
    assert (counts["reused"], counts["encoded"]) == (done, counts["read"] - done)
    assert counts["remade_shards"] == 0


def leftovers(out: Path) -> list[str]:
    return [str(path.relative_to(out)) for path in out.rglob(".tmp-*")]


@dataclass(frozen=True)
class Setting:
    """A corpus, its undisturbed index, and another index that a build will replace."""

    job: str
    undisturbed: Path
    moments: dict[str, int]
    before: Path


def published_identity(out: Path) -> str:
    """Return what tells the published version from others: its name without the number."""
    return json.loads((out / "CURRENT").read_text())["version"].partition("-")[2]


def run(job: Path, *watch: str) -> subprocess.CompletedProcess[str]:
    """Run the job, under watch where its arguments are given: out, phase, nth, pace."""
    program = [__file__, "--child"] if watch else ["-m", "pipelines.build_index"]
    command = [sys.executable, *program, str(job), *watch]
    return subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def write_texts(folder: Path, seed: int, rows: int, words: tuple[str, ...]) -> None:
    folder.mkdir()
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(words, size=rng.integers(3, 25))) for _ in range(rows)]
    for start in range(0, rows, ROWS_A_FILE):
        ids = [f"{seed}-{row}" for row in range(start, min(start + ROWS_A_FILE, rows))]
        table = pa.table({"id": ids, "text": texts[start : start + ROWS_A_FILE]})
        pq.write_table(table, folder / f"{start:05d}.parquet")


@pytest.fixture(scope="module")
def setting(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_words: tuple[str, ...]
) -> Setting:
    folder = tmp_path_factory.mktemp("crash")
    write_texts(folder / "corpus", 1, ROWS, tiny_words)
    write_texts(folder / "earlier", 2, ROWS_A_FILE, tiny_words)
    template = (
        f'corpus = "{folder}/<corpus>"\ntext-column = "text"\nid-column = "id"\n'
        f'model = "{tiny_model}"\nshard-rows = {ROWS_A_SHARD}\nk = 16\n'
        'threads = 1\ndevice = "cpu"\nfactory = "IVF4,Flat"\nout = "<out>"\n'
    )
    paths = {name: folder / f"{name}-index" for name in ("corpus", "earlier")}
    for name, out in paths.items():
        job = folder / f"{name}.toml"
        job.write_text(template.replace("<corpus>", name).replace("<out>", str(out)))
        done = run(job, str(out), ANY, "0", "0")
        assert done.returncode == 0, done.stdout + done.stderr
        moments = events(done.stdout)[-1]
        if name == "corpus":
            counted = moments
    return Setting(
        template.replace("<corpus>", "corpus"), paths["corpus"], counted, paths["earlier"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "how", "seed", "published_before"),
    [
        ("encode", "moment", 1, False), ("encode", "moment", 2, True),
        ("encode", "clock", 3, False), ("index", "moment", 4, True), ("index", "moment", 5, False),
        ("index", "clock", 6, True), ("publish", "moment", 7, True),
        ("publish", "moment", 8, False), ("publish", "moment", 9, True),
        ("publish", "clock", 10, True),
    ],
)  # fmt: skip
def test_a_killed_build_goes_on_where_it_stopped(
    tmp_path: Path, setting: Setting, phase: str, how: str, seed: int, published_before: bool
) -> None:
    out, job = tmp_path / "index", tmp_path / "job.toml"
    job.write_text(setting.job.replace("<out>", str(out)))
    if published_before:
        shutil.copytree(setting.before, out)
    status, lines = kill(job, out, phase, how, np.random.default_rng(seed), setting.moments[phase])

    assert status == -signal.SIGKILL, lines[-1]
    assert phase_of(lines) == phase
    assert not CLOSING & {line["event"] for line in lines}
    finished = finished_shards(out)
    if published_before:
        is_new = published_identity(out) == published_identity(setting.undisturbed)
        assert phase == "publish" or not is_new
        assert_same_index(out, setting.undisturbed if is_new else setting.before)

    again = run(job)

    assert again.returncode == 0, again.stdout + again.stderr
    corpus_shards = set(finished_shards(setting.undisturbed))
    assert_taken_up(out, finished, events(again.stdout)[-1], corpus_shards)
    assert leftovers(out) == []
    assert_same_index(out, setting.undisturbed)


def kill(
    job: Path, out: Path, phase: str, how: str, rng: np.random.Generator, moments: int
) -> tuple[int, list[dict[str, Any]]]:
    """Kill a build in a phase: at a moment drawn, from within, or at a time drawn, from here.

    By the clock, the moments of the phase are stretched over two seconds, so that the time drawn
    is in the phase however fast the machine is.
    """
    if how == "moment":
        nth = int(rng.integers(1, moments, endpoint=True))
        done = run(job, str(out), phase, str(nth), "0")
        return done.returncode, events(done.stdout)
    command = [sys.executable, __file__, "--child", str(job), str(out), phase, "0"]
    process = subprocess.Popen(
        [*command, str(PACED_SECONDS / moments)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        output = ""
        for line in process.stdout:
            output += line
            if any(PHASES.get(stage) == phase for stage in started(events(line))):
                break
        time.sleep(rng.uniform(0, 0.8) * PACED_SECONDS)
        process.kill()
        output += process.stdout.read()
    return process.returncode, events(output)


@pytest.mark.slow
def test_a_build_may_die_at_any_moment(tmp_path: Path) -> None:
    template = (
        f'corpus = "{tmp_path}/<corpus>"\nembedding-column = "embedding"\nid-column = "id"\n'
        'shard-rows = 30\nk = 4\nthreads = 1\nout = "<out>"\n'
    )
    job = tmp_path / "job.toml"
    for seed, name in enumerate(("earlier.parquet", "corpus.parquet")):
        flat = np.random.default_rng(seed).normal(size=60 * 8).astype(np.float32)
        column = pa.FixedSizeListArray.from_arrays(flat, 8)
        pq.write_table(pa.table({"id": np.arange(60), "embedding": column}), tmp_path / name)
    job.write_text(
        template.replace("<corpus>", "earlier.parquet").replace("<out>", f"{tmp_path}/before")
    )
    assert run(job).returncode == 0
    job.write_text(template.replace("<corpus>", "corpus.parquet"))
    done = subprocess.run(
        [sys.executable, __file__, "--sweep", str(tmp_path)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    *killed, whole = events(done.stdout)
    assert whole["status"] == 0
    undisturbed = tmp_path / str(whole["nth"])
    versions = {json.loads((tmp_path / "before/CURRENT").read_text())["version"]}
    shards = set(whole["finished"]) - set(finished_shards(tmp_path / "before"))
    phases = Counter(phase_of(found["died"]) for found in killed)
    assert all(phases[phase] >= 3 for phase in PHASES.values()), phases
    for found in killed:
        out = tmp_path / str(found["nth"])
        assert (found["status"], found["again"]) == (-signal.SIGKILL, 0), found
        assert not CLOSING & {line["event"] for line in found["died"]}
        if phase_of(found["died"]) == "publish":
            versions.add(whole["published"])
        assert found["published"] in versions, found
        assert_taken_up(out, found["finished"], found["events"][-1], shards)
        assert_same_index(out, undisturbed)
    left = {found["nth"]: leftovers(tmp_path / str(found["nth"])) for found in killed}
    assert not {nth: paths for nth, paths in left.items() if paths}


if __name__ == "__main__":
    sys.exit({"--child": child, "--sweep": sweep}[sys.argv[1]](*sys.argv[2:]))
