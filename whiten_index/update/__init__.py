"""A published index brought up to date with its corpus: changed rows only, or nothing at all."""

from whiten_index.update.config import UpdateConfig
from whiten_index.update.plan import UpdatePlan, plan_update
from whiten_index.update.report import UpdateReport
from whiten_index.update.run import update_index

__all__ = ["UpdateConfig", "UpdatePlan", "UpdateReport", "plan_update", "update_index"]
