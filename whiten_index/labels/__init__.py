"""Labels to choose a transform by: judged queries, or pairs of texts."""

from whiten_index.labels.judged import JudgedQueries, read_judged
from whiten_index.labels.readers import Pairs, qrels_splits, read_pairs, read_qrels, read_queries
from whiten_index.labels.sts import StsSet, chosen_sets, key_of, read_sts, require_ranked
from whiten_index.labels.tasks import Task, read_task, task_files

__all__ = [
    "JudgedQueries",
    "Pairs",
    "StsSet",
    "Task",
    "chosen_sets",
    "key_of",
    "qrels_splits",
    "read_judged",
    "read_pairs",
    "read_qrels",
    "read_queries",
    "read_sts",
    "read_task",
    "require_ranked",
    "task_files",
]
