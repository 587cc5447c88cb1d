"""The rule by which ``auto`` chooses the FAISS index: rows, width, bytes to spend, recall wanted.

The structure comes first, then the most precise codec whose whole index fits the budget. If its own
scores fall short of the recall wanted, candidates are scored again by the vectors in the store.
"""

import math
import os
from dataclasses import dataclass, field, replace

from whiten_index.artifacts.manifest import Count
from whiten_index.errors import ConfigError
from whiten_index.index.factory import inner_index
from whiten_index.index.library import load_faiss
from whiten_index.index.ondisk_ivf import lists_on_disk
from whiten_index.index.sizes import IndexBytes, expected_bytes

AUTO = "auto"
TARGET_RECALL = 0.95
# One row in so many is held out at most, to set the effort of searches by.
HELD_OUT_SHARE = 10
# Exact search of so many rows takes some 10 ms, which lists do not better by enough to lose recall.
EXACT_UP_TO_ROWS = 200_000
LISTS_PER_ROOT = 4
# Of this recall a graph answers four times as fast as lists, and takes eight times as long to build
# (237,000 vectors of 128 dims; three times as fast at 0.95).
GRAPH_FROM_RECALL = 0.99
# From the slowest to the fastest. Exact search of fewer rows takes less time than Python's calls.
_STRUCTURES, _FASTER_FROM_ROWS = ("flat", "ivf", "hnsw"), 1_000
# Work on blocks of rows and their training takes so many bytes, however small the budget.
LEAST_WORK = 32 << 20
_GRAPH = "HNSW32"


@dataclass(frozen=True)
class Codec:
    """A codec of vectors."""

    name: str  # in words
    factory: str  # ending of the factory string
    in_graph: bool  # whether HNSW can keep it
    rerank: int  # candidates scored again from the store, if any are, until tuning finds the number
    # Index recall@10 by its own scores, looking at all rows, as measured on SciFact's vectors
    # (MiniLM, PCA, k = 128), None if candidates are always scored again.
    recall: float | None


# From the most precise on.
CODECS = (
    Codec("float32", "Flat", True, 50, 1.0),
    Codec("float16", "SQfp16", True, 50, 0.999),
    Codec("8 bits a coordinate", "SQ8", True, 50, 0.99),
    Codec("6 bits a coordinate", "SQ6", True, 50, 0.97),
    Codec("4 bits a coordinate by TurboQuant", "SQtqmse4", False, 100, 0.912),
    Codec("binary codes", "RaBitQ", False, 200, None),
)


@dataclass(frozen=True)
class IndexPlan:
    """The FAISS index to build, the reason, and its resources."""

    asked: str  # factory string of the user, or `auto`
    built: str  # factory string that it comes to, of the index behind the transforms
    # Candidates a query whose scores come from the store, None for the index's own.
    rerank: int | None
    why: str  # one sentence
    expected: IndexBytes  # bytes of the index, before it is made
    seed: int  # of the training sample and of the vectors held out
    target_recall: float  # index recall that the index is tuned to
    budget: int | None  # bytes held in memory, None for no limit
    device: str  # auto, cpu or gpu
    max_latency: float | None = None  # seconds in which 95 % of single searches are to answer
    faster: tuple["IndexPlan", ...] = ()  # to be made in turn where this one takes longer

    @property
    def work_bytes(self) -> int | None:
        """Bytes for blocks, sample and lists; never less than work takes at all."""
        return None if self.budget is None else max(self.budget, LEAST_WORK)

    @property
    def list_bytes(self) -> int | None:
        """Bytes of lists held while they are made on disk: half is for blocks of rows."""
        work, fixed = self.work_bytes, self.expected.fixed
        return None if work is None else max(work // 2 - fixed, work // 4)

    def fits_in_memory(self, *, grows: bool = False) -> bool:
        """Return whether the lists fit into three quarters of the budget; growing takes twice."""
        size = self.expected.fixed + self.expected.per_row_total * (2 if grows else 1)
        return self.budget is None or size <= self.budget * 3 // 4


@dataclass(frozen=True)
class OperatingPoint:
    """The setting of an index, and its index recall."""

    # Nprobe or efSearch; empty for a kind without any.
    parameters: dict[str, Count] = field(default_factory=dict)
    recall: float | None = None  # share of the exact neighbours found, None if nothing was measured
    target: float = 0.0  # recall wanted
    reached: bool = False  # whether it is met
    queries: Count = 0  # held-out vectors it was measured with
    p95_ms: float | None = None  # of single searches, None if they were not timed


def choose_factory(
    factory: str,
    *,
    rows: int,
    dim: int,
    k: int,
    budget: int | None = None,
    target_recall: float = TARGET_RECALL,
    seed: int = 0,
    device: str = "auto",
    max_latency: float | None = None,
) -> IndexPlan:
    """Choose the index for ``rows`` vectors of k dims, or take the factory named.

    ``dim`` is the width d of raw embeddings, ``budget`` the bytes of memory it may hold.
    """
    resources = seed, target_recall, budget, device, max_latency
    if factory != AUTO:
        expected = expected_bytes(factory, rows=rows, dim=dim, k=k)
        _require_room(factory, k, expected, budget)
        return IndexPlan(factory, factory, None, "named by --factory", expected, *resources)
    tried = ["flat"]
    if rows > EXACT_UP_TO_ROWS:
        tried = ["hnsw", "ivf"] if target_recall >= GRAPH_FROM_RECALL else ["ivf"]
    faster = _STRUCTURES if max_latency is not None and rows >= _FASTER_FROM_ROWS else ()
    plans, last = list[IndexPlan](), -1
    for each in (*tried, *faster):
        for codec in _codecs(each) if _STRUCTURES.index(each) > last else ():
            built = _factory(each, codec, rows=rows)
            expected = expected_bytes(built, rows=rows, dim=dim, k=k)
            if budget is None or _held(built, k, expected) <= budget:
                if budget is None:
                    try:
                        _require_memory(built, expected)
                    except ConfigError:
                        if plans:
                            continue
                        raise
                # Half of what may be lost is for lists that are not looked at.
                wanted = target_recall if each == "flat" else (1 + target_recall) / 2
                good = codec.recall is not None and codec.recall >= wanted
                rerank = None if good else codec.rerank
                why = _why(each, codec, rows=rows, budget=budget, rerank=rerank)
                plans.append(IndexPlan(factory, built, rerank, why, expected, *resources))
                last = _STRUCTURES.index(each)
                break
    if plans:
        return replace(plans[0], faster=tuple(plans[1:]))
    assert budget is not None
    raise _nothing_fits(tried[-1], rows=rows, dim=dim, k=k, budget=budget)


def in_units(size: int) -> str:
    """Return bytes as a text that ``parse_bytes`` takes, never less than they are."""
    for unit, base in (("GiB", 2**30), ("MiB", 2**20)):
        if size % base == 0:
            return f"{size // base}{unit}"
    for unit, base in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= 10 * base:
            return f"{math.ceil(10 * size / base) / 10:g}{unit}"
    return str(size)


def _codecs(structure: str) -> list[Codec]:
    return [codec for codec in CODECS if codec.in_graph or structure != "hnsw"]


def _factory(structure: str, codec: Codec, *, rows: int) -> str:
    code = codec.factory
    if structure == "hnsw":
        return _GRAPH if code == "Flat" else f"{_GRAPH}_{code}"
    return code if structure == "flat" else f"IVF{LISTS_PER_ROOT * math.isqrt(rows)},{code}"


def _why(structure: str, codec: Codec, *, rows: int, budget: int | None, rerank: int | None) -> str:
    shapes = {
        "flat": f"{rows:,} rows are searched exhaustively (up to {EXACT_UP_TO_ROWS:,})",
        "ivf": f"{rows:,} rows are searched by lists (above {EXACT_UP_TO_ROWS:,})",
        "hnsw": f"{rows:,} rows are searched by a graph (recall of {GRAPH_FROM_RECALL} or more)",
    }
    if budget is None:
        return f"{shapes[structure]}, kept in {codec.name} as there is no --memory-budget"
    again = ""
    if rerank is not None:
        again = ", the best of them scored again from the store"
        if codec.recall is not None:
            again += f" as its own scores find {codec.recall:.1%} of the neighbours"
    return (
        f"{shapes[structure]}; the most precise codec that fits {in_units(budget)} is "
        f"{codec.name}{again}"
    )


def _held(factory: str, k: int, expected: IndexBytes) -> int:
    """Return the most bytes that making an index and searching it hold in memory."""
    # Flat codes are allocated once, and lists are made on disk if need be. Every other kind grows
    # by doubling, and holds twice its bytes for a moment.
    inner = inner_index(factory, k)
    once = isinstance(inner, load_faiss().IndexFlatCodes) or lists_on_disk(inner)
    return expected.fixed + expected.per_row_total * (1 if once else 2)


def _require_memory(factory: str, expected: IndexBytes) -> None:
    """Refuse, without a budget, an index that is larger than the machine's memory."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return
    if expected.total > memory > 0:
        raise ConfigError(
            f"{factory} would take {expected.total:,} bytes of memory, and this machine has "
            f"{memory:,}; give a --memory-budget, within which lists are made on disk"
        )


def _require_room(factory: str, k: int, expected: IndexBytes, budget: int | None) -> None:
    """Refuse a factory that was named and cannot be made within a budget."""
    if budget is None:
        _require_memory(factory, expected)
    elif not lists_on_disk(inner_index(factory, k)):
        held = _held(factory, k, expected)
        if held > budget:
            raise ConfigError(
                f"--factory {factory} is made in memory, which takes {held:,} bytes, above "
                f"--memory-budget {in_units(budget)}; use a budget of {in_units(held)}, or lists, "
                "which are made on disk: IVF with Flat, SQ8, SQfp16, PQ or RaBitQ, without fast "
                "scan, such as IVF1024,Flat"
            )
    elif expected.fixed * 2 > max(budget, LEAST_WORK):
        raise ConfigError(
            f"--factory {factory} has {expected.fixed:,} bytes of centroids and codebooks, which "
            f"leave no room for rows in --memory-budget {in_units(budget)}; use fewer lists, or a "
            f"budget of {in_units(2 * expected.fixed)}"
        )


def _nothing_fits(structure: str, *, rows: int, dim: int, k: int, budget: int) -> ConfigError:
    made = (_factory(structure, codec, rows=rows) for codec in _codecs(structure))
    least = min(_held(each, k, expected_bytes(each, rows=rows, dim=dim, k=k)) for each in made)
    return ConfigError(
        f"--memory-budget {in_units(budget)} ({budget:,} bytes) holds no index of {rows:,} vectors "
        f"of {k} dims: the least takes {least:,} bytes; use a smaller --k, a budget of "
        f"{in_units(least)}, or name a --factory of lists, which are then made on disk"
    )
