"""Upkeep of stores and indexes: gc, compaction, and checking every checksum again."""

from whiten_index.upkeep.compact import CompactReport, compact_store
from whiten_index.upkeep.gc import KEEP_DAYS, GcReport, gc_store
from whiten_index.upkeep.packing import WORTH_WRITING
from whiten_index.upkeep.report import Damage, VerifyReport
from whiten_index.upkeep.verify import verify_paths
from whiten_index.upkeep.verify_index import verify_index
from whiten_index.upkeep.verify_store import verify_store

__all__ = [
    "KEEP_DAYS",
    "WORTH_WRITING",
    "CompactReport",
    "Damage",
    "GcReport",
    "VerifyReport",
    "compact_store",
    "gc_store",
    "verify_index",
    "verify_paths",
    "verify_store",
]
