"""Tasks of mteb made of local data, and a model that looks vectors up; it imports mteb."""

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata


class _Local:
    """Data that are there already instead of a download."""

    data: Any

    def load_data(self, *args: Any, **kwargs: Any) -> None:
        self.dataset, self.data_loaded = self.data, True


def _task(base: type, kind: str, main_score: str, data: Any) -> Any:
    metadata = TaskMetadata(
        dataset={"path": "local", "revision": "1"},
        name=f"Local{kind}",
        description="Made of local data.",
        type=kind,
        category="t2t",
        eval_langs=["eng-Latn"],
        main_score=main_score,
    )
    return type(kind, (_Local, base), {"metadata": metadata, "data": data})()


def sts(first: Sequence[str], second: Sequence[str], score: Sequence[float]) -> Any:
    rows = {"sentence1": list(first), "sentence2": list(second), "score": list(score)}
    return _task(AbsTaskSTS, "STS", "cosine_spearman", DatasetDict(test=Dataset.from_dict(rows)))


def retrieval(
    documents: Sequence[Mapping[str, str]],
    queries: Sequence[Mapping[str, str]],
    qrels: Mapping[str, Mapping[str, int]],
) -> Any:
    split = {
        "corpus": Dataset.from_list(list(documents)),
        "queries": Dataset.from_list(list(queries)),
        "relevant_docs": qrels,
        "top_ranked": None,
    }
    return _task(AbsTaskRetrieval, "Retrieval", "ndcg_at_10", {"default": {"test": split}})
