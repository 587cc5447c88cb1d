"""What a build on a cluster comes up against, and what is gained by what can be done about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.scaling_model import (
    ALONE,
    CODECS,
    Cluster,
    Plan,
    hours,
    money,
    money_apart,
    stages,
    worker_rows,
)
from benchmarks.scaling_rates import BUCKET_WRITES, DISK_WRITE, Rates

# Hashes of all ids, 8 bytes each, and once more where those of the shards are joined.
ID_BYTES = 16
# What FAISS advises.
ROWS_A_LIST = 39
# Embeddings, moments, manifest; ids and columns beside them.
OBJECTS_A_SHARD = 4
_GIB = 1 << 30


@dataclass(frozen=True)
class Limit:
    """What a size comes up against.

    Attributes:
        what: in words.
        asked: how much is needed.
        there: how much there is.
        unit: of both.
        then: what to do where it breaks.
    """

    what: str
    asked: float
    there: float
    unit: str
    then: str

    @property
    def share(self) -> float:
        """Above 1 where it breaks."""
        return self.asked / self.there


def limits(plan: Plan, cluster: Cluster, rates: Rates, *, memory_gib: float = 16.0) -> list[Limit]:
    """Return what a build comes up against, the worst first.

    Args:
        plan: of the build.
        cluster: of the build.
        rates: measured.
        memory_gib: of each machine; an assumption.
    """
    return sorted(_limits(plan, cluster, rates, memory_gib), key=lambda limit: -limit.share)


def _limits(plan: Plan, cluster: Cluster, rates: Rates, memory_gib: float) -> Iterator[Limit]:
    found = stages(plan, cluster, rates)
    encode = next(stage.seconds for stage in found if stage.name == "encode")
    alone = sum(stage.seconds for stage in found if stage.name in ALONE)
    writes = cluster.machines * worker_rows(cluster, rates) * rates.stored_row.value
    yield Limit(
        "one machine alone (ids, training, joining, publishing), against encoding",
        alone / 3600,
        encode / 3600,
        "h",
        "fewer lists; encode first, and build from the store on machines without a GPU",
    )
    yield Limit(
        "GPUs idle: coding, against encoding",
        next(stage.seconds for stage in found if stage.name == "code") / 3600,
        encode / 3600,
        "h",
        "the same; the time goes into finding each row's list, which fewer lists shorten",
    )
    yield Limit(
        "index in the memory of a machine",
        plan.index_bytes(rates) / _GIB,
        memory_gib,
        "GiB",
        "refused as it is; made and searched on disk with `--factory IVF…,Flat --memory-budget "
        "4GiB`; or codes of fewer bytes, `IVF…,SQ8`",
    )
    yield Limit(
        f"rows a list is trained on, of the {ROWS_A_LIST} that FAISS advises",
        ROWS_A_LIST,
        plan.sample / plan.lists,
        "",
        f"`--factory IVF{most_lists(plan)},Flat`: as many as the sample of 1 GiB is enough for"
        if most_lists(plan) < plan.lists
        else "nothing yet",
    )
    yield Limit(
        "memory of the head: ids checked",
        ID_BYTES * plan.rows / _GIB,
        memory_gib,
        "GiB",
        "a head with more memory, or no `--id-column`: rows are then named by file and place",
    )
    yield Limit(
        "store written to one EFS",
        writes / _GIB,
        DISK_WRITE.value / _GIB,
        "GiB/s",
        "a bucket; or a higher quota of the EFS (1 to 5 GiB/s are published, by region)",
    )
    yield Limit(
        f"objects written to a bucket, {OBJECTS_A_SHARD} a shard",
        OBJECTS_A_SHARD * plan.shards / encode,
        BUCKET_WRITES.value,
        "1/s",
        "nothing: it is far off",
    )
    if rates.driver_shard is not None:
        yield Limit(
            "the driver, against encoding",
            plan.shards * rates.driver_shard.value / 3600,
            encode / 3600,
            "h",
            "fewer workers gain nothing; this many shards a second are one driver's most",
        )


def most_lists(plan: Plan) -> int:
    """Return how many lists the sample is enough for."""
    return plan.sample // ROWS_A_LIST


@dataclass(frozen=True)
class Remedy:
    """What a build becomes by one more thing done.

    Attributes:
        what: in words.
        hours: in all.
        money: $.
        index_gb: bytes of the index.
    """

    what: str
    hours: float
    money: float
    index_gb: float


def remedies(plan: Plan, cluster: Cluster, rates: Rates) -> Iterator[Remedy]:
    """Yield a build as it is, and with one thing after the other done about it."""

    def now(what: str, dollars: float) -> Remedy:
        found = stages(plan, cluster, rates)
        return Remedy(what, hours(found), dollars, plan.index_bytes(rates) / 1e9)

    yield now("as `auto` chooses", money(stages(plan, cluster, rates), cluster))
    fewer = min(most_lists(plan), plan.lists)
    plan = replace(plan, named=fewer)
    yield now(f"{fewer:,} lists", money(stages(plan, cluster, rates), cluster))
    assert "SQ8" in CODECS
    plan = replace(plan, codec="SQ8")
    yield now("and 8 bits a coordinate", money(stages(plan, cluster, rates), cluster))
    sent = now("and GPUs sent home after encoding", money_apart(plan, cluster, rates))
    yield replace(sent, hours=sent.hours + cluster.start_seconds / 3600)
