"""How good embeddings and vectors are at what they are for: flows that read, encode, measure."""
