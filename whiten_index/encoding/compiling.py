"""``torch.compile`` as a trial: kept where it makes batches faster, undone where it does not."""

from __future__ import annotations

import itertools
import statistics
import time

from whiten_index.encoding.budget import TokenBudget
from whiten_index.encoding.lanes import Lanes
from whiten_index.encoding.transformer import Transformer
from whiten_index.encoding.window import Batches

_WORTH_IT = 1.05
_BATCHES_A_LANE = 5


def compile_if_faster(
    transformer: Transformer, batches: Batches, budget: TokenBudget, lanes: Lanes
) -> str:
    """Compile a model if that makes batches of the window at least 5 % faster; say what came of it.

    Args:
        transformer: not compiled yet; afterwards as fast as it can be.
        batches: of the window about to be encoded, none taken yet.
        budget: gives the size of the batches.
        lanes: where they are timed, side by side as they will be encoded.
    """
    if not transformer.compilable:
        return "off: layers other than the last are asked for, which are read between the layers"
    tokens = budget.typical
    try:
        plain = _seconds(batches, lanes, tokens)
        started = time.perf_counter()
        transformer.compile()
        # Two shapes, so that what is compiled takes any.
        batches.try_one(tokens=tokens // 2)
        batches.try_one(tokens=tokens)
        spent = time.perf_counter() - started
        gain = plain / _seconds(batches, lanes, tokens)
    except Exception as error:
        # The compiler needs tools of the machine, and fails in as many ways as these; memory may
        # not suffice for the trial.
        transformer.uncompile()
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        return f"off: the trial failed here ({reason})"
    kept = gain >= _WORTH_IT
    if not kept:
        transformer.uncompile()
    return f"{'on' if kept else 'off'}: {gain:.2f} times as fast, compiled in {spent:.0f} s"


def _seconds(batches: Batches, lanes: Lanes, tokens: int) -> float:
    """Return the median seconds of batches encoded in every lane at once."""
    left = itertools.count(_BATCHES_A_LANE * lanes.count, -1)
    seconds: list[float] = []

    def step() -> int | None:
        if next(left) <= 0:
            return None
        seconds.append(batches.try_one(tokens=tokens))
        return 0

    lanes.run(step, lambda _: None)
    return statistics.median(seconds)
