"""Labels to choose a transform by: judged queries, or pairs of texts."""

from whiten_index.labels.readers import Pairs, read_pairs, read_qrels, read_queries

__all__ = ["Pairs", "read_pairs", "read_qrels", "read_queries"]
