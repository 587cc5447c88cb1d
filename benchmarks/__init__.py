"""Measurements of speed, storage and quality: raw results as JSON lines, tables made from them."""
