"""STS of MiniLM: raw beside public figures, and whitened by what it is fitted on.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.sts figures`` and ``… geometry [STORE]``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.results_file import data_folder, write
from pipelines.papers.states import LayerStates, kept_states
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.evaluation.sts_sets import StsSet, chosen_sets, read_sts
from whiten_index.measure.eval_config import EvalConfig
from whiten_index.measure.evaluate_sts import evaluate_geometry, evaluate_sts
from whiten_index.measure.measure_options import DISTINCT, SCORED, TARGET
from whiten_index.progress import Progress, Stages
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig

ENCODER = EncoderConfig(pooling="mean", max_length=256)
# MTEB's public scores of the model, by Spearman's correlation of all pairs of a set together.
PUBLIC = {
    "STS12": 72.37, "STS13": 80.60, "STS14": 75.59, "STS15": 85.39, "STS16": 78.99,
    "STS-B": 82.03, "SICK-R": 77.58,
}  # fmt: skip
LAYERS: tuple[tuple[int, ...], ...] = ((-1,), (1,))
TRANSFORMS = (
    *(WhiteningConfig(k=k) for k in ("full", 256, 128)),
    WhiteningConfig(kind=Kind.PCA, k=128),
    WhiteningConfig(k=256, exponent=0.5),
)


def figures(sets: Sequence[StsSet], states: LayerStates) -> Iterator[dict[str, Any]]:
    """Yield a row for each choice of layers, transform and fit."""
    for layers in LAYERS:
        embedder = states.embedder(layers)
        for fit in (None, TARGET, DISTINCT, SCORED):
            config = EvalConfig(encoder=ENCODER)
            if fit is not None:
                config = replace(config, transforms=TRANSFORMS, fit=fit)
            for run in evaluate_sts(config, sets, embedder=embedder)["runs"]:
                public = PUBLIC if fit is None and layers == (-1,) else None
                kept = {name: run[name] for name in ("name", "datasets", "average")}
                yield {"figure": "sts", "layers": layers, "fit": fit, "public": public, **kept}


def geometry(store: str) -> Iterator[dict[str, Any]]:
    """Yield alignment, uniformity and the rest on STS-B dev, raw and in each transform."""
    sets = read_sts([data_folder() / "sts" / "sts_raw.parquet"], splits={"STS-B": "dev"})
    pairs = chosen_sets(sets, ["STS-B"])
    transforms = tuple(WhiteningConfig(k=k) for k in (128, 256, "full"))
    config = EvalConfig(encoder=ENCODER, transforms=transforms, store=store)
    for run in evaluate_geometry(config, pairs)["runs"]:
        (found,) = run["datasets"].values()
        yield {"figure": "geometry", "set": "STS-B dev", "name": run["name"], **found}


@contextmanager
def encoded_states(texts: Sequence[str]) -> Iterator[LayerStates]:
    """Encode texts into a temporary folder, all layers in one pass."""
    with tempfile.TemporaryDirectory() as folder:
        yield kept_states(texts, ENCODER, Path(folder), Stages(Progress()), ["mean"])["mean"]


def main(arguments: Sequence[str]) -> None:
    """Measure figures or geometry, and write the raw results."""
    if not arguments or arguments[0] not in ("figures", "geometry"):
        raise SystemExit(__doc__)
    if arguments[0] == "geometry":
        with tempfile.TemporaryDirectory() as temporary:
            store = arguments[1] if arguments[1:] else temporary
            print(write("geometry_MiniLM", geometry(store)))
        return
    sets = read_sts([data_folder() / "sts" / "sts_raw.parquet"])
    texts = [text for each in sets for text in each.texts]
    with encoded_states(texts) as states:
        print(write("sts_MiniLM", figures(sets, states)))


if __name__ == "__main__":
    main(sys.argv[1:])
