"""Metrics, scores on arrays, and readers of judged data."""
