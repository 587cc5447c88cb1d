"""Log lines of jobs, and the JSON that commands print."""

import json
import sys

import pytest

from whiten_index.cli.terminal import Bars, print_json


def test_json_holds_null_for_what_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [1.5, float("inf"), {"c": -float("inf")}], "d": "NaN"})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"a": None, "b": [1.5, None, {"c": None}], "d": "NaN"}


def test_a_notebook_shows_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    bars = Bars()
    bars.start("encode", 10)
    bars.advance(10)
    bars.finish("encode", 0.1)
    assert "| 0.00/10.0 [" in capsys.readouterr().err
