"""Labels to choose a transform by: judged queries, or pairs of texts."""

from whiten_index.labels.readers import Pairs, qrels_splits, read_pairs, read_qrels, read_queries

__all__ = ["Pairs", "qrels_splits", "read_pairs", "read_qrels", "read_queries"]
