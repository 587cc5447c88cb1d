"""Selection of k, γ and centring, from scores or from the spectrum alone. numpy only."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.manifest import Count, Positive
from whiten_index.whitening.spectrum import unit_rows

if TYPE_CHECKING:
    from whiten_index.whitening.transform import Whitening

_EXPONENTS = tuple(step / 8 for step in range(9))
_WIDTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# What a narrower width may lose of the best score, as a share of it.
_WIDTH_LOSS = 0.03
_STANDARD_ERRORS = 1.0
_LARGE_MEAN = 0.4

# A smaller sample leaves the choice to chance.
LEAST_SAMPLE = 50

Vectors = NDArray[np.float32]
Scores = NDArray[np.float64]
Rule = Literal["pieces", "spectrum", "labels"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One transform that may be chosen: W = U[:, :k] Λ[:k]^(−γ/2)."""

    k: Positive  # kept width
    exponent: float  # γ
    center: bool  # whether μ is subtracted


@dataclass(frozen=True, slots=True)
class Candidate(Setting):
    """A setting and its score."""

    score: float  # mean over the sample, 0 … 1
    error: float  # standard error of its paired difference to the best of the same width
    leads: bool  # whether the rule takes it among those of its width


@dataclass(frozen=True)
class Choice:
    """A chosen transform, with its reason and the alternatives."""

    rule: Rule  # `pieces`, `spectrum` or `labels`
    chosen: Setting  # the transform
    measure: str  # name of the score
    sample: Count  # number of documents or queries scored
    candidates: Sequence[Candidate]  # the alternatives; none if the spectrum alone decided
    why: str  # one sentence for the user
    raw_score: float | None = None  # of the embeddings as they are

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Choice":
        """Return the choice that ``dataclasses.asdict`` gave."""
        candidates = [Candidate(**row) for row in value["candidates"]]
        chosen = Setting(**value["chosen"])
        return cls(**{**value, "chosen": chosen, "candidates": candidates})


@dataclass(frozen=True, eq=False)
class Trial:
    """Queries and candidates, and the score of their search once both are transformed."""

    queries: NDArray[np.floating]  # (q, d) raw embeddings
    candidates: NDArray[np.floating]  # (n, d) raw embeddings, among which they search
    # Gives (q,) scores from vectors (q, k) and (n, k), whose inner products rank.
    score: Callable[[Vectors, Vectors], Scores]
    weight: float = 1.0  # relative to other trials


def reciprocal_ranks(queries: Vectors, candidates: Vectors) -> Scores:
    """Return 1/rank (q,) of each query's answer, the candidate of its row; ties count half."""
    cosines = queries @ candidates.T
    own = np.diagonal(cosines)[:, None]
    above = np.count_nonzero(cosines > own, axis=1)
    equal = np.count_nonzero(cosines == own, axis=1) - 1
    ranks: Scores = 1.0 + above + equal / 2
    return 1.0 / ranks


def widths(rank: int) -> tuple[int, ...]:
    """Return the widths among which k is chosen: round ones up to the rank."""
    return tuple(k for k in _WIDTHS if k <= rank) or (rank,)


def settings(
    ks: Iterable[int], *, exponent: float | None = None, center: bool | None = None
) -> list[Setting]:
    """Return the grid of settings; a given exponent or centring is fixed."""
    exponents = _EXPONENTS if exponent is None else (exponent,)
    centers = (True, False) if center is None else (center,)
    return [Setting(k, g, c) for k in ks for c in centers for g in exponents]


def score_settings(
    fit: "Whitening", trials: Sequence[Trial], grid: Sequence[Setting]
) -> NDArray[np.float64]:
    """Return the scores (len(grid), q), the weighted mean over trials that score the same q items.

    ``fit`` is a PCA of the corpus, of every direction in the grid.
    """
    total: list[Scores | float] = [0.0] * len(grid)
    for trial in trials:
        for center in {setting.center for setting in grid}:
            queries, candidates = (
                _turned(fit, rows, center) for rows in (trial.queries, trial.candidates)
            )
            for row, setting in enumerate(grid):
                if setting.center is center:
                    scale = fit.eigenvalues[: setting.k] ** (-setting.exponent / 2)
                    scaled = (rows[:, : setting.k] * scale for rows in (queries, candidates))
                    pair = (fit.compared(rows).astype(np.float32) for rows in scaled)
                    total[row] = total[row] + trial.weight * trial.score(*pair)
    return np.array(total) / sum(trial.weight for trial in trials)


def keeps(score: float, best: float) -> bool:
    """Return whether a width's score is at least 97 % of the best one."""
    return score >= (1 - _WIDTH_LOSS) * best


def choose_by_scores(
    grid: Sequence[Setting], scores: NDArray[np.float64], *, errors: float = _STANDARD_ERRORS
) -> tuple[Setting, tuple[Candidate, ...]]:
    """Return the gentlest setting that is not significantly worse than the best, and the scores.

    Within a width it is the least γ whose score is no more than ``errors`` standard errors of the
    paired differences below the best, since a corpus's own pieces can overrate strong whitening.
    Among the widths it is the narrowest that keeps 97 % of the best score.
    ``scores`` (n, q) are of the same q items; 0 ``errors`` take the best.
    """
    candidates: list[Candidate] = []
    leaders: list[tuple[Setting, float]] = []
    for k in sorted({setting.k for setting in grid}):
        rows = [row for row, setting in enumerate(grid) if setting.k == k]
        means = scores[rows].mean(axis=1)
        missing = scores[rows[int(means.argmax())]] - scores[rows]
        count = scores.shape[1]
        error = missing.std(axis=1, ddof=1) / np.sqrt(count) if count > 1 else np.zeros(len(rows))
        close = np.flatnonzero(missing.mean(axis=1) <= errors * error + 1e-12)
        leader = min(close, key=lambda i: (grid[rows[i]].exponent, -means[i]))
        leaders.append((grid[rows[leader]], float(means[leader])))
        candidates += [
            Candidate(
                **asdict(grid[row]),
                score=float(means[i]),
                error=float(error[i]),
                leads=bool(i == leader),
            )
            for i, row in enumerate(rows)
        ]
    best = max(score for _, score in leaders)
    chosen = next(setting for setting, score in leaders if keeps(score, best))
    return chosen, tuple(candidates)


def choose_by_spectrum(
    fit: "Whitening", k: int, *, exponent: float | None = None, center: bool | None = None
) -> Setting:
    """Return a setting from mean and spectrum alone, for a corpus without scores.

    γ = √s·ρ, where s = ‖μ‖²/(‖μ‖² + tr Λ) is the share of the mean in the embeddings' mean square
    length, near 1 for raw language models and small for contrastively trained ones, and
    ρ = SNR/(1 + SNR) sets the mean eigenvalue kept against the noise floor, the median one within
    the rank. The mean is subtracted where s is above 0.4. This is our own rule. Inner products
    are kept best by γ = 0 without centring.
    """
    if fit.similarity == "dot":
        return Setting(k, exponent or 0.0, bool(center))
    mean = float(fit.mean @ fit.mean)
    share = mean / (mean + float(fit.eigenvalues.sum()))
    if exponent is None:
        values = fit.eigenvalues[: fit.k]
        ratio = float(values[:k].mean() / np.median(values))
        exponent = round(8 * np.sqrt(share) * ratio / (1 + ratio)) / 8
    return Setting(k, exponent, share > _LARGE_MEAN if center is None else center)


def _turned(fit: "Whitening", rows: NDArray[np.floating], center: bool) -> NDArray[np.float64]:
    """Return rows (n, d) along the eigenvectors, (n, r)."""
    x = rows.astype(np.float64)
    if fit.normalize_input:
        x = unit_rows(x)
    turned: NDArray[np.float64] = (x - fit.mean if center else x) @ fit.basis
    return turned
