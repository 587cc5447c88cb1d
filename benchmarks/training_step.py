"""What shuffled group whitening adds to a training step, and which way to the root is cheapest.

Run ``python -m benchmarks.training_step steps|maps [MODEL]``, on a GPU if there is one; the first
needs the evaluation data.

- ``steps``: a step of WhitenedCSE and one of SimCSE with as many views, on the same batches by
  turns: batch 64, 3 positives, 10⁵ sentences to draw from, bf16 on a GPU.
- ``maps``: whitening alone, forwards and backwards, by each map and number of groups, and how far
  group covariances are from I without epsilon.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, get_args

import torch

from benchmarks.results_file import data_folder, write
from whiten_index.corpus.corpus_config import CorpusConfig
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.training.contrastive_model import contrastive_model
from whiten_index.training.group_whitening import ShuffledGroupWhitening
from whiten_index.training.train import read_sentences, require_trainable
from whiten_index.training.training_config import GroupMap, TrainingConfig

SENTENCES, BATCH, POSITIVES = 100_000, 64, 3
_WARM, _STEPS = {"cpu": 1, "cuda": 5}, {"cpu": 10, "cuda": 100}
_CALLS = 40
_DIM, _GROUPS = 768, (384, 128, 32, 16)


def device_name() -> str:
    """Return what computes."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


def steps(model: str | None) -> Iterator[dict[str, Any]]:
    """Time whole steps, whitened and not, by turns on the same batches."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus = str(data_folder() / "sentences/wikipedia_en.parquet")
    base: dict[str, Any] = {
        "corpus": (corpus,), "out": "unused", "model": model, "batch_size": BATCH,
        "positives": POSITIVES, "limit": SENTENCES,
    }  # fmt: skip
    configs = {
        "simcse": TrainingConfig(whiten=False, **base),
        "whitened-zca": TrainingConfig(**base),
    }
    spec, folder = require_trainable(configs["simcse"])
    sentences = read_sentences(
        ParquetCorpus.open(
            CorpusConfig(sources=(corpus,), text_columns=("text",), limit=SENTENCES)
        ),
        batch_size=BATCH,
    )
    ready = {}
    for name, config in configs.items():
        made, collator = contrastive_model(config, spec, folder)
        made.to(device)
        ready[name] = made, torch.optim.AdamW(made.parameters(), lr=config.learning_rate)
    generator = torch.Generator().manual_seed(0)
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    warm = _WARM[device.type]
    for number in range(warm + _STEPS[device.type]):
        rows = torch.randint(len(sentences), (BATCH,), generator=generator).tolist()
        batch = {
            name: tensor.to(device)
            for name, tensor in collator([sentences[row] for row in rows]).items()
        }
        # By turns, so that no one is always first with a new batch.
        turn = number % len(ready)
        for name, (made, optimizer) in [*ready.items()][turn:] + [*ready.items()][:turn]:
            took = _timed(device, lambda m=made, o=optimizer, b=batch: _step(m, o, b))  # type: ignore[misc]
            if number >= warm:
                seconds[name].append(took)
    plain = seconds["simcse"]
    for name, times in seconds.items():
        yield {
            "what": "steps",
            "device": device_name(),
            "torch": torch.__version__,
            "model": spec.model,
            "dim": folder.hidden_size,
            "name": name,
            "views": POSITIVES + 1,
            "batch": BATCH,
            "step_ms": 1e3 * statistics.median(times),
            "steps": len(times),
            "ratio": statistics.median(a / b for a, b in zip(times, plain, strict=True)),
        }


def _step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    kind = batch["input_ids"].device.type
    with torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda"):
        loss = model(**batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def maps() -> Iterator[dict[str, Any]]:
    """Time whitening alone, of as many views as a step has."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    mixing = torch.randn(_DIM, _DIM, device=device) / _DIM**0.5
    features = torch.randn(POSITIVES + 1, BATCH, _DIM, device=device) @ mixing
    for groups in _GROUPS:
        for kind in get_args(GroupMap):
            module = ShuffledGroupWhitening(_DIM, groups=groups, group_map=kind).to(device)
            place = {
                "what": "maps", "device": device_name(), "groups": groups,
                "group_size": module.group_size, "map": kind,
            }  # fmt: skip

            def both(module: ShuffledGroupWhitening = module) -> None:
                given = features.clone().requires_grad_()
                module(given).square().sum().backward()

            times = [_timed(device, both) for _ in range(_CALLS + 5)][5:]
            yield {
                **place,
                "ms": 1e3 * statistics.median(times),
                "covariance_off": _off(features, groups, kind),
            }


def _off(features: torch.Tensor, groups: int, kind: GroupMap) -> float:
    """Return the largest entry of a group's covariance less I, of neighbouring channels."""
    module = ShuffledGroupWhitening(
        features.shape[-1], groups=groups, group_map=kind, shuffle=False, epsilon=0.0
    )
    white = module.to(features.device)(features).double()
    views, rows, _ = white.shape
    blocks = white.view(views, rows, groups, -1).transpose(1, 2)
    covariances = blocks.mT @ blocks / (rows - 1)
    return float((covariances - torch.eye(blocks.shape[-1], device=white.device)).abs().max())


def _timed(device: torch.device, call: Callable[[], None]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    """Run one of them."""
    what, *rest = sys.argv[1:] or [""]
    if what not in ("steps", "maps"):
        raise SystemExit("say steps or maps")
    rows = maps() if what == "maps" else steps(rest[0] if rest else None)
    print(write(f"training_{what}_{'gpu' if torch.cuda.is_available() else 'cpu'}", rows))


if __name__ == "__main__":
    main()
