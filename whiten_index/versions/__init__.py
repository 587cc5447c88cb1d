"""Published versions of an index: their files, CURRENT, rollback, pruning and verification."""
