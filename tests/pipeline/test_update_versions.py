"""What an update publishes and what it refuses: versions kept aside, damaged, of long ago."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.helpers import updates
from tests.helpers.updates import DIM, Place, ids_of, some_rows, version_of
from whiten_index import UpdateConfig, list_versions, open_index, update_index
from whiten_index.errors import ConfigError, GateError, WhiteningError
from whiten_index.versions.retention import prune, rollback

indexed, place = updates.indexed, updates.place


def test_a_corpus_that_became_again_what_it_was_is_a_version_of_its_own(place: Place) -> None:
    first, old = version_of(place.out).name, dict(place.files)
    place.change()
    second = place.update(refit="always")
    place.files = old
    place.write()
    report = place.update(refit="always")
    assert report.base == second.version
    assert report.version not in (first, second.version)
    assert all(gate["passed"] for gate in report.gates)
    assert report.gates
    # Its changes are those since the version before, not those that were once made.
    counts, undone = report.changes.to_json(), second.changes.to_json()
    assert (counts["new"], counts["deleted"]) == (undone["deleted"], undone["new"])
    assert ids_of(place.out) == list(place.rows)
    assert rollback(place.out).to == second.version


def test_the_version_of_a_killed_update_passes_the_gates_that_are_asked_now(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.files = {**place.files, "c.parquet": some_rows(range(900, 1000))}
    place.write()
    with monkeypatch.context() as patch:
        patch.setattr("whiten_index.pipeline.update.set_current", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            place.update()
    with pytest.raises(GateError, match=r"--max-growth is 0\.01"):
        place.update(max_growth=0.01)
    # No rollback or prune takes what was refused for a version that was ever published.
    (published,) = (each.name for each in list_versions(place.out) if not each.candidate)
    assert place.update().version is not None
    assert rollback(place.out).to == published
    assert prune(place.out, keep=1).kept == (published,)
    (left,) = (place.out / "versions").iterdir()
    assert left.name == published


def test_rows_of_a_version_that_a_gate_kept_back_are_not_encoded_again(place: Place) -> None:
    place.files = {**place.files, "c.parquet": some_rows(range(900, 1300))}
    place.write()
    with pytest.raises(GateError, match="gate size"):
        place.update()
    # Not the same corpus any more, but most of its rows.
    place.files["c.parquet"] = some_rows([*range(900, 1200), *range(1400, 1405)])
    place.write()
    assert place.update(max_growth=9).encoded.counts.encoded == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refit": "sometimes"}, "sometimes.*auto, always, never"),
        ({"drift_threshold": -1.0}, "--drift-threshold"),
        ({"drift_threshold": float("nan")}, "--drift-threshold"),
        ({"drift_threshold": float("inf")}, "--drift-threshold"),
        ({"drift_threshold": "0.1"}, "--drift-threshold takes a number; '0.1' was given"),
        ({"choose_again": True, "refit": "never"}, "--choose-again.*--refit never"),
        ({"index_device": "tpu"}, "tpu.*auto, cpu, gpu"), ({"canaries": -1}, "--canaries"),
        ({"canaries": 1.5}, "--canaries takes a whole number"),
        ({"canaries": True}, "--canaries takes a whole number"),
        ({"max_shrink": 1.5}, "--max-shrink"), ({"max_bytes": "many"}, "--max-bytes"),
        ({"threads": 0}, "threads"), ({"store": ""}, "an empty path"),
        ({"corpus": ("",)}, "an empty path"), ({"index": ""}, "an empty path"),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_cannot_be_used(indexed: Place, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        update_index(UpdateConfig(**{"index": str(indexed.out), **options}))


def test_whitening_that_became_impossible(place: Place) -> None:
    row = np.ones(DIM, dtype=np.float32)
    place.files = {"a.parquet": dict.fromkeys(range(300), (row, 1))}
    place.write()
    with pytest.raises((WhiteningError, GateError)):
        place.update()
    assert len(open_index(place.out)) == 300
