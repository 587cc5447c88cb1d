"""A long-lived searcher follows what is published, a version at a time."""

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readers
from benchmarks.readers import STEP
from whiten_index import open_index
from whiten_index.errors import ArtifactError
from whiten_index.search.search_index import SearchIndex
from whiten_index.versions.published import set_current, version_names

ROWS, DIM = 64, 16
POINTS = readers.points(ROWS, DIM)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of versions 0 to 3, of which 3 is published."""
    root = tmp_path_factory.mktemp("built")
    for version in range(4):
        readers.publish(root, version, POINTS)
    return root / "out"


@pytest.fixture
def out(tmp_path: Path, built: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "out"))


def publish(out: Path, number: int) -> None:
    set_current(out, version_names(out)[number])


def answered(index: SearchIndex, **options: Any) -> int:
    """Return the version that answers all points; every hit is of it, ids and vectors."""
    found = index.search_embeddings(POINTS, top_k=3, **options)
    (version,) = {readers.version_of(point, hits, ROWS) for point, hits in enumerate(found)}
    return version


@pytest.mark.parametrize("what", ["index.faiss", "manifest.json", "CURRENT", "gone"])
def test_a_reload_that_fails_leaves_the_version_in_use(out: Path, what: str) -> None:
    publish(out, 0)
    index = open_index(out)
    publish(out, 1)
    folder = out / "versions" / version_names(out)[1]
    path = out / "CURRENT" if what == "CURRENT" else folder / what
    if what == "gone":
        folder.rename(out / "aside")
    else:
        whole = path.read_bytes()
        path.write_bytes(whole[:-9] + b"x" + whole[-8:])
    for _ in range(2):
        with pytest.raises(ArtifactError):
            index.reload()
        assert answered(index) == 0
    (out / "aside").rename(folder) if what == "gone" else path.write_bytes(whole)
    assert index.reload()
    assert answered(index) == 1


def test_threads_that_search_while_others_reload_never_see_two_versions(out: Path) -> None:
    publish(out, 0)
    index = open_index(out)
    stop, seen, errors, reloads = threading.Event(), set(), [], []

    def search() -> None:
        while not stop.is_set():
            try:
                seen.add(answered(index))
                like = index.search_like(index.bundle.documents.ids([0])[0], top_k=5)
                assert len({hit.id // STEP for hit in like}) == 1
            except ArtifactError as error:
                errors.append(error)
            except Exception as error:
                # ``search_like`` asks for an id that the version opened since may lack.
                if "no document has the id" not in str(error):
                    errors.append(error)

    def follow() -> None:
        while not stop.is_set():
            reloads.append(index.reload())

    threads = [threading.Thread(target=work) for work in (search,) * 3 + (follow,) * 2]
    for thread in threads:
        thread.start()
    for number in [1, 2, 3, 0, 2, 1, 3] * 4:
        publish(out, number)
        time.sleep(0.01)
    deadline = time.monotonic() + 60
    while index.bundle.version != version_names(out)[3] and time.monotonic() < deadline:
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors[:3]
    assert answered(index) == 3
    assert sum(reloads) >= 2
    assert len(seen) >= 2
