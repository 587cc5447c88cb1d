"""Picture of an index: a file that opens, panels with the right figures, clear errors."""

import sys

import numpy as np
import pytest

from whiten_index.errors import ConfigError
from whiten_index.measure.charts import check_plot_path, draw_spectrum

pytest.importorskip("matplotlib")
DIM, RANK = 48, 45
EIGENVALUES = np.r_[0.02 * np.arange(1, RANK + 1) ** -0.9, 0.0, 1e-22, -1e-20]


def describe(*, k=16, exponent=0.25, kind="whitening", center=True, choice=True):
    """A description as ``describe_index`` returns it, as far as it is drawn."""
    description = {
        "version": "v3",
        "rows": 184_213,
        "encoder": {"model": "a/model"},
        "whitening": {
            "kind": kind, "dim": DIM, "k": k, "exponent": exponent, "center": center,
            "normalize_input": False, "rank": RANK,
            "variance_kept": EIGENVALUES[:k].sum() / EIGENVALUES.sum(), "rows": 184_213,
        },
    }  # fmt: skip
    if choice:
        description["choice"] = {
            "candidates": [
                {"exponent": e, "center": c, "k": width, "score": 0.6 - (e - 0.3) ** 2 + 0.001 * c,
                 "error": 0.01}
                for e in (0.0, 0.25, 0.5, 1.0) for c in (True, False) for width in (8, 16)
            ],
            "chosen": {"exponent": exponent, "center": center, "k": 16},
        }  # fmt: skip
    return description


SMALL = describe(choice=False)


@pytest.mark.parametrize(
    ("options", "eigenvalues"),
    [
        ({"kind": "none", "k": DIM, "exponent": 0.0}, EIGENVALUES),
        ({"kind": "pca", "k": RANK, "exponent": 0.0, "choice": False}, EIGENVALUES),
        ({"k": 1, "exponent": 1.0, "center": False}, np.r_[1.0, np.zeros(DIM - 1)]),
        ({"kind": "none", "k": DIM, "exponent": 0.0}, np.zeros(DIM)),
        ({"kind": "random", "k": DIM, "exponent": 1.0}, EIGENVALUES),
        ({"kind": "a-later-kind", "k": 16, "exponent": 1.0}, EIGENVALUES),
    ],
)
def test_every_transform_and_spectrum_is_drawn_without_a_warning(
    options, eigenvalues, tmp_path, recwarn
):
    draw_spectrum(tmp_path / "a.png", describe(**options), eigenvalues)
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert not [str(warning.message) for warning in recwarn]


def test_a_name_is_neither_markup_nor_a_formula(tmp_path):
    draw_spectrum(tmp_path / "a.svg", SMALL | {"encoder": {"column": "a$b$^\x1b<"}}, EIGENVALUES)
    text = (tmp_path / "a.svg").read_text()
    assert "\x1b" not in text
    assert r"encoder a$b$^\x1b&lt;" in text


def test_an_unknown_ending_names_the_known_ones(tmp_path):
    for name in ("spectrum.jpg", "spectrum"):
        with pytest.raises(ConfigError, match=rf"{name} names no .* \.png, \.svg, \.pdf"):
            check_plot_path(tmp_path / name)
        with pytest.raises(ConfigError, match="names no picture format"):
            draw_spectrum(tmp_path / name, describe(), EIGENVALUES)


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib; run: pip install 'whiten"):
        draw_spectrum(tmp_path / "a.png", SMALL, EIGENVALUES)
