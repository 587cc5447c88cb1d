"""Pushes by aliases that are cut off at every step, and two at once, on an engine in memory."""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pytest

from tests.vectordb.pushed_rows import Rows, append, end
from whiten_index.errors import DatabaseError
from whiten_index.vectordb.alias_writer import AliasWriter
from whiten_index.vectordb.database_writer import Stored
from whiten_index.vectordb.pushed_table import Layout

ROWS = Rows.make(10)
V1, V2, V3 = (replace(ROWS, version=f"00000{at}-abc") for at in (1, 2, 3))
TAKEN = "another push to here/docs took this one over; run it again"


@dataclass
class Engine:
    """Collections with their metadata, and aliases.

    Attributes:
        cut: how many calls that write are made until the connection breaks, and whether the last
            one is done.
        before: called once, before a call of that name.
    """

    metadata: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    cut: tuple[int, bool] | None = None
    before: dict[str, Callable[[], None]] = field(default_factory=dict)

    @contextmanager
    def writing(self, call: str, needs: str | None = None) -> Iterator[None]:
        if call in self.before:
            self.before.pop(call)()
        if needs is not None and needs not in self.metadata:
            raise DatabaseError(f"{needs} is not there")
        left, done = self.cut or (1000, False)
        if left == 0 and not done:
            raise DatabaseError("cut off")
        yield
        if left == 0:
            raise DatabaseError("cut off")
        self.cut = left - 1, done

    def state(self) -> Any:
        return copy.deepcopy((self.metadata, self.aliases))


class Writer(AliasWriter):
    engine, target = "memory", "here/docs"

    def __init__(self, engine: Engine) -> None:
        super().__init__("docs")
        self.there = engine

    def _explain(self, error: Exception) -> tuple[str, str]:
        raise error

    def _collections(self) -> Sequence[str]:
        return list(self.there.metadata)

    def _alias_target(self) -> str | None:
        return self.there.aliases.get("docs")

    def _aliases_of(self, collection: str) -> Sequence[str]:
        return [each for each, target in self.there.aliases.items() if target == collection]

    def _metadata(self, collection: str) -> str | None:
        if collection not in self.there.metadata:
            raise DatabaseError(f"{collection} is not there")
        return self.there.metadata[collection]

    def _describe(self, stored: Stored) -> None:
        with self.there.writing("write", stored.name):
            self.there.metadata[stored.name] = stored.table.text

    def _make(self, collection: str, layout: Layout, description: str) -> None:
        with self.there.writing("create"):
            self.there.metadata[collection] = description

    def _drop(self, collection: str) -> None:
        with self.there.writing("drop", collection):
            assert collection not in self.there.aliases.values(), "users see what is dropped"
            del self.there.metadata[collection]

    def _point_alias(self, collection: str | None, *, replaces: bool) -> None:
        assert collection is not None
        with self.there.writing("alias", collection):
            assert replaces == ("docs" in self.there.aliases)
            self.there.aliases["docs"] = collection

    def _upsert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        with self.there.writing("upsert", stored.name):
            pass

    _delete: Any = _upsert

    def _build(self, held: Stored, layout: Layout) -> None:
        with self.there.writing("build", held.name):
            pass

    _count = _fetch = _searching = NotImplemented

    def close(self) -> None:
        pass


def published(engine: Engine) -> tuple[str, int, str]:
    found = Writer(engine).published()
    return found.version, found.done, found.changing


def begun(engine: Engine, rows: Rows, *, whole: bool = True) -> Writer:
    writer = Writer(engine)
    writer.begin(rows.pushed, rows.layout)
    append(writer, rows.batches(5) if whole else ())
    return writer


def change(engine: Engine, after: Rows) -> None:
    with Writer(engine).changing(after.pushed, after.layout) as changing:
        changing.upsert(after.batches()[0])


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("call", range(12))
def test_a_push_that_is_cut_off(call: int, done: bool) -> None:
    """Users see the old rows or all new ones, and the next push ends with no rest."""
    engine = Engine()
    V1.fill(Writer(engine), batch=5)
    engine.cut = call, done
    try:
        V2.fill(Writer(engine), batch=5)
    except DatabaseError:
        pass
    else:
        assert call >= 8
    engine.cut = None
    assert published(engine) in ((V1.version, 10, ""), (V2.version, 10, ""))
    writer = Writer(engine)
    if published(engine)[0] == V1.version and (pending := writer.pending()) is not None:
        assert pending.version == V2.version
        writer.resume(V2.layout)
        end(writer, V2.batches(5)[pending.done // 5 :])
    elif published(engine)[0] == V1.version:
        V2.fill(writer, batch=5)
    writer.discard()
    assert writer.pending() is None
    assert published(engine) == (V2.version, 10, "")
    assert len(engine.metadata) == 1


@pytest.mark.parametrize("call", ["upsert", "build"])
@pytest.mark.parametrize("other", ["begin", "resume and swap"])
def test_a_push_is_taken_over_while_it_writes(other: str, call: str) -> None:
    """What the engine says of it, such as that the collection is gone, is not the reason."""
    engine = Engine()
    first, second = begun(engine, V1), Writer(engine)

    def take_over() -> None:
        if other == "begin":
            second.begin(V2.pushed, V2.layout)
        else:
            second.resume(V1.layout)
            second.swap()

    engine.before[call] = take_over
    writes = {"upsert": first.append, "build": first.finish}[call]
    with pytest.raises(DatabaseError, match=TAKEN):
        writes(*V1.batches(10) if call == "upsert" else ())


def test_what_is_swapped_in_while_another_push_drops_it_stays() -> None:
    engine = Engine()
    V1.fill(Writer(engine))
    begun(engine, V2)
    (pending,) = set(engine.metadata) - set(engine.aliases.values())
    engine.before["write"] = lambda: engine.aliases.update(docs=pending)
    Writer(engine).discard()
    assert published(engine)[0] == V2.version
    change(engine, V3)
    assert published(engine) == (V3.version, 10, "")


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_what_another_push_drops_while_it_is_swapped_in(ends: bool, first: bool) -> None:
    """The swap is refused, and users see what they saw."""
    engine = Engine()
    if not first:
        V1.fill(Writer(engine))
    writer = begun(engine, V2)
    (pending,) = set(engine.metadata) - set(engine.aliases.values())

    def gone() -> None:
        # As Qdrant does, with the aliases that point to it.
        del engine.metadata[pending]
        engine.aliases = {name: to for name, to in engine.aliases.items() if to != pending}

    def dropping() -> None:
        # It saw, before the swap, that the alias does not point to it.
        engine.metadata[pending] = json.dumps({**json.loads(engine.metadata[pending]), "lease": ""})
        if ends:
            engine.before["read"] = gone

    engine.before["alias"] = dropping
    with pytest.raises(DatabaseError, match=TAKEN):
        writer.swap()
    if not first:
        assert published(engine) == (V1.version, 10, "")
    V3.fill(Writer(engine))
    assert published(engine) == (V3.version, 10, "")
    assert len(engine.metadata) == 1


@pytest.mark.parametrize("call", ["write", "drop", "read"])
def test_two_connections_drop_the_same(call: str) -> None:
    engine = Engine()
    V1.fill(Writer(engine))
    begun(engine, V2)
    engine.before[call] = Writer(engine).discard
    Writer(engine).discard()
    assert len(engine.metadata) == 1
    assert published(engine)[0] == V1.version
