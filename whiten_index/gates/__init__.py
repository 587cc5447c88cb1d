"""Gates: what a new version of an index must show before it is published."""

from whiten_index.gates.config import Base, Gate, GateConfig, require_passed
from whiten_index.gates.file import CanaryFile
from whiten_index.gates.run import run_gates

__all__ = ["Base", "CanaryFile", "Gate", "GateConfig", "require_passed", "run_gates"]
