"""Labels to choose a transform by: judged queries, or pairs of texts."""
