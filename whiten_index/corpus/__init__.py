"""``ParquetCorpus``: plans shards from the footers, streams their rows as batches."""
