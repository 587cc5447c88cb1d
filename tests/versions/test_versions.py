"""Versions of an index: published, taken back, listed, removed; always whole or not there."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import faiss
import pytest

from tests.helpers.bad_input import ARTIFACT, run, succeed
from tests.helpers.builds import build, random_rows, write_rows
from tests.helpers.flipped import flip
from tests.versions.upkeep import reseal
from whiten_index import open_index
from whiten_index.artifacts import manifest
from whiten_index.artifacts.files import list_folder, sha256_file
from whiten_index.errors import ArtifactError, StorageError
from whiten_index.versions import published
from whiten_index.versions.bundle import open_files
from whiten_index.versions.published import find_version, next_version, read_current, set_current
from whiten_index.versions.retention import list_versions, prune, rollback
from whiten_index.versions.verify import verify_index

WIDTHS = (2, 3, 4, 5)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an index of four versions, of k = 2, 3, 4 and 5."""
    root = tmp_path_factory.mktemp("built")
    corpus = write_rows(root / "c.parquet", random_rows(3, rows=80))
    for k in WIDTHS:
        build(root / "out", corpus, k=k)
    return root


@pytest.fixture
def out(tmp_path: Path, built: Path) -> Path:
    return Path(shutil.copytree(built / "out", tmp_path / "out"))


def names(out: Path) -> list[str]:
    return published.version_names(out)


def k_of(out: Path) -> int:
    return open_index(out).bundle.whitening.k


def make_version(out: Path, source: str, *, passed: bool) -> str:
    """Write a copy of a version, of another identity, that passed its gates or not."""
    name = next_version(out, "f" * 32)
    with published.new_version(out, name) as (folder, fields):
        for path in (out / "versions" / source).iterdir():
            if path.name != manifest.MANIFEST:
                shutil.copyfile(path, folder / path.name)
        fields |= json.loads((out / "versions" / source / manifest.MANIFEST).read_text())
        gates = [{"name": "size", "passed": passed, "found": {}, "bound": {}, "why": ""}]
        fields |= {"version": name, "identity": "f" * 32, "gates": gates}
    return name


def test_a_bit_flipped_in_any_byte_and_every_cut_of_current_is_noticed(out: Path) -> None:
    set_current(out, names(out)[0], withdrawn=names(out)[1:])
    path = out / "CURRENT"
    whole = path.read_bytes()
    for at in range(len(whole)):
        flipped = whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]
        for data in (flipped, whole[:at]):
            path.write_bytes(data)
            with pytest.raises(ArtifactError):
                read_current(out)
    path.write_bytes(whole)
    assert read_current(out).version == names(out)[0]


def test_a_version_that_failed_a_gate_is_a_candidate(out: Path) -> None:
    first, *_, last = before = names(out)
    name = make_version(out, first, passed=False)
    assert names(out) == before
    assert len(before) == 4
    assert read_current(out).version == last
    assert find_version(out, "f" * 32) is None
    assert open_files(published.read_version(out / "candidates" / name)).whitening.k == 2


def test_a_version_that_was_made_and_not_published_is_found(out: Path) -> None:
    before = read_current(out)
    name = make_version(out, names(out)[0], passed=True)
    assert not (out / "candidates").exists()
    assert read_current(out) == before
    assert k_of(out) == 5
    assert find_version(out, "f" * 32) == name
    set_current(out, name)
    assert k_of(out) == 2


@pytest.mark.parametrize("named", [True, False])
def test_a_rollback_leaves_behind_what_a_disk_does_not_give(
    out: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    _first, second, third, last = names(out)
    broken = {out / "versions" / name / "index.faiss" for name in (third, last)}
    read = sha256_file

    def read_or_fail(path: Path) -> str:
        if path in broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    monkeypatch.setattr(manifest, "sha256_file", read_or_fail)
    if not named:
        with pytest.raises(StorageError, match=rf"{third}.*rollback {out} --to VERSION"):
            rollback(out)
        assert read_current(out).version == last
    rolled = rollback(out, to=second)
    assert (rolled.to, f"{last} is not withdrawn" in rolled.note) == (second, True)
    # It may be made again.
    assert read_current(out).withdrawn == {}
    with pytest.raises(StorageError, match="the disk reports an input/output error"):
        rollback(out, to=last)
    assert read_current(out).version == second


@pytest.mark.parametrize(
    "name", ["/absolute", "../../../outside", "index.faiss", "documents.arrow"]
)
def test_lists_in_a_file_that_the_manifest_does_not_name_are_refused(
    tmp_path: Path, name: str
) -> None:
    """An index from elsewhere, checksums and all, whose lists are in another file."""
    outside = tmp_path / "outside"
    outside.write_bytes(bytes(1 << 16))
    corpus = write_rows(tmp_path / "c.parquet", random_rows(3, rows=300))
    build(tmp_path / "out", corpus, factory="IVF4,SQ8")
    (only,) = names(tmp_path / "out")
    folder = tmp_path / "out" / "versions" / only
    place = str(outside) if name == "/absolute" else name
    make_lists_on_disk(folder / "index.faiss", place, tmp_path / "made")
    reseal(folder / "index.faiss")
    before = outside.read_bytes()
    for mapped in (None, True):
        with pytest.raises(ArtifactError, match=r"index\.faiss"):
            open_index(tmp_path / "out", mapped=mapped)
    assert outside.read_bytes() == before


@pytest.mark.parametrize("nprobe", [0, 1 << 63])
def test_an_index_that_would_search_no_list_is_refused(tmp_path: Path, nprobe: int) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(3, rows=300))
    build(tmp_path / "out", corpus, factory="IVF4,SQ8")
    (only,) = names(tmp_path / "out")
    path = tmp_path / "out" / "versions" / only / "index.faiss"
    index = faiss.read_index(str(path))
    faiss.extract_index_ivf(index).nprobe = nprobe
    faiss.write_index(index, str(path))
    reseal(path)
    status, _, said = run("search", tmp_path / "out", "--like", 1)
    assert (status, "would look into none of its lists" in said) == (ARTIFACT, True)


def make_lists_on_disk(path: Path, place: str, made: Path) -> None:
    """Rewrite an index of lists so that its lists are in another file."""
    index = faiss.read_index(str(path))
    ivf = faiss.extract_index_ivf(index)
    lists = faiss.OnDiskInvertedLists(ivf.nlist, ivf.code_size, str(made))
    lists.merge_from_1(ivf.invlists)
    lists.filename = place
    ivf.replace_invlists(lists, False)
    faiss.write_index(index, str(path))


@pytest.mark.parametrize("reranked", [True, False])
def test_a_rollback_refuses_a_version_whose_searches_need_what_the_store_lacks(
    tmp_path: Path, *, reranked: bool
) -> None:
    out, budget = tmp_path / "out", "9KB" if reranked else None
    for seed in range(2):
        corpus = write_rows(tmp_path / "c.parquet", random_rows(seed, rows=2000))
        build(out, corpus, factory="auto", memory_budget=budget)
    first, last = names(out)
    assert (find_rerank(out, first) is not None) == reranked
    needed = json.loads((out / "versions" / first / "corpus.json").read_text())["parts"]
    for part in needed:
        for folder in out.glob(f"store/*/segments/{part['digests']}"):
            shutil.rmtree(folder)
    if reranked:
        with pytest.raises(ArtifactError, match=r"lacks 2,000 of its rows, .* its searches fail"):
            rollback(out, to=first)
        with pytest.raises(ArtifactError, match=r"no sound version.* its searches fail"):
            rollback(out)
        shutil.rmtree(out / "store")
        with pytest.raises(ArtifactError, match=f"each search of {first} reads the store .* none"):
            rollback(out, to=first)
        assert read_current(out).version == last
    else:
        rollback(out)
        assert open_index(out).search_embeddings(random_rows(0, rows=1), top_k=1)[0]


@pytest.mark.parametrize("file", ["index.faiss", "corpus.json"])
def test_a_version_with_a_file_of_another_is_no_unforeseen_error(tmp_path: Path, file: str) -> None:
    out, corpus = tmp_path / "out", tmp_path / "c.parquet"
    for rows in (50, 60):
        build(out, write_rows(corpus, random_rows(rows, rows=rows)))
    fewer, last = names(out)
    path = out / "versions" / last / file
    shutil.copy(out / "versions" / fewer / file, path)
    reseal(path)
    query = write_rows(tmp_path / "q.parquet", random_rows(3, rows=2))
    asked = ("--queries", query, "--embedding-column", "embedding", "--rerank", 50)
    status, _, stderr = run("search", out, *asked, "--run", tmp_path / "run.trec")
    assert (status, "Traceback" in stderr) == (ARTIFACT, False), stderr
    write_rows(corpus, random_rows(60, rows=61))
    succeed("update", out, corpus)
    assert len(open_index(out)) == 61


def find_rerank(out: Path, name: str) -> int | None:
    """Return the candidates that searches of a version rank again by default."""
    fields = json.loads((out / "versions" / name / manifest.MANIFEST).read_text())
    return fields["factory"]["rerank"]


def test_prune_keeps_what_can_be_gone_back_to_after_a_rollback(out: Path) -> None:
    first, second, third, last = names(out)
    rollback(out, to=second)
    assert prune(out, keep=2).removed == (third, last), "those after the published one go first"
    assert names(out) == [first, second]
    assert next_version(out, "0" * 32) == "000005-000000000000", "numbers do not come again"
    assert rollback(out).to == first


def test_the_number_of_a_damaged_version_that_was_pruned_does_not_come_again(out: Path) -> None:
    last = names(out)[-1]
    flip(out / "versions" / last / "index.faiss")
    rollback(out)
    assert last in prune(out, keep=2).removed
    assert next_version(out, "0" * 32) == "000005-000000000000"


def test_prune_never_removes_the_published_version_damaged_as_it_may_be(out: Path) -> None:
    _first, _second, third, last = names(out)
    flip(out / "versions" / last / "index.faiss")
    assert prune(out, keep=1).kept == (third, last)
    (out / "CURRENT").write_text("garbage")
    with pytest.raises(ArtifactError, match="CURRENT"):
        prune(out, keep=1)
    assert names(out) == [third, last]


def test_prune_leaves_what_a_later_release_made_and_what_is_not_its_own(out: Path) -> None:
    first, second, third, last = names(out)
    path = out / "versions" / first / "manifest.json"
    manifest.write_manifest(path, {**json.loads(path.read_text()), "format_version": 99})
    (out / "versions" / "2024 backup").mkdir()
    assert prune(out, keep=1).removed == (second, third)
    assert names(out) == [first, last]
    assert (out / "versions" / "2024 backup").exists()


def test_a_prune_that_dies_leaves_no_half_a_version(out: Path) -> None:
    _first, second, third, last = names(out)

    def die(path: Path, **_: Any) -> None:
        next(Path(path).glob("index.faiss")).unlink()
        raise KeyboardInterrupt

    with patch.object(shutil, "rmtree", die), pytest.raises(KeyboardInterrupt):
        prune(out, keep=1)
    assert names(out) == [second, third, last]
    assert [facts.sound for facts in list_versions(out, verify="full")] == [""] * 3
    assert [p for p in (out / "versions").iterdir() if p.name.startswith(".tmp-")]
    (out / "versions" / ".tmp-of-somebody").mkdir()
    assert prune(out, keep=1).removed == (second, third)
    assert [p.name for p in list_folder(out / "versions")] == [".tmp-of-somebody", last]


def test_a_folder_that_cannot_be_written_is_a_disk_error(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "rename", Mock(side_effect=PermissionError(13, os.strerror(13))))
    with pytest.raises(StorageError, match=r"cannot write .*: permission is denied"):
        prune(out, keep=1)
    monkeypatch.undo()
    assert [facts.sound for facts in list_versions(out, verify="full")] == [""] * 4


def test_links_among_the_versions_are_left_alone(out: Path, tmp_path: Path) -> None:
    before = names(out)
    strange = [out / "versions" / f"00000{n}-cccccccccccc" for n in (5, 6, 7, 8)]
    strange[0].symlink_to(".")
    strange[1].symlink_to("/nonexistent")
    strange[2].symlink_to(before[0])
    strange[3].write_text("a file")
    assert names(out) == before
    assert next_version(out, "f" * 32).startswith("000009-")
    assert [facts.name for facts in list_versions(out)] == before[::-1]
    assert not prune(out, keep=10**20).removed
    pruned = prune(out, keep=2)
    assert (pruned.kept, pruned.strange) == (tuple(before[2:]), tuple(map(str, strange)))
    assert all(path.is_symlink() for path in strange[:3])
    status, _, err = run("prune", out, "--keep", 1)
    assert (status, err.count("and was left alone")) == (0, 4)
    damages = {damage.path: damage for damage in verify_index(out).damages}
    assert set(damages) == set(map(str, strange))
    status, _, err = run("verify", out)
    assert (status, "Traceback" in err) == (ARTIFACT, False)
    for path in strange:
        path.unlink()
    assert verify_index(out).sound


def test_half_a_copy_of_a_store_does_not_hide_the_whole_one(tmp_path: Path) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(1, rows=80))
    build(tmp_path / "a" / "index", corpus, store=tmp_path / "a" / "store")
    shutil.copytree(tmp_path / "a" / "index", tmp_path / "b" / "index")
    (encoder,) = (tmp_path / "a" / "store").glob("*/manifest.json")
    (tmp_path / "b" / "store" / encoder.parent.name / "segments").mkdir(parents=True)
    status, out, err = run("update", tmp_path / "b" / "index")
    assert status == 0, (out, err)


def test_a_published_version_behind_a_link_is_no_reason_to_stop(out: Path, tmp_path: Path) -> None:
    *others, last = names(out)
    (out / "versions" / last).rename(tmp_path / last)
    (out / "versions" / last).symlink_to(tmp_path / last)
    assert others[-1] in prune(out, keep=2).kept
    assert prune(out, keep=1).removed == (others[-1],)
    assert open_index(out).bundle.manifest["version"] == last
