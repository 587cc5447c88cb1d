"""What workers of a cluster are given, by what its machines have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Slot:
    """What a worker is given.

    Attributes:
        cpus: cores, which are also its threads.
        gpus: 0 or 1.
        node: the machine that it is meant for, empty for any.
    """

    cpus: int
    gpus: int
    node: str = ""


@dataclass(frozen=True)
class Size:
    """How many workers, and what each has.

    Attributes:
        workers: None for one a GPU, or one a machine where no GPU is used.
        gpu: whether each is to have a GPU; None for where the cluster has any.
    """

    workers: int | None = None
    gpu: bool | None = None


@dataclass(frozen=True)
class Machine:
    """A machine of a cluster.

    Attributes:
        name: Ray's, of a node.
        cpus: cores.
        gpus: how many it has.
    """

    name: str
    cpus: int
    gpus: int

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> Machine:
        """Return one as Ray describes it."""
        resources = node["Resources"]
        return cls(node["NodeID"], int(resources.get("CPU", 0)), int(resources.get("GPU", 0)))

    def slots(self, *, gpu: bool) -> list[Slot]:
        """Return one for each GPU, or one with all cores."""
        if gpu:
            share = max(self.cpus // max(self.gpus, 1), 1)
            return [Slot(share, 1, self.name)] * min(self.gpus, self.cpus)
        return [Slot(self.cpus, 0, self.name)] if self.cpus else []


def spread(workers: int, machines: Sequence[Machine], *, gpu: bool) -> list[Slot]:
    """Return equal slots for so many workers, with as many cores as let all find room."""
    cpus = sum(machine.cpus for machine in machines)
    for share in range(cpus // workers, 1, -1):
        room = (min(each.cpus // share, each.gpus if gpu else each.cpus) for each in machines)
        if sum(room) >= workers:
            return [Slot(share, int(gpu))] * workers
    return [Slot(1, int(gpu))] * workers


def too_small(size: Size, machines: Sequence[Machine]) -> str:
    """Return the words for a cluster without room for so many."""
    cpus, gpus = sum(each.cpus for each in machines), sum(each.gpus for each in machines)
    asked = "a worker" if size.workers is None else f"{size.workers} workers"
    return f"the cluster has {cpus} cores and {gpus} GPUs, too few for {asked}"
