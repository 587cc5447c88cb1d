"""Files that users name: pipes in their place are refused, modes stay, others' files are kept."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import bad_input
from tests.helpers.bad_input import CORPUS, EMBEDDED, OPTIONS, Place, assert_refused, succeed

place = bad_input.place

QUERIES = ("--queries", "good", *EMBEDDED)
PIPES: dict[str, tuple[tuple[Any, ...], int]] = {
    "corpus": (("build", "P", *EMBEDDED, "--out", "new"), CORPUS),
    "queries": (("search", "out", "--queries", "P", *EMBEDDED, "--run", "r.trec"), CORPUS),
    "pairs": (("eval", "sts", "P.tsv", "--model", "m"), CORPUS),
    "canaries": (("update", "out", "--canary-file", "P.parquet"), CORPUS),
    "job file": (("build", "--config", "P"), OPTIONS),
    "nightly job": (("nightly", "P"), OPTIONS),
    "run": (("search", "out", *QUERIES, "--run", "P.trec"), OPTIONS),
    "matrix": (("export", "out", "P.safetensors"), OPTIONS),
    "push": (("push", "out", "--to", "P.parquet"), OPTIONS),
}


@pytest.mark.parametrize("name", list(PIPES))
def test_a_pipe_is_no_file(place: Place, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    arguments, status = PIPES[name]
    monkeypatch.chdir(place.root)
    (pipe,) = (Path(each) for each in arguments if str(each).startswith("P"))
    os.mkfifo(pipe)
    if name == "nightly job":
        found, stdout, _ = bad_input.run(*arguments)
        assert (found, "is a pipe, a socket or a device" in stdout) == (status, True)
        return
    why = "is a pipe, a socket or a device|is neither a file nor a folder"
    assert_refused(place, arguments, status, why)
    assert pipe.is_fifo()


OUTPUTS: dict[str, tuple[Any, ...]] = {
    "r.trec": ("search", "out", *QUERIES, "--run"),
    "m.safetensors": ("export", "out"),
    "v.npy": ("push", "out", "--to"),
}


@pytest.mark.parametrize("name", list(OUTPUTS))
def test_a_file_that_is_replaced_keeps_its_mode(
    place: Place, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(place.root)
    for mode in (None, 0o600, 0o640, 0o664):
        if mode is not None:
            Path(name).chmod(mode)
        succeed(*OUTPUTS[name], name)
        assert mode in (None, Path(name).stat().st_mode & 0o777)


def test_vectors_in_the_place_of_pushed_ones_are_not_lost(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.root)
    push = ("push", "out", "--to", "v.npy")
    succeed(*push)
    pushed = np.load("v.npy")
    np.save("v.npy", -pushed)
    before = Path("v.npy").read_bytes()
    assert_refused(place, push, OPTIONS, r"v.npy holds something else than rows that a push wrote")
    assert Path("v.npy").read_bytes() == before
    # A push that was killed between its two files left new documents beside old vectors.
    np.save("v.npy", pushed)
    succeed(*push, "--k", 2)
    np.save("v.npy", pushed)
    succeed(*push)
    assert np.array_equal(np.load("v.npy"), pushed)
