"""Peak memory of each encoder, in a process of its own that loads nothing of the others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.encoding_inputs import sample
from benchmarks.encoding_peers import (
    OURS,
    OURS_STREAM,
    PEER,
    PEER_STREAM,
    Contender,
    Setting,
    load_ours,
    load_peer,
    ours,
    peers,
)
from benchmarks.results_file import data_folder

_MOST_TEXTS = 65_536
_OURS, _PEERS = (OURS, OURS_STREAM), (PEER, PEER_STREAM)


def memory_rows(names: Sequence[str], setting: Setting, texts: int) -> Iterator[dict[str, Any]]:
    """Yield the memory of those of ``names`` that are encoders, over so many texts."""
    for name in (each for each in names if each in _OURS + _PEERS):
        asked = {"name": name, "setting": asdict(setting), "texts": min(texts, _MOST_TEXTS)}
        command = [sys.executable, "-m", "benchmarks.encoding_memory", json.dumps(asked)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        yield {"figure": "memory", "contender": name, **json.loads(done.stdout.splitlines()[-1])}


def memory_of(name: str, setting: Setting, texts: int) -> dict[str, Any]:
    """Return this process's memory: with model and texts there, and at its highest after a run.

    Embeddings are dropped as they come, so that a stream holds only what it must.
    """
    contender = _contender(name, setting, sample(data_folder(), texts).texts)
    loaded = memory_mib()["now"]
    rows = sum(len(block) for block in contender.run())
    found = {"texts": rows, "loaded_mib": loaded, "peak_mib": memory_mib()["peak"]}
    if setting.device != "cpu":
        found["gpu_peak_mib"] = torch.cuda.max_memory_allocated() / (1 << 20)
    return found


def memory_mib() -> dict[str, float]:
    """Return the resident memory of this process, now and at its highest since it began.

    VmHWM starts with the program; ``ru_maxrss`` would start from the size of its parent.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        raise SystemExit("peak memory is read from /proc, which only Linux has; run there")
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return {
        name: int(fields[key].split()[0]) / 1024
        for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))
    }


def _contender(name: str, setting: Setting, texts: list[str]) -> Contender:
    mine = name in _OURS
    found = ours(load_ours(setting), texts) if mine else peers(load_peer(setting), texts)
    return next(each for each in found if each.name == name)


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    print(json.dumps(memory_of(request["name"], Setting(**request["setting"]), request["texts"])))
