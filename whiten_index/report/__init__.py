"""What an index looks like on paper. The home of matplotlib, which loads when it is used."""

from whiten_index.report.spectrum import check_plot_path, draw_spectrum

__all__ = ["check_plot_path", "draw_spectrum"]
