"""Manifests whose digests are right and whose fields are wrong, and files that are no files."""

import json
import os
import random
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import faiss
import numpy as np
import pyarrow as pa
import pytest

from tests.damage.crafted import CRAFTS, World, crafted, new_world, places
from tests.helpers.bad_input import fails, run, succeed
from tests.helpers.builds import random_rows, write_rows
from whiten_index import EmbeddingStore, QueryTransform, open_index
from whiten_index.artifacts.manifest import write_manifest
from whiten_index.errors import ArtifactError, CorpusError, WhitenIndexError
from whiten_index.versions.documents import Documents, write_documents

# A documented status: done, or one of ``errors.py``, but never 1, which is for what is unforeseen.
STATUSES = {0, 2, 3, 4, 5, 7, 8, 9}
ROW = "0"
COMMANDS = {
    "search": ("search", "{index}", "--like", ROW, "--top-k", "3"),
    "search again": ("search", "{index}", "--like", ROW, "--rerank", "5"),
    "inspect": ("inspect", "{index}"),
    "inspect --json": ("inspect", "{index}", "--json"),
    "versions": ("versions", "{index}"),
    "verify": ("verify", "{index}"),
    "verify store": ("verify", "{store}"),
    "update": ("update", "{index}"),
    "update --dry-run": ("update", "{index}", "--dry-run"),
    "push": ("push", "{index}", "--to", "{root}/rows.parquet"),
    "gc": ("gc", "{store}", "--keep-days", "0", "--dry-run"),
    "compact": ("compact", "{store}"),
    "export": ("export", "{index}", "{root}/again", "--as", "query"),
    "rollback": ("rollback", "{index}"),
    "prune": ("prune", "{index}", "--keep", "1"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return new_world(tmp_path_factory.mktemp("crafted"))


@pytest.fixture(autouse=True)
def _as_it_was(world: World) -> Iterator[None]:
    yield
    world.restore()


def command(world: World, name: str) -> tuple[str, ...]:
    named = {"index": world.index, "store": world.store, "root": world.root}
    return tuple(part.format_map(named) for part in COMMANDS[name])


def assert_told(world: World, name: str) -> None:
    """A command ends with a documented status and, if it fails, one line; all is inside."""
    around = sorted(world.root.parent.iterdir())
    status, _, stderr = run(*command(world, name))
    assert status in STATUSES, (status, stderr)
    last = stderr.strip().splitlines()[-1:] if status else []
    assert "Traceback" not in stderr
    if status and not name.startswith("verify"):
        assert last[0].startswith("Error: "), stderr
    assert sorted(world.root.parent.iterdir()) == around


def assert_damaged(message: str, *arguments: object) -> None:
    status, _, stderr = run(*arguments)
    assert status == 5, stderr
    assert re.search(message, stderr)


def cases(world: World) -> list[tuple[str, tuple[str | int, ...], str]]:
    found = []
    for name in world.manifests():
        fields = world.fields(name)
        found += [(name, place, craft) for place in places(fields) for craft in CRAFTS]
    return found


def craft(world: World, name: str, place: tuple[str | int, ...], how: str) -> None:
    fields = world.fields(name)
    world.write(name, crafted(fields, place, how))


def fuzz(world: World, seed: int, count: int) -> None:
    chosen = random.Random(seed)
    every = cases(world)
    before = world.content()
    for name, place, how in chosen.sample(every, min(count, len(every))):
        craft(world, name, place, how)
        which = chosen.choice(list(COMMANDS))
        try:
            assert_told(world, which)
        except BaseException as error:
            error.add_note(f"{which} with {name} {place} {how}")
            raise
        if world.content().keys() == before.keys():
            for each in {name, f"{Path(name).parent}/manifest.json", "index/CURRENT"} & {*before}:
                shutil.copyfile(world.kept / each, world.root / each)
        if world.content() != before:
            world.restore()


@pytest.mark.parametrize("seed", range(2))
def test_no_wrong_field_leads_to_a_traceback(world: World, seed: int) -> None:
    fuzz(world, seed, 40)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_no_wrong_field_of_many_leads_to_a_traceback(world: World, seed: int) -> None:
    fuzz(world, seed, 200)


# Field, value and the command that met it with a traceback, or worse.
MANIFEST = "index/versions/{version}/manifest.json"
FOUND = [
    (MANIFEST, ("corpus",), "deleted", "inspect"),
    (MANIFEST, ("factory",), "null", "search"),
    (MANIFEST, ("whitening", "variance_kept"), "empty object", "update"),
    (MANIFEST, ("files", "index.faiss", "bytes"), "huge", "search"),
    (MANIFEST, ("files",), "wrong object", "search"),
    (MANIFEST, ("encoder", "kind"), "deleted", "search"),
    (MANIFEST, ("rows",), "empty object", "versions"),
    (MANIFEST, ("config",), "null", "update"),
    (MANIFEST, ("bytes", "index"), "null", "inspect"),
    (MANIFEST, ("config", "keep"), "null", "update"),
    (MANIFEST, ("encoder", "dim"), "wide", "search"),
    ("index/CURRENT", ("withdrawn",), "empty list", "search"),
    ("index/CURRENT", ("version",), "traversal", "search"),
]


@pytest.mark.parametrize(("name", "place", "how", "which"), FOUND)
def test_a_wrong_field_is_damage(
    world: World, name: str, place: tuple[str | int, ...], how: str, which: str
) -> None:
    craft(world, name.format(version=world.published.name), place, how)
    status, _, stderr = run(*command(world, which))
    if which == "versions":
        assert "damaged" in stderr
    else:
        assert status == 5, stderr
        assert "is damaged: field" in stderr


DOCUMENTS = {
    "without ids": lambda table: table.drop_columns(["id"]),
    "with names not in UTF-8": lambda table: table,
    "with ids twice": lambda table: table.append_column("id", table["id"]),
    "with ids of another type": lambda table: table.set_column(0, "id", [[1.5] * len(table)]),
    "not in UTF-8": lambda table: table.set_column(
        1, table.column_names[1], pa.array([b"\xff"] * len(table)).view("utf8")
    ),
}


@pytest.mark.parametrize("change", DOCUMENTS)
def test_documents_of_other_columns_are_damage(world: World, change: str) -> None:
    path, table = world.documents, world.table()
    write_documents(path, [DOCUMENTS[change](table)])
    if change == "with names not in UTF-8":
        path.write_bytes(path.read_bytes().replace(b"title", b"ti\xffle"))
    world.seal(path)
    reason = "cannot be read" if "UTF" in change else "is damaged: its columns are"
    assert_damaged(reason, "search", world.index, "--like", "1", "--filter", "title != 'x'")


@pytest.mark.parametrize("rows", [0, 10**15])
def test_a_manifest_of_another_number_of_rows_is_damage(world: World, rows: int) -> None:
    name = f"index/versions/{world.published.name}/manifest.json"
    world.write(name, {**world.fields(name), "rows": rows})
    assert_damaged("is damaged", "search", world.index, "--like", "1")


def test_a_part_of_more_rows_than_it_has_is_damage(world: World) -> None:
    name = f"index/versions/{world.published.name}/corpus.json"
    record = world.fields(name)
    record["parts"][0]["rows"] = 10**12
    world.write(name, record)
    titles = [f"other {number}" for number in range(20)]
    write_rows(world.root / "corpus" / "0.parquet", random_rows(9, rows=20), title=titles)
    assert_damaged("it does not have 1,000,000,000,000 rows", *command(world, "update"))


@pytest.mark.parametrize("of", ["values", "dictionary", "values of an older version"])
def test_documents_that_unpack_to_more_are_damage(world: World, of: str) -> None:
    path, table = world.documents, world.table()
    packed = pa.array(["x" * 100_000] * len(table))
    if of == "dictionary":
        packed, table = packed.dictionary_encode(), table.select(["id"])
    table = table.append_column("packed", packed)
    version = pa.ipc.MetadataVersion.V4 if "older" in of else pa.ipc.MetadataVersion.V5
    options = pa.ipc.IpcWriteOptions(compression="zstd", metadata_version=version)
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(file, table.schema, options=options) as out,
    ):
        out.write_table(table)
    world.seal(path)
    assert_damaged("its columns are compressed", "search", world.index, "--like", "1")


MANY = pa.nulls(200_000_000)
LISTS = {
    "lists of one length": lambda n: pa.FixedSizeListArray.from_arrays(
        MANY[: 2_000_000 * n], 2_000_000
    ),
    "one long list": lambda n: pa.LargeListArray.from_arrays([0] * n + [len(MANY)], MANY),
    "views of one list": lambda n: pa.LargeListViewArray.from_arrays(
        pa.array([0] * n, pa.int64()), pa.array([2**62] * n, pa.int64()), pa.nulls(4_000_000)
    ),
    "one list of a dictionary": lambda n: pa.DictionaryArray.from_arrays(
        pa.array([0] * n, pa.int32()),
        pa.LargeListArray.from_arrays([0, len(MANY)] + [len(MANY)] * 99, MANY),
    ),
    "of unknown meaning": lambda n: pa.ExtensionArray.from_storage(
        pa.opaque(pa.large_list(pa.null()), "a", "b"), LISTS["one long list"](n)
    ),
    "in a structure": lambda n: pa.StructArray.from_arrays([LISTS["one long list"](n)], ["a"]),
    "runs": lambda n: pa.RunEndEncodedArray.from_arrays([n], ["a"]),
    "no fields": lambda n: pa.array([{}] * n, pa.struct([])),
}


@pytest.mark.parametrize("kind", LISTS)
def test_columns_without_end_are_damage(world: World, kind: str) -> None:
    """Nulls in lists take no bytes, and views of lists share them."""
    path, table = world.documents, world.table()
    nested = pa.map_(pa.string(), pa.list_(pa.int8()))
    for sound in (pa.array([[None, 1]]), pa.array([[("a", [1])]], nested)):
        table = table.append_column(str(sound.type), sound.take([0] * len(table)))
    write_documents(path, [table])
    world.seal(path)
    succeed("search", world.index, "--like", "1")
    made = table.append_column("many", LISTS[kind](len(table)))
    with path.open("wb") as file, pa.ipc.new_file(file, made.schema) as out:
        out.write_table(made)
    world.seal(path)
    message = "types that no index has|unpacks to more"
    assert_damaged(message, "search", world.index, "--like", "1")


def test_documents_that_share_a_long_text_are_damage(tmp_path: Path) -> None:
    """A filter writes it out for each row."""
    words = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(20_000, np.int8)), pa.array(["x" * 60_000])
    )
    table = pa.table({"id": np.arange(20_000), "word": words})
    with (tmp_path / "d").open("wb") as file, pa.ipc.new_file(file, table.schema) as out:
        out.write_table(table)
    with pytest.raises(ArtifactError, match="it unpacks to more than"):
        Documents(tmp_path / "d")
    with pytest.raises(CorpusError, match="the rows of the kept columns repeat long texts"):
        write_documents(tmp_path / "d", [table])


def test_a_time_that_parquet_does_not_hold(world: World, tmp_path: Path) -> None:
    path, table = world.documents, world.table()
    times = pa.array([2**62] * len(table), pa.timestamp("s"))
    write_documents(path, [table.append_column("when", times)])
    world.seal(path)
    pushed = tmp_path / "pushed.parquet"
    fails(10, "cannot hold a kept value", "push", world.index, "--to", pushed)
    assert not list(tmp_path.glob("*pushed*"))


@pytest.mark.parametrize("how", ["behind no transforms", "with labels of no rows", "below all"])
def test_an_index_file_of_another_kind_is_damage(world: World, how: str) -> None:
    path = world.published / "index.faiss"
    index = faiss.read_index(str(path))
    inner = faiss.IndexIDMap(faiss.IndexFlatIP(index.index.d))
    vectors = np.ones((index.ntotal, inner.d), dtype=np.float32)
    rows = np.arange(index.ntotal)
    inner.add_with_ids(vectors, -2 - rows if how == "below all" else rows + index.ntotal)
    index.own_fields, index.index = False, inner
    faiss.write_index(inner if "no transforms" in how else index, str(path))
    world.seal(path)
    with pytest.raises(ArtifactError, match=r"index.faiss is damaged: it"):
        open_index(world.index).search_embeddings(random_rows(1, rows=1))


def test_a_field_that_no_schema_names_is_damage(world: World) -> None:
    for name in world.manifests():
        fields = world.fields(name)
        world.write(name, {**fields, "more": 1})
        with pytest.raises(WhitenIndexError, match=r"field 'more'|is missing or damaged"):
            read_all(world)
        world.restore()


@pytest.mark.parametrize("file", ["exported/whitening.safetensors", "index/store/*/*/*/moments.*"])
def test_a_file_that_no_manifest_lists_is_not_used(world: World, file: str) -> None:
    path = next(world.root.glob(file))
    fields = json.loads(path.with_name("manifest.json").read_text())
    del fields["files"][path.name]
    world.write(f"{path.parent.relative_to(world.root)}/manifest.json", fields)
    with pytest.raises(WhitenIndexError, match=r"it has no |is missing or damaged"):
        read_all(world)


def read_all(world: World) -> None:
    """Read every manifest through the Python API."""
    open_index(world.index)
    QueryTransform.load(world.root / "exported")
    store = EmbeddingStore.open(world.store)
    record = store.corpus()
    for part in record.parts:
        store.embeddings(part)
    for which in ("verify", "verify store"):
        status, stdout, stderr = run(*command(world, which))
        if status:
            raise WhitenIndexError(stdout + stderr)


@pytest.mark.parametrize("kind", ["index/CURRENT", "index/versions", "store", "exported"])
def test_json_within_json_is_damage(world: World, kind: str) -> None:
    path = world.root / kind
    if kind == "index/versions":
        path = min(path.glob("*/manifest.json"))
    elif kind == "store":
        path = next(world.store.glob("*/corpora/*.json"))
    elif kind == "exported":
        path /= "manifest.json"
    path.write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(WhitenIndexError, match="nest"):
        read_all(world)
    for which in COMMANDS:
        assert_told(world, which)


def test_a_manifest_that_is_too_long_is_not_read(world: World) -> None:
    (world.root / "exported" / "manifest.json").write_bytes(bytes(65 << 20))
    with pytest.raises(WhitenIndexError, match="it has more than 67,108,864 bytes"):
        QueryTransform.load(world.root / "exported")


def every_file(world: World) -> list[str]:
    folders = (world.index, world.root / "exported")
    return sorted(
        path.relative_to(world.root).as_posix()
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    )


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def make_zeros(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


READERS = ("search", "inspect", "versions", "verify", "verify store", "update", "push", "gc")


@pytest.fixture
def soon() -> Iterator[None]:
    """Interrupt a command that waits."""
    stop = Mock(side_effect=AssertionError("it waits for a file that never comes"))
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.timeout(300)
def test_no_command_waits_for_a_pipe(world: World, soon: None) -> None:
    """Each file in turn is a pipe that nobody writes to."""
    for number, name in enumerate(every_file(world)):
        make_pipe(world.root / name)
        asked = READERS if name.endswith(("CURRENT", "manifest.json")) else READERS[number % 4 :: 4]
        for which in asked:
            signal.alarm(60)
            assert_told(world, which)
        world.restore()


@pytest.mark.parametrize("make", [make_pipe, make_socket, make_zeros])
@pytest.mark.parametrize("name", ["CURRENT", "manifest.json", "index.faiss", "documents.arrow"])
def test_what_is_no_file_is_refused(world: World, name: str, make) -> None:
    folder = world.index if name == "CURRENT" else world.published
    make(folder / name)
    for verify in ("full", "manifest"):
        status, _, stderr = run("inspect", world.index, "--verify", verify)
        assert status in (5, 7), stderr
        assert name in stderr


def test_a_link_to_the_same_content_is_read(world: World) -> None:
    """The hub's cache holds links, and checksums are of the content."""
    for path in [*world.published.iterdir()]:
        blob = world.root / f"blob-{path.name}"
        path.rename(blob)
        path.symlink_to(blob)
    for which in ("search", "inspect", "verify"):
        succeed(*command(world, which))


def test_a_crafted_name_reads_nothing_outside(world: World) -> None:
    secret = world.root / "secret"
    secret.write_text("secret")
    name = "exported/manifest.json"
    fields = world.fields(name)
    facts = {
        "bytes": 6,
        "sha256": "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b",
    }
    write_manifest(world.root / name, {**fields, "files": {"../secret": facts}})
    with pytest.raises(WhitenIndexError, match=r"files\.\.\./secret.*path of a file inside"):
        QueryTransform.load(world.root / "exported")
