"""What is printed at the end: JSON that any reader takes."""

from __future__ import annotations

import json

import pytest

from whiten_index.cli.terminal import print_json


def test_json_holds_null_for_what_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [1.5, float("inf"), {"c": -float("inf")}], "d": "NaN"})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"a": None, "b": [1.5, None, {"c": None}], "d": "NaN"}
