"""Search of a published index, re-ranking, and the query transform."""
