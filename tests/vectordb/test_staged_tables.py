"""The life of pushed tables on an engine in memory: cut off at every step, and two pushes at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from whiten_index.errors import DatabaseError
from whiten_index.vectordb.database_writer import PushedTable
from whiten_index.vectordb.staged_tables import StagedTables

V1, V2, V3 = (PushedTable(f"00000{at}-abc", "t1", 4, "float32", 10) for at in (1, 2, 3))
TAKEN = "another push to here/docs took this one over; run it again"


@dataclass
class Engine:
    """Collections with their marks, and aliases.

    Attributes:
        wrote: what was written, in order.
        cut: calls that write until the connection breaks, before or after the call is done.
        before: called once, before a call of that name is done.
    """

    marks: dict[str, dict[str, Any]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    wrote: list[str] = field(default_factory=list)
    cut: tuple[int, bool] | None = None
    before: dict[str, Callable[[], None]] = field(default_factory=dict)

    def collections(self) -> list[str]:
        return list(self.marks)

    def stands_for(self, alias: str) -> str | None:
        return self.aliases.get(alias)

    def metadata(self, collection: str) -> Mapping[str, Any]:
        self._meanwhile("mark")
        if collection not in self.marks:
            raise DatabaseError(f"{collection} is not there")
        return copy.deepcopy(self.marks[collection])

    def create(self, collection: str, mark: Mapping[str, Any]) -> None:
        for _ in self._writes("create"):
            self.marks[collection] = dict(mark)

    def write_metadata(self, collection: str, mark: Mapping[str, Any]) -> None:
        for _ in self._writes("write_metadata"):
            if collection not in self.marks:
                raise DatabaseError(f"{collection} is not there")
            self.marks[collection] = copy.deepcopy(dict(mark))

    def publish(self, alias: str, collection: str, *, moved: bool) -> None:
        for _ in self._writes("publish"):
            assert moved == (alias in self.aliases)
            if collection not in self.marks:
                raise DatabaseError(f"{collection} is not there")
            self.aliases[alias] = collection

    def drop(self, collection: str) -> None:
        for _ in self._writes("drop"):
            if collection not in self.marks:
                raise DatabaseError(f"{collection} is not there")
            assert collection not in self.aliases.values(), "what users see is dropped"
            del self.marks[collection]

    def _meanwhile(self, call: str) -> None:
        if call in self.before:
            self.before.pop(call)()

    def _writes(self, call: str) -> Iterator[None]:
        self._meanwhile(call)
        left, after = self.cut or (1000, False)
        if left == 0 and not after:
            raise DatabaseError("cut off")
        yield
        self.wrote.append(call)
        if left == 0:
            raise DatabaseError("cut off")
        self.cut = left - 1, after

    def state(self) -> tuple[Any, ...]:
        return copy.deepcopy((self.marks, self.aliases))


@pytest.fixture
def engine() -> Engine:
    return Engine()


def connected(engine: Engine) -> StagedTables:
    return StagedTables(engine, "docs", "here/docs")


def begun(engine: Engine, pushed: PushedTable) -> StagedTables:
    life = connected(engine)
    life.begin(pushed, engine.create)
    return life


def append(life: StagedTables, rows: int = 5) -> None:
    with life.filling(adds=rows):
        pass


def fill(engine: Engine, pushed: PushedTable) -> StagedTables:
    life = begun(engine, pushed)
    append(life)
    append(life)
    life.swap()
    return life


def told(found: PushedTable | None) -> tuple[str, int, str]:
    assert found is not None
    return found.version, found.done, found.changing


def test_one_life(engine: Engine) -> None:
    life = fill(engine, V1)
    assert told(life.published()) == (V1.version, 10, "")
    assert life.pending() is None
    life.begin(V2, engine.create, metric="IP")
    append(life)
    assert told(life.published()) == (V1.version, 10, "")
    pending = life.pending()
    assert told(pending) == (V2.version, 5, "")
    assert pending is not None
    assert life.extra(pending.name, "metric") == "IP"
    append(life)
    assert life.extra(pending.name, "metric") == "IP"
    life.swap()
    assert told(life.published()) == (V2.version, 10, "")
    assert list(engine.marks) == [pending.name]
    # Of what is gone nothing is remembered for long.
    for _ in range(5):
        fill(engine, V1)
    (mark,) = engine.marks.values()
    assert len(mark["replaces"]) == 1


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", range(4))
def test_a_swap_that_is_cut_off(engine: Engine, call: int, after: bool) -> None:
    """The published pushed is one or the other, and none that is to go."""
    fill(engine, V1)
    life = begun(engine, V2)
    append(life)
    append(life)
    engine.cut = call, after
    # Where the answer to the last call alone is lost, all is done.
    done = (call, after) == (3, True)
    with nullcontext() if done else pytest.raises(DatabaseError, match="cut off"):
        life.swap()
    engine.cut = None
    again = connected(engine)
    published = again.published()
    assert published is not None
    assert engine.marks[published.name]["dropped"] is False
    if published.version == V1.version:
        assert (call, after) < (1, True)
        pending = again.pending()
        assert told(pending) == (V2.version, 10, "")
        again.resume(pending)
        again.swap()
    else:
        assert (call, after) >= (1, True)
        assert again.pending() is None
        again.discard()
    assert told(again.published()) == (V2.version, 10, "")
    assert len(engine.marks) == 1


def test_what_two_cut_swaps_left_is_never_taken_for_pending(engine: Engine) -> None:
    fill(engine, V1)
    life = begun(engine, V2)
    engine.cut = 2, False
    with pytest.raises(DatabaseError, match="cut off"):
        life.swap()
    engine.cut = None
    # Begun beside it, as a push does that looked before the swap.
    first = engine.marks[engine.aliases["docs"]]["replaces"]
    engine.create("docs__00000000", {**engine.marks[first[0]], "name": "docs__00000000"})
    engine.marks["docs__00000000"] |= {**V3.to_json(), "name": "docs__00000000"}
    pending = connected(engine).pending()
    assert told(pending) == (V3.version, 0, "")
    life = connected(engine)
    life.resume(pending)
    engine.cut = 2, False
    with pytest.raises(DatabaseError, match="cut off"):
        life.swap()
    engine.cut = None
    assert len(engine.marks) == 3
    assert connected(engine).pending() is None
    connected(engine).discard()
    assert list(engine.marks) == ["docs__00000000"]


@pytest.mark.parametrize("does", ["append", "finish", "swap"])
@pytest.mark.parametrize("other", ["begin", "resume", "resume and swap", "discard"])
def test_the_first_of_two_pushes_is_refused(engine: Engine, other: str, does: str) -> None:
    fill(engine, V1)
    first, second = begun(engine, V2), connected(engine)
    append(first)
    if other == "begin":
        second.begin(V3, engine.create)
    elif other == "discard":
        second.discard()
    else:
        second.resume(second.pending())
    if other == "resume and swap":
        append(second)
        second.swap()
    before = engine.state()

    def finish() -> None:
        with first.filling():
            raise AssertionError("it is let write")

    with pytest.raises(DatabaseError, match=TAKEN):
        {"append": finish, "finish": finish, "swap": first.swap}[does]()
    assert engine.state() == before
    if other in ("begin", "resume"):
        append(second)
        second.swap()
        assert connected(engine).pending() is None


@pytest.mark.parametrize("other", ["begin", "resume and swap"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_push_is_taken_over_while_it_writes(engine: Engine, other: str, fails: bool) -> None:
    """What the engine says of it, such as that the collection is gone, is not the reason."""
    first, second = begun(engine, V1), connected(engine)
    before = None
    with pytest.raises(DatabaseError, match=TAKEN), first.filling(adds=5):  # noqa: PT012
        if other == "begin":
            second.begin(V2, engine.create)
        else:
            second.resume(second.pending())
            append(second, 10)
            second.swap()
        before = engine.state()
        if fails:
            raise DatabaseError("no such collection")
    assert engine.state() == before


def test_an_error_of_ones_own_is_told_as_it_is(engine: Engine) -> None:
    life = begun(engine, V1)
    before = engine.state()
    with pytest.raises(DatabaseError, match="rows come twice"), life.filling(adds=5):
        raise DatabaseError("rows come twice")
    assert engine.state() == before
    append(life)
    assert told(life.pending()) == (V1.version, 5, "")


def test_nothing_is_written_that_was_not_begun(engine: Engine) -> None:
    life = connected(engine)
    for does in (life.swap, lambda: append(life), lambda: life.resume(life.pending())):
        with pytest.raises(DatabaseError, match="no push to here/docs was begun"):
            does()
    with pytest.raises(DatabaseError, match="is not there"), life.changing(V1):
        pass
    assert engine.wrote == []


def test_what_is_swapped_in_while_another_drops_it_stays(engine: Engine) -> None:
    fill(engine, V1)
    first, second = begun(engine, V2), connected(engine)
    pending = first.pending()
    assert pending is not None
    mark = copy.deepcopy(engine.marks[pending.name])
    engine.before["write_metadata"] = lambda: engine.aliases.update(docs=pending.name)
    second.discard()
    assert engine.marks[pending.name] == mark
    assert told(connected(engine).published())[0] == V2.version


def dropping(engine: Engine, *, ends: bool) -> Callable[[], None]:
    """What another push does that drops the pending pushed; ``ends`` before the swap looks."""
    (pending,) = set(engine.marks) - set(engine.aliases.values())

    def drop() -> None:
        # It saw, before the swap, that the name does not stand for it.
        engine.marks[pending] |= {"dropped": True, "lease": ""}
        if ends:
            engine.before["mark"] = gone

    def gone() -> None:
        # As Qdrant does, with the aliases that stand for it.
        del engine.marks[pending]
        for name in [name for name, stands in engine.aliases.items() if stands == pending]:
            del engine.aliases[name]

    return drop


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_what_another_drops_while_it_is_swapped_in(engine: Engine, ends: bool, first: bool) -> None:
    """The swap is told, and users see what they saw."""
    if not first:
        fill(engine, V1)
    life = begun(engine, V2)
    append(life)
    append(life)
    engine.before["publish"] = dropping(engine, ends=ends)
    with pytest.raises(DatabaseError, match=TAKEN):
        life.swap()
    again = connected(engine)
    if not first:
        assert told(again.published()) == (V1.version, 10, "")
        assert again.pending() is None
        again.discard()
        assert len(engine.marks) == 1
    # The next push mends it, and then rows can be changed.
    fill(engine, V3)
    assert told(again.published()) == (V3.version, 10, "")
    change(connected(engine), V2)
    assert told(connected(engine).published()) == (V2.version, 10, "")
    assert len(engine.marks) == 1


def test_what_a_third_push_swapped_in_is_not_taken_back(engine: Engine) -> None:
    fill(engine, V1)
    life = begun(engine, V2)
    drop = dropping(engine, ends=False)

    def meanwhile() -> None:
        drop()
        engine.before["mark"] = other

    def other() -> None:
        mark = engine.marks[engine.aliases["docs"]] | V3.to_json() | {"name": "docs__00000000"}
        engine.marks["docs__00000000"] = mark | {"dropped": False}
        engine.aliases["docs"] = "docs__00000000"

    engine.before["publish"] = meanwhile
    with pytest.raises(DatabaseError, match=TAKEN):
        life.swap()
    assert told(connected(engine).published())[0] == V3.version


def test_rows_are_changed_that_a_push_marked_before_they_were_swapped_in(engine: Engine) -> None:
    """Whoever marked them for dropping was cut off; users see them."""
    fill(engine, V1)
    (name,) = engine.marks
    engine.marks[name]["dropped"] = True
    change(connected(engine), V2)
    assert told(connected(engine).published()) == (V2.version, 10, "")
    assert engine.marks[name]["dropped"] is False


def test_a_generation_that_an_earlier_release_wrote(engine: Engine) -> None:
    """What it did not know of is empty, until rows are changed or all are pushed."""
    fill(engine, replace(V1, query_digest="q1"))
    (mark,) = engine.marks.values()
    for name in ("query_digest", "options", "lease", "changing"):
        del mark[name]
    found = connected(engine).published()
    assert found is not None
    assert (found.version, found.query_digest, found.options) == (V1.version, "", "")
    change(connected(engine), replace(V2, query_digest="q2"))
    found = connected(engine).published()
    assert found is not None
    assert found.query_digest == "q2"


@pytest.mark.parametrize("call", ["write_metadata", "drop", "mark"])
def test_two_connections_drop_the_same(engine: Engine, call: str) -> None:
    fill(engine, V1)
    begun(engine, V2)
    second = connected(engine)
    engine.before[call] = connected(engine).discard
    second.discard()
    assert len(engine.marks) == 1
    assert told(second.published())[0] == V1.version


def change(life: StagedTables, after: PushedTable, *, fails: bool = False) -> None:
    with life.changing(after) as changed, changed.writing():
        published = connected(life._engine).published()  # type: ignore[arg-type]
        assert published is not None
        assert published.changing
        if fails:
            raise RuntimeError("cut off")


def cut(engine: Engine, after: PushedTable) -> str:
    with pytest.raises(RuntimeError, match="cut off"):
        change(connected(engine), after, fails=True)
    found = connected(engine).published()
    assert found is not None
    assert (found.version, found.done) == (V1.version, 10)
    return found.changing


def test_changes_that_are_cut_off(engine: Engine) -> None:
    """The rows are told to be of every version that they may be of, until changes are whole."""
    fill(engine, V1)
    assert cut(engine, V2) == V2.version
    assert cut(engine, V2) == V2.version
    # On the way back to what the pushed is called they are still of either.
    assert V2.version in cut(engine, V1).split()
    assert {V2.version, V3.version} <= set(cut(engine, V3).split())
    assert {V2.version, V3.version} <= set(cut(engine, V1).split())
    change(connected(engine), replace(V1, rows=7))
    assert told(connected(engine).published()) == (V1.version, 7, "")
    # Rows of a version changed to the same one.
    fill(engine, V1)
    assert cut(engine, V1) == V1.version


@pytest.mark.parametrize("other", ["changes", "swaps"])
def test_the_first_of_two_changes_is_refused(engine: Engine, other: str) -> None:
    fill(engine, V1)
    taken = pytest.raises(DatabaseError, match=TAKEN)
    with taken, connected(engine).changing(V2) as changed:
        with changed.writing():
            pass
        change(connected(engine), V3) if other == "changes" else fill(engine, V3)
        before = engine.state()
        with pytest.raises(DatabaseError, match=TAKEN), changed.writing():
            pass
    assert engine.state() == before
    assert told(connected(engine).published()) == (V3.version, 10, "")


def test_changes_are_of_the_generation_that_was_told(engine: Engine) -> None:
    """Which rows to change follows from what was published when the push began."""
    fill(engine, V1)
    first = connected(engine)
    first.published()
    change(connected(engine), V2)
    before = engine.state()
    with pytest.raises(DatabaseError, match=TAKEN):
        change(first, V3)
    assert engine.state() == before
    first.published()
    change(first, V3)
    change(first, V1)
    assert told(first.published()) == (V1.version, 10, "")


@pytest.mark.parametrize("spoilt", [{}, {"replaces": None}, {"table": "other"}, {"rows": "many"}])
def test_marks_that_are_none(engine: Engine, spoilt: dict[str, Any]) -> None:
    fill(engine, V1)
    (name,) = engine.marks
    engine.marks[name] = engine.marks[name] | spoilt if spoilt else {}
    with pytest.raises(DatabaseError, match=f"alias of '{name}', which no push made"):
        connected(engine).published()
    del engine.aliases["docs"]
    life = connected(engine)
    assert life.pending() is None
    life.discard()
    assert list(engine.marks) == [name]
    engine.marks["docs"] = {}
    with pytest.raises(DatabaseError, match="a collection that no push made"):
        life.published()
