"""The nightly job from a checkout: ``python -m pipelines.nightly_reindex job.toml``.

It is ``whiten-index nightly job.toml``; ``whiten_index.cli.nightly_job`` documents the job file.
"""

from whiten_index.cli.maintenance_commands import nightly
from whiten_index.cli.signals import stop_on_signals

if __name__ == "__main__":
    stop_on_signals()
    nightly()
