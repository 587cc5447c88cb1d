"""Map given work over items; a runner knows no work, only who does it."""

from whiten_index.runners.local import LocalRunner, Runner, Work
from whiten_index.runners.processes import ProcessRunner

__all__ = ["LocalRunner", "ProcessRunner", "Runner", "Work"]
