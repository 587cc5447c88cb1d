"""Texts to embeddings: models, tokens, batches, pooling. The home of torch."""

import os

# Products of different shapes that oneDNN, and torch in each thread, remember: 0.6 MB each. With
# 1,024, their default, a server grew by 300 MB in three minutes; with 32, a query took 1.5 ms
# longer. Both read this when torch is loaded.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "256")
