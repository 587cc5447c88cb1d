"""Pages on the papers and on layers."""

from whiten_index.report.layers import write_layers
from whiten_index.report.page import check_report
from whiten_index.report.papers import write_papers

__all__ = ["check_report", "write_layers", "write_papers"]
