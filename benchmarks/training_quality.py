"""What WhitenedCSE and SimCSE come to in the same steps, from random BERTs and from MiniLM.

Run ``python -m benchmarks.training_quality random|minilm WORK``; it needs the evaluation data.
Each is trained with three seeds on Wikipedia's sentences, on one thread of a CPU. Of the random
ones, each seed has a BERT of its own (2 layers of 128, MiniLM's vocabulary). What WORK has is not
trained again.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.results_file import data_folder, write
from pipelines.train_whitenedcse import Job, Run
from whiten_index.encoding import EncoderConfig, resolve_encoder

SEEDS = (0, 1, 2)
_SIMCSE: Mapping[str, Any] = {"whiten": False, "positives": 1}
_VIEWS: Mapping[str, Any] = {"whiten": False}
_WHITENED: Mapping[str, Any] = {"groups": 8}
_BASE: Mapping[str, Any] = {"limit": 20_000, "device": "cpu"}
_RANDOM: Mapping[str, Any] = {
    **_BASE, "learning_rate": 3e-4, "max_steps": 200, "eval_steps": 50,
}  # fmt: skip
_ROWS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "random": {
        "SimCSE": {**_RANDOM, **_SIMCSE, "pooling": "mean"},
        "3 positives, no whitening": {**_RANDOM, **_VIEWS, "pooling": "mean"},
        "WhitenedCSE": {**_RANDOM, **_WHITENED, "pooling": "mean"},
        "SimCSE, [CLS]": {**_RANDOM, **_SIMCSE, "pooling": "cls"},
        "WhitenedCSE, [CLS]": {**_RANDOM, **_WHITENED, "pooling": "cls"},
    },
    "minilm": {
        name: {**_BASE, **own, "pooling": "mean", "max_steps": 100, "eval_steps": 25}
        for name, own in (("SimCSE", _SIMCSE), ("WhitenedCSE", _WHITENED))
    },
}


def random_bert(path: Path, *, seed: int) -> None:
    """Write a BERT of 2 layers of 128 whose weights are drawn, with MiniLM's tokenizer."""
    _, folder = resolve_encoder(EncoderConfig(model=None))
    transformers.set_seed(seed)
    config = transformers.BertConfig(
        vocab_size=30_522, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=512,
    )  # fmt: skip
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(folder.path / name, path / name)


def runs(start: str, work: Path) -> Iterator[Run]:
    """Yield the trainings from one start, whose random models are made here."""
    for name, options in _ROWS[start].items():
        for seed in SEEDS:
            model = None
            if start == "random":
                path = work / f"bert-{seed}"
                if not path.exists():
                    random_bert(path, seed=seed)
                model = str(path)
            yield Run(start, name, {**options, "seed": seed, "model": model})


def rows(start: str, work: Path) -> Iterator[dict[str, Any]]:
    """Train, and yield a row a training with its curves."""
    data = data_folder()
    job = Job(
        list(runs(start, work)), (str(data / "sentences/wikipedia_en.parquet"),), work / start,
        str(data / "sts/sts_senteval.parquet"), None, keep_models=False,
    )  # fmt: skip
    for run, result in job.results():
        options = {key: value for key, value in run.options.items() if key != "model"}
        yield {**result, "start": start, "name": run.name, "options": options}


def main() -> None:
    """Train from one of the starts."""
    if len(sys.argv) != 3 or sys.argv[1] not in _ROWS:
        raise SystemExit("say random or minilm, and a folder to work in")
    torch.set_num_threads(1)
    start, work = sys.argv[1], Path(sys.argv[2])
    work.mkdir(parents=True, exist_ok=True)
    print(write(f"training_{start}_cpu", rows(start, work)))


if __name__ == "__main__":
    main()
