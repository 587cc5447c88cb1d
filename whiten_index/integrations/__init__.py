"""Thin faces of frameworks that use this package; each loads with its own import, not before."""
