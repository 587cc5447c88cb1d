"""Opening an index leaves the standard output of the process alone."""

import subprocess
import sys
from pathlib import Path

from tests.helpers.builds import build, random_rows, write_rows

# Writes lines while the index is opened again and again.
_CODE = """
import itertools, os, sys, threading, time
from whiten_index import open_index

open_index(sys.argv[1])
over = threading.Event()
written = itertools.count()

def write():
    while not over.is_set():
        os.write(1, b"line %d\\n" % next(written))
        time.sleep(1e-5)

writer = threading.Thread(target=write)
writer.start()
for _ in range(100):
    open_index(sys.argv[1], verify="manifest")
over.set()
writer.join()
print(next(written), file=sys.stderr)
"""


def test_no_line_is_lost_while_an_index_with_lists_on_disk_is_opened(tmp_path: Path) -> None:
    rows = random_rows(rows=3000, dim=64)
    corpus = write_rows(tmp_path / "c.parquet", rows)
    build(tmp_path / "built", corpus, k=32, factory="IVF8,Flat", memory_budget="500KB")
    # FAISS notes that the lists are elsewhere than they were written.
    (tmp_path / "built").rename(tmp_path / "moved")
    assert list((tmp_path / "moved").rglob("*.ivfdata"))
    done = subprocess.run(
        [sys.executable, "-c", _CODE, str(tmp_path / "moved")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = int(done.stderr)
    assert lines > 100
    assert done.stdout.splitlines() == [f"line {number}" for number in range(lines)]
