"""What an index and a sweep look like on paper. The home of matplotlib and jinja2, loaded late."""

from whiten_index.report.page import check_report, write_report
from whiten_index.report.spectrum import check_plot_path, draw_spectrum

__all__ = ["check_plot_path", "check_report", "draw_spectrum", "write_report"]
