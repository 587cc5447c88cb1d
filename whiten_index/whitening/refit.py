"""Whether a transform is kept or fitted again, by its drift or by order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from whiten_index.errors import ConfigError
from whiten_index.whitening.drift import Drift

# Nats a kept dimension beyond chance above which a transform is fitted again: of Wikinews with
# Wikipedia added, a tenth of the nearest neighbours by full whitening, k = 128, are then others.
DRIFT_THRESHOLD = 0.002
# Share of the variance that the kept directions may miss more of than they did at the fit.
VARIANCE_THRESHOLD = 0.05


class Refit(Enum):
    """Whether a transform is fitted again: as the drift says, or by order."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"

    @classmethod
    def parse(cls, name: str) -> Refit:
        """Read ``auto``, ``always`` or ``never``.

        Raises:
            ConfigError: it is none of these.
        """
        try:
            return cls(name)
        except ValueError as error:
            known = ", ".join(each.value for each in cls)
            raise ConfigError(f"--refit {name!r} is unknown; use {known}") from error


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether the transform stays.

    Attributes:
        whitening: ``keep`` or ``refit``.
        why: one sentence with the figure and the threshold.
        threshold: nats a dimension it was decided by.
    """

    whitening: str
    why: str
    threshold: float

    @property
    def refits(self) -> bool:
        """Whether the transform is fitted again."""
        return self.whitening == "refit"

    def to_json(self) -> dict[str, Any]:
        """Return the decision as JSON values."""
        return {"whitening": self.whitening, "why": self.why, "threshold": self.threshold}


def decide(
    drift: Drift,
    *,
    threshold: float = DRIFT_THRESHOLD,
    order: Refit = Refit.AUTO,
    variance_threshold: float = VARIANCE_THRESHOLD,
) -> Decision:
    """Decide whether a transform is kept or fitted again.

    It is fitted again where ``kl_of_refit`` is above ``threshold`` and ``noise_kl`` together, or
    where the kept directions miss more of the variance than at the fit, by above
    ``variance_threshold`` and ``noise_variance``: what is new may lie where the transform does not
    look.

    Raises:
        ConfigError: a threshold is negative or no number.
    """
    for name, value in (("--drift-threshold", threshold), ("variance", variance_threshold)):
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} {value:g} is no threshold; give a number from 0")
    return Decision(*_decided(drift, threshold, order, variance_threshold), threshold)


def _decided(
    drift: Drift, threshold: float, order: Refit, variance_threshold: float
) -> tuple[str, str]:
    figure = f"the drift is {drift.kl_of_refit:.4g} nats a dimension"
    if order is not Refit.AUTO:
        verb = "refit" if order is Refit.ALWAYS else "keep"
        return verb, f"--refit {order.value} was given ({figure}, the threshold {threshold:g})"
    if not (drift.reads_covariance or drift.reads_mean):
        return "keep", "this kind of transform reads no data, so a refit would give the same one"
    if math.isinf(drift.noise_kl):
        return (
            "keep",
            f"{drift.rows_today:g} rows are too few to tell {drift.k} dimensions by, so a refit "
            f"would fit chance ({figure}, the threshold {threshold:g})",
        )
    beside = f"{threshold:g} and {drift.noise_kl:.2g} of sampling noise"
    if drift.kl_of_refit > threshold + drift.noise_kl:
        return "refit", f"{figure}, above the threshold of {beside}"
    if drift.reads_covariance and (drift.variance_lost > variance_threshold + drift.noise_variance):
        return (
            "refit",
            f"the directions kept miss {drift.variance_lost:.1%} more of the variance than at the "
            f"fit, above {variance_threshold:.0%} (they hold {drift.variance_kept:.1%} of today's, "
            f"and as many new ones would hold {drift.variance_possible:.1%})",
        )
    return "keep", f"{figure}, not above the threshold of {beside}"
