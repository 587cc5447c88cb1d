"""What the system does not let be read is neither gone nor damaged, and nothing is deleted for it.

Each command runs under strace, which lets one system call on one path fail.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from tests.helpers.bad_input import ARTIFACT, DISK, PROJECT, assert_one_error, run
from tests.helpers.builds import build, random_rows, write_rows
from whiten_index.cli import cli

STRACE = shutil.which("strace")
needs_strace = pytest.mark.skipif(STRACE is None, reason="strace is not installed")
MAIN = "from whiten_index.cli import main; main()"
EACH = """
import json, sys
from click.testing import CliRunner
from whiten_index.cli import cli

for command in json.loads(sys.argv[1]):
    ended = CliRunner().invoke(cli, command)
    if not isinstance(ended.exception, SystemExit | None):
        raise ended.exception
    print(json.dumps([ended.exit_code, ended.stdout, ended.stderr]))
"""
LISTED = (
    "versions", "candidates", "store", "corpora", "segments", "digests", "indexes", "registered",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """An index of three versions, with shards of no use to any and one corpus in its store."""

    out: Path
    corpus: str
    needed: Mapping[str, bytes]

    @property
    def store(self) -> Path:
        return self.out / "store"

    def folder(self, name: str) -> Path:
        if name in ("versions", "candidates", "store"):
            return self.out / name
        (encoder,) = (path for path in self.store.iterdir() if path.is_dir())
        return encoder / name

    def version(self, number: int) -> Path:
        return sorted((self.out / "versions").iterdir())[number]

    def command(self, name: str) -> tuple[object, ...]:
        return {
            "gc": ("gc", self.store, "--keep-days", 0),
            "compact": ("compact", self.store),
            "prune": ("prune", self.out, "--keep", 2),
            "rollback": ("rollback", self.out),
            "update": ("update", self.out, self.corpus),
            "search": ("search", self.out, "--like", 3),
            "inspect": ("inspect", self.out),
            "verify": ("verify", self.out),
            "verify store": ("verify", self.store),
        }[name]

    def assert_all_there(self) -> None:
        """Every file that a version, the corpus or the registry needs is as it was."""
        assert files_of(self.out).items() >= self.needed.items()


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith((".lock", ".tmp"))
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("built")
    corpus = write_rows(root / "c.parquet", random_rows(3, rows=80))
    for k in (2, 3, 4):
        build(root / "out", corpus, k=k)
    (root / "out" / "candidates").mkdir()
    return root


@pytest.fixture
def place(tmp_path: Path, built: Path) -> Place:
    # Its registry names the index that was copied, which is there too.
    root = Path(shutil.copytree(built, tmp_path / "place"))
    return Place(root / "out", str(built / "c.parquet"), files_of(root / "out"))


def failing(
    call: str, path: Path, error: str, *arguments: object, when: str = "1+", code: str = MAIN
) -> tuple[int, str, str]:
    """Run a command for which a system call on a path fails; return status and both outputs.

    ``when`` says which of the calls, as strace counts them.
    """
    assert STRACE is not None
    traced = [STRACE, "-f", "--seccomp-bpf", "-qq", "-o", "/dev/null", "-e", f"trace={call}"]
    traced += ["-e", f"inject={call}:error={error}:when={when}", "-P", str(path)]
    done = subprocess.run(
        [*traced, sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=PROJECT,
    )
    return done.returncode, done.stdout, done.stderr


def each_failing(
    place: Place, call: str, path: Path, error: str, commands: Sequence[str]
) -> Iterator[tuple[str, int, str, str]]:
    """Run commands one after another in such a process; yield name, status and both outputs."""
    given = [[str(each) for each in place.command(name)] for name in commands]
    status, stdout, stderr = failing(call, path, error, json.dumps(given), code=EACH)
    assert status == 0, stderr
    for name, line in zip(commands, stdout.splitlines(), strict=True):
        yield name, *json.loads(line)


TOO_MANY = "cannot read {}: this process has too many files open"
STOPPED = [
    *(("gc", "getdents64", name, "EIO", "cannot list {}: the disk reports an input/output error")
      for name in LISTED),
    *((command, "openat", f"{number}/{file}", error, match)
      for command, number, error, match in (
          ("prune", 1, "EMFILE", TOO_MANY), ("update", 2, "EMFILE", TOO_MANY),
          ("rollback", 1, "EIO", "cannot read {}.*rollback .* --to VERSION"))
      for file in ("manifest.json", "index.faiss")),
]  # fmt: skip


@needs_strace
@pytest.mark.parametrize(("command", "call", "name", "error", "match"), STOPPED)
def test_a_command_stops_where_it_cannot_read_what_it_needs(
    place: Place, command: str, call: str, name: str, error: str, match: str
) -> None:
    number, _, file = name.partition("/")
    path = place.version(int(number)) / file if file else place.folder(name)
    status, _, stderr = failing(call, path, error, *place.command(command))
    assert_one_error(stderr, match=match.format(path))
    assert status == DISK
    assert files_of(place.out) == place.needed


@needs_strace
@pytest.mark.parametrize(
    ("name", "commands"),
    [("versions", ("prune", "compact", "update", "verify", "rollback")),
     ("corpora", ("compact", "verify"))],
)  # fmt: skip
def test_a_folder_that_cannot_be_listed_is_an_error(
    place: Place, name: str, commands: tuple[str, ...]
) -> None:
    ended = each_failing(place, "getdents64", place.folder(name), "EACCES", commands)
    for command, status, stdout, stderr in ended:
        # An index may be sound where a folder of its store cannot be read.
        called = re.findall(r"(?m)^(index|store) .*: sound", stdout)
        assert (status, called) in ((DISK, []), (DISK, ["index"])), (command, stderr)
    place.assert_all_there()


@pytest.mark.parametrize("command", ["gc", "prune", "compact", "update", "verify", "verify store"])
def test_nothing_goes_where_the_disk_of_the_versions_is_not_mounted(
    place: Place, command: str
) -> None:
    versions = place.out / "versions"
    needed = {name: data for name, data in place.needed.items() if not name.startswith("versions")}
    versions.rename(place.out.parent / "away")
    versions.mkdir()
    name = sorted((place.out.parent / "away").iterdir())[-1].name
    status, stdout, stderr = run(*place.command(command))
    assert status == ARTIFACT
    assert name in stdout + stderr
    assert "Traceback" not in stderr
    assert files_of(place.out).items() >= needed.items()
    versions.rmdir()
    (place.out.parent / "away").rename(versions)
    assert run(*place.command("gc"))[0] == 0
    place.assert_all_there()


def assert_gc_stops(store: Path, folder: Path, why: str) -> None:
    """It says why, and leaves every file of a folder as it is."""
    before = files_of(folder)
    status, _, stderr = run("gc", store, "--keep-days", 0)
    assert status == ARTIFACT
    assert_one_error(stderr, match=why)
    assert files_of(folder) == before


@pytest.mark.parametrize("inside", [(), ("lost+found",)])
def test_gc_stops_where_a_registered_index_is_an_empty_mount_point(
    tmp_path: Path, inside: tuple[str, ...]
) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(3, rows=80))
    store, out = tmp_path / "store", tmp_path / "out"
    build(out, corpus, store=str(store))
    (record,) = store.glob("*/corpora/*.json")
    record.unlink()
    out.rename(tmp_path / "away")
    out.mkdir()
    for name in inside:
        (out / name).mkdir()
    assert_gc_stops(store, store, f"{out}, an index built from {store}, is not there")


@pytest.mark.parametrize("name", ["segments", "digests"])
def test_gc_stops_where_what_is_needed_is_not_there(place: Place, name: str) -> None:
    folder = place.folder(name)
    folder.rename(place.out.parent / "away")
    folder.mkdir()
    assert_gc_stops(place.store, place.out, "damaged or missing.*mount its disk")


@pytest.mark.parametrize("name", ["my-backup", ".hidden", "000001-0123456789ab.bak"])
def test_a_version_under_a_strange_name_stops_gc(place: Place, name: str) -> None:
    strange = place.out / "versions" / name
    place.version(0).rename(strange)
    why = f"{strange} is a link to a version or has the name of none"
    assert_gc_stops(place.store, place.out, why)


def test_a_record_under_another_name_stops_gc(tmp_path: Path) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(3, rows=80))
    options = ("--embedding-column", "embedding", "--id-column", "id")
    assert run("encode", corpus, "--store", tmp_path / "store", *options)[0] == 0
    (record,) = (tmp_path / "store").glob("*/corpora/*.json")
    record.rename(record.with_name(f".{record.name}.bak"))
    why = f".{record.name}.bak is damaged: it is the record of another corpus"
    assert_gc_stops(tmp_path / "store", tmp_path / "store", why)


@needs_strace
def test_a_rollback_leaves_a_failing_disk_for_a_version_that_is_named(place: Place) -> None:
    left, to = place.version(2), place.version(0).name
    arguments = ("rollback", place.out, "--to", to, "--json")
    status, stdout, _ = failing("openat", left / "index.faiss", "EIO", *arguments)
    found = json.loads(stdout)
    assert (status, found["to"]) == (0, to)
    assert f"{left.name} is not withdrawn" in found["note"]


def test_a_rollback_tells_which_versions_it_skipped(place: Place) -> None:
    first, second, _ = sorted((place.out / "versions").iterdir())
    (second / "index.faiss").write_bytes(b"damaged")
    status, stdout, stderr = run(*place.command("rollback"))
    assert (status, first.name in stdout) == (0, True)
    assert f"note: {second.name} was skipped" in stderr
    assert run("rollback", place.out, "--to", place.version(2).name)[0] == 0
    found = json.loads(run("rollback", place.out, "--json")[1])
    assert found["to"] == first.name
    assert "is damaged" in found["skipped"][second.name]


@needs_strace
@pytest.mark.parametrize("file", ["manifest.json", "corpus.json", "documents.arrow"])
def test_verify_tells_what_it_could_not_read_from_damage(place: Place, file: str) -> None:
    path = place.version(1) / file
    arguments = ("verify", place.out, "--json")
    status, stdout, stderr = failing("openat", path, "EACCES", *arguments)
    report, *_ = json.loads(stdout)["reports"]
    (unread,) = report["unread"]
    assert (status, report["damages"], report["sound"]) == (DISK, [], False)
    assert str(path) in unread["why"]
    assert "permission is denied" in unread["why"]
    assert "damaged" not in stderr


# A search starts no thread.
@pytest.mark.parametrize(
    ("command", "status"), [("search", 0), ("verify", DISK), ("update", DISK), ("compact", DISK)]
)
def test_a_thread_that_the_system_does_not_start_is_no_damage(
    place: Place, command: str, status: int
) -> None:
    arguments = [sys.executable, "-c", MAIN, *map(str, place.command(command))]
    stack = 1 << 46  # of each thread, more than there are addresses for
    done = subprocess.run(
        ["prlimit", f"--stack={stack}:", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=PROJECT,
    )
    assert (done.returncode, "damage" in done.stderr) == (status, False), done.stderr
    assert ("the system starts no more threads" in done.stdout + done.stderr) == (status != 0)


@needs_strace
@pytest.mark.parametrize(
    ("call", "path"),
    [
        ("openat", "CURRENT"),
        ("getdents64", "versions"),
        ("newfstatat", "versions/*/manifest.json"),
        ("openat", "versions/*/documents.arrow"),
        ("openat", "store/*/corpora/*.json"),
        ("openat", "store/*/segments/*/embeddings.safetensors"),
    ],
)
def test_verify_reports_what_could_not_be_read_once(place: Place, call: str, path: str) -> None:
    failed = max(place.out.glob(path))
    status, stdout, stderr = failing(call, failed, "EIO", "verify", place.out, when="1")
    assert (status, "Traceback" in stderr) == (DISK, False), stderr
    assert str(failed) in stdout + stderr
    assert "the disk reports an input/output error" in stdout + stderr


@needs_strace
@pytest.mark.parametrize("commands", [("gc",), ("search", "verify", "prune")])
def test_an_argument_that_cannot_be_looked_at_is_no_wrong_option(
    place: Place, commands: tuple[str, ...]
) -> None:
    folder = place.store if commands == ("gc",) else place.out
    calls = "?access,?faccessat,?faccessat2"
    for command, status, _, stderr in each_failing(place, calls, folder, "EACCES", commands):
        assert status in (0, DISK), (command, stderr)


def test_no_argument_is_looked_at_before_its_command_runs() -> None:
    """Click would report what the system refuses as a wrong option."""
    found, groups = list[str](), [("whiten-index", cli)]
    while groups:
        name, command = groups.pop()
        groups += [(f"{name} {each}", it) for each, it in getattr(command, "commands", {}).items()]
        for parameter in command.params:
            kind = parameter.type
            if isinstance(kind, click.Path) and (kind.exists or kind.readable or kind.writable):
                found.append(f"{name}: {parameter.name}")
    assert found == []


@needs_strace
def test_versions_are_not_called_damaged_for_a_failed_open(place: Place) -> None:
    path = place.version(1) / "manifest.json"
    status, stdout, stderr = failing("openat", path, "EIO", "versions", place.out)
    assert (status, f"cannot read {path}" in stderr) == (DISK, True)
    assert place.version(0).name in stdout
    assert "damaged" not in stdout + stderr


@needs_strace
def test_the_bytes_of_a_version_that_cannot_be_listed_are_not_called_0(place: Place) -> None:
    folder = place.version(1)
    status, stdout, _ = failing("getdents64", folder, "EIO", "versions", place.out, "--json")
    found = {each["name"]: each["bytes"] for each in json.loads(stdout)["versions"]}
    assert (status, found.pop(folder.name)) == (DISK, None)
    assert all(found.values())


@needs_strace
@pytest.mark.parametrize("file", ["corpus.json", "manifest.json"])
def test_what_a_version_needs_stays_where_it_cannot_be_read(place: Place, file: str) -> None:
    commands = ("gc", "compact", "verify store")
    ended = each_failing(place, "openat", place.version(0) / file, "EIO", commands)
    for command, status, _, stderr in ended:
        assert status == DISK, (command, stderr)
    place.assert_all_there()


@needs_strace
@pytest.mark.parametrize(
    ("folder", "file"),
    [
        ("corpora", "*.json"),
        ("indexes", "*.json"),
        ("segments", "*/manifest.json"),
        ("segments", "*/embeddings.safetensors"),
        ("digests", "*.zst"),
        ("rows", "*.zst"),
    ],
)
def test_a_store_that_cannot_be_read_is_not_damaged(place: Place, folder: str, file: str) -> None:
    (path,) = place.folder(folder).glob(file)
    ended = each_failing(place, "openat", path, "EIO", ("verify store", "gc"))
    for command, status, stdout, stderr in ended:
        # gc does not read ids and kept columns.
        expected = 0 if (command, folder) == ("gc", "rows") else DISK
        assert (status, "damaged" in stdout) == (expected, False), (command, stderr)
    place.assert_all_there()


@needs_strace
@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("update", "moments.safetensors"),
        ("update", "whitening.safetensors"),
        ("search", "index.faiss"),
        ("search", "documents.arrow"),
        ("inspect", "whitening.safetensors"),
        ("verify", "documents.arrow"),
    ],
)
def test_what_opens_to_be_checked_and_not_to_be_used_is_not_damaged(
    place: Place, command: str, file: str
) -> None:
    """Arrow, FAISS and safetensors report the system's errors in ways of their own."""
    path = place.version(2) / file
    arguments = place.command(command)
    status, stdout, stderr = failing("openat", path, "EMFILE", *arguments, when="2+")
    assert "this process has too many files open" in stdout + stderr
    assert "damaged" not in stdout + stderr
    assert status == DISK
    assert files_of(place.out) == place.needed


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_faiss_that_cannot_be_loaded_is_not_called_missing(
    place: Place, tmp_path: Path, error: str
) -> None:
    package = tmp_path / "path" / "faiss"
    package.mkdir(parents=True)
    why = "libfaiss.so: failed to map segment from shared object"
    (package / "__init__.py").write_text(f"raise {error}({why!r})\n")
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "search", place.out,
         "--like", "3"],
        capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": f"{package.parent}:{PROJECT}"},
    )  # fmt: skip
    assert done.returncode == DISK
    assert_one_error(done.stderr, match=f"FAISS is installed and cannot be loaded .{why}")


def test_a_job_file_that_may_not_be_read_is_the_systems_error(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text("k = 3\n")
    status, _, stderr = failing("openat", job, "EACCES", "build", "--config", job)
    assert status == DISK
    assert_one_error(stderr, match=f"cannot read {job}: permission is denied")


@pytest.mark.parametrize(
    "command",
    [
        ("push", "{index}", "--to", "loop.parquet"),
        ("push", "{index}", "--to", "loop.npy", "--status"),
        ("export", "{index}", "loop", "--as", "query"),
        ("eval", "retrieval", "--run", "run.trec", "--qrels", "loop.tsv"),
        ("eval", "retrieval", "loop"),
        ("build", "{corpus}", "--embedding-column", "v", "--out", "loop"),
        ("verify", "loop"),
        ("gc", "loop"),
        ("report", "loop"),
        ("search", "loop", "--like", "1"),
    ],
)
def test_a_link_that_leads_back_to_itself_is_an_error(
    place: Place, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.trec").write_text("q Q0 d 1 1.0 x\n")
    for name in ("loop", "loop.parquet", "loop.npy", "loop.tsv"):
        (tmp_path / name).symlink_to(name)
    named = {"index": place.out, "corpus": place.corpus}
    status, _, stderr = run(*(part.format_map(named) for part in command))
    assert status in (2, 3, 5, 7)
    assert_one_error(stderr, match="loop")
    place.assert_all_there()
