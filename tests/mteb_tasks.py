"""Tasks of mteb made of local data, and a model that looks vectors up; it imports mteb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from mteb.abstasks import (
    AbsTaskClassification,
    AbsTaskClustering,
    AbsTaskPairClassification,
    AbsTaskRetrieval,
    AbsTaskSTS,
)
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models.abs_encoder import AbsEncoder
from mteb.types import PromptType
from numpy.typing import NDArray


class _Local:
    """Data that are there already instead of a download."""

    data: Any

    def load_data(self, *args: Any, **kwargs: Any) -> None:
        self.dataset, self.data_loaded = self.data, True


def _task(
    base: type, kind: str, main_score: str, data: Any, *, category: str = "t2t", **attributes: Any
) -> Any:
    metadata = TaskMetadata(
        dataset={"path": "local", "revision": "1"},
        name=f"Local{kind}",
        description="Made of local data.",
        type=kind,
        category=category,
        eval_langs=["eng-Latn"],
        main_score=main_score,
    )
    return type(kind, (_Local, base), {"metadata": metadata, "data": data, **attributes})()


def sts(first: Sequence[str], second: Sequence[str], score: Sequence[float]) -> Any:
    rows = {"sentence1": list(first), "sentence2": list(second), "score": list(score)}
    return _task(AbsTaskSTS, "STS", "cosine_spearman", _test(rows))


def pairs(first: Sequence[str], second: Sequence[str], labels: Sequence[int]) -> Any:
    rows = {"sentence1": list(first), "sentence2": list(second), "labels": list(labels)}
    return _task(AbsTaskPairClassification, "PairClassification", "max_ap", _test(rows))


def classification(texts: Sequence[str], labels: Sequence[int]) -> Any:
    rows = Dataset.from_dict({"text": list(texts), "label": list(labels)})
    data = DatasetDict(train=rows, test=rows)
    return _task(
        AbsTaskClassification, "Classification", "accuracy", data, category="t2c", n_experiments=2
    )


def clustering(texts: Sequence[str], labels: Sequence[int]) -> Any:
    rows = {"sentences": list(texts), "labels": list(labels)}
    return _task(
        AbsTaskClustering, "Clustering", "v_measure", _test(rows), category="t2c",
        max_fraction_of_documents_to_embed=None, max_document_to_embed=len(texts),
        max_documents_per_cluster=len(texts), n_clusters=3,
    )  # fmt: skip


def retrieval(
    documents: Sequence[Mapping[str, str]],
    queries: Sequence[Mapping[str, str]],
    qrels: Mapping[str, Mapping[str, int]],
    top_ranked: Mapping[str, Sequence[str]] | None = None,
) -> Any:
    split = {
        "corpus": Dataset.from_list(list(documents)),
        "queries": Dataset.from_list(list(queries)),
        "relevant_docs": qrels,
        "top_ranked": top_ranked,
    }
    kind = "Retrieval" if top_ranked is None else "Reranking"
    return _task(AbsTaskRetrieval, kind, "ndcg_at_10", {"default": {"test": split}})


def _test(rows: Mapping[str, Any]) -> DatasetDict:
    return DatasetDict(test=Dataset.from_dict(dict(rows)))


class LookedUp(AbsEncoder):
    """A model whose vectors were made by hand, with the similarity that mteb gives every model.

    Attributes:
        vectors: side (``query``, ``document`` or None) and text -> vector.
    """

    def __init__(
        self, meta: Any, vectors: Mapping[tuple[str | None, str], NDArray[np.float64]]
    ) -> None:
        self.mteb_model_meta = meta.model_copy(update={"name": "by/hand"})
        self.vectors = vectors

    def encode(
        self, inputs: Any, *, prompt_type: PromptType | None = None, **told: Any
    ) -> NDArray[np.float32]:
        side = None if prompt_type is None else prompt_type.value
        texts = [text for batch in inputs for text in batch["text"]]
        return np.array([self.vectors[side, text] for text in texts], dtype=np.float32)
