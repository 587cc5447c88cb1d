"""Damaged files of moments, of whitenings and of whole versions: refused, with what to do."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.helpers.builds import build, put_lists_on_disk, random_rows, write_rows
from tests.helpers.moments import make_rows
from whiten_index import Moments, Whitening, WhiteningConfig, open_index
from whiten_index.errors import ArtifactError

READERS = {"moments": Moments, "whitening": Whitening}


def header(text):
    return len(text).to_bytes(8, "little") + text


@pytest.fixture(params=READERS)
def kind(request):
    return request.param


@pytest.fixture
def saved(tmp_path, kind):
    path, moments = tmp_path / f"{kind}.safetensors", Moments.of(make_rows(0, 20, 3))
    (moments if kind == "moments" else Whitening.fit(moments, WhiteningConfig(k=2))).save(path)
    return path


def everything_in(path, kind):
    found = READERS[kind].load(path)
    return {name: np.asarray(value).tolist() for name, value in vars(found).items()}


def assert_unreadable(path, kind):
    with pytest.raises(
        ArtifactError, match=rf"{path.name} cannot be read as (a )?{kind}\b.*; restore it"
    ):
        READERS[kind].load(path)


def rewrite(path, tensors=None, *, without=None, **facts):
    """Write a file anew with other tensors, with one less, with other facts (None: without)."""
    with safe_open(path, framework="numpy") as file:
        facts = {k: v for k, v in (file.metadata() | facts).items() if v is not None}
    kept = {k: v for k, v in (load_file(path) | (tensors or {})).items() if k != without}
    save_file(kept, path, facts or None)


def test_a_missing_file_or_a_folder_is_named(tmp_path, kind):
    assert_unreadable(tmp_path / "nowhere.safetensors", kind)
    assert_unreadable(tmp_path, kind)


def test_a_file_cut_anywhere_is_an_error(saved, kind):
    whole = saved.read_bytes()
    for size in range(len(whole)):
        saved.write_bytes(whole[:size])
        assert_unreadable(saved, kind)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 200,
        b"not safetensors at all",
        b"{" * 50,
        header(b"[]"),
        header(b'{"mean": []}'),
        header(b'{"mean": {"dtype": "F64", "shape": [1], "data_offsets": [0, 1e999]}}'),
    ],
)
def test_other_bytes_are_an_error(saved, kind, data):
    saved.write_bytes(data)
    assert_unreadable(saved, kind)


def test_more_arrays_than_any_release_writes_are_not_read(saved, kind):
    """Each would take a hundred times its bytes in the header."""
    rewrite(saved, {f"k{number}": np.empty(0, np.float32) for number in range(20_000)})
    assert_unreadable(saved, kind)
    with pytest.raises(ArtifactError, match="its header has 1,"):
        READERS[kind].load(saved)


def test_a_header_with_a_flipped_bit_is_an_error_or_harmless(saved, kind):
    whole, expected = bytearray(saved.read_bytes()), everything_in(saved, kind)
    header = 8 + int.from_bytes(whole[:8], "little")
    seen = []
    for at in range(header):
        flipped = whole.copy()
        flipped[at] ^= 1
        saved.write_bytes(flipped)
        with contextlib.suppress(ArtifactError):
            if everything_in(saved, kind) != expected:
                seen.append(bytes(flipped[max(0, at - 20) : at + 20]))
    assert not seen, f"{len(seen)} flips change what is read, the first is in {seen[0]}"


DAMAGES = [
    *(("moments", "count", array) for array in (np.empty(0), np.array(1.0), np.array([np.nan]))),
    ("moments", "mean", np.array(1.0)),
    ("moments", "mean", np.zeros(4)),
    ("moments", "mean", np.array([0, np.nan, 0])),
    *(("moments", "scatter_upper", a) for a in (np.zeros(5), np.zeros(1), np.full(6, np.nan))),
    *(("moments", "cubic", a) for a in (np.zeros(4), np.array(0.0), np.full(3, np.inf))),
    *(("moments", "quartic", a) for a in (np.array(1.0), np.zeros(2), np.array([np.nan]))),
    ("whitening", "mean", np.zeros(5)),
    *((kind, "mean", np.zeros(3, dtype)) for kind in READERS for dtype in ("u2", "?")),
    *(("whitening", "basis", np.zeros(shape)) for shape in ((2, 2), (3,), (3, 2, 1), (3, 0))),
    ("whitening", "basis", np.full((3, 2), np.inf)),
    *(("whitening", "eigenvalues", array) for array in (np.ones(2), np.full(3, np.nan))),
    *(("whitening", "eigenvalues", np.full(3, each)) for each in (-1.0, 1e308)),
    ("whitening", "basis_variances", -np.ones(2)),
    *(("whitening", name, np.empty(0)) for name in ("exponent", "count")),
]


@pytest.mark.parametrize(("kind", "name", "array"), DAMAGES, indirect=["kind"])
def test_tensors_that_do_not_belong_together_are_an_error(saved, kind, name, array):
    rewrite(saved, {name: array})
    assert_unreadable(saved, kind)


@pytest.mark.parametrize("kind", ["moments"], indirect=True)
@pytest.mark.parametrize("others", [{"rows": 19}, {"dim": 4}])
def test_moments_of_other_rows_are_refused(saved, others):
    assert Moments.load(saved, rows=20, dim=3).count == 20
    with pytest.raises(ArtifactError, match="of 20 rows of 3 dims"):
        Moments.load(saved, **others)


@pytest.mark.parametrize("kind", ["whitening"], indirect=True)
def test_whole_numbers_are_read_as_fractions(saved, kind):
    rewrite(saved, {name: np.ones(3, np.int64) for name in ("mean", "eigenvalues")})
    read = READERS[kind].load(saved)
    assert read.mean.dtype == read.eigenvalues.dtype == np.float64


@pytest.mark.parametrize(
    "facts",
    [{"kind": "zca"}, {"kind": None}, {"format_version": "99"}, {"kind": None, "transform": None}],
)
def test_another_kind_or_a_later_format_is_refused(saved, kind, facts):
    rewrite(saved, **facts)
    held = rf"holds {facts.get('kind', kind)} of format {facts.get('format_version', 1)}"
    message = rf"{saved.name} {held}, and {kind} up to format 1 is needed; .*upgrade"
    with pytest.raises(ArtifactError, match=message):
        READERS[kind].load(saved)


@pytest.mark.parametrize("kind", ["whitening"], indirect=True)
@pytest.mark.parametrize(
    "facts",
    [{"transform": None}, {"transform": "zca-cor"}, {"center": None}, {"normalize_input": None}],
)
def test_a_whitening_without_its_choices_is_an_error(saved, kind, facts):
    rewrite(saved, **facts)
    assert_unreadable(saved, kind)


@pytest.mark.parametrize("kind", ["whitening"], indirect=True)
@pytest.mark.parametrize("name", ["center", "normalize_input"])
def test_a_choice_that_is_neither_true_nor_false_is_an_error(saved, kind, name):
    rewrite(saved, **{name: "maybe"})
    assert_unreadable(saved, kind)


PLACES, FLIPS = 20, 120


def files_of(out: Path) -> list[Path]:
    """Return ``CURRENT`` and the files of the published version, those without bytes left out."""
    version = json.loads((out / "CURRENT").read_text())["version"]
    files = [out / "CURRENT", *sorted((out / "versions" / version).iterdir())]
    return [path for path in files if path.stat().st_size]


def damages(out: Path) -> Iterator[tuple[Path, str, bytes]]:
    """Yield a file, its damage and its bytes: ``PLACES`` cuts, then ``FLIPS`` bits, files in turn.

    Each file is cut at its very end first. By their sizes alone the small files, which say what
    the others are, would hardly be hit.
    """
    files, random = files_of(out), np.random.default_rng(0)
    for number in range(PLACES):
        path = files[number % len(files)]
        whole = path.read_bytes()
        size = len(whole) - 1 if number < len(files) else int(random.integers(len(whole)))
        yield path, f"cut to {size}", whole[:size]
    for number in range(FLIPS):
        path = files[number % len(files)]
        data = bytearray(path.read_bytes())
        bit = int(random.integers(len(data) * 8))
        data[bit // 8] ^= 1 << bit % 8
        yield path, f"bit {bit}", bytes(data)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damaged")
    titles = [f"title {i}" for i in range(300)]
    corpus = write_rows(root / "c.parquet", random_rows(5, rows=300), title=titles)
    build(root / "out", corpus, factory="IVF4,PQ4x4", keep=("title",), k=8)
    put_lists_on_disk(root / "out")
    return root / "out"


def test_every_damage_is_refused(out: Path) -> None:
    """Sizes alone tell cuts and damage to the files that say what the others are."""
    tried = 0
    for path, damage, data in damages(out):
        whole = path.read_bytes()
        path.write_bytes(data)
        with pytest.raises(ArtifactError) as caught:
            open_index(out)
        message = str(caught.value)
        assert path.name in message, (damage, message)
        assert any(word in message for word in ("restore", "build", "rollback")), message
        if damage.startswith("cut") or path.name in ("CURRENT", "manifest.json"):
            with pytest.raises(ArtifactError):
                open_index(out, verify="manifest")
        path.write_bytes(whole)
        tried += 1
    assert tried == PLACES + FLIPS
    open_index(out, verify="full")
