"""Sweep over k, transform, codec and index: bytes, time and quality of each, and the report.

Home of matplotlib and jinja2, which load late.
"""

from whiten_index.sweep.sweep_config import SweepConfig, sweep_config
from whiten_index.sweep.sweep_report import check_report, write_report
from whiten_index.sweep.sweep_run import SweepPlan, SweepReport, plan_sweep, run_sweep

__all__ = [
    "SweepConfig",
    "SweepPlan",
    "SweepReport",
    "check_report",
    "plan_sweep",
    "run_sweep",
    "sweep_config",
    "write_report",
]
