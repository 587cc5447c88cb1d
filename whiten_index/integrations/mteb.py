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
from whiten_index.whitening.whitening_config import WhiteningConfig

try:
    from mteb._create_dataloaders import create_dataloader
    from mteb.models import ModelMeta
    from mteb.similarity_functions import cos_sim, pairwise_cos_sim
    from mteb.types import PromptType
except ImportError as error:
    raise ConfigError(
        f"MTEB's tasks need the package mteb ({error}); pip install 'whiten-index[mteb]'"
    ) from error

__all__ = ["IndexedSearch", "WhitenedEncoder"]

Batch = Mapping[str, Any]
_ROWS = 8192
_SIDES = ("document", "query")
# Set by the task, or leaving documents out of it.
_NOT_OPTIONS = (
    "corpus", "out", "text_columns", "id_column", "embedding_column", "keep", "row_filter",
    "limit",
)  # fmt: skip
# Options that change where and how fast an index is made, and not what it finds.
_WITHOUT_EFFECT = ("store", "shard_rows", "index_device", *EncoderConfig.__dataclass_fields__)
_SCHEMA = pa.schema({"id": pa.string(), "text": pa.large_string()})


class WhitenedEncoder:
    """An encoder and a transform fitted beforehand, as ``mteb.EncoderProtocol``.

    Its vectors are those that an index holds: transformed, then of unit length. MTEB files results
    by name and revision. The revision stands for the encoder, its prompts and the numbers of the
    transform, so results of another fit are never taken for these.

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
            ConfigError: the whitening is for embeddings of another width, or ``symmetric`` is
                unknown.
        """
        if whitening is not None and whitening.dim != encoder.dim:
            raise ConfigError(
                f"the whitening takes embeddings of {whitening.dim} dims and {encoder.spec.model} "
                f"gives {encoder.dim}; name the model that it was fitted on, or fit another"
            )
        if symmetric not in _SIDES:
            raise ConfigError(f"symmetric {symmetric!r} is unknown; use {' or '.join(_SIDES)}")
        self.encoder, self.whitening, self.symmetric = encoder, whitening, symmetric

    @classmethod
    def load(
        cls,
        model: str | None = None,
        *,
        whitening: Whitening | Path | str | None = None,
        symmetric: str = "document",
        **options: Any,
    ) -> WhitenedEncoder:
        """Load a model and, if one is named, a whitening.

        Args:
            model: hub name or local folder; None for the embedded one.
            whitening: a fitted one, or the ``whitening.safetensors`` of an index, in its
                ``versions/<version>/``.
            symmetric: see ``WhitenedEncoder``.
            options: the other fields of ``EncoderConfig``.

        Raises:
            EncoderError: the model cannot be found or loaded.
            ArtifactError: the whitening cannot be read.
        """
        if isinstance(whitening, Path | str):
            whitening = Whitening.load(Path(whitening))
        return cls(Encoder.load(model, **options), whitening, symmetric=symmetric)

    @classmethod
    def of_index(
        cls, folder: Path | str, *, symmetric: str = "document", **options: Any
    ) -> WhitenedEncoder:
        """Take encoder and transform of a published index; ``options`` are of ``open_index``."""
        index = open_index(folder, **options)
        return cls(index.encoder, index.bundle.whitening, symmetric=symmetric)

    @classmethod
    def fitted(
        cls,
        model: str | None = None,
        *,
        on: Sequence[str],
        config: WhiteningConfig | None = None,
        symmetric: str = "document",
        **options: Any,
    ) -> WhitenedEncoder:
        """Load a model, see ``load``, and fit a whitening on its embeddings of the texts ``on``.

        MTEB gives texts piece by piece, so a transform cannot be fitted on a task while it runs. To
        fit on the task's own texts, give them here. By default it is a whitening of default width.

        Raises:
            EncoderError: the model cannot be found or loaded.
            WhiteningError: the embeddings do not allow the whitening.
        """
        encoder = Encoder.load(model, **options)
        return cls(encoder, Whitening.fit(encoder.encode(on), config), symmetric=symmetric)

    def encode(
        self, inputs: Iterable[Batch], *, prompt_type: PromptType | None = None, **given: Any
    ) -> NDArray[np.float32]:
        """Return the vectors of the texts of a data loader, (n, k) float32.

        Queries get the encoder's query prompt, documents its document prompt. Batches are filled by
        tokens, so a batch size is ignored.

        Raises:
            ConfigError: a batch has no text, or another precision than float32 is wanted.
        """
        _require_float32(given)
        texts = [text for batch in inputs for text in _field(batch, "text")]
        side = self.symmetric if prompt_type is None else prompt_type.value
        encode = self.encoder.encode_queries if side == "query" else self.encoder.encode
        return self._vectors(encode(texts))

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Return the cosines of all pairs of vectors (n, k) and (m, k), a tensor (n, m)."""
        return cos_sim(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Return the cosines of the pairs of rows of two arrays (n, k): a tensor (n,)."""
        return pairwise_cos_sim(embeddings1, embeddings2)

    @property
    def mteb_model_meta(self) -> ModelMeta:
        """Name and revision under which MTEB files results."""
        whitening = self.whitening
        kind = "none" if whitening is None else whitening.kind.value
        identity = {
            "whitening": None if whitening is None else whitening.digest,
            "symmetric": self.symmetric,
        }
        return _model_meta(self.encoder.spec, f"{kind}-k{self._k}", identity, k=self._k)

    @property
    def _k(self) -> int:
        return self.encoder.dim if self.whitening is None else self.whitening.k

    def _vectors(self, embeddings: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the vectors (n, k) of raw embeddings (n, d), in float64 a block at a time."""
        vectors = np.empty((len(embeddings), self._k), dtype=np.float32)
        for start in range(0, len(embeddings), _ROWS):
            rows = embeddings[start : start + _ROWS].astype(np.float64)
            if self.whitening is not None:
                rows = self.whitening.apply(rows)
            vectors[start : start + _ROWS] = unit_rows(rows)
        return vectors


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
            ConfigError: an option is unknown, is set by the task, or cannot be used.
        """
        if unfit := [name for name in options if name in _NOT_OPTIONS]:
            raise ConfigError(
                f"IndexedSearch takes no {', '.join(unfit)}: the task says which texts are indexed"
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
        self, corpus: Any, *, task_metadata: Any, hf_split: str, hf_subset: str, **given: Any
    ) -> None:
        """Write a corpus (``id``, ``text``, perhaps ``title``) as Parquet and build its index.

        An index that was built before is used again.

        Raises:
            WhitenIndexError: see ``build_index``.
        """
        _require_float32(given.get("encode_kwargs") or {})
        name = re.sub(r"[^\w.-]+", "_", f"{task_metadata.name}-{hf_subset}-{hf_split}")
        place = self.folder / name
        path = place / "corpus.parquet"
        with writing(path):
            place.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary, pq.ParquetWriter(temporary, _SCHEMA) as writer:
                for batch in _batches(corpus, task_metadata, PromptType.document, given):
                    columns = {each: _field(batch, each) for each in _SCHEMA.names}
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
        _require_float32(given.get("encode_kwargs") or {})
        if self._index is None:
            raise ConfigError("there is no index to search yet; call index() with a corpus first")
        batches = list(_batches(queries, task_metadata, PromptType.query, given))
        ids, texts = (
            [value for batch in batches for value in _field(batch, name)] for name in ("id", "text")
        )
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
        left_out = {*_NOT_OPTIONS, *_WITHOUT_EFFECT}
        identity = {name: value for name, value in config.to_json().items() if name not in left_out}
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
    on_hub = spec.revision is not None and "/" in spec.model
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", f"{Path(spec.model).name}-{setting}")
    unknown = dict.fromkeys((
        "loader", "release_date", "languages", "n_parameters", "memory_usage_mb", "license",
        "open_weights", "public_training_code", "public_training_data", "training_datasets",
    ))  # fmt: skip
    return ModelMeta(
        **unknown,
        name=f"whiten-index/{name}",
        revision=fingerprint(whole),
        max_tokens=spec.max_length,
        embed_dim=k,
        framework=["PyTorch", "NumPy"],
        similarity_fn_name="cosine",
        use_instructions=bool(spec.query_prompt or spec.document_prompt),
        adapted_from=spec.model if on_hub else None,
    )


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


def _field(batch: Batch, name: str) -> list[Any]:
    """Return a column of a batch; tasks on images or sounds lack it."""
    if name not in batch:
        raise ConfigError(
            f"the task gives {', '.join(batch) or 'nothing'} and no {name}; this model takes tasks "
            "on texts"
        )
    return list(batch[name])


def _require_float32(given: Mapping[str, Any]) -> None:
    """Refuse encode_kwargs that ask for vectors of another precision."""
    precision = given.get("precision", "float32")
    if precision != "float32":
        raise ConfigError(
            f"encode_kwargs ask for precision {precision!r} and these vectors are float32; leave "
            "it out, or measure an index of fewer bits: IndexedSearch(factory='SQ8')"
        )
