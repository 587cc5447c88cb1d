"""What WhitenedCSE and SimCSE come to in the same steps, from random BERTs and from MiniLM.

Run ``python -m benchmarks.training_quality random|minilm|minilm_cls WORK``; it needs the evaluation
data. Each is trained with three seeds on Wikipedia's sentences, on one thread of a CPU. Of the
random ones, each seed has a BERT of its own (2 layers of 128, MiniLM's vocabulary). What WORK has
is not trained again. ``… plot`` draws ``docs/training.png`` from the results.
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
from benchmarks.training_tables import means_by_step, measured
from pipelines.train_whitenedcse import Job, Run
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.load_encoder import local_model

SEEDS = (0, 1, 2)
PLOT = Path(__file__).parents[1] / "docs/training.png"
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
    **{
        start: {
            name: {**_BASE, **own, "pooling": pooling, "max_steps": most, "eval_steps": most // 4}
            for name, own in (("SimCSE", _SIMCSE), ("WhitenedCSE", _WHITENED))
        }
        for start, pooling, most in (("minilm", "mean", 100), ("minilm_cls", "cls", 60))
    },
}


def random_bert(path: Path, *, seed: int) -> None:
    """Write a BERT of 2 layers of 128 whose weights are drawn, with MiniLM's tokenizer."""
    _, folder = local_model(EncoderConfig(model=None), by="a benchmark")
    transformers.set_seed(seed)
    config = transformers.BertConfig(
        vocab_size=30_522, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=512,
    )  # fmt: skip
    partial = path.with_name(f"{path.name}.part")
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(partial)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(folder.path / name, partial / name)
    partial.rename(path)


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
    found, failed = job.results()
    if failed:
        raise SystemExit("\n".join(failed))
    for run, result in found:
        options = {key: value for key, value in run.options.items() if key != "model"}
        encoder = Path(result["encoder"]).name
        yield {
            **result, "start": start, "name": run.name, "options": options, "encoder": encoder,
        }  # fmt: skip


def plot(path: Path = PLOT) -> None:
    """Draw alignment against uniformity by step, as the paper's Figure 3."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(12, 3.8), layout="constrained")
    panels = figure.subplots(1, len(measured()))
    for panel, (title, found) in zip(panels, measured(), strict=True):
        for name in dict.fromkeys(row["name"] for row in found):
            means = means_by_step([row for row in found if row["name"] == name])
            x, y = ([each[key] for _, each in means] for key in ("uniformity", "alignment"))
            panel.plot(x, y, marker="o", ms=4, label=name)
            panel.plot(x[:1], y[:1], marker="*", ms=12, color="black", ls="")
            panel.annotate(str(means[-1][0]), (x[-1], y[-1]), fontsize=8)
        panel.plot([], [], marker="*", ms=12, color="black", ls="", label="before")
        panel.set(title=title, xlabel="uniformity", ylabel="alignment")
        panel.grid(visible=True, color="#dddddd")
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Train from one of the starts, or draw."""
    if sys.argv[1:] == ["plot"]:
        plot()
        return
    if len(sys.argv) != 3 or sys.argv[1] not in _ROWS:
        raise SystemExit("say random, minilm or minilm_cls, and a folder to work in")
    torch.set_num_threads(1)
    start, work = sys.argv[1], Path(sys.argv[2])
    work.mkdir(parents=True, exist_ok=True)
    print(write(f"training_{start}_cpu", rows(start, work)))


if __name__ == "__main__":
    main()
