"""Sweep over k, transform, codec and index, and its report. Home of matplotlib and jinja2."""
