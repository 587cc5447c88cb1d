"""Readers in other processes while versions are published and removed: no error, no mixed answer.

A reader ends with an error on the first answer whose ids are of one version and its vectors of
another, so these tests see that none does, and that it would.
"""

from pathlib import Path

import pytest

from benchmarks import readers
from whiten_index import open_index
from whiten_index.search.search_index import Hit
from whiten_index.versions.published import version_names

ROWS, DIM = 200, 16


def test_readers_follow_versions_that_come_and_go(tmp_path: Path) -> None:
    found = readers.measure(tmp_path, rows=ROWS, dim=DIM, readers=2, versions=6)
    for reader in found["readers"]:
        seen = reader["versions"]
        assert seen == sorted(seen), "no reader goes back in time"
        assert len(seen) == len(set(seen)) >= 2
        assert max(seen) <= 6
        assert reader["searches"] > 100
        assert reader["reloads"] > 0
    assert len(version_names(tmp_path / "out")) == 2


def test_an_answer_of_two_versions_would_show(tmp_path: Path) -> None:
    points = readers.points(ROWS, DIM)
    for version in (0, 1):
        readers.publish(tmp_path, version, points)
    index = open_index(tmp_path / "out")
    (hits,) = index.search_embeddings(points[7:8], top_k=3)
    assert readers.version_of(7, hits, ROWS) == 1
    first = hits[0]
    mixed = [
        Hit(first.id - readers.STEP, first.score, first.row, {}),  # ids of the version before
        Hit(first.id - 1, first.score, first.row - 1, {}),  # its vectors
        Hit(first.id + 1, first.score, first.row, {}),  # the id of another row
    ]
    for hit in mixed:
        with pytest.raises(AssertionError, match=r"has the id|is nearest"):
            readers.version_of(7, [hit], ROWS)
