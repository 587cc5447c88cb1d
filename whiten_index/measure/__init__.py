"""Sweeps over k, transform, codec and index, and evaluations. Home of matplotlib and jinja2."""
