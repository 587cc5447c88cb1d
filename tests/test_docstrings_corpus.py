"""The corpus of docstrings: exact in number, seeded, readable, and made without any import."""

from __future__ import annotations

import inspect
import itertools
import json
import shutil
import textwrap
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from pipelines import docstrings_corpus
from pipelines.docstrings_corpus import (
    Passage,
    harvest,
    installed_roots,
    main,
    sample,
    write_corpus,
)
from whiten_index.errors import CorpusError, StorageError

TELLING = "Read the {} and give back all that it holds, in order."


def write(root: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source), encoding="utf-8")
    return root


def function(name: str, doc: str | None = None) -> str:
    return f"def {name}():\n    {doc or TELLING.format(name)!r}\n\n"


def by_id(root: Path, *, max_chars: int = 600) -> dict[str, Passage]:
    return {passage.id: passage for passage in harvest([root], max_chars=max_chars)}


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """A library of six modules; site-packages with a large and a small package."""
    library = {
        f"lib{i}.py": "".join(function(f"read_lib{i}_{j}") for j in range(5)) for i in range(6)
    }
    large = {
        f"large/part{i}.py": "".join(function(f"read_large{i}_{j}") for j in range(9))
        for i in range(30)
    }
    small = {"small/__init__.py": function("read_small")}
    return [write(tmp_path / "library", library), write(tmp_path / "site", large | small)]


def test_a_sample_has_exactly_so_many_passages_each_once(roots: list[Path]) -> None:
    chosen = sample(roots, passages=100)
    assert len(chosen) == 100
    assert len({passage.id for passage in chosen}) == 100
    assert len({passage.text for passage in chosen}) == 100


def test_a_seed_gives_the_same_rows_and_another_seed_others(roots: list[Path]) -> None:
    first = sample(roots, passages=100, seed=3)
    assert sample(roots, passages=100, seed=3) == first
    other = sample(roots, passages=100, seed=4)
    assert {passage.id for passage in other} != {passage.id for passage in first}


def test_every_package_has_its_turn(roots: list[Path]) -> None:
    packages = {passage.module.partition(".")[0] for passage in sample(roots, passages=60)}
    assert packages == {"large", "small", *(f"lib{i}" for i in range(6))}


def test_large_packages_take_turns_by_the_cube_root_of_their_files(tmp_path: Path) -> None:
    files = {
        f"{package}/m{i}.py": "".join(function(f"{package}_{i}_{j}") for j in range(40))
        for package, count in (("big", 27), ("mid", 1))
        for i in range(count)
    }
    root = write(tmp_path, files)
    first = list(itertools.islice(harvest([root]), 80))
    packages = Counter(passage.module.partition(".")[0] for passage in first)
    assert packages["big"] == pytest.approx(3 * packages["mid"], abs=3)


def test_too_few_passages_is_an_error_that_counts_them(roots: list[Path]) -> None:
    with pytest.raises(CorpusError, match=r"^1000 passages .* 301 found: lower --passages"):
        sample(roots, passages=1000)


def test_a_root_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="not a folder"):
        sample([tmp_path / "nowhere"], passages=1)


def test_nothing_is_imported(tmp_path: Path) -> None:
    marker = tmp_path / "imported"
    trap = f"open({str(marker)!r}, 'w').close()\nraise RuntimeError\n"
    root = write(tmp_path / "root", {"trap/__init__.py": trap + function("read_trap")})
    assert "trap.read_trap" in by_id(root)
    assert not marker.exists()


@pytest.mark.parametrize(
    "source",
    [b"def broken(:\n", b'"""\xff\xfe"""\n', b"\0", b"# coding: klingon\n", b"-" * 100_000 + b"1"],
    ids=["syntax", "encoding", "null", "codec", "depth"],
)
def test_a_file_that_does_not_parse_is_passed_over_and_told(source: bytes, tmp_path: Path) -> None:
    write(tmp_path, {"good.py": function("read_good")})
    (tmp_path / "bad.py").write_bytes(source)
    broken: list[Path] = []
    found = list(harvest([tmp_path], broken=broken))
    assert [passage.id for passage in found] == ["good.read_good"]
    assert broken == [tmp_path / "bad.py"]


def test_the_coding_of_a_file_is_honoured_and_its_warnings_are_silent(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    source = (
        '# coding: latin-1\ndef f():\n    """Brew a café \\d with as much milk as asked for."""\n'
    )
    (tmp_path / "drinks.py").write_bytes(source.encode("latin-1"))
    assert "café" in by_id(tmp_path)["drinks.f"].text
    assert not recwarn


SHAPES = '''
    """Shapes of the plane: areas, outlines, and what contains what."""
    import abc

    class Square(abc.ABC):
        """A square of which the sides are given in metres, for tiling."""
        def __init__(self, side: float, *, name: str = "") -> None: ...
        def grow(self, by, /, times=1) -> "Square":
            """Make the sides longer, as many times as asked for."""
        @staticmethod
        def unit(name, *rest, **options):
            """Make the square that has sides of one metre each."""
        @classmethod
        def parse(cls, text: str) -> "Square":
            """Read a square from the text that describes its sides."""
        @property
        def area(self) -> float:
            """How much of the plane it covers, in square metres."""
        def _secret(self):
            """Nobody outside should know about this method of squares."""

    class Round(abc.ABC, metaclass=abc.ABCMeta):
        """All that rolls, such as circles and also some ellipses."""

    try:
        async def fetch(url, timeout=3.5, *sizes):
            """Fetch the shape that is described at the address given."""
    except ImportError:
        pass
'''


@pytest.mark.parametrize(
    ("id_", "name", "signature"),
    [
        ("shapes", "shapes", "import shapes"),
        ("shapes.Square", "Square", "Square(side: float, *, name: str='')"),
        ("shapes.Square.grow", "Square.grow", "grow(by, /, times=1) -> 'Square'"),
        ("shapes.Square.unit", "Square.unit", "unit(name, *rest, **options)"),
        ("shapes.Square.parse", "Square.parse", "parse(text: str) -> 'Square'"),
        ("shapes.Square.area", "Square.area", "area -> float"),
        ("shapes.Round", "Round", "class Round(abc.ABC)"),
        ("shapes.fetch", "fetch", "fetch(url, timeout=3.5, *sizes)"),
    ],
)
def test_signatures(id_: str, name: str, signature: str, tmp_path: Path) -> None:
    passage = by_id(write(tmp_path, {"shapes.py": SHAPES}))[id_]
    assert (passage.module, passage.name, passage.signature) == ("shapes", name, signature)


def test_functions_of_the_library_agree_with_inspect(tmp_path: Path) -> None:
    assert json.__file__ is not None
    shutil.copytree(Path(json.__file__).parent, tmp_path / "json")
    found = by_id(tmp_path, max_chars=10_000)
    for call in (json.dump, json.dumps, json.load, json.loads):
        passage = found[f"json.{call.__name__}"]
        assert passage.signature == f"{call.__name__}{inspect.signature(call)}"
        assert passage.text == inspect.getdoc(call)


def test_private_names_and_tests_are_left_out(tmp_path: Path) -> None:
    hidden = ["pkg/_private.py", "_top/open.py", "pkg/tests/helper.py", "pkg/test_it.py"]
    hidden += ["pkg/_vendor/copy.py", "site-packages/other.py", "pkg/run-it.py"]
    files = {name: function(f"read_{i}") for i, name in enumerate(hidden)}
    files["pkg/__init__.py"] = function("_read_it") + function("read_it")
    files["pkg/listed.py"] = "__all__ = ['a']\n__all__ += ['b']\n" + "".join(
        map(function, ["a", "b", "c"])
    )
    assert set(by_id(write(tmp_path, files))) == {"pkg.read_it", "pkg.listed.a", "pkg.listed.b"}


def test_a_private_module_s_names_belong_to_the_public_package_that_imports_them(
    tmp_path: Path,
) -> None:
    files = {
        "pkg/__init__.py": "from ._core import mean\nfrom pkg._one import single\n",
        "pkg/_core/__init__.py": "from .numeric import *\n",
        "pkg/_core/numeric.py": function("mean") + function("inner"),
        "pkg/_core/chars.py": function("mean", TELLING.format("characters")),
        "pkg/_one.py": function("single") + function("helper"),
        "pkg/_jit/engine.py": function("mean", TELLING.format("machine code")),
    }
    found = by_id(write(tmp_path, files))
    assert {id_: passage.text for id_, passage in found.items()} == {
        "pkg.mean": TELLING.format("mean"),
        "pkg.single": TELLING.format("single"),
    }


@pytest.mark.parametrize(
    "doc",
    [
        "Close the file.",
        "labels (`torch.LongTensor` of shape `(batch,)`, *optional*):\n    The labels to be used.",
        "Example:\n\n    >>> read_all_that_there_is_in_the_file(path, encoding='utf-8')",
        "Parameters\n----------\npath : str\n    The path of the file to be read.",
        ":param path: the path of the file of which all the lines are read",
    ],
)
def test_docstrings_that_say_nothing_are_left_out(doc: str, tmp_path: Path) -> None:
    assert not by_id(write(tmp_path, {"m.py": function("f", doc)}))


def test_boilerplate_is_kept_once(tmp_path: Path) -> None:
    first = "Return the parameters\nof this very estimator.\n\nOf the first kind."
    again = "Return the parameters of this very\nestimator.\n\nOf the second kind."
    assert len(by_id(write(tmp_path, {"m.py": function("f", first) + function("g", again)}))) == 1


def test_titles_templates_and_shown_calls_do_not_count_as_text(tmp_path: Path) -> None:
    doc = "f(x[, y]) -> list of str\n\n====\nOf files\n====\nAll files in the folder, by name.\n\n"
    found = by_id(write(tmp_path, {"m.py": function("f", doc + "%(notes)s\nLinks are followed.")}))
    assert found["m.f"].text == "Of files\nAll files in the folder, by name.\n\nLinks are followed."


@pytest.mark.parametrize("max_chars", [40, 41, 45, 57, 66, 79])
def test_text_is_cut_between_two_words(max_chars: int, tmp_path: Path) -> None:
    doc = "Read the table, row by row,\n  and give back every column of it: with its name and type."
    root = write(tmp_path, {"m.py": function("f", doc)})
    whole, cut = (by_id(root, max_chars=limit)["m.f"].text for limit in (600, max_chars))
    assert len(cut) <= max_chars
    assert whole.startswith(cut)
    assert whole[len(cut)].isspace()
    assert max_chars - len(cut) <= len("everything")


def test_one_endless_word_is_cut_where_the_limit_is(tmp_path: Path) -> None:
    doc = "/".join(["folder"] * 50) + " is a path"
    found = by_id(write(tmp_path, {"m.py": function("f", doc)}), max_chars=100)
    assert found["m.f"].text == doc[:100]


def test_the_file_holds_the_rows_and_is_the_same_each_time(
    roots: list[Path], tmp_path: Path
) -> None:
    chosen = sample(roots, passages=100)
    path = write_corpus(chosen, tmp_path / "new" / "corpus")
    table = pq.read_table(path)
    assert table.column_names == ["id", "module", "name", "signature", "text"]
    assert [Passage(**row) for row in table.to_pylist()] == chosen
    assert list(path.parent.iterdir()) == [path]
    before = path.read_bytes()
    assert write_corpus(chosen, path.parent).read_bytes() == before


def test_a_failed_write_leaves_the_earlier_file(
    roots: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_corpus(sample(roots, passages=10), tmp_path / "corpus")
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(StorageError, match=r"cannot write .*docstrings\.parquet: the disk is full"):
        write_corpus(sample(roots, passages=20), path.parent)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_the_command_writes_the_corpus_and_says_so_in_a_line(
    roots: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docstrings_corpus, "installed_roots", lambda: roots)
    out = tmp_path / "out"
    result = CliRunner().invoke(main, [str(out), "--passages", "50", "--max-chars", "45"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("50 passages from 8 packages in ")
    assert result.output.count("\n") == 1
    texts = pq.read_table(out)["text"].to_pylist()
    assert len(texts) == 50
    assert all(text.strip() and len(text) <= 45 for text in texts)


@pytest.mark.parametrize(
    ("passages", "out", "code"), [("1000", "out", 3), ("5", "library/lib0.py", 7)]
)
def test_the_command_ends_with_a_line_and_the_code_of_the_error(
    passages: str,
    out: str,
    code: int,
    roots: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(docstrings_corpus, "installed_roots", lambda: roots)
    result = CliRunner().invoke(main, [str(tmp_path / out), "--passages", passages])
    assert result.exit_code == code
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


def test_this_python_s_own_library_gives_passages() -> None:
    library = installed_roots()[0]
    assert (library / "json" / "__init__.py").is_file()
    chosen = sample([library], passages=40)
    assert len({passage.module for passage in chosen}) > 20
    assert all(40 <= len(passage.text) <= 600 for passage in chosen)
