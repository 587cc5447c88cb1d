"""What the encoding benchmark encodes: real texts of mixed length, with a model found or made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from whiten_index.encoding.encoder_config import DEFAULT_MODEL
from whiten_index.encoding.models import find_model

MAX_LENGTH = 256
# BERT-base of random weights: it costs what the published one costs, and needs no download.
RANDOM_BASE = "bert-base"
# Small samples flatter whoever puts texts of like length together.
ENOUGH_TEXTS = 4_000
_ABSTRACTS_SHARE = 0.1
_ABSTRACTS = "retrieval/scifact/corpus.parquet"
_SENTENCES = "sentences/wikipedia_en.parquet"


@dataclass(frozen=True)
class Sample:
    """Texts to encode, all different, shuffled.

    Attributes:
        texts: n texts.
        abstracts: how many are SciFact's titles and abstracts; the rest are Wikipedia sentences.
        seed: of the draw.
    """

    texts: list[str]
    abstracts: int
    seed: int


def sample(data: Path, count: int, *, seed: int = 0) -> Sample:
    """Draw ``count`` texts, one in ten an abstract as long as there are so many.

    Args:
        data: folder of the evaluation data.
        count: texts wanted.
        seed: of the draw.
    """
    documents = pq.read_table(_present(data / _ABSTRACTS), columns=["title", "text"])
    columns = (documents[name].to_pylist() for name in ("title", "text"))
    abstracts = [f"{title} {text}" for title, text in zip(*columns, strict=True)]
    sentences = pq.read_table(_present(data / _SENTENCES), columns=["text"])["text"].to_pylist()
    rng = np.random.default_rng(seed)
    long = _drawn(rng, abstracts, min(round(_ABSTRACTS_SHARE * count), len(abstracts)))
    short = _drawn(rng, sentences, count - len(long))
    texts = list(dict.fromkeys(long + short))
    if len(texts) < count:
        raise SystemExit(f"the data hold only {len(texts)} of {count} texts; give a lower --texts")
    return Sample([texts[i] for i in rng.permutation(count)], len(long), seed)


def model_folder(name: str, work: Path) -> Path:
    """Return the folder of a model that both libraries can load; make it where it is random."""
    return _random_base(work / RANDOM_BASE) if name == RANDOM_BASE else find_model(name).root


def model_flops(config: Mapping[str, Any], lengths: NDArray[np.int64]) -> int | None:
    """Return the floating-point operations of a BERT over texts of these lengths, no padding.

    Two for each weight of a layer and each token, and 4 t d for the attention of each of t tokens.
    None where the configuration does not name a BERT's shapes.
    """
    names = ("hidden_size", "intermediate_size", "num_hidden_layers")
    if config.get("model_type") != "bert" or any(name not in config for name in names):
        return None
    width, inner, layers = (int(config[name]) for name in names)
    weights = 4 * width**2 + 2 * width * inner
    attention = 4 * width * int((lengths**2).sum())
    return layers * (2 * weights * int(lengths.sum()) + attention)


def _present(path: Path) -> Path:
    if not path.exists():
        raise SystemExit(
            f"{path} is missing; set WHITEN_INDEX_DATA to a folder with {_ABSTRACTS} and "
            f"{_SENTENCES} (docs/benchmarks.md, Data)"
        )
    return path


def _drawn(rng: np.random.Generator, texts: list[str], count: int) -> list[str]:
    different = list(dict.fromkeys(texts))
    chosen = rng.permutation(len(different))[:count]
    return [different[i] for i in chosen]


def _random_base(folder: Path) -> Path:
    """Write BERT-base with seeded random weights, MiniLM's tokenizer and mean pooling."""
    import torch
    import transformers

    source = find_model(DEFAULT_MODEL).root
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    settings = transformers.BertConfig()
    pooling = folder / "1_Pooling" / "config.json"
    told = json.loads(pooling.read_text(encoding="utf-8"))
    told["word_embedding_dimension"] = settings.hidden_size
    pooling.write_text(json.dumps(told), encoding="utf-8")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModel.from_config(settings).save_pretrained(folder)
    return folder
