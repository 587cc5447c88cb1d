"""What a build on a cluster takes, on paper: hours, bytes, memory and money from measured rates.

``python -m benchmarks.scaling_model ROWS MACHINES cpu|gpu`` prints a plan; ``--gpu-price``,
``--cpu-price`` and ``--start`` change what is assumed. ``docs/scaling.md`` explains it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.scaling_rates import (
    CLIENT,
    DISK_READ,
    DISK_WRITE,
    GPU_ROWS,
    HELD_OUT,
    SHARD_ROWS,
    Rates,
)
from whiten_index.index.choice import LISTS_PER_ROOT

_MOST_TRAINING_BYTES = 1 << 30
ENCODING = ("start", "check ids", "encode", "moments")
ALONE = ("check ids", "fit and tune", "train", "join", "publish")
# Bytes a coordinate, by the codec's factory string.
CODECS = {"Flat": 4.0, "SQ8": 1.0, "PQ64x4fs": 0.25}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines, and what is assumed of them.

    Attributes:
        machines: that work, each with two cores for what is not the encoder's.
        gpu: whether each has a GPU that encodes at the published rate.
        gpu_price, cpu_price: $ an hour of a machine with a GPU, and of two cores; the head is one
            of the latter.
        start_seconds: until machines are there.
    """

    machines: int
    gpu: bool = False
    gpu_price: float = 1.00
    cpu_price: float = 0.10
    start_seconds: float = 300.0

    @property
    def price(self) -> float:
        """$ an hour of a machine."""
        return self.gpu_price if self.gpu else self.cpu_price


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is built: an index of lists.

    Attributes:
        rows: of the corpus.
        dim: width of an embedding.
        k: width of a vector.
        codec: ending of the factory string.
        named: lists, where ``--factory`` names how many; 0 for four times √rows, as ``auto`` does.
    """

    rows: int
    dim: int = 384
    k: int = 128
    codec: str = "Flat"
    named: int = 0

    @property
    def shards(self) -> int:
        """Shards, all of them full."""
        return math.ceil(self.rows / SHARD_ROWS)

    @property
    def lists(self) -> int:
        """Lists of the index."""
        return self.named or LISTS_PER_ROOT * math.isqrt(self.rows)

    @property
    def sample(self) -> int:
        """Rows the lists are trained on: 256 a list within 1 GiB, and never fewer than lists."""
        most = max(_MOST_TRAINING_BYTES // (4 * self.k), self.lists)
        return max(1, min(self.rows - HELD_OUT, max(256 * self.lists, 1 << 16), most))

    @property
    def moments_bytes(self) -> float:
        """Bytes of a shard's moments: count, mean and upper triangle in float64."""
        return 8.0 * (1 + self.dim + self.dim * (self.dim + 1) / 2)

    def index_bytes(self, rates: Rates) -> float:
        """Bytes of the index: codes, ids, what pads lists, and centroids."""
        a_row = self.k * CODECS[self.codec] + rates.index_extra_row.value
        return self.rows * a_row + 4.0 * self.k * self.lists


@dataclass(frozen=True)
class Stage:
    """A step of a build.

    Attributes:
        name: of the step.
        seconds: it takes.
        machines: that work at it.
        read, written: bytes, from and to what all machines share.
        bound: what it waits for: compute, disk, driver.
    """

    name: str
    seconds: float
    machines: int
    read: float = 0.0
    written: float = 0.0
    bound: str = "compute"


def worker_rows(cluster: Cluster, rates: Rates) -> float:
    """Return the rows/s that one machine encodes; a GPU never more than its two cores feed."""
    overhead = rates.overhead.value if rates.overhead else 1.0
    if cluster.gpu:
        return GPU_ROWS.value / max(1.0, rates.feeding()) / overhead
    return rates.cpu_rows.value / overhead


def disk_seconds(machines: int, read: float, written: float) -> float:
    """Return the seconds that bytes take from and to the shared disk, by its published limits."""
    client = machines * CLIENT.value
    return read / min(client, DISK_READ.value) + written / min(client, DISK_WRITE.value)


def _stage(
    name: str, compute: float, machines: int, read: float = 0.0, written: float = 0.0
) -> Stage:
    disk = disk_seconds(machines, read, written)
    bound = "disk" if disk > compute else "compute"
    return Stage(name, max(disk, compute), machines, read, written, bound)


def stages(plan: Plan, cluster: Cluster, rates: Rates) -> list[Stage]:
    """Return the steps of a build, one after the other."""
    rows, many = plan.rows, cluster.machines
    stored, index = rows * rates.stored_row.value, plan.index_bytes(rates)
    # Beside embeddings, the store holds digests, ids and moments, which are not read again here.
    embeddings = rows * 2.0 * plan.dim
    groups = max(1, min(many, math.isqrt(plan.shards)))
    encode = _stage(
        "encode",
        rates.load_seconds.value + rows / worker_rows(cluster, rates) / many,
        many,
        rows * rates.corpus_row.value,
        stored,
    )
    if rates.driver_shard is not None:
        driver = plan.shards * rates.driver_shard.value
        if driver > encode.seconds:
            encode = replace(encode, seconds=driver, bound="driver")
    coding = rates.code_row.value + rates.code_row_list.value * plan.lists
    joining = 0.0 if rates.join_bytes is None else index / rates.join_bytes.value
    return [
        Stage("start", cluster.start_seconds, many),
        Stage("check ids", rows * rates.check_row.value, 1),
        encode,
        _stage("moments", 0.0, groups, plan.shards * plan.moments_bytes),
        Stage("fit and tune", rates.fit_seconds.value, 1),
        Stage("train", plan.sample * plan.lists / rates.train_pairs.value, 1),
        _stage("exact neighbours", rows * rates.exact_row.value / many, many, embeddings),
        _stage("code", rows * coding / many, many, embeddings, index),
        _stage("join", joining, 1, index, index),
        _stage("publish", index / rates.publish_bytes.value, 1, index),
    ]


def hours(found: Sequence[Stage]) -> float:
    """Return the hours of some stages."""
    return sum(stage.seconds for stage in found) / 3600


def money(found: Sequence[Stage], cluster: Cluster) -> float:
    """Return the $ of all machines and the head for the whole time."""
    return hours(found) * (cluster.machines * cluster.price + cluster.cpu_price)


def money_apart(plan: Plan, cluster: Cluster, rates: Rates) -> float:
    """Return the $ where machines with GPUs go after encoding, and as many of two cores come."""
    first = [stage for stage in stages(plan, cluster, rates) if stage.name in ENCODING]
    cores = replace(cluster, gpu=False)
    rest = [stage for stage in stages(plan, cores, rates) if stage.name not in ENCODING]
    rest.append(Stage("start", cluster.start_seconds, cluster.machines))
    return money(first, cluster) + money(rest, cores)


def main(arguments: Sequence[str]) -> None:
    """Print a plan."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=int)
    parser.add_argument("machines", type=int)
    parser.add_argument("device", choices=("cpu", "gpu"))
    parser.add_argument("--codec", choices=sorted(CODECS), default="Flat")
    parser.add_argument("--k", type=int, default=Plan.k)
    parser.add_argument("--gpu-price", type=float, default=Cluster.gpu_price, help="$ an hour")
    parser.add_argument("--cpu-price", type=float, default=Cluster.cpu_price, help="$ an hour")
    parser.add_argument("--start", type=float, default=Cluster.start_seconds, help="seconds")
    given = parser.parse_args(arguments)
    rates, plan = Rates.read(), Plan(rows=given.rows, k=given.k, codec=given.codec)
    cluster = Cluster(
        machines=given.machines,
        gpu=given.device == "gpu",
        gpu_price=given.gpu_price,
        cpu_price=given.cpu_price,
        start_seconds=given.start,
    )
    found = stages(plan, cluster, rates)
    for stage in found:
        print(f"{stage.name:17} {stage.seconds:10,.0f} s on {stage.machines:4} ({stage.bound})")
    print(f"{hours(found):.2f} h, {money(found, cluster):,.2f} $")


if __name__ == "__main__":
    main(sys.argv[1:])
