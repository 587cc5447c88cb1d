"""A look at everything an index holds: what is lost is found.

Other damage is examined by the tests of the gates.
"""

from __future__ import annotations

import numpy as np

from whiten_index.index import examine, inner_index


def test_a_refinement_that_lacks_rows():
    inner = inner_index("Flat,RFlat", 4)
    inner.add(np.eye(4, dtype=np.float32))
    inner.refine_index.reset()
    assert examine(inner).lost == 4
