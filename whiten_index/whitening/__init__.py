"""Transforms of embeddings and what they are chosen by: arrays in, arrays out. numpy only."""
