"""The encoder with its whitening as a model of MTEB, and an index as its way of searching.

``WhitenedEncoder`` runs every task on texts. ``IndexedSearch`` runs retrieval and reranking through
an index as it is published, so the index itself is measured: its transform fitted on the task's own
corpus, its embeddings rounded as the store keeps them, its kind of search.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

import whiten_index
from whiten_index.artifacts.atomic import replacing
from whiten_index.artifacts.files import writing
from whiten_index.artifacts.manifest import fingerprint
from whiten_index.encoding.encoder import Encoder
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.spec import EncoderSpec, resolve_encoder
from whiten_index.errors import ConfigError
from whiten_index.pipeline.build import build_index
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.search.search_index import SearchIndex, open_index
from whiten_index.whitening.spectrum import unit_rows
from whiten_index.whitening.transform import Whitening

try:
    from mteb._create_dataloaders import create_dataloader
    from mteb.models import ModelMeta
    from mteb.models.abs_encoder import AbsEncoder
    from mteb.types import PromptType
except ImportError as error:
    raise ConfigError(
        f"MTEB's tasks need the package mteb ({error}); pip install 'whiten-index[mteb]'"
    ) from error

__all__ = ["IndexedSearch", "WhitenedEncoder"]

Batch = Mapping[str, Any]
_ROWS = 8192
_SIDES = ("document", "query")
# Options that change where and how fast an index is made, and not what it finds.
_WITHOUT_EFFECT = {
    "out", "store", "shard_rows", "index_device", *EncoderConfig.__dataclass_fields__
}  # fmt: skip
_SCHEMA = pa.schema({"id": pa.string(), "text": pa.large_string()})


class WhitenedEncoder(AbsEncoder):
    """An encoder and a transform fitted beforehand, as ``mteb.EncoderProtocol``.

    Its vectors are those that an index holds: transformed, then of unit length. MTEB files results
    by name and revision. The revision stands for the encoder, its prompts and the numbers of the
    transform, so results of another fit are never taken for these. MTEB gives texts piece by piece,
    so a transform cannot be fitted on a task while it runs; fit it on the task's texts before.

    Attributes:
        encoder: of texts.
        whitening: applied to its embeddings; None for none.
        symmetric: ``document`` or ``query``: prompt of texts in tasks without queries, such as STS;
            models of the E5 family want ``query`` there.
    """

    def __init__(
        self, encoder: Encoder, whitening: Whitening | None = None, *, symmetric: str = "document"
    ) -> None:
        """Join an encoder and a transform that was fitted on its embeddings.

        Raises:
            ConfigError: ``symmetric`` is unknown.
        """
        if symmetric not in _SIDES:
            raise ConfigError(f"symmetric {symmetric!r} is unknown; use {' or '.join(_SIDES)}")
        self.encoder, self.whitening, self.symmetric = encoder, whitening, symmetric
        k = encoder.dim if whitening is None else whitening.k
        kind = "none" if whitening is None else whitening.kind.value
        digest = None if whitening is None else whitening.digest
        identity = {"whitening": digest, "symmetric": symmetric}
        # Name and revision under which MTEB files results.
        self.mteb_model_meta = _model_meta(encoder.spec, f"{kind}-k{k}", identity, k=k)

    @classmethod
    def of_index(
        cls, folder: Path | str, *, symmetric: str = "document", **options: Any
    ) -> WhitenedEncoder:
        """Take encoder and transform of a published index; ``options`` are of ``open_index``."""
        index = open_index(folder, **options)
        return cls(index.encoder, index.bundle.whitening, symmetric=symmetric)

    def encode(
        self, inputs: Iterable[Batch], *, prompt_type: PromptType | None = None, **_: Any
    ) -> NDArray[np.float32]:
        """Return the vectors of the texts of a data loader, (n, k) float32.

        Queries get the encoder's query prompt, documents its document prompt. Batches are filled by
        tokens, so a batch size is ignored.

        Raises:
            ConfigError: the whitening is for embeddings of another width.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        side = self.symmetric if prompt_type is None else prompt_type.value
        encode = self.encoder.encode_queries if side == "query" else self.encoder.encode
        vectors = encode(texts)
        if self.whitening is None:
            return unit_rows(vectors.astype(np.float64)).astype(np.float32)
        # In float64, a block at a time.
        blocks = np.array_split(vectors, len(vectors) // _ROWS + 1)
        white = [unit_rows(self.whitening.apply(each)).astype(np.float32) for each in blocks]
        return np.concatenate(white)


class IndexedSearch:
    """An index built over a task's corpus, as ``mteb.SearchProtocol``: retrieval and reranking.

    Documents without content are no rows of an index and are never found.

    Attributes:
        folder: of corpora, indexes and the store of embeddings. With one folder for all tasks and
            settings, no text is encoded twice.
    """

    def __init__(self, folder: Path | str | None = None, **options: Any) -> None:
        """Set how indexes are built.

        Args:
            folder: kept by the user; None for a temporary one that is removed with this object.
            options: fields of ``BuildConfig``, such as ``model``, ``whiten``, ``k``, ``factory``.
                By default the transform is chosen by the corpus.

        Raises:
            ConfigError: an option is unknown or cannot be used.
        """
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
        self, corpus: Any, *, task_metadata: Any, hf_split: str, hf_subset: str, **given: Any
    ) -> None:
        """Write a corpus (``id``, ``text``, perhaps ``title``) as Parquet and build its index.

        An index that was built before is used again.

        Raises:
            WhitenIndexError: see ``build_index``.
        """
        name = re.sub(r"[^\w.-]+", "_", f"{task_metadata.name}-{hf_subset}-{hf_split}")
        place = self.folder / name
        path = place / "corpus.parquet"
        with writing(path):
            place.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary, pq.ParquetWriter(temporary, _SCHEMA) as writer:
                for batch in _batches(corpus, task_metadata, PromptType.document, given):
                    columns = {each: list(batch[each]) for each in _SCHEMA.names}
                    writer.write_table(pa.table(columns, schema=_SCHEMA))
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
        **given: Any,
    ) -> dict[str, dict[str, float]]:
        """Return query id -> document id -> cosine, of the best ``top_k`` documents.

        If the task reranks, ``top_ranked`` names the only documents to rank for each query.
        """
        if self._index is None:
            raise ConfigError("there is no index to search yet; call index() with a corpus first")
        batches = list(_batches(queries, task_metadata, PromptType.query, given))
        ids, texts = ([row for each in batches for row in each[name]] for name in ("id", "text"))
        found: dict[str, dict[str, float]] = {query: {} for query in ids}
        embeddings = self._index.encoder.encode_queries(texts)
        if top_ranked is None:
            rankings = iter(self._index.rank_embeddings(ids, embeddings, top_k=top_k))
        else:
            # All rows that pass a filter of few are compared, so no named document is lost.
            rankings = (
                ranking
                for query, embedding in zip(ids, embeddings, strict=True)
                if (named := list(top_ranked.get(query, ())))
                for ranking in self._index.rank_embeddings(
                    [query], embedding[None], top_k=top_k, row_filter=f"id in {named!r}"
                )
            )
        for each in rankings:
            found[str(each.query_id)] = dict(zip(map(str, each.ids), each.scores, strict=True))
        return found

    @property
    def mteb_model_meta(self) -> ModelMeta:
        """Name and revision under which MTEB files results; the width if it is given."""
        config = self._config
        identity = {n: each for n, each in config.to_json().items() if n not in _WITHOUT_EFFECT}
        # Another release may choose another transform.
        identity["release"] = whiten_index.__version__
        width = "" if config.k is None else f"-k{config.k}"
        factory = "" if config.factory == "auto" else f"-{config.factory}"
        k = config.k if isinstance(config.k, int) else None
        return _model_meta(self._spec, f"{config.whiten}{width}{factory}-index", identity, k=k)


def _model_meta(
    spec: EncoderSpec, setting: str, identity: Mapping[str, Any], *, k: int | None
) -> ModelMeta:
    """Return the metadata under which MTEB files results; ``identity`` is in the revision."""
    whole = {"encoder": spec.fingerprint, "query_encoder": spec.query_fingerprint, **identity}
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", f"{Path(spec.model).name}-{setting}")
    known = {
        "name": f"whiten-index/{name}",
        "revision": fingerprint(whole),
        "max_tokens": spec.max_length,
        "embed_dim": k,
        "use_instructions": bool(spec.query_prompt or spec.document_prompt),
    }
    return ModelMeta.create_empty(known)


def _batches(
    rows: Any, task_metadata: Any, side: PromptType, given: Mapping[str, Any]
) -> Iterable[Batch]:
    """Return batches; mteb joins title and text, query and instruction, turns of conversations."""
    batches: Iterable[Batch] = create_dataloader(
        rows,
        task_metadata=task_metadata,
        prompt_type=side,
        batch_size=_ROWS,
        num_proc=given.get("num_proc"),
    )
    return batches
