"""The parts of the job that reproduces the papers' tables and figures."""
