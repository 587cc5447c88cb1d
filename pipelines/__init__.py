"""Jobs that people run or schedule; each one is a thin order of calls into the library."""
