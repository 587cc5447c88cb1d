"""Map given work over items; a runner knows no work, only who does it."""

from whiten_index.runners.calls import Calls, InThisProcess
from whiten_index.runners.cluster import cluster
from whiten_index.runners.crew import Crew
from whiten_index.runners.local import LocalRunner, Runner, Work
from whiten_index.runners.processes import ProcessRunner
from whiten_index.runners.ray_runner import CrewCalls, RayRunner, reason, refusal
from whiten_index.runners.schedule import Events, SetAside
from whiten_index.runners.slots import Size, Slot

__all__ = [
    "Calls",
    "Crew",
    "CrewCalls",
    "Events",
    "InThisProcess",
    "LocalRunner",
    "ProcessRunner",
    "RayRunner",
    "Runner",
    "SetAside",
    "Size",
    "Slot",
    "Work",
    "cluster",
    "reason",
    "refusal",
]
