"""Faults of the system at every file operation of every command."""
