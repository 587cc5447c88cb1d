"""Texts to embeddings: load a model, tokenise, batch, run, pool. Home of torch and transformers."""
