"""How many tokens a batch may hold: found while encoding, halved when memory runs out, remembered.

Each rung of a ladder of budgets is tried on batches that had to be encoded anyway, one after the
other so that neighbours hold texts of like length; the smallest rung within 2 % of the best wins.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whiten_index.artifacts.limits import load_json
from whiten_index.artifacts.manifest import fingerprint, write_json
from whiten_index.errors import StorageError

LADDERS = {
    "cpu": (512, 1024, 2048, 4096, 8192),
    "other": (16_384, 32_768, 65_536, 131_072, 262_144),
}
_ROUNDS = 4
_CLOSE = 0.98


class TokenBudget:
    """The padded tokens of a batch; safe to share between threads.

    Attributes:
        halvings: how often memory ran out.
        thorough: whether every rung was tried before one was chosen, and memory sufficed: only then
            the choice is worth remembering.
    """

    def __init__(self, ladder: Sequence[int], *, known: int | None = None) -> None:
        """Start on a ``ladder`` of rising budgets, or with the one ``known`` to be good."""
        self._lock = threading.Lock()
        self._ladder = list(ladder)
        self._chosen = known
        self._asked = 0
        self._rates: dict[int, list[float]] = {rung: [] for rung in self._ladder}
        self.halvings = 0
        self.thorough = False

    @property
    def chosen(self) -> int | None:
        """The budget settled on, None while it is being found."""
        return self._chosen

    def ask(self, most: int | None = None) -> int:
        """Return the budget of the next batch, ``most`` at most."""
        with self._lock:
            if self._chosen is not None:
                return self._chosen if most is None else min(self._chosen, most)
            rungs = self._rungs(most)
            if not rungs:
                return self._ladder[0] if most is None else most
            self._asked += 1
            return rungs[(self._asked - 1) % len(rungs)]

    def tell(self, budget: int, *, tokens: int, seconds: float, most: int | None = None) -> None:
        """Hear how long a full batch took; when every rung up to ``most`` was heard, choose."""
        with self._lock:
            if self._chosen is not None or budget not in self._rates:
                return
            self._rates[budget].append(tokens / max(seconds, 1e-9))
            rungs = self._rungs(most)
            if any(len(self._rates[rung]) < _ROUNDS for rung in rungs):
                return
            medians = {rung: statistics.median(self._rates[rung]) for rung in rungs}
            good = _CLOSE * max(medians.values())
            self._chosen = min(rung for rung, rate in medians.items() if rate >= good)
            self.thorough = rungs == self._ladder and not self.halvings

    def _rungs(self, most: int | None) -> list[int]:
        return [rung for rung in self._ladder if most is None or rung <= most]

    def halve(self, budget: int) -> None:
        """Hear that a batch of ``budget`` was too much for the memory."""
        with self._lock:
            self.halvings += 1
            # Memory may be short for a moment only: nothing of this is remembered.
            self.thorough = False
            most = max(budget // 2, 1)
            if self._chosen is not None:
                self._chosen = min(self._chosen, most)
                return
            self._ladder = [rung for rung in self._ladder if rung <= most]
            if not self._ladder:
                self._chosen = most


def remembered(facts: Mapping[str, Any]) -> int | None:
    """Return the budget found before for the same model and device, None where none was."""
    try:
        value = load_json(_file(facts).read_bytes())["token_budget"]
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None
    lowest, highest = LADDERS["cpu"][0], LADDERS["other"][-1]
    # Anything else was not written by ``remember``.
    sane = isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest
    return value if sane else None


def remember(facts: Mapping[str, Any], budget: int) -> None:
    """Keep a budget for later runs on this machine; one that cannot be kept is found again."""
    try:
        path = _file(facts)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"token_budget": budget, "facts": dict(facts)})
    except (OSError, RuntimeError, StorageError):
        # RuntimeError: this user has no home.
        return


def _file(facts: Mapping[str, Any]) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(home) / "whiten-index" / "token-budgets" / f"{fingerprint(dict(facts))}.json"
