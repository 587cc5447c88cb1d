"""The report of a sweep: its charts, their captions and their alternative texts."""

from __future__ import annotations

import pytest

from tests.report_helpers import RAW, header, point, read, sweep_records
from whiten_index.report.charts import charts_of

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


def test_the_same_results_give_the_same_pictures(tmp_path):
    (sweep,) = read(tmp_path, [header(), RAW, point(), point(k=128)])
    png = tmp_path / "a.png"
    first, second = ((*charts_of(sweep)[0].render(png), png.read_bytes()) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("narrow", [True, False])
def test_labels_of_a_front_keep_clear_of_each_other(narrow, tmp_path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    chart = charts_of(read(tmp_path, sweep_records())[0])[0]
    figure = chart.figure(narrow=narrow)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == len(chart.leading)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
