"""Bad stores: damaged, of nothing, and of two corpora."""

import pytest

from tests.helpers import bad_input
from tests.helpers.bad_input import ARTIFACT, EMBEDDED, ROWS, Place, assert_refused, numbers, table
from tests.helpers.flipped import flip

place = bad_input.place


def test_a_damaged_store_without_a_corpus_to_mend_it_from(place: Place) -> None:
    path = next((place.out / "store").rglob("embeddings.safetensors"))
    flip(path, -1)
    arguments = ("build", "--store", place.out / "store", "--k", 2, "--out", place.out)
    assert_refused(place, arguments, ARTIFACT, "damaged; run the same encode or build with the")


@pytest.mark.parametrize("store", ["gone", "good"])
def test_a_store_that_is_none(place: Place, store: str) -> None:
    arguments = ("build", "--store", place.root / store, "--out", place.out)
    assert_refused(place, arguments, ARTIFACT, "holds no store of embeddings")


def test_a_store_of_two_corpora_asks_which(place: Place) -> None:
    corpus = place.write(
        table(id=[f"x{i}" for i in range(ROWS)], e=list(numbers(4))), "b/b.parquet"
    )
    store = place.out / "store"
    bad_input.succeed("encode", corpus, *EMBEDDED, "--store", store)
    arguments = ("build", "--store", store, "--k", 2, "--out", place.out)
    assert_refused(place, arguments, ARTIFACT, "2 corpora .*good.*name the corpus")
