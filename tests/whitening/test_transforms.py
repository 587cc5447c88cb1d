"""Every kind of transform: closed forms, files, and options that go together or do not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.helpers.transforms import SLICED, few, fit, make_rows, seeds
from whiten_index.errors import ArtifactError, ConfigError, WhiteningError
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig

FITTED = [kind for kind in Kind if kind is not Kind.NONE]


def centred(rows):
    return rows - rows.mean(axis=0)


@pytest.mark.parametrize("kind", SLICED)
@few
@given(seed=seeds, data=st.data())
def test_truncating_is_slicing(kind, seed, data):
    rows = make_rows(seed)
    full = fit(rows, kind=kind, k="full")
    k = data.draw(st.integers(1, full.k))
    cut = full.truncate(k)
    np.testing.assert_array_equal(cut.basis, full.basis[:, :k])
    np.testing.assert_array_equal(cut.matrix(), full.matrix()[:, :k])
    np.testing.assert_allclose(cut.apply(rows), full.apply(rows)[:, :k], rtol=0, atol=1e-12)
    fitted = fit(rows, kind=kind, k=k)
    np.testing.assert_allclose(cut.apply(rows), fitted.apply(rows), rtol=0, atol=1e-12)
    assert cut.describe() == pytest.approx(fitted.describe())


@pytest.mark.parametrize("kind", FITTED)
@pytest.mark.parametrize("n", [200, 7])
@few
@given(seed=seeds, ratio=st.sampled_from([0, 10]), center=st.sampled_from([None, True, False]))
def test_the_inverse_undoes_within_the_kept_directions(kind, n, seed, ratio, center):
    rows = make_rows(seed, n, condition=10, ratio=ratio)
    whitening = fit(rows, kind=kind, center=center)
    vectors = whitening.apply(rows)
    found = whitening.inverse(vectors)
    np.testing.assert_allclose(whitening.apply(found), vectors, atol=1e-8)
    # The nearest point: what is missing is at a right angle to all that is kept.
    np.testing.assert_allclose((rows - found) @ whitening.basis, 0, atol=1e-8)


@pytest.mark.parametrize("kind", [Kind.PCA, Kind.WHITENING, Kind.ALL_BUT_THE_TOP])
def test_directions_below_the_floor_weigh_nothing(kind):
    rows = make_rows(condition=1e6)
    none, floored = (fit(rows, kind=kind, k="full", floor=floor) for floor in (0, 1e-3))
    live = none.variances > 1e-3 * none.eigenvalues[0]
    assert 0 < live.sum() < len(live)
    np.testing.assert_array_equal(floored.basis, none.basis[:, live])
    np.testing.assert_array_equal(floored.scales(), none.scales()[live])
    facts = floored.describe()
    assert facts["floor"] == 1e-3
    assert facts["k"] == live.sum()
    assert "floor" not in none.describe()


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


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (Kind.PCA, {"shrinkage": "oas"}, r"scales nothing, so --shrinkage cannot.*use --whiten wh"),
        (Kind.NONE, {"remove_top": 2}, r"so --remove-top cannot.*pca or whitening or all-but-the-"),
        (Kind.NONE, {"k": 0.9}, r"as it is, so --k cannot.*or use --whiten pca"),
        (Kind.TRUNCATE, {"exponent": 1, "k": 2, "remove_top": 1}, r"--exponent and --remove-top"),
        (Kind.ALL_BUT_THE_TOP, {"exponent": 1}, r"so --exponent cannot apply; .*whitening"),
        (Kind.TRUNCATE, {"k": 0.9}, r"so --k as a share of variance cannot apply"),
        (Kind.TRUNCATE, {"shrinkage": 0.1, "floor": 0.1}, r"so --shrinkage and --floor cannot"),
        (Kind.PCA, {"remove_top": 2.5}, "--remove-top takes a whole number; 2.5"),
        (Kind.WHITENING, {"floor": float("nan")}, "--floor takes a finite number; nan"),
    ],
)
def test_options_that_do_not_go_together_are_refused_with_what_would(kind, options, said):
    with pytest.raises(ConfigError, match=said):
        WhiteningConfig(kind=kind, **options)


def test_what_the_width_forbids_is_known_before_and_at_the_fit():
    for refused in (
        lambda: fit(make_rows(), kind=Kind.TRUNCATE, k=13),
        lambda: WhiteningConfig(kind=Kind.TRUNCATE, k=13).require_dim(12),
    ):
        with pytest.raises(ConfigError, match=r"--k 13 is more than the 12 dims .*use --k 12 or"):
            refused()


@pytest.mark.parametrize("kind", SLICED[:3])
def test_what_does_needs_two_and_says_what_else_there_is(kind):
    with pytest.raises(WhiteningError, match=r"there are 1; .*or use --whiten none"):
        fit(make_rows(0, 1), kind=kind)
    with pytest.raises(WhiteningError, match=r"embeddings are equal.*--whiten none"):
        fit(np.ones((5, 12)), kind=kind)
