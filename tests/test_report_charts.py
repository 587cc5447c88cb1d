"""The report of a sweep: its charts, their captions and their alternative texts."""

from __future__ import annotations

import pytest

from tests.report_helpers import RAW, header, point, read, sweep_records
from whiten_index.report.charts import charts_of

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


def test_index_recall_has_its_own_chart_and_fronts_leave_it_out(tmp_path):
    charts = {c.slug: c for c in charts_of(read(tmp_path, sweep_records())[0])}
    assert list(charts) == ["quality-bytes", "quality-latency", "quality-k", "index-recall",
                            "spectrum"]  # fmt: skip
    assert not any("recall" in charts[s].alt.lower() for s in charts if s.startswith("quality"))
    assert "do not read it as quality" in charts["index-recall"].caption


def test_index_recall_says_with_what_it_was_tuned(tmp_path):
    (sweep,) = read(tmp_path, [header(), RAW, point(index="ivf")])
    (caption,) = [c.caption for c in charts_of(sweep) if c.slug == "index-recall"]
    assert caption.endswith("on rows held out of their training; queries may be harder.")


@pytest.mark.parametrize("target", [0.95, 0.99, 0.995])
def test_the_target_of_recall_is_not_rounded(target, tmp_path):
    start = header()
    start["settings"]["target_recall"] = target
    (sweep,) = read(tmp_path, [start, RAW, point(index="ivf")])
    (chart,) = [c for c in charts_of(sweep) if c.slug == "index-recall"]
    (axes,) = chart.figure(narrow=False).axes
    assert f"tuned to {100 * target:g}%" in [text.get_text() for text in axes.texts]


def test_alt_texts_hold_the_ends_of_the_front_and_raw(tmp_path):
    (sweep,) = read(tmp_path, sweep_records())
    chart = charts_of(sweep)[0]
    first, last = chart.leading[0], chart.leading[-1]
    for value in (first.ndcg, last.ndcg, sweep.raw.ndcg):
        assert f"{100 * value:.2f}" in chart.alt
    assert not any(p.candidates for p in chart.leading)


def test_one_width_has_no_curve_and_no_spectrum_no_spectrum(tmp_path):
    bare = {**header(), "spectrum": None}
    (sweep,) = read(tmp_path, [bare, RAW, point(), point(codec="sq8")])
    assert [c.slug for c in charts_of(sweep)] == ["quality-bytes", "quality-latency",
                                                  "index-recall"]  # fmt: skip


def test_points_outside_a_chart_are_counted(tmp_path):
    (sweep,) = read(tmp_path, [header(), RAW, point(ndcg=0.64), point(codec="pq", ndcg=0.2)])
    chart = charts_of(sweep)[0]
    assert "1 point lies below 48.38 and outside; the table has them." in chart.caption


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
