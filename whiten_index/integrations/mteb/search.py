"""An index over a task's corpus, for retrieval and reranking."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from mteb._create_dataloaders import create_dataloader
from mteb.models import ModelMeta
from mteb.types import PromptType
from numpy.typing import NDArray

import whiten_index
from whiten_index.artifacts.atomic import replacing
from whiten_index.artifacts.files import writing
from whiten_index.encoding import EncoderConfig, resolve_encoder
from whiten_index.errors import ConfigError
from whiten_index.integrations.mteb.meta import Batch, field_of, model_meta, require_float32
from whiten_index.pipeline.build import BuildConfig, build_index
from whiten_index.search.search_index import Ranking, SearchIndex, open_index

_ROWS = 8192
# What is settled here, and what would leave documents out of the task.
_NOT_OPTIONS = (
    "corpus", "out", "text_columns", "id_column", "embedding_column", "keep", "row_filter",
    "limit", "weight_column", "weighting",
)  # fmt: skip
# What changes where and how fast an index is made, and not what it finds.
_WITHOUT_EFFECT = ("store", "shard_rows", "index_device", *EncoderConfig.__dataclass_fields__)
_SCHEMA = pa.schema({"id": pa.string(), "text": pa.large_string()})


class IndexedSearch:
    """An index built over a task's corpus, as ``mteb.SearchProtocol``: retrieval and reranking.

    Documents without content are no rows of an index and are never found.

    Attributes:
        folder: where corpora, indexes and the store of embeddings are; with one folder for all
            tasks and settings, what was encoded once is not encoded again.
    """

    def __init__(self, folder: Path | str | None = None, **options: Any) -> None:
        """Settle how indexes are built.

        Args:
            folder: kept by the user; None for a temporary one that goes with this object.
            options: fields of ``BuildConfig``, such as ``model``, ``whiten``, ``k``, ``factory``;
                what is left out has its default, so the transform is chosen by the corpus.

        Raises:
            ConfigError: an option is unknown, is settled by the task, or cannot be used.
            EncoderError: the model cannot be found.
        """
        known = [name for name in BuildConfig.__dataclass_fields__ if name not in _NOT_OPTIONS]
        if unfit := [name for name in options if name not in known]:
            raise ConfigError(
                f"IndexedSearch has no option {', '.join(unfit)}; it takes {', '.join(known)}, and "
                "the task says which texts are indexed"
            )
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="whiten-index-")
            folder = self._temporary.name
        self.folder = Path(folder)
        self._config = BuildConfig(
            corpus=("corpus.parquet",),
            out=str(self.folder),
            text_columns=("text",),
            id_column="id",
            **{"store": str(self.folder / "store"), **options},
        )
        self._spec = resolve_encoder(self._config.encoder_config())[0]
        self._index: SearchIndex | None = None

    def index(
        self, corpus: Any, *, task_metadata: Any, hf_split: str, hf_subset: str, **told: Any
    ) -> None:
        """Write the corpus as Parquet and build its index, or find it as it was built before.

        Args:
            corpus: data set with ``id``, ``text`` and perhaps ``title``.
            task_metadata: of the task.
            hf_split: of the task.
            hf_subset: of the task.
            told: what else mteb tells: ``encode_kwargs``, ``num_proc``.

        Raises:
            WhitenIndexError: see ``build_index``.
        """
        require_float32(told.get("encode_kwargs") or {})
        name = re.sub(r"[^\w.-]+", "_", f"{task_metadata.name}-{hf_subset}-{hf_split}")
        place = self.folder / name
        path = place / "corpus.parquet"
        batches = _batches(corpus, task_metadata, PromptType.document, told)
        with writing(path):
            place.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                _write(temporary, batches)
        config = replace(self._config, corpus=(str(path),), out=str(place / "index"))
        build_index(config)
        self._index = open_index(
            place / "index",
            trust_remote_code=config.trust_remote_code,
            device=config.device,
            threads=config.threads,
        )

    def search(
        self,
        queries: Any,
        *,
        task_metadata: Any,
        top_k: int,
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        **told: Any,
    ) -> dict[str, dict[str, float]]:
        """Return query id -> document id -> cosine, of the best documents.

        Args:
            queries: data set with ``id``, ``text`` and perhaps ``instruction``.
            task_metadata: of the task.
            top_k: documents a query.
            top_ranked: query id -> the only documents to rank, where the task reranks.
            told: what else mteb tells: split, subset, ``encode_kwargs``, ``num_proc``.

        Raises:
            ConfigError: nothing is indexed yet.
        """
        require_float32(told.get("encode_kwargs") or {})
        if self._index is None:
            raise ConfigError("there is no index to search yet; call index() with a corpus first")
        ids: list[str] = []
        texts: list[str] = []
        for batch in _batches(queries, task_metadata, PromptType.query, told):
            ids += field_of(batch, "id")
            texts += field_of(batch, "text")
        embeddings = self._index.encoder.encode_queries(texts)
        if top_ranked is None:
            rankings = self._index.rank_embeddings(ids, embeddings, top_k=top_k)
        else:
            rankings = _among(self._index, ids, embeddings, top_ranked, top_k)
        found: dict[str, dict[str, float]] = {query: {} for query in ids}
        for each in rankings:
            found[str(each.query_id)] = dict(zip(map(str, each.ids), each.scores, strict=True))
        return found

    @property
    def mteb_model_meta(self) -> ModelMeta:
        """What this model is, as mteb files its results; how wide, where that is named."""
        config = self._config
        left_out = {*_NOT_OPTIONS, *_WITHOUT_EFFECT}
        identity = {name: value for name, value in config.to_json().items() if name not in left_out}
        # What is left to choose may be chosen otherwise by another release.
        identity["release"] = whiten_index.__version__
        width = None if config.chooses else config.whitening_config().width(self._spec.dim)
        k = config.k if config.chooses and isinstance(config.k, int) else width
        factory = "" if config.factory == "auto" else f"-{config.factory}"
        shown = "" if config.k is None and config.chooses else f"-k{k or config.k}"
        return model_meta(self._spec, f"{config.whiten}{shown}{factory}-index", identity, k=k)


def _among(
    index: SearchIndex,
    ids: Sequence[str],
    embeddings: NDArray[np.float32],
    top_ranked: Mapping[str, Sequence[str]],
    top_k: int,
) -> Iterator[Ranking]:
    """Yield the ranking of each query among the documents named for it, if any are."""
    for query, embedding in zip(ids, embeddings, strict=True):
        if named := list(top_ranked.get(query, ())):
            # All rows that pass a filter of few are compared, so nothing named is lost.
            yield from index.rank_embeddings(
                [query], embedding[None], top_k=top_k, row_filter=f"id in {named!r}"
            )


def _batches(
    rows: Any, task_metadata: Any, side: PromptType, told: Mapping[str, Any]
) -> Iterable[Batch]:
    """Return batches of documents or queries with the texts that mteb gives to encoders.

    The loader is mteb's own: it joins title and text, query and instruction, and the turns of a
    conversation, by rules that are no one else's to keep.
    """
    batches: Iterable[Batch] = create_dataloader(
        rows,
        task_metadata=task_metadata,
        prompt_type=side,
        batch_size=_ROWS,
        num_proc=told.get("num_proc"),
    )
    return batches


def _write(path: Path, batches: Iterable[Batch]) -> None:
    """Write documents as Parquet: ``id`` and ``text``."""
    with pq.ParquetWriter(path, _SCHEMA) as writer:
        for batch in batches:
            columns = {name: field_of(batch, name) for name in _SCHEMA.names}
            writer.write_table(pa.table(columns, schema=_SCHEMA))
