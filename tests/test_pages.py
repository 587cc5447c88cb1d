"""Large pages are a wish about large arrays, and change nothing in them."""

from __future__ import annotations

import numpy as np

from whiten_index.index.pages import LEAST_BYTES, gather_pages


def test_a_large_array_is_as_it_was() -> None:
    rows = np.arange(LEAST_BYTES // 4 + 12_345, dtype=np.float32)
    before = rows.copy()
    thread = gather_pages(rows[3:])
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()
    np.testing.assert_array_equal(rows, before)


def test_small_and_scattered_arrays_are_left_alone() -> None:
    assert gather_pages(np.zeros(1000, dtype=np.float32)) is None
    assert gather_pages(np.zeros((LEAST_BYTES // 4, 2), dtype=np.float32)[:, 0]) is None


def test_a_system_without_such_advice_is_left_alone(monkeypatch) -> None:
    monkeypatch.setattr("whiten_index.index.pages.ctypes.CDLL", lambda _: object())
    thread = gather_pages(np.zeros(LEAST_BYTES // 4, dtype=np.float32))
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()
