"""The report of a sweep: what it reads of the results, and the fronts that no point beats."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report_helpers import RAW, header, point, read, write_results
from whiten_index.errors import ArtifactError
from whiten_index.report.fronts import front
from whiten_index.report.records import Point, read_results

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


def test_a_torn_last_line_is_left_out_and_any_other_is_named(tmp_path):
    path = write_results(tmp_path / "results.jsonl", [header(), RAW])
    whole = path.read_text()
    path.write_text(whole + '{"type": "point", "run')
    assert len(read_results(path)[0].points) == 1
    for line in ("{half", "[1, 2]", "3", json.dumps(RAW)):
        path.write_text(f"{whole}{line}\n{whole}")
        with pytest.raises(ArtifactError, match=r"line 3 of .* is damaged .*; remove that line"):
            read_results(path)


def test_a_changed_figure_is_damage(tmp_path):
    path = write_results(tmp_path / "results.jsonl", [header(), RAW])
    whole = path.read_text()
    assert whole.count("0.6451") == 1
    path.write_text(whole.replace("0.6451", "0.6541"))
    with pytest.raises(ArtifactError, match=r"line 2 of .* is damaged"):
        read_results(path)


def test_a_point_measured_twice_counts_once_as_it_was_last(tmp_path):
    again = {**RAW, "quality": {"ndcg@10": 0.7}}
    (sweep,) = read(tmp_path, [header(), RAW, again])
    assert [p.ndcg for p in sweep.points] == [0.7]
    skipped = {"type": "skipped", "run": "r1", "key": "a", "why": "because"}
    measured = {**point(), "key": "a"}
    (sweep,) = read(tmp_path, [header(), skipped, measured])
    assert (len(sweep.points), len(sweep.skipped)) == (1, 0)


# Fronts

_COORDINATE = st.one_of(st.none(), st.integers(0, 6).map(float))


@given(st.lists(st.tuples(_COORDINATE, _COORDINATE), max_size=12))
def test_the_front_is_what_no_point_beats(pairs):
    points = [
        Point(str(n), "ours", "auto", 8, "fp32", "flat", per_row=x, ndcg=y)
        for n, (x, y) in enumerate(pairs)
    ]
    known = [p for p in points if p.per_row is not None and p.ndcg is not None]

    def beats(a, b):
        no_worse = a.per_row <= b.per_row and a.ndcg >= b.ndcg
        return no_worse and (a.per_row, a.ndcg) != (b.per_row, b.ndcg)

    truth = {(p.per_row, p.ndcg) for p in known if not any(beats(o, p) for o in known)}
    found = front(points, lambda p: p.per_row, lambda p: p.ndcg)
    assert {(p.per_row, p.ndcg) for p in found} == truth
    assert len(found) == len(truth)
    assert found == sorted(found, key=lambda p: p.per_row)
