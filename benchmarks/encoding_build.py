"""A whole build (read, encode, spill, moments) beside encoding alone, in turn in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.encoding_inputs import MAX_LENGTH
from benchmarks.encoding_peers import Setting, load_ours
from whiten_index import BuildConfig, encode_corpus
from whiten_index.encoding.encoder import Encoder
from whiten_index.pipeline.encode import EncodeReport

_LOADING = "encode/load encoder"


class _Spent(Protocol):
    @property
    def cpu(self) -> float: ...

    @property
    def wall(self) -> float: ...


Timed = Callable[[Callable[[], Any], str], tuple[Any, _Spent]]


def build_against_encoding(
    encoder: Encoder, setting: Setting, texts: list[str], rounds: int, timed: Timed
) -> Iterator[dict[str, Any]]:
    """Yield for each clock what ``ratio`` takes: seconds of builds above, of encoding below.

    Loading the model is left out: of the wall time as the build reports it, of the CPU time as it
    took beside the build in the same round.
    """
    builds: dict[str, list[float]] = {"cpu": [], "wall": []}
    alone: dict[str, list[float]] = {"cpu": [], "wall": []}
    with tempfile.TemporaryDirectory() as work:
        corpus = _written(Path(work), texts)
        for number in range(rounds):
            store = Path(work) / f"store-{number}"
            steps = (partial(_build, corpus, store, setting), partial(encoder.encode, texts))
            order = (0, 1) if number % 2 == 0 else (1, 0)
            done = {step: timed(steps[step], setting.device) for step in order}
            _, loading = timed(partial(load_ours, setting), setting.device)
            (report, build), (_, encoding) = done[0], done[1]
            builds["cpu"].append(build.cpu - loading.cpu)
            builds["wall"].append(_stage_seconds(report))
            alone["cpu"].append(encoding.cpu)
            alone["wall"].append(encoding.wall)
    for clock in builds:
        yield {
            "name": "time of a whole build / encoding alone",
            "above": builds[clock],
            "below": alone[clock],
            "of": "whole build",
            "to": "encoding alone",
            "clock": clock,
        }


def _written(work: Path, texts: list[str]) -> Path:
    path = work / "corpus.parquet"
    table = pa.table({"id": [str(i) for i in range(len(texts))], "text": texts})
    pq.write_table(table, path, compression="zstd")
    return path


def _build(corpus: Path, store: Path, setting: Setting) -> EncodeReport:
    config = BuildConfig(
        corpus=(str(corpus),),
        text_columns=("text",),
        id_column="id",
        store=str(store),
        model=setting.model,
        max_length=MAX_LENGTH,
        device=setting.device,
        dtype=setting.dtype,
    )
    return encode_corpus(config)


def _stage_seconds(report: EncodeReport) -> float:
    """Return the wall seconds of all stages, those of loading the model left out."""
    seconds = report.stages.seconds
    whole = sum(taken for stage, taken in seconds.items() if "/" not in stage)
    return whole - seconds.get(_LOADING, 0.0)
