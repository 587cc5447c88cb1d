"""STS of MiniLM: raw beside public figures, whitened by what it is fitted on, pairs of layers.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.sts figures``, ``… geometry [STORE]``,
``… times [ROUNDS]`` and ``… plot``, which draws ``docs/layer_pairs.png`` from the times' run. The
time of all pairs of layers, encoding included, is compared with encoding the seven sets once, in
turns.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.results_file import data_folder, read, write
from pipelines.papers.pictures import draw_heat_maps, heat_matrix
from whiten_index import Encoder
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.evaluation.sts_sets import StsSet, chosen_sets, read_sts
from whiten_index.measure.eval_config import EvalConfig
from whiten_index.measure.evaluate_geometry import evaluate_geometry
from whiten_index.measure.evaluate_layers import LayerStates, encode_states, evaluate_layers
from whiten_index.measure.evaluate_sts import evaluate_sts
from whiten_index.measure.measure_options import DISTINCT, SCORED, TARGET
from whiten_index.progress import Silent, Stages
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig

PLOT = Path(__file__).parents[1] / "docs/layer_pairs.png"
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


def plot() -> Path:
    """Draw ``docs/layer_pairs.png`` from the stored results."""
    runs = [row for row in read("layers_MiniLM") if row["figure"] == "layers"]
    maps = {}
    for run in runs:
        values = {
            tuple(cell["layers"]): cell["average"]["spearman"]["mean"]
            for cell in run["combinations"]
        }
        maps[run["name"]] = heat_matrix(values, run["states"])
    draw_heat_maps(PLOT, maps, [str(layer) for layer in range(runs[0]["states"])])
    return PLOT


def timed(sets: Sequence[StsSet], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the seconds of encoding alone and of all pairs of layers, in turns."""
    texts = list(dict.fromkeys(text for each in sets for text in each.texts))
    config = EvalConfig(encoder=ENCODER, transforms=(WhiteningConfig(k="full"),))
    Encoder.load(max_length=256).encode(texts[:4096])  # the batch size is found and remembered
    ratios: dict[str, list[float]] = {"wall": [], "cpu": []}
    for number in range(rounds):
        alone = _clocked(lambda: Encoder.load(pooling="mean", max_length=256).encode(texts))
        report: dict[str, Any] = {}
        pairs = _clocked(lambda found=report: found.update(evaluate_layers(config, sets)))
        for clock, spent in pairs.items():
            ratios[clock].append(spent / alone[clock])
        if number == 0:
            for run in report["runs"]:
                yield {"figure": "layers", "states": report["states"], **run}
        yield {"figure": "round", "encode": alone, "pairs": pairs, "stages": report["seconds"]}
    for clock, values in ratios.items():
        yield {
            "figure": "ratio", "name": "all pairs of layers / encoding once", "clock": clock,
            "texts": len(texts), "median": median(values), "least": min(values),
            "greatest": max(values),
        }  # fmt: skip


def _clocked(call: Any) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def main(arguments: Sequence[str]) -> None:
    """Measure figures or times, and write their raw results."""
    if not arguments or arguments[0] not in ("figures", "times", "geometry", "plot"):
        raise SystemExit(__doc__)
    if arguments[0] == "plot":
        print(plot())
        return
    if arguments[0] == "geometry":
        with tempfile.TemporaryDirectory() as temporary:
            store = arguments[1] if arguments[1:] else temporary
            print(write("geometry_MiniLM", geometry(store)))
        return
    sets = read_sts([data_folder() / "sts" / "sts_raw.parquet"])
    if arguments[0] == "times":
        rounds = int(arguments[1]) if arguments[1:] else 3
        print(write("layers_MiniLM", timed(sets, rounds)))
        return
    texts = [text for each in sets for text in each.texts]
    with encode_states(ENCODER, texts, "mean", Stages(Silent())) as states:
        print(write("sts_MiniLM", figures(sets, states)))


if __name__ == "__main__":
    main(sys.argv[1:])
