"""A fault of the system at every file operation of every command that writes, deletes or reads.

Each command of the command line runs in a process whose calls to libc are numbered
(``interpose.c``). One of them fails with an error of the system, or the process is killed right
before it. Afterwards:

- the published version is the old or the new one, whole by its checksums;
- no file of a version to be kept is gone or changed, and the store still has its embeddings, as
  compared with the corpus they were made from;
- the command ended with its own status or with 7, without a traceback;
- the same command, run again, ends as if nothing had happened, and nothing is left over.

``make faults`` tries a sample, ``make soak`` every operation.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.faults import child
from tests.faults.place import Place
from tests.faults.run import ROOT, assert_no_problems, compiled, environment, tried_faults

pytestmark = pytest.mark.faults


def assert_harmless(points: list[dict[str, Any]]) -> None:
    assert_no_problems(points)
    flows = set(child.flows(Place(Path())))
    assert {point["flow"] for point in points} == flows
    assert {point["fault"] for point in points} == set(child.FAULTS)
    counts = Counter((point["fault"], point["status"]) for point in points)
    print(f"\n{len(points):,} faults in {len(flows)} commands:", dict(sorted(counts.items())))


@pytest.mark.timeout(1800)
def test_a_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = tried_faults(tmp_path, share=0.0005)
    with capsys.disabled():
        assert_harmless(points)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = tried_faults(tmp_path, share=1)
    with capsys.disabled():
        assert_harmless(points)


@pytest.mark.parametrize("flow", ["build, first", "update, refit", "push, changes", "gc"])
def test_no_operation_escapes(flow: str, tmp_path: Path) -> None:
    """Every system call below the folder that strace lists was numbered too."""
    place, library = Place(tmp_path), compiled(tmp_path)
    prepared = environment(tmp_path, library)
    begin = f"from tests.faults.place import Place; Place(Path({str(tmp_path)!r})).prepare()"
    subprocess.run(
        [sys.executable, "-c", f"from pathlib import Path; {begin}"],
        env=prepared, cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    command = [str(each) for each in child.flows(place)[flow]]
    numbered, traced = tmp_path / "numbered", tmp_path / "traced"
    code = (
        "import ctypes, os, sys; from pathlib import Path;"
        "from tests.faults import child; from tests.faults.place import Place;"
        f"log = os.open({str(numbered)!r}, os.O_CREAT | os.O_WRONLY | os.O_APPEND);"
        f"place = Place(Path({str(tmp_path)!r}));"
        "operations = child.Operations(ctypes.CDLL(None));"
        "operations.arm(place, child.Fault(child.KINDS, 0), 0, log);"
        f"sys.exit(place.run(*{command!r}))"
    )
    calls = (
        "openat,open,getdents64,write,pwrite64,writev,fsync,fdatasync,rename,renameat,renameat2,"
    )
    calls += "unlink,unlinkat,rmdir,mkdir,mkdirat,link,linkat,ftruncate"
    strace = ["strace", "-f", "-qq", "-y", "-o", str(traced), "-e", f"trace={calls}"]
    subprocess.run(
        [*strace, "-E", f"LD_PRELOAD={library}", sys.executable, "-c", code],
        env={**prepared, "LD_PRELOAD": ""}, cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    seen = {tuple(line.split(" ", 1)) for line in numbered.read_text().splitlines()}
    called = operations_in(traced.read_text(), place.disk)
    assert {kind for kind, _ in called} >= {"fsync", "rename"}
    assert called - seen == set()


KIND_OF_CALL = {
    "getdents64": "list", "write": "write", "pwrite64": "write", "writev": "write",
    "ftruncate": "write", "fsync": "fsync", "fdatasync": "fsync", "rename": "rename",
    "renameat": "rename", "renameat2": "rename", "unlink": "unlink", "unlinkat": "unlink",
    "rmdir": "unlink", "mkdir": "mkdir", "mkdirat": "mkdir", "link": "link", "linkat": "link",
}  # fmt: skip


def operations_in(trace: str, disk: Path) -> set[tuple[str, ...]]:
    """Return the kinds and paths of the successful system calls below a folder."""
    found = set()
    for line in trace.splitlines():
        match = re.match(r"\d+ +(\w+)\((.*)\) += (-?\d+)", line)
        if match is None or match[3] == "-1" or match[1] not in KIND_OF_CALL:
            continue
        paths = re.findall(rf'(?:"|<)({re.escape(str(disk))}[^">]*)', match[2])
        if paths:
            found.add((KIND_OF_CALL[match[1]], paths[-1].removesuffix("(deleted)")))
    return found
