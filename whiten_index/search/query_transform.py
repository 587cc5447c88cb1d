"""A transform and the identity of its encoder, without an index, for clients of a database.

Texts or raw embeddings in, vectors as ``whiten-index push`` sent them out. A ``QueryTransform`` is
read from an index, or from a small folder::

    manifest.json             which encoder, its fingerprint, the index version it comes from
    whitening.safetensors     the transform
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.artifacts.atomic import replace_folder
from whiten_index.artifacts.cached_storage import place_of
from whiten_index.artifacts.manifest import (
    Described,
    Digest,
    Schema,
    check_files,
    listed_files,
    new_artifact,
    read_manifest,
)
from whiten_index.artifacts.prefetch import blocks
from whiten_index.encoding.load_encoder import local_model, require_transformer
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.spec import EncoderFacts, EncoderOpening, EncoderSpec, recorded_spec
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.search.query_encoder import QueryEncoder, digest_of, require_texts
from whiten_index.versions.published import WHITENING, Version, with_published
from whiten_index.whitening.spectrum import real_rows
from whiten_index.whitening.transform import Whitening

if TYPE_CHECKING:
    from whiten_index.encoding.window_encoder import WindowEncoder
    from whiten_index.vectordb.pushed_table import PushedTable

_ROWS = 8192
_LOG = logging.getLogger(__name__)
_REMEDY = "restore it from a copy, or export it again from its index"
_WHAT = "a query transform"


class _Saved(Described):
    encoder: EncoderFacts
    version: str
    whitening: dict[str, Any]
    query_digest: Digest


_SCHEMA = Schema("query transform", 1, _Saved)
_files = partial(listed_files, schema=_SCHEMA)


class QueryTransform:
    """A whitening and the encoder it was fitted on; threads may share it, and it can be pickled.

    Its vectors are those that an index holds and that a push sends: transformed, and of unit length
    unless ``whitening.similarity`` is ``dot``.
    An index that is built again with another transform has another ``query_digest``, and must be
    read again. A pickle holds no encoder, which is loaded where it is needed.

    Attributes:
        whitening: the transform, in float64.
        encoder_facts: the encoder as the index recorded it.
        version: of the index that the transform comes from.
        spec: identity of the encoder; None where the index knows none.

    Examples:
        >>> queries = QueryTransform.of("index")
        >>> queries.encode_queries(["a cat on a mat"]).shape
        (1, 16)
    """

    def __init__(
        self,
        whitening: Whitening,
        encoder: Mapping[str, Any],
        *,
        version: str = "",
        **opening: Unpack[EncoderOpening],
    ) -> None:
        """Join a transform and an encoder; ``of`` and ``load`` read both.

        Args:
            whitening: fitted on embeddings of the encoder.
            encoder: the entry ``encoder`` of an index's manifest, with its ``fingerprint`` if it
                names no model.
            version: of the index.
            opening: ``model``, ``trust_remote_code``, ``device``, ``backend`` and ``threads``, as
                of ``open_index``.

        Raises:
            ConfigError: the encoder gives embeddings of another width.
        """
        self.whitening = whitening
        self.encoder_facts = dict(encoder)
        self.version = version
        self._opening = opening
        self.spec = recorded_spec(self.encoder_facts)
        if self.spec is not None and self.spec.dim != whitening.dim:
            raise ConfigError(
                f"the whitening takes embeddings of {whitening.dim} dims and {self.spec.model} "
                f"gives {self.spec.dim}; name the model that it was fitted on"
            )
        self._queries = QueryEncoder(self.spec, **opening, instead="reduce embeddings of your own")

    def __reduce__(self) -> "tuple[Callable[[], QueryTransform], tuple[()]]":
        """Copy and pickle the parts; the encoder is loaded again."""
        # A replaced whitening is the same without the matrix that it keeps once made.
        parts = replace(self.whitening), self.encoder_facts
        return partial(type(self), *parts, version=self.version, **self._opening), ()

    def __deepcopy__(self, memo: object) -> "QueryTransform":
        """Share it within a process, so that the encoder is loaded once."""
        return self

    def __repr__(self) -> str:
        return f"QueryTransform({self.dim} to {self.k} dims, version {self.version})"

    @classmethod
    def of(
        cls,
        index: Path | str,
        *,
        k: int | None = None,
        verify: str | None = None,
        **opening: Unpack[EncoderOpening],
    ) -> "QueryTransform":
        """Read the transform of the published version of an index, and nothing else of it.

        Args:
            index: its folder, or its URI in a bucket.
            k: keep the first k numbers of each vector; None for all.
            verify: None checks the manifest and the transform, whose neighbours need not be there;
                ``full`` checks every file's checksum, ``manifest`` their sizes.
            opening: ``model``, ``trust_remote_code``, ``device``, ``backend`` and ``threads``, as
                of ``open_index``.

        Raises:
            ArtifactError: nothing is published there, or it is damaged.
            ConfigError: the vectors are not as wide as k.
        """
        root, mirror = place_of(index)

        def read(version: Version) -> QueryTransform:
            if verify is not None:
                version.check()
            fields, whitening = version.fields, Whitening.load(version.file(WHITENING))
            encoder = {**fields["encoder"], "fingerprint": fields["encoder_fingerprint"]}
            return cls(whitening, encoder, version=fields["version"], **opening)

        made = with_published(root, read, mirror, verify=verify or "full")
        return made if k is None else made.truncate(k)

    @classmethod
    def load(cls, folder: Path | str, **opening: Unpack[EncoderOpening]) -> "QueryTransform":
        """Read what ``save`` wrote, checked.

        Args:
            folder: as given to ``save``.
            opening: as of ``of``.

        Raises:
            ArtifactError: it is missing, damaged, something else, or of a later release.
        """
        path = Path(folder)
        fields = read_manifest(path, _SCHEMA, remedy=_REMEDY)
        check_files(path, fields, content=True, names=[WHITENING], remedy=_REMEDY)
        whitening = Whitening.load(path / WHITENING)
        made = cls(whitening, fields["encoder"], version=fields["version"], **opening)
        # The file may have been replaced since it was checked.
        if made.query_digest != fields["query_digest"]:
            raise ArtifactError(f"{path} is damaged: its transform is another one; {_REMEDY}")
        return made

    def save(self, folder: Path | str) -> Path:
        """Write a folder of a manifest and the transform, whole or not at all; return its path.

        Raises:
            ConfigError: the folder holds something else than a query transform.
            StorageError: it cannot be written.
        """

        def make(path: Path) -> None:
            with new_artifact(path) as (inside, fields):
                self.whitening.save(inside / WHITENING)
                fields |= _SCHEMA.headed(
                    version=self.version,
                    encoder=self.encoder_facts,
                    whitening=self.whitening.describe(),
                    query_digest=self.query_digest,
                )

        return replace_folder(folder, make, files=_files, what=_WHAT)

    @property
    def dim(self) -> int:
        """Width d of the raw embeddings."""
        return self.whitening.dim

    @property
    def k(self) -> int:
        """Width of the vectors."""
        return self.whitening.k

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the encoder of queries; where none is known, of the index's embeddings."""
        spec, given = self.spec, self.encoder_facts.get("fingerprint", "")
        return spec.query_fingerprint if spec else str(given)

    @property
    def encoder(self) -> "WindowEncoder":
        """The encoder, loaded on first use: its embeddings are raw.

        Raises:
            ConfigError: the index knows none.
            EncoderError: the model is gone, or is not the one the index was built with.
        """
        return self._queries.get()

    @property
    def query_digest(self) -> str:
        """32 hex digits of encoder, prompt of queries and transform: equal ones, equal vectors.

        A refit changes it; the place of the model and the version of the index do not. Whatever is
        pushed or exported carries it, so that a client can check compatibility.
        """
        given = self.encoder_facts.get("fingerprint", self.spec and self.spec.fingerprint)
        return digest_of(str(given or ""), self.whitening, self.spec)

    def model_folder(self) -> tuple[EncoderSpec, ModelFolder]:
        """Return the encoder's identity and files, checked to be those of the index, not loaded."""
        spec, folder, config = self._queries.resolve()
        if not isinstance(spec, EncoderSpec) or folder is None:
            return local_model(config, by="this export")
        require_transformer(folder, by="this export")
        return spec, folder

    def require(self, pushed: "PushedTable | None") -> None:
        """Refuse a table whose vectors are of another encoder or transform.

        Args:
            pushed: the table's state, as ``pushed_version`` returns it.

        Examples:
            >>> QueryTransform.of("index").require(pushed_version("pushed.parquet"))

        Raises:
            ConfigError: nothing is pushed there, or its vectors are no match for these queries.
        """
        if pushed is None:
            raise ConfigError("nothing is pushed under that name; push the index first")
        if pushed.query_digest != self.query_digest:
            raise ConfigError(
                f"the table has vectors of version {pushed.version} with the query digest "
                f"{pushed.query_digest}, and this query transform is of version {self.version} "
                f"with {self.query_digest}: their scores mean nothing; export the query transform "
                "of that version, or push the index again"
            )

    def truncate(self, k: int) -> "QueryTransform":
        """Return a transform of the same encoder to the first ``k`` numbers of each vector.

        Raises:
            ConfigError: there are fewer, or they are not sorted by what they hold.
        """
        whitening = self.whitening.truncate(k)
        made = QueryTransform(whitening, self.encoder_facts, version=self.version, **self._opening)
        made._queries = self._queries
        return made

    def reduce(self, embeddings: ArrayLike) -> NDArray[np.float32]:
        """Return the vectors (n, k), float32, of raw embeddings (n, d).

        Raises:
            ConfigError: embeddings of another width, with NaN, infinity or what is no number, or
                so long that a vector is beyond float32.
        """
        rows = real_rows(embeddings, self.dim, taker="this transform")
        # At least one block, as nothing concatenates none.
        parts = [*blocks(rows, _ROWS)] or [rows]
        with np.errstate(over="ignore"):
            found = [self.whitening.vectors(part).astype(np.float32) for part in parts]
        if not all(np.isfinite(each).all() for each in found):
            raise ConfigError("some vectors are beyond float32; scale the embeddings down")
        return np.concatenate(found)

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors (n, k), float32, of queries.

        Raises:
            ConfigError: a query is blank, or the index knows no encoder of texts.
            EncoderError: the model is gone, or is not the one the index was built with.
        """
        require_texts(texts)
        if not len(texts):
            return np.empty((0, self.k), dtype=np.float32)
        return self.reduce(self.encoder.encode_queries(texts))

    def encode_documents(
        self, texts: Sequence[str], *, advance: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        """Return the vectors (n, k), float32, of documents.

        Each text is one document: those longer than the encoder's limit are cut to it, and a
        warning in the log has the count. An index of passages holds the vectors of passages, so
        give those.

        Args:
            texts: the documents.
            advance: called with the number of documents just done.

        Raises:
            ConfigError: a text is blank, or the index knows no encoder of texts.
            EncoderError: the model is gone, or is not the one the index was built with.
        """
        require_texts(texts, what="text")
        vectors, done, cut = np.empty((len(texts), self.k), dtype=np.float32), 0, 0
        if not len(texts):
            return vectors
        for window in self.encoder.stream_windows([texts], advance=advance):
            block = self.reduce(window.embeddings)
            vectors[done : done + len(block)] = block
            done, cut = done + len(block), cut + int(window.truncated.sum())
        if cut:
            _LOG.warning(
                "%d of %d texts were longer than the %d tokens that the encoder takes, and were "
                "cut; split them into passages to have all of them embedded",
                cut,
                done,
                self.encoder.spec.max_length,
            )
        return vectors
