"""The collector of cycles: held back by whoever asks, as it was before afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import nullcontext

import pytest

from whiten_index import encoding
from whiten_index.collector import collector_held_back
from whiten_index.encoding import Encoder


@pytest.fixture(autouse=True)
def _as_it_was():
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


def _run(*lines: str) -> str:
    program = "\n".join(("import atexit, gc", "from whiten_index import collector", *lines))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_it_is_off_inside_and_on_after_the_last():
    gc.enable()
    with collector_held_back():
        assert not gc.isenabled()
        with collector_held_back():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_whoever_turned_it_off_finds_it_off():
    gc.disable()
    with collector_held_back():
        pass
    assert not gc.isenabled()


def test_an_error_turns_it_on_again():
    gc.enable()
    with pytest.raises(ZeroDivisionError), collector_held_back():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_a_loaded_encoder_leaves_it_on(tiny_model):
    gc.enable()
    Encoder.load(str(tiny_model), device="cpu")
    assert gc.isenabled()


def test_an_encoder_asked_for_again_holds_nothing_back(monkeypatch):
    """In a process of our own each time would freeze all that is there by then."""
    asked = []
    monkeypatch.setattr(encoding, "collector_held_back", lambda: asked.append(1) or nullcontext())
    monkeypatch.delitem(vars(encoding), "Encoder", raising=False)
    for _ in range(3):
        assert encoding.Encoder is Encoder
    assert asked == [1]


def test_a_library_freezes_nothing():
    assert (
        _run("with collector.collector_held_back(): pass", "print(gc.get_freeze_count())") == "0\n"
    )


def test_a_process_of_our_own_freezes_what_was_imported():
    printed = _run(
        "collector.spare_what_was_imported()",
        "atexit.register(lambda: print('handler', gc.get_freeze_count() > 1000))",
        "print(gc.get_freeze_count())",
        "with collector.collector_held_back(): import json",
        "print(gc.get_freeze_count() > 1000, gc.isenabled())",
    )
    assert printed == "0\nTrue True\nhandler True\n"
