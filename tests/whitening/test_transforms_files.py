"""Every kind of transform in files: exported as one matrix and one bias, and saved as it is."""

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.helpers.transforms import fit, make_rows
from whiten_index.errors import ArtifactError
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import Kind


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("normalize_input", [False, True])
def test_an_export_maps_as_the_transform_does(kind, normalize_input, tmp_path):
    rows = make_rows(ratio=1)
    wish = {} if kind is Kind.NONE else {"normalize_input": normalize_input}
    whitening = fit(rows, kind=kind, **wish)
    path = tmp_path / "matrix.safetensors"
    whitening.export().save(path)
    made = load_file(path)
    assert made["matrix"].dtype == made["bias"].dtype == np.float32
    assert made["matrix"].shape == (12, whitening.k)
    with safe_open(path, framework="numpy") as file:
        unit = file.metadata()["normalize_input"] == "true"
    assert unit is whitening.normalize_input
    given = rows / np.linalg.norm(rows, axis=1, keepdims=True) if unit else rows
    vectors = given.astype(np.float32) @ made["matrix"] + made["bias"]
    np.testing.assert_allclose(vectors, whitening.apply(rows), atol=1e-3)


CHOICES = [
    *({"kind": kind} for kind in Kind),
    {"k": 3, "exponent": 0.7},
    {"center": False, "normalize_input": True},
    {"shrinkage": "oas"},
    {"shrinkage": "ledoit-wolf"},
    {"shrinkage": 0.25},
    {"floor": 1e-3},
    {"remove_top": 2},
    {"kind": Kind.TRUNCATE, "k": 3},
]


@pytest.mark.parametrize("options", CHOICES)
def test_save_and_load_keep_every_bit(tmp_path, options):
    rows, path = make_rows(), tmp_path / "whitening.safetensors"
    saved = fit(rows, **options)
    saved.save(path)
    found = Whitening.load(path)
    np.testing.assert_array_equal(found.apply(rows), saved.apply(rows))
    np.testing.assert_array_equal(found.variances, saved.variances)
    assert found.describe() == saved.describe()
    for name, value in vars(saved).items():
        np.testing.assert_array_equal(getattr(found, name), value)


@pytest.mark.parametrize(
    ("options", "missing"),
    [({}, ("floor", "remove_top", "shrinkage")), ({"kind": Kind.TRUNCATE}, ("basis_variances",))],
)
def test_a_file_without_what_its_kind_needs_is_an_error(tmp_path, options, missing):
    path = tmp_path / "whitening.safetensors"
    fit(make_rows(), **options).save(path)
    with safe_open(path, framework="numpy") as file:
        facts = file.metadata()
    whole = load_file(path)
    for name in missing:
        save_file({key: x for key, x in whole.items() if key != name}, path, facts)
        with pytest.raises(ArtifactError, match=f"cannot be read as whitening .*{name}"):
            Whitening.load(path)
    for damage in ({"estimator": "magic"}, {"center": "maybe"}):
        save_file(whole, path, facts | damage)
        with pytest.raises(ArtifactError, match="cannot be read as whitening"):
            Whitening.load(path)


@pytest.mark.parametrize(
    ("name", "value"), [("exponent", -1e300), ("exponent", 3), ("basis", 1e300)]
)
def test_a_file_whose_map_no_fit_makes_is_an_error(tmp_path, name, value):
    # Its vectors would be NaN, or of one direction alone.
    path = tmp_path / "whitening.safetensors"
    fit(make_rows()).save(path)
    with safe_open(path, framework="numpy") as file:
        facts = file.metadata()
    whole = load_file(path)
    save_file(whole | {name: np.full_like(whole[name], value)}, path, facts)
    with pytest.raises(
        ArtifactError, match=r"cannot be read as whitening \(exponent .* directions"
    ):
        Whitening.load(path)
