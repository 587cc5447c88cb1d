"""A choice is found again in the store, and is told from a transform that was named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline import choosing
from tests.pipeline.choosing import Place, assert_applied, assert_same_choice, choice, stages
from whiten_index.pipeline.build import BuildReport

place = choosing.place


def test_a_second_build_finds_the_choice_in_the_store(
    place: Place, chosen: tuple[Place, BuildReport]
) -> None:
    again = place.build("first")
    assert choice(again) == choice(chosen[1])
    assert not {"encode pieces", "choose"} & stages(again)
    elsewhere = place.build("elsewhere")
    assert choice(elsewhere) == choice(chosen[1])
    assert not {"encode pieces", "choose"} & stages(elsewhere)


def test_a_store_alone_gives_the_same_choice(
    place: Place, chosen: tuple[Place, BuildReport]
) -> None:
    alone = {"corpus": (), "text_columns": (), "id_column": None}
    report = place.build("alone", **alone)
    assert choice(report) == choice(chosen[1])
    assert_applied(report)
    with_a_wish = place.build("wish", k=20, **alone)
    assert choice(with_a_wish)["rule"] == "pieces"
    assert_applied(with_a_wish)


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


@pytest.mark.parametrize("how", ["empty", "garbage", "another object", "half", "list"])
@pytest.mark.parametrize("kind", ["choices", "samples"])
def test_a_damaged_note_is_made_anew(
    place: Place, chosen: tuple[Place, BuildReport], kind: str, how: str
) -> None:
    (path,) = place.store.glob(f"*/{kind}/*")
    damaged(path, how)
    if kind == "samples":
        for note in place.store.glob("*/choices/*"):
            note.unlink()
    report = place.build("out")
    assert_same_choice(choice(report), choice(chosen[1]))
    assert ("encode pieces" in stages(report)) is (kind == "samples")
    assert "choose" in stages(report)
    assert not {"encode pieces", "choose"} & stages(place.build("again"))
