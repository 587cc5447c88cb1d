"""Flows: build, encode, update and their plans, each from the corpus to a published version."""
