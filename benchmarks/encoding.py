"""Our encoder beside sentence-transformers: one process, interleaved rounds, CPU and wall time.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.encoding``: MiniLM on a CPU; MiniLM and a BERT-base
on a GPU, where there is one. Every ratio is of two runs of the same round, and its median is told
with the least and the greatest. The raw seconds of every round are kept.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import encoding_peers as peers
from benchmarks.encoding_build import build_against_encoding
from benchmarks.encoding_inputs import (
    ENOUGH_TEXTS,
    MAX_LENGTH,
    RANDOM_BASE,
    Sample,
    model_flops,
    model_folder,
    sample,
)
from benchmarks.encoding_memory import memory_rows
from benchmarks.encoding_peers import Contender, Setting
from benchmarks.processors import products
from benchmarks.results_file import data_folder, write
from whiten_index.encoding.encoder_config import DEFAULT_MODEL, DtypeName
from whiten_index.encoding.models import find_model
from whiten_index.errors import WhitenIndexError

_TEXTS = {"cpu": 4_096, "cuda": 200_000}
_ROUNDS = {"cpu": 5, "cuda": 3}
_DTYPE: dict[str, DtypeName] = {"cpu": "float32", "cuda": "float16"}
_FLOAT32_TEXTS = 4_096
# Threads that wait for work spin for a moment, on the time of whoever comes next.
_PAUSE_SECONDS = 0.3
_AT_OUR_PRECISION = (peers.PEER_HALF, peers.PEER_PACKED)


@dataclass(frozen=True)
class Spent:
    """What one run took: CPU seconds of all threads, and wall seconds."""

    cpu: float
    wall: float


Rounds = dict[str, list[Spent]]


# --------------------------------------------------------------------------- timing


def timed(run: Callable[[], Any], device: str) -> tuple[Any, Spent]:
    """Call ``run`` and return its result with what it took, a GPU's work done."""
    gc.collect()
    time.sleep(_PAUSE_SECONDS)
    peers.wait_for(device)
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    peers.wait_for(device)
    return result, Spent(time.process_time() - cpu, time.perf_counter() - wall)


def matrix_peak(device: str, dtype: str) -> float:
    """Return the operations a second of the best of several square products, by any library."""
    if device == "cpu":
        best = {row["dtype"]: row["flops"] for row in sorted(products(), key=lambda r: r["flops"])}
        return float(best.get(dtype, best["float32"]))
    size, times = 8_192, 20
    a, b = (torch.randn(size, size, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    out = a @ b
    seconds = []
    for _ in range(times):
        peers.wait_for(device)
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        peers.wait_for(device)
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


def ratio(
    name: str, above: Sequence[float], below: Sequence[float], **facts: Any
) -> dict[str, Any]:
    """Return the row of a ratio, paired round by round."""
    rounds = [a / b for a, b in zip(above, below, strict=True)]
    return {
        "figure": "ratio",
        "name": name,
        "median": statistics.median(rounds),
        "least": min(rounds),
        "greatest": max(rounds),
        "rounds": rounds,
        **facts,
    }


# --------------------------------------------------------------------------- one model


class Measurement:
    """The figures of one model on one device; rows can be had after any round."""

    def __init__(self, setting: Setting, name: str, chosen: Sample, *, packed: bool) -> None:
        """Load everybody, or of the peers only the ``packed`` one, and let each run once."""
        self.packed = packed
        self.setting, self.name, self.chosen = setting, name, chosen
        _say(f"{name} on {setting.device}, {setting.dtype}, {len(chosen.texts):,} texts: loading")
        self.encoder = peers.load_ours(setting)
        self.tokens = peers.tokens_of(setting, chosen.texts)
        config = find_model(setting.model).config
        self.flops = model_flops(config, self.tokens.lengths)
        self.cosines: list[dict[str, Any]] = []
        self.contenders = self._contenders()
        self.padding = {each.name: self._warmed(each) for each in self.contenders}
        self.spent: Rounds = {each.name: [] for each in self.contenders}
        self.peaks: list[float] = []
        self.extra: list[dict[str, Any]] = []

    def _contenders(self) -> list[Contender]:
        setting, texts = self.setting, self.chosen.texts
        peer = peers.load_peer(setting)
        found = peers.ours(self.encoder, texts)
        if not self.packed:
            found += [*peers.peers(peer, texts), peers.tuned_peer(peer, texts)]
        if setting.dtype != "float32":
            if not self.packed:
                same = peers.load_peer(setting, dtype=setting.dtype)
                found.append(peers.peer_at_our_precision(same, texts))
            packed = peers.load_packed_peer(setting)
            found.append(peers.tuned_peer(packed, texts, peers.PEER_PACKED))
            few = texts[:_FLOAT32_TEXTS]
            self.cosines.append(_float32_cosine(setting, peer, few))
        return [*found, *peers.bounds(setting, texts, self.tokens)]

    def _warmed(self, contender: Contender) -> float | None:
        _say(f"  warming up: {contender.name}")
        return contender.padding()

    def round(self, number: int) -> None:
        """Let every contender run once: another one first, and every other round backwards."""
        self.peaks.append(matrix_peak(self.setting.device, self.setting.dtype))
        turn = number % len(self.contenders)
        order = self.contenders[turn:] + self.contenders[:turn]
        outputs = {}
        for each in order if number % 2 == 0 else order[::-1]:
            blocks, spent = timed(partial(_all_blocks, each), self.setting.device)
            self.spent[each.name].append(spent)
            outputs[each.name] = blocks
            _say(f"  round {number + 1}: {each.name}: {spent.cpu:.2f} s CPU, {spent.wall:.2f} s")
        if number == 0:
            self.cosines += self._compared(outputs)

    def _compared(self, outputs: Mapping[str, list[NDArray[Any]]]) -> Iterator[dict[str, Any]]:
        joined = {name: np.concatenate(blocks) for name, blocks in outputs.items() if blocks}
        others = [peers.PEER, peers.PEER_STREAM, peers.PEER_TUNED, *_AT_OUR_PRECISION]
        pairs = [(peers.OURS, other) for other in others] + [(peers.OURS_STREAM, peers.PEER)]
        for one, other in pairs:
            if other in joined:
                yield _cosine(one, other, joined[one], joined[other], self.setting.dtype)

    def rows(self) -> list[dict[str, Any]]:
        """Return everything found so far, with what identifies it."""
        found = [self._setup(), *self._contender_rows(), *self._ratios(), *self.cosines]
        return [{"benchmark": "encoding", **row} for row in [*found, *self.extra]]

    def _setup(self) -> dict[str, Any]:
        setting, texts = self.setting, self.chosen.texts
        return {
            "figure": "setup",
            "model": self.name,
            "device": setting.device,
            "device_name": _device_name(setting.device),
            "threads": torch.get_num_threads(),
            "dtype": setting.dtype,
            "texts": len(texts),
            "enough_texts": len(texts) >= ENOUGH_TEXTS,
            "abstracts": self.chosen.abstracts,
            "seed": self.chosen.seed,
            "tokens": len(self.tokens.ids),
            "max_length": MAX_LENGTH,
            "chunk_rows": peers.CHUNK_ROWS,
            "rounds": len(self.peaks),
            "token_budget": self.encoder.batch_tokens,
            "sentence_transformers": peers.peer_version(),
            "matrix_flops_per_second": self.peaks,
            "flops": self.flops,
        }

    def _contender_rows(self) -> Iterator[dict[str, Any]]:
        for each in self.contenders:
            wall = self._seconds(each.name, "wall")
            median = statistics.median(wall)
            yield {
                "figure": "contender",
                "contender": each.name,
                **each.facts,
                "cpu_seconds": self._seconds(each.name, "cpu"),
                "wall_seconds": wall,
                "sentences_per_second": len(self.chosen.texts) / median,
                "tokens_per_second": len(self.tokens.ids) / median,
                "share_of_peak": self._share_of_peak(each.name),
                "padding_share": self.padding[each.name],
            }

    def _share_of_peak(self, name: str) -> float | None:
        """Return the median share of the matrix peak of the same round, by wall time."""
        flops = self.flops
        if flops is None or name == peers.TOKENISER:
            return None
        pairs = zip(self._seconds(name, "wall"), self.peaks, strict=True)
        return statistics.median(flops / seconds / peak for seconds, peak in pairs)

    def _ratios(self) -> Iterator[dict[str, Any]]:
        """Yield how many times faster we are than each other, over a list and over a stream."""
        others = (peers.PEER, peers.PEER_TUNED, *_AT_OUR_PRECISION, peers.BARE)
        pairs = [(peers.OURS, other) for other in others]
        for us, other in [*pairs, (peers.OURS_STREAM, peers.PEER_STREAM)]:
            if other not in self.spent:
                continue
            for clock in ("cpu", "wall"):
                taken = [self._seconds(name, clock) for name in (other, us)]
                name = f"speed of {us} / {other}"
                yield ratio(name, *taken, of=us, to=other, clock=clock)
        limits = [name for name in (peers.BARE, peers.TOKENISER) if name in self.spent]
        taken = [self._seconds(limit, "wall") for limit in limits]
        yield ratio(
            f"speed of {peers.OURS} / the lower of its limits",
            [max(each) for each in zip(*taken, strict=True)],
            self._seconds(peers.OURS, "wall"),
            of=peers.OURS,
            to=" and ".join(limits),
            clock="wall",
        )

    def _seconds(self, name: str, clock: str) -> list[float]:
        return [getattr(spent, clock) for spent in self.spent[name]]


def _all_blocks(contender: Contender) -> list[NDArray[Any]]:
    return list(contender.run())


def _cosine(one: str, other: str, a: NDArray[Any], b: NDArray[Any], dtype: str) -> dict[str, Any]:
    a, b = (each.astype(np.float64) for each in (a, b))
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosines = (a * b).sum(axis=1) / norms
    return {
        "figure": "cosine",
        "of": one,
        "to": other,
        "dtype": dtype,
        "texts": len(a),
        "least": float(cosines.min()),
        "mean": float(cosines.mean()),
    }


def _float32_cosine(setting: Setting, peer: Any, texts: list[str]) -> dict[str, Any]:
    """Compare the two libraries in float32, where ours was timed in another precision."""
    encoder = peers.load_ours(replace(setting, dtype="float32"))
    theirs = peer.encode(texts, show_progress_bar=False)
    return _cosine(peers.OURS, peers.PEER, encoder.encode(texts), theirs, "float32")


# --------------------------------------------------------------------------- the command


def measure(
    setting: Setting, name: str, chosen: Sample, rounds: int, *, memory: bool, packed: bool
) -> Path:
    """Measure one model; the results are written after every round, should time run out."""
    measured = Measurement(setting, name, chosen, packed=packed)
    file = f"encoding_{setting.device}_{Path(name).name}_{setting.dtype}" + "_packed" * packed
    if memory:
        _say("  peak memory, a process for each")
        names = [each.name for each in measured.contenders]
        measured.extra += memory_rows(names, setting, len(chosen.texts))
    for number in range(rounds):
        measured.round(number)
        path = write(file, measured.rows())
    _say("  a whole build beside encoding alone")
    for row in build_against_encoding(measured.encoder, setting, chosen.texts, rounds, timed):
        measured.extra.append(ratio(**row))
    path = write(file, measured.rows())
    for row in measured.rows():
        if row["figure"] == "ratio":
            _say(
                f"  {row['name']}, {row['clock']}: {row['median']:.3f} "
                f"({row['least']:.3f} to {row['greatest']:.3f})"
            )
    return path


def _device(asked: str) -> str:
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise SystemExit("torch sees no CUDA device here; use --device cpu")
    return "cuda" if there and asked != "cpu" else "cpu"


def _device_name(device: str) -> str:
    return "CPU" if device == "cpu" else str(torch.cuda.get_device_name())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.encoding", description=__doc__)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--model", help=f"hub name, folder or {RANDOM_BASE} (random weights)")
    parser.add_argument(
        "--dtype", choices=get_args(DtypeName), help="ours; float32 on a CPU, else float16"
    )
    parser.add_argument("--texts", type=int, help="4,096 on a CPU, else 200,000")
    parser.add_argument("--rounds", type=int, help="5 on a CPU, else 3")
    parser.add_argument("--skip-memory", action="store_true", help="measure no peak memory")
    parser.add_argument(
        "--packed", action="store_true", help="of the peers only the one without padding (GPU)"
    )
    parser.add_argument("--base", action="store_true", help="measure a BERT-base too")
    return parser.parse_args(given)


def _models(asked: str | None, *, base: bool) -> list[str]:
    """Return the model asked for, or the default one with the large one where that was wanted."""
    return [asked or DEFAULT_MODEL, *([RANDOM_BASE] if base and asked != RANDOM_BASE else [])]


def main(given: Sequence[str] | None = None) -> None:
    """Measure what the arguments ask for and write the results."""
    asked = _arguments(given)
    peers.peer_version()
    device = _device(asked.device)
    chosen = sample(data_folder(), asked.texts or _TEXTS[device])
    dtype = asked.dtype or _DTYPE[device]
    if len(chosen.texts) < ENOUGH_TEXTS:
        _say(f"fewer than {ENOUGH_TEXTS:,} texts: a trial, not to be judged by")
    with tempfile.TemporaryDirectory() as work:
        # On a GPU the small model is bound by the tokeniser and the large one by the GPU.
        for name in _models(asked.model, base=asked.base or (device == "cuda" and not asked.model)):
            setting = Setting(str(model_folder(name, Path(work))), device, dtype)
            rounds = asked.rounds or _ROUNDS[device]
            print(
                measure(
                    setting, name, chosen, rounds, memory=not asked.skip_memory, packed=asked.packed
                )
            )


if __name__ == "__main__":
    try:
        main()
    except WhitenIndexError as error:
        raise SystemExit(str(error)) from error
