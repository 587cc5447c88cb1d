"""What workers are given, by what the machines of a cluster have."""

from __future__ import annotations

from typing import Any

import pytest

from whiten_index.runners import Size, Slot
from whiten_index.runners.slots import Machine, spread, too_small


def machine(name: str = "a", **resources: float) -> Machine:
    node: dict[str, Any] = {"NodeID": name, "Resources": resources}
    return Machine.of(node)


@pytest.mark.parametrize(
    ("resources", "gpu", "slots"),
    [
        ({"CPU": 16.0, "GPU": 4.0}, True, [Slot(4, 1, "a")] * 4),
        ({"CPU": 16.0, "GPU": 4.0}, False, [Slot(16, 0, "a")]),
        # A worker without a core could not be started.
        ({"CPU": 2.0, "GPU": 4.0}, True, [Slot(1, 1, "a")] * 2),
        ({"CPU": 8.0}, True, []),
        ({"memory": 1e9}, False, []),
    ],
)
def test_a_machine_has_a_worker_a_gpu_or_one(
    resources: dict[str, float], gpu: bool, slots: list[Slot]
) -> None:
    assert machine(**resources).slots(gpu=gpu) == slots


@pytest.mark.parametrize(
    ("workers", "machines", "gpu", "share"),
    [
        (2, [{"CPU": 8}, {"CPU": 8}], False, 8),
        (4, [{"CPU": 8}, {"CPU": 8}], False, 4),
        # Five of three cores would fit by the sum of cores, and not machine by machine.
        (5, [{"CPU": 8}, {"CPU": 8}], False, 2),
        (3, [{"CPU": 6}, {"CPU": 2}], False, 2),
        (4, [{"CPU": 32, "GPU": 2}, {"CPU": 8, "GPU": 2}], True, 4),
        (100, [{"CPU": 8}], False, 1),
    ],
)
def test_so_many_workers_share_the_cores_evenly(
    workers: int, machines: list[dict[str, float]], gpu: bool, share: int
) -> None:
    slots = spread(workers, [machine(**each) for each in machines], gpu=gpu)
    assert slots == [Slot(share, int(gpu))] * workers


def test_a_cluster_without_room_is_told_in_figures() -> None:
    machines = [machine(CPU=3.0), machine(CPU=1.0, GPU=1.0)]
    assert too_small(Size(workers=9), machines) == (
        "the cluster has 4 cores and 1 GPUs, too few for 9 workers"
    )
    assert too_small(Size(), []).endswith("too few for a worker")
