"""What indexes, sweeps and evaluations look like on paper.

The home of matplotlib and jinja2, loaded late.
"""

from whiten_index.report.layers import write_layers
from whiten_index.report.page import check_report, write_report
from whiten_index.report.papers import write_papers
from whiten_index.report.spectrum import check_plot_path, draw_spectrum

__all__ = [
    "check_plot_path",
    "check_report",
    "draw_spectrum",
    "write_layers",
    "write_papers",
    "write_report",
]
