"""``torch.compile`` as a trial: kept where it makes batches faster, undone where it does not."""

from __future__ import annotations

import time

from whiten_index.encoding.budget import TokenBudget
from whiten_index.encoding.transformer import Transformer
from whiten_index.encoding.window import Batches

_WORTH_IT = 1.05
_TIMES = 5


def compile_if_faster(transformer: Transformer, batches: Batches, budget: TokenBudget) -> str:
    """Compile a model if that makes a batch of the window at least 5 % faster; say what came of it.

    Args:
        transformer: not compiled yet; afterwards as fast as it can be.
        batches: of the window about to be encoded, none taken yet.
        budget: gives the size of the batch.
    """
    if not transformer.compilable:
        return "off: layers other than the last are asked for, which are read between the layers"
    tokens = budget.typical
    plain = batches.time_of(tokens=tokens, repeat=_TIMES)
    started = time.perf_counter()
    transformer.compile()
    try:
        # Two shapes, so that what is compiled takes any.
        batches.time_of(tokens=tokens // 2, repeat=1)
        batches.time_of(tokens=tokens, repeat=1)
    except Exception as error:
        # The compiler needs tools of the machine, and fails in as many ways as these.
        transformer.uncompile()
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        return f"off: torch.compile failed here ({reason})"
    spent = time.perf_counter() - started
    compiled = batches.time_of(tokens=tokens, repeat=_TIMES)
    gain = plain / compiled
    kept = gain >= _WORTH_IT
    if not kept:
        transformer.uncompile()
    return f"{'on' if kept else 'off'}: {gain:.2f} times as fast, compiled in {spent:.0f} s"
