"""Texts to whitened vectors, for every kind of task."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from mteb.models import ModelMeta
from mteb.similarity_functions import cos_sim, pairwise_cos_sim
from mteb.types import PromptType
from numpy.typing import NDArray

from whiten_index.artifacts.files import is_folder
from whiten_index.corpus import CorpusConfig, ParquetCorpus
from whiten_index.corpus.batches import TextBatch
from whiten_index.encoding import Encoder, EncoderConfig
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.integrations.mteb.meta import Batch, field_of, model_meta, require_float32
from whiten_index.search.search_index import open_index
from whiten_index.whitening import Whitening, WhiteningConfig, unit_rows
from whiten_index.whitening.moments import Moments

_ROWS = 8192
_SIDES = ("document", "query")


class WhitenedEncoder:
    """An encoder and a transform fitted beforehand, as ``mteb.EncoderProtocol``.

    Its vectors are those that an index holds: transformed, then of unit length. ``mteb`` keeps
    results under name and revision; the revision stands for the encoder, its prompts and the
    numbers of the transform, so that results of another fit are never taken for these.

    Attributes:
        encoder: of texts.
        whitening: applied to its embeddings; None for none.
        normalize: whether vectors are of unit length.
        symmetric: whose prompt texts get that a task calls neither queries nor documents.
    """

    def __init__(
        self,
        encoder: Encoder,
        whitening: Whitening | None = None,
        *,
        normalize: bool = True,
        symmetric: str = "document",
    ) -> None:
        """Join an encoder and a transform.

        Args:
            encoder: of texts.
            whitening: fitted on embeddings of the same encoder; None leaves them as they are.
            normalize: scale vectors to unit length, as an index does. It leaves cosines alone,
                and matters to classifiers and clusterings.
            symmetric: ``document`` or ``query``: the prompt of texts in tasks without queries,
                such as STS; models of the E5 family want ``query`` there.

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
        self.encoder = encoder
        self.whitening = whitening
        self.normalize = normalize
        self.symmetric = symmetric

    @classmethod
    def load(
        cls,
        model: str | None = None,
        *,
        whitening: Whitening | Path | str | None = None,
        normalize: bool = True,
        symmetric: str = "document",
        **options: Any,
    ) -> WhitenedEncoder:
        """Load a model and, where it is named, a whitening.

        Args:
            model: hub name or local folder; None for the embedded one.
            whitening: a fitted one, or the ``whitening.safetensors`` of an index.
            normalize: see ``WhitenedEncoder``.
            symmetric: see ``WhitenedEncoder``.
            options: the other fields of ``EncoderConfig``.

        Raises:
            EncoderError: the model cannot be found or loaded.
            ArtifactError: the whitening cannot be read.
            ConfigError: an option does not fit, or the whitening has another width.
        """
        if isinstance(whitening, Path | str):
            whitening = _load(Path(whitening))
        encoder = _open(model, options)
        return cls(encoder, whitening, normalize=normalize, symmetric=symmetric)

    @classmethod
    def of_index(
        cls,
        folder: Path | str,
        *,
        normalize: bool = True,
        symmetric: str = "document",
        **options: Any,
    ) -> WhitenedEncoder:
        """Take encoder and transform of a published index.

        Args:
            folder: of the index.
            normalize: see ``WhitenedEncoder``.
            symmetric: see ``WhitenedEncoder``.
            options: those of ``open_index``, such as ``model`` and ``device``.

        Raises:
            ArtifactError: nothing is published there, or it is damaged.
            EncoderError: the model is gone, or is not the one the index was built with.
            ConfigError: the index knows no model.
        """
        index = open_index(folder, **options)
        whitening = index.bundle.whitening
        return cls(index.encoder, whitening, normalize=normalize, symmetric=symmetric)

    @classmethod
    def fitted(
        cls,
        model: str | None = None,
        *,
        on: Sequence[str] | Path,
        config: WhiteningConfig | None = None,
        text_columns: Sequence[str] = ("text",),
        normalize: bool = True,
        symmetric: str = "document",
        **options: Any,
    ) -> WhitenedEncoder:
        """Load a model and fit a whitening on its embeddings of given texts.

        ``mteb`` hands texts over piece by piece, so a transform cannot be fitted on a task while
        it runs. To fit on the task's own texts, give them here.

        Args:
            model: hub name or local folder; None for the embedded one.
            on: a list of texts, or the path of a Parquet file, folder or glob.
            config: of the transform; whitening of the default width where it is left out.
            text_columns: of the Parquet file, joined by a space.
            normalize: see ``WhitenedEncoder``.
            symmetric: see ``WhitenedEncoder``.
            options: the other fields of ``EncoderConfig``.

        Raises:
            EncoderError: the model cannot be found or loaded.
            CorpusError: the file cannot be used.
            WhiteningError: the embeddings do not allow the whitening.
        """
        config = config or WhiteningConfig()
        encoder = _open(model, options)
        config.require_dim(encoder.dim)
        moments = Moments.empty(encoder.dim)
        for block in encoder.stream(_texts(on, text_columns)):
            rows = unit_rows(block.astype(np.float64)) if config.normalize_input else block
            moments = moments.update(rows)
        whitening = Whitening.fit(moments, config)
        return cls(encoder, whitening, normalize=normalize, symmetric=symmetric)

    def encode(
        self, inputs: Iterable[Batch], *, prompt_type: PromptType | None = None, **told: Any
    ) -> NDArray[np.float32]:
        """Return the vectors of the texts of a data loader, (n, k) float32.

        Args:
            inputs: batches with the key ``text``, as mteb joined titles and instructions to it.
            prompt_type: queries get the encoder's query prompt, documents its document prompt.
            told: what else mteb tells: the task, split and subset; a batch size, of no use to an
                encoder that fills batches by tokens; and a ``precision``.

        Raises:
            ConfigError: a batch has no text, or another precision than float32 is asked for.
        """
        require_float32(told)
        texts = [text for batch in inputs for text in field_of(batch, "text")]
        side = self.symmetric if prompt_type is None else prompt_type.value
        encode = self.encoder.encode_queries if side == "query" else self.encoder.encode
        return self._vectors(encode(texts))

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Return the cosines of all pairs of vectors (n, k) and (m, k), a tensor (n, m)."""
        return cos_sim(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Return the cosines of vectors (n, k) and those beside them, (n, k): a tensor (n,)."""
        return pairwise_cos_sim(embeddings1, embeddings2)

    @property
    def mteb_model_meta(self) -> ModelMeta:
        """What this model is, as mteb files its results."""
        spec, whitening = self.encoder.spec, self.whitening
        kind = "none" if whitening is None else whitening.kind.value
        k = self.encoder.dim if whitening is None else whitening.k
        identity = {
            "whitening": None if whitening is None else _identity(whitening),
            "normalize": self.normalize,
            "symmetric": self.symmetric,
        }
        return model_meta(spec, f"{kind}-k{k}", identity, k=k)

    def _vectors(self, embeddings: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the vectors (n, k) of raw embeddings (n, d), in float64 a block at a time."""
        width = self.encoder.dim if self.whitening is None else self.whitening.k
        vectors = np.empty((len(embeddings), width), dtype=np.float32)
        for start in range(0, len(embeddings), _ROWS):
            rows = embeddings[start : start + _ROWS].astype(np.float64)
            if self.whitening is not None:
                rows = self.whitening.apply(rows)
            vectors[start : start + _ROWS] = unit_rows(rows) if self.normalize else rows
        return vectors


def _open(model: str | None, options: Mapping[str, Any]) -> Encoder:
    """Load an encoder by the fields of ``EncoderConfig``."""
    known = EncoderConfig.__dataclass_fields__
    if unknown := [name for name in options if name not in known]:
        raise ConfigError(
            f"{', '.join(unknown)} is no option of an encoder ({', '.join(known)}); options of a "
            "transform go into config=WhiteningConfig(…) of WhitenedEncoder.fitted"
        )
    return Encoder.load(model, **options)


def _load(path: Path) -> Whitening:
    """Read a whitening, and say where an index has its own."""
    if is_folder(path):
        raise ConfigError(
            f"{path} is a folder; take an index whole with WhitenedEncoder.of_index, or name the "
            "whitening.safetensors in its versions/<version>/"
        )
    try:
        return Whitening.load(path)
    except ArtifactError as error:
        raise ArtifactError(
            f"{error} (an index has its own in versions/<version>/whitening.safetensors; what "
            "export writes is another form)"
        ) from error


def _texts(on: Sequence[str] | Path, text_columns: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the texts to fit on, in lists."""
    if not isinstance(on, str | Path):
        yield on
        return
    corpus = ParquetCorpus.open(CorpusConfig(sources=(str(on),), text_columns=tuple(text_columns)))
    for batch in corpus.batches():
        assert isinstance(batch, TextBatch)
        yield batch.texts


def _identity(whitening: Whitening) -> dict[str, Any]:
    """Return the fields of a transform, arrays by the digest of their bytes."""
    values = {each.name: getattr(whitening, each.name) for each in fields(whitening)}
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    return value.value if isinstance(value, Enum) else value
