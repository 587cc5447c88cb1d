"""Make the golden whitenings of format 2; run once when the format is new, never after.

Run ``python -m tests.golden.make_whitening_v2`` from the root of the project. They are fitted on
the embeddings of v1, and ``tests/test_golden.py`` holds the closed forms they must map by.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from whiten_index.moments import Moments
from whiten_index.whitening import Kind, Whitening, WhiteningConfig

FOLDER = Path(__file__).parent
FINAL = FOLDER / "whitening-v2"
CONFIGS = {
    "zca-cor": WhiteningConfig(kind=Kind.ZCA_COR),
    "group": WhiteningConfig(kind=Kind.GROUP, groups=2, shuffle=True, seed=3),
    "all-but-the-top": WhiteningConfig(kind=Kind.ALL_BUT_THE_TOP),
    "random": WhiteningConfig(kind=Kind.RANDOM, k=3, seed=3),
    "whitening-shrunk": WhiteningConfig(k=2, shrinkage="ledoit-wolf", floor=1e-3),
}


def main() -> None:
    """Fit and save one file of each kind that holds something of its own."""
    if FINAL.exists():
        sys.exit(f"{FINAL} exists: golden artifacts are never made anew")
    rows = pq.read_table(FOLDER / "v1" / "corpus.parquet").column("embedding").to_pylist()
    moments = Moments.of(np.array(rows))
    FINAL.mkdir()
    for name, config in CONFIGS.items():
        Whitening.fit(moments, config).save(FINAL / f"{name}.safetensors")


if __name__ == "__main__":
    main()
