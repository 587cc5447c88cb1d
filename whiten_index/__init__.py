"""Build searchable, whitened FAISS indexes from Parquet corpora.

The names below load on first use, so ``import whiten_index`` loads neither torch nor faiss.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whiten_index.corpus.corpus_config import CorpusConfig
    from whiten_index.corpus.parquet_corpus import ParquetCorpus
    from whiten_index.encoding.load_encoder import load_encoder
    from whiten_index.errors import WhitenIndexError
    from whiten_index.evaluation.sts_sets import read_sts
    from whiten_index.integrations.sklearn import WhitenedTransformer
    from whiten_index.measure.eval_config import EvalConfig
    from whiten_index.measure.evaluate_sts import evaluate_sts
    from whiten_index.measure.sweep_config import SweepConfig
    from whiten_index.measure.sweep_run import run_sweep
    from whiten_index.pipeline.build import build_index
    from whiten_index.pipeline.build_config import BuildConfig
    from whiten_index.pipeline.certify import certify_index
    from whiten_index.pipeline.encode import encode_corpus
    from whiten_index.pipeline.migrate import migrate_index
    from whiten_index.pipeline.update import update_index
    from whiten_index.pipeline.update_config import CertifyConfig, MigrateConfig, UpdateConfig
    from whiten_index.search.query_transform import QueryTransform
    from whiten_index.search.search_index import open_index
    from whiten_index.store.embedding_store import EmbeddingStore
    from whiten_index.training.train import train_encoder
    from whiten_index.training.training_config import TrainingConfig
    from whiten_index.vectordb.push import push_index, pushed_version
    from whiten_index.vectordb.push_config import PushConfig
    from whiten_index.versions.retention import list_versions
    from whiten_index.whitening.moments import Moments
    from whiten_index.whitening.transform import Whitening
    from whiten_index.whitening.whitening_config import WhiteningConfig

__version__ = "0.1.0"

_HOME = {
    "BuildConfig": "pipeline.build_config",
    "CertifyConfig": "pipeline.update_config",
    "CorpusConfig": "corpus.corpus_config",
    "EmbeddingStore": "store.embedding_store",
    "EvalConfig": "measure.eval_config",
    "MigrateConfig": "pipeline.update_config",
    "Moments": "whitening.moments",
    "ParquetCorpus": "corpus.parquet_corpus",
    "PushConfig": "vectordb.push_config",
    "QueryTransform": "search.query_transform",
    "SweepConfig": "measure.sweep_config",
    "TrainingConfig": "training.training_config",
    "UpdateConfig": "pipeline.update_config",
    "WhitenIndexError": "errors",
    "WhitenedTransformer": "integrations.sklearn",
    "Whitening": "whitening.transform",
    "WhiteningConfig": "whitening.whitening_config",
    "build_index": "pipeline.build",
    "certify_index": "pipeline.certify",
    "encode_corpus": "pipeline.encode",
    "evaluate_sts": "measure.evaluate_sts",
    "load_encoder": "encoding.load_encoder",
    "list_versions": "versions.retention",
    "migrate_index": "pipeline.migrate",
    "open_index": "search.search_index",
    "push_index": "vectordb.push",
    "pushed_version": "vectordb.push",
    "read_sts": "evaluation.sts_sets",
    "run_sweep": "measure.sweep_run",
    "train_encoder": "training.train",
    "update_index": "pipeline.update",
}

__all__ = [
    "BuildConfig", "CertifyConfig", "CorpusConfig", "EmbeddingStore", "EvalConfig",
    "MigrateConfig", "Moments", "ParquetCorpus", "PushConfig", "QueryTransform",
    "SweepConfig", "TrainingConfig", "UpdateConfig", "WhitenIndexError", "WhitenedTransformer",
    "Whitening",
    "WhiteningConfig", "__version__", "build_index", "certify_index", "encode_corpus",
    "evaluate_sts", "list_versions", "load_encoder", "migrate_index", "open_index", "push_index",
    "pushed_version", "read_sts", "run_sweep", "train_encoder", "update_index",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'whiten_index' has no attribute {name!r}")
    if name == "WhitenedTransformer":
        from whiten_index.errors import require_installed

        require_installed("sklearn", by=name, extra="scikit-learn")
    return getattr(importlib.import_module(f"whiten_index.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
