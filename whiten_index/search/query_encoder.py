"""The encoder of queries that an index names, found and loaded when it is first needed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.manifest import fingerprint
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.spec import EncoderSpec, recorded_config, recorded_spec, resolve_encoder
from whiten_index.errors import ConfigError, EncoderError, StorageError
from whiten_index.paths import shown
from whiten_index.progress import Stages
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.whitening.transform import Whitening

if TYPE_CHECKING:
    from whiten_index.encoding.encoder import Encoder

_OF_AN_INDEX = "search with --like or with embeddings"


class QueryEncoder:
    """The encoder of queries, loaded when first needed; threads may share it."""

    def __init__(
        self, recorded: EncoderSpec | None, *, instead: str = _OF_AN_INDEX, **opening: Any
    ) -> None:
        """Take what a manifest names, and what its opener allows.

        Args:
            recorded: the encoder's identity, None where the index knows none.
            instead: what the caller can do where the index knows none, for the message.
            opening: the options of ``recorded_config``.
        """
        self._recorded, self._instead, self._opening = recorded, instead, opening
        self._encoder: Encoder | None = None
        self._loading = threading.Lock()

    @property
    def config(self) -> EncoderConfig | None:
        """Configuration that loads it; ``None`` if the index knows none.

        Raises:
            EncoderError: the model needs code that the opener does not allow.
        """
        recorded = self._recorded
        return None if recorded is None else recorded_config(recorded, **self._opening)

    @property
    def loaded(self) -> bool:
        """True if it was needed so far."""
        return self._encoder is not None

    @property
    def recorded(self) -> EncoderSpec:
        """The encoder's identity.

        Raises:
            ConfigError: no model is known for queries.
        """
        if self._recorded is None:
            raise ConfigError(
                "this index was built from an embedding column, so it cannot encode text; "
                f"{self._instead}, or build again with --model to name the encoder "
                "of the queries"
            )
        return self._recorded

    def equals(self, other: QueryEncoder) -> bool:
        """Return whether both give a query the same embedding, wherever their models are."""
        if self._recorded is None or other._recorded is None:
            return False
        return self._recorded.query_fingerprint == other._recorded.query_fingerprint

    def get(self) -> Encoder:
        """Return it.

        Raises:
            ConfigError: no model is known for queries.
            EncoderError: the model is not the one the index was built with.
        """
        with self._loading:
            if self._encoder is None:
                self._encoder = self._load()
            return self._encoder

    def resolve(self, *, documents: bool = True) -> tuple[EncoderSpec, ModelFolder, EncoderConfig]:
        """Find the model's files and check that they are those of the index, without loading them.

        Args:
            documents: whether it will encode documents too, not queries alone.

        Raises:
            ConfigError: no model is known for queries.
            EncoderError: the model is gone, needs code that the opener does not allow, or is not
                the one the index was built with.
        """
        recorded, config = self.recorded, self.config
        assert config is not None
        spec, folder = resolve_encoder(config)
        require_same(recorded, spec.query_fingerprint, spec.model)
        if documents:
            require_same(recorded, spec.fingerprint, spec.model, of="fingerprint")
        return spec, folder, config

    def _load(self) -> Encoder:
        from whiten_index.encoding.encoder import Encoder

        return Encoder(*self.resolve(documents=False))


def require_same(
    recorded: EncoderSpec, fingerprint: str, model: str, *, of: str = "query_fingerprint"
) -> None:
    """Refuse an encoder that gives other embeddings than the recorded one.

    Args:
        recorded: as the index names it.
        fingerprint: of the other one.
        model: its name.
        of: the half compared, ``query_fingerprint`` or ``fingerprint`` (of documents).

    Raises:
        EncoderError: it does.
    """
    known: str = getattr(recorded, of)
    if fingerprint != known:
        raise EncoderError(
            f"the index was built with {recorded.model} ({known[:8]}) and "
            f"{model} ({fingerprint[:8]}) gives other embeddings; name where "
            "the same model is now with --model (in Python model=), or build a new index with the "
            "new one"
        )


def require_texts(texts: Sequence[str], *, what: str = "query") -> None:
    """Raise a ConfigError for a single text instead of a list, or for a blank text."""
    if isinstance(texts, str):
        raise ConfigError("this takes a list of texts; put the one text in brackets")
    if not hasattr(texts, "__len__"):
        raise ConfigError(f"this takes a list of texts; {shown(texts)} was given")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ConfigError(f"{what} {number} is {shown(text)}, no text; give a string")
        if not text.strip():
            raise ConfigError(
                f"a {what} is blank (number {number}, from 0); give it some text, or leave it out"
            )
        if not _is_unicode(text):
            raise ConfigError(
                f"{what} {number} is no text: it has bytes that are not UTF-8, or half a character "
                f"of UTF-16 ({shown(text)}); check how it is made"
            )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def digest_of(fingerprint: str, whitening: Whitening, queries: EncoderSpec | None) -> str:
    """Return what all query halves that give the same vectors have in common, 32 hex digits.

    Args:
        fingerprint: of the encoder of documents, ``encoder_fingerprint`` in the manifest of an
            index.
        whitening: as wide as the vectors.
        queries: encoder of queries, which may be another one; None where the index knows none.
    """
    told = json.dumps([fingerprint, whitening.digest, queries and queries.query_fingerprint])
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def query_embeddings(
    store: EmbeddingStore | None,
    texts: Sequence[str],
    encode: Callable[[Sequence[str]], NDArray[np.floating]],
    stages: Stages,
) -> NDArray[np.float32]:
    """Return the raw embeddings (q, d) of queries, from the store where they are known.

    Args:
        store: of the corpus, which names the encoder; None keeps nothing.
        texts: the queries.
        encode: called for what is not known.
        stages: where the time is shown.
    """
    texts = list(texts)
    key: dict[str, Any] = {}
    if store is not None:
        key = {"queries": fingerprint({"texts": texts}), **asked_by(store.encoder)}
        if (kept := store.results.sample(key, {"queries": "qd"})) is not None:
            return kept["queries"].astype(np.float32)
    with stages.stage("encode queries", len(texts)) as watcher:
        found = encode(texts).astype(np.float32)
        watcher.advance(len(texts))
    if store is not None:
        # A store that cannot be written still serves: the queries are encoded again next time.
        with contextlib.suppress(StorageError):
            store.results.save_sample(key, {"queries": found})
    return found


def asked_by(encoder: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of a query's embedding, next to its text and the store's encoder."""
    spec = recorded_spec(encoder)
    return {"query_encoder": spec and spec.query_fingerprint}
