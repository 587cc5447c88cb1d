"""A query transform as the embedders of frameworks hold it.

Frameworks copy, pickle and write it down, which takes along how the transform is opened. What is
read again opens what is published then, which may be another transform than that of the vectors
that some store holds; so what was pickled after it was opened tells where it is. What was written
down as settings (``to_dict``) does not: it is for a store that is filled anew, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.files import exists
from whiten_index.artifacts.manifest import MANIFEST
from whiten_index.artifacts.paths import require_folder, require_path
from whiten_index.errors import ConfigError
from whiten_index.integrations.index_reader import no_encoder
from whiten_index.search.query_transform import QueryTransform
from whiten_index.versions.published import CURRENT

# Of the query digest, in names.
_DIGITS = 8


class QueryHalf:
    """A query transform as embedders hold it, opened on first use; threads may share it.

    Once opened it keeps its transform, whatever is published later: its vectors then are those of
    the version before. ``name`` is another one where the transform, the encoder or the prompt of
    queries is, so compare it with that of one made anew to see whether there was a refit.

    Attributes:
        given: the source, as it was given.
    """

    def __init__(
        self,
        source: Path | str,
        *,
        k: int | None = None,
        model: str | None = None,
        trust_remote_code: bool = False,
        device: str = "auto",
        threads: int | None = None,
    ) -> None:
        """Take what is needed to open it; no file is read yet.

        Args:
            source: the folder of an index, or one that ``QueryTransform.save`` wrote.
            k: keep the first k numbers of each vector; None for all.
            model: where the encoder is now, if no longer where it was; it must be the same one.
            trust_remote_code: let the encoder run Python code that comes with its model.
            device: of the encoder: ``auto``, ``cpu``, ``cuda``.
            threads: CPU threads of the encoder.

        Raises:
            ConfigError: the path can name nothing.
        """
        require_path(str(source), what="the index or query transform")
        require_folder(source, what="the query half")
        self.given, self._source, self._k = str(source), Path(source).absolute(), k
        self._options: dict[str, Any] = {
            "model": model, "trust_remote_code": trust_remote_code, "device": device,
            "threads": threads,
        }  # fmt: skip
        self._opened: QueryTransform | None = None
        self._expected: str | None = None
        self._opening = threading.Lock()

    def __reduce__(self) -> tuple[Callable[..., QueryHalf], tuple[Any, ...]]:
        """Pickle how the transform is opened, and which one it was if it was opened."""
        expected = self._expected if self._opened is None else self._opened.query_digest
        return self._again, (self.given, self._source, self._k, self._options, expected)

    @classmethod
    def _again(
        cls, given: str, source: Path, k: int | None, options: dict[str, Any], expected: str | None
    ) -> QueryHalf:
        """Return what was pickled, perhaps in another folder or process."""
        made = cls(given, k=k, **options)
        made._source, made._expected = source, expected
        return made

    def __copy__(self) -> QueryHalf:
        """Share it within a process: nothing of it changes, and the encoder is loaded once."""
        return self

    def __deepcopy__(self, memo: object) -> QueryHalf:
        """Share it, as by ``copy``."""
        return self

    @property
    def transform(self) -> QueryTransform:
        """The transform.

        Raises:
            ArtifactError: there is none, or it is damaged.
            ConfigError: an option cannot be used, no encoder of texts is known, or this was
                pickled with another transform.
        """
        with self._opening:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def _open(self) -> QueryTransform:
        source = self._source
        saved = exists(source / MANIFEST) and not exists(source / CURRENT)
        made = (QueryTransform.load if saved else QueryTransform.of)(source, **self._options)
        if made.spec is None:
            raise no_encoder(str(source), "an embedder")
        made = made if self._k is None else made.truncate(self._k)
        if self._expected not in (None, made.query_digest):
            raise ConfigError(
                f"{source} has another transform, encoder or prompt of queries since this embedder "
                "was pickled, and its vectors do not go with those made before; make the embedder "
                "anew, and embed with it all that a store holds"
            )
        return made

    @property
    def name(self) -> str:
        """The encoder of queries, the width of whitened vectors and 8 digits of the query digest.

        It is another one wherever ``QueryTransform.query_digest`` is: after a refit, with another
        encoder, with another prompt of queries. So caches may tell vectors by it.
        """
        transform = self.transform
        spec = transform.spec
        assert spec is not None
        return f"{Path(spec.model).name}-whitened-{transform.k}-{transform.query_digest[:_DIGITS]}"

    def query(self, text: str) -> list[float]:
        """Return the vector (k,) of a query, by the transform that was opened first.

        Raises:
            ConfigError: it is blank.
            EncoderError: the model is gone, or is not the one the index was built with.
        """
        return _lists(self.transform.encode_queries([text]))[0]

    def documents(
        self, texts: Sequence[str], *, advance: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        """Return the vectors (n, k) of documents, by the transform that was opened first.

        Each text is one document, cut where it is longer than the encoder takes; see
        ``QueryTransform.encode_documents``.

        Args:
            texts: the documents.
            advance: told the number of documents just done.

        Raises:
            ConfigError: a text is blank.
            EncoderError: the model is gone, or is not the one the index was built with.
        """
        return _lists(self.transform.encode_documents(texts, advance=advance))


def _lists(vectors: NDArray[np.float32]) -> list[list[float]]:
    found: list[list[float]] = vectors.tolist()
    return found
