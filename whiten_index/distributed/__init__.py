"""Executors: run given work on items in this process, in one process per device, or on Ray."""
