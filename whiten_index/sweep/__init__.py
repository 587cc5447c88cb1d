"""Every setting of k, transform, codec and index side by side: bytes, time and quality."""

from whiten_index.sweep.config import SweepConfig, sweep_config
from whiten_index.sweep.plan import SweepPlan, plan_sweep
from whiten_index.sweep.run import SweepReport, run_sweep

__all__ = ["SweepConfig", "SweepPlan", "SweepReport", "plan_sweep", "run_sweep", "sweep_config"]
