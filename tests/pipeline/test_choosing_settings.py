"""A choice by the spectrum, the widths that are tried, and a choice that is found again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.pipeline import choosing
from tests.pipeline.choosing import Place
from whiten_index import BuildConfig, build_index
from whiten_index.artifacts.tensors import write_tensors
from whiten_index.errors import ConfigError, FormatError
from whiten_index.pipeline.build import BuildReport


def test_short_texts_are_chosen_for_by_the_spectrum_and_told_why(
    tmp_path: Path, model: Path
) -> None:
    texts = choosing.documents(150, sentences=1)
    corpus = choosing.parquet(tmp_path / "c.parquet", id=list(range(150)), text=texts)
    place = Place(tmp_path, model, texts)
    report = place.build("out", corpus=(corpus,))
    found = choosing.choice(report)
    assert found["rule"] == "spectrum"
    assert "150 of 150 texts are too short" in found["why"]
    assert found["candidates"] == []
    assert 0 <= found["chosen"]["exponent"] <= 1
    choosing.assert_applied(report)


@pytest.mark.parametrize("wishes", [{}, {"k": 5}, {"exponent": 0.3}, {"center": False}])
def test_embeddings_are_chosen_for_by_the_spectrum(tmp_path: Path, wishes: dict[str, Any]) -> None:
    options = {**choosing.embedded(tmp_path / "c.parquet"), **wishes}
    report = build_index(BuildConfig(out=str(tmp_path / "out"), **options))
    assert choosing.choice(report)["rule"] == "spectrum"
    assert "only embeddings" in choosing.choice(report)["why"]
    assert choosing.choice(report)["chosen"].items() >= wishes.items()
    choosing.assert_applied(report)


def column(path: Path, dim: int, *, rank: int | None = None, rows: int = 300) -> dict[str, Any]:
    """Embeddings that fill the first ``rank`` of their dims."""
    values = np.random.default_rng(0).normal(size=(rows, dim)) * np.geomspace(1, 0.2, dim) + 0.5
    values[:, dim if rank is None else rank :] = 0
    corpus = choosing.parquet(path, id=list(range(rows)), e=list(values.astype(np.float32)))
    return {"corpus": (corpus,), "embedding_column": "e", "id_column": "id"}


def test_a_width_is_chosen_that_fits_the_budget(tmp_path: Path) -> None:
    options = column(tmp_path / "c.parquet", 96, rows=2_000) | {"store": str(tmp_path / "store")}
    free = build_index(BuildConfig(out=str(tmp_path / "free"), **options))
    assert choosing.choice(free)["chosen"]["k"] == 32
    # 2,000 rows of 32 dims take 16,640 bytes of binary codes and transforms, or more.
    kept = build_index(BuildConfig(out=str(tmp_path / "out"), memory_budget="30KB", **options))
    assert choosing.choice(kept)["chosen"]["k"] == 16
    assert kept.manifest["bytes"]["index"]["total"] <= 30_000


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("PQ7", "--factory PQ7 fits none of the round widths.*name one with --k"),
        ("PQ5", "cannot make 'PQ5' over 98 dims"),
        ("Nonsense", "cannot make 'Nonsense'"),
        ("PCA16,Flat", "a transform of its own"),
    ],
)
def test_a_factory_that_fits_no_width_is_refused_before_anything_is_encoded(
    tmp_path: Path, factory: str, message: str
) -> None:
    options = column(tmp_path / "c.parquet", 98)
    with pytest.raises(ConfigError, match=message):
        build_index(BuildConfig(out=str(tmp_path / "out"), factory=factory, **options))
    assert not choosing.shards(tmp_path)


place = choosing.place


def test_a_second_build_finds_the_choice_in_the_store(
    place: Place, chosen: tuple[Place, BuildReport]
) -> None:
    again = place.build("first")
    assert choosing.choice(again) == choosing.choice(chosen[1])
    assert not {"encode pieces", "choose"} & choosing.stages(again)
    elsewhere = place.build("elsewhere")
    assert choosing.choice(elsewhere) == choosing.choice(chosen[1])
    assert not {"encode pieces", "choose"} & choosing.stages(elsewhere)


def test_a_store_alone_gives_the_same_choice(
    place: Place, chosen: tuple[Place, BuildReport]
) -> None:
    alone = {"corpus": (), "text_columns": (), "id_column": None}
    report = place.build("alone", **alone)
    assert choosing.choice(report) == choosing.choice(chosen[1])
    choosing.assert_applied(report)
    with_a_wish = place.build("wish", k=20, **alone)
    assert choosing.choice(with_a_wish)["rule"] == "pieces"
    choosing.assert_applied(with_a_wish)


def damaged(path: Path, how: str) -> None:
    data = path.read_bytes()
    at = len(data) // 2
    path.write_bytes(
        {
            "empty": b"",
            "garbage": b"\xff\x00garbage",
            "another object": b'{"rule": "pieces"}',
            "half": data[:at],
            "list": b"[]",
        }[how]
    )


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("choices", how) for how in ("empty", "garbage", "another object", "half", "list")),
        ("samples", "garbage"),
        ("samples", "another object"),
    ],
)
def test_a_damaged_note_is_made_anew(
    place: Place, chosen: tuple[Place, BuildReport], kind: str, how: str
) -> None:
    (path,) = place.store.glob(f"*/{kind}/*")
    damaged(path, how)
    if kind == "samples":
        for note in place.store.glob("*/choices/*"):
            note.unlink()
    report = place.build("out")
    choosing.assert_same_choice(choosing.choice(report), choosing.choice(chosen[1]))
    assert ("encode pieces" in choosing.stages(report)) is (kind == "samples")
    assert "choose" in choosing.stages(report)
    assert not {"encode pieces", "choose"} & choosing.stages(place.build("again"))


def test_a_sample_of_a_later_release_is_left_alone(
    place: Place, chosen: tuple[Place, BuildReport]
) -> None:
    (path,) = place.store.glob("*/samples/*")
    for note in place.store.glob("*/choices/*"):
        note.unlink()
    arrays, facts = load_file(path), {"of": path.name}
    write_tensors(path, arrays, kind="sample", version=99, facts=facts, seal=True)
    before = path.read_bytes()
    with pytest.raises(FormatError, match="upgrade whiten-index"):
        place.build("out")
    assert path.read_bytes() == before
