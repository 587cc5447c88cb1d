"""The encoder of queries that an index names, found and loaded when it is first needed."""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.manifest import fingerprint
from whiten_index.encoding.canary import require_alike, spec_with_canary
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.load_encoder import make_encoder, resolve_encoder
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.spec import (
    EncoderOpening,
    Spec,
    recorded_config,
    recorded_spec,
    require_options,
)
from whiten_index.encoding.window_encoder import WindowEncoder
from whiten_index.errors import ArtifactError, ConfigError, EncoderError
from whiten_index.paths import require_no_secret, require_text, shown
from whiten_index.progress import Stages
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.whitening.transform import Whitening


class QueryEncoder:
    """The encoder of queries, loaded when first needed; threads may share it."""

    def __init__(
        self,
        recorded: Spec | None,
        *,
        instead: str = "search with --like or with embeddings (--queries and --embedding-column)",
        **opening: Unpack[EncoderOpening],
    ) -> None:
        """Take what a manifest names, None where the index knows none, and what its opener allows.

        ``instead`` is what the caller can do without an encoder, for the message.
        """
        require_options(opening, EncoderOpening.__annotations__)
        require_no_secret(opening, what="the encoder")
        self._recorded, self._instead, self._opening = recorded, instead, opening
        self._encoder: WindowEncoder | None = None
        self._loading = threading.Lock()

    @property
    def config(self) -> EncoderConfig | None:
        """Configuration that loads it; ``None`` if the index knows none."""
        recorded = self._recorded
        return None if recorded is None else recorded_config(recorded, **self._opening)

    @property
    def loaded(self) -> bool:
        """True if it was needed so far."""
        return self._encoder is not None

    @property
    def recorded(self) -> Spec:
        """The encoder's identity."""
        if self._recorded is None:
            raise ConfigError(
                "this index was built from an embedding column, so it cannot encode text; "
                f"{self._instead}, or build again with --model to name the encoder "
                "of the queries"
            )
        return self._recorded

    def equals(self, other: "QueryEncoder") -> bool:
        """Return whether both give a query the same embedding, wherever their models are."""
        ours, theirs = self._recorded, other._recorded
        if ours is None or theirs is None or ours.query_fingerprint != theirs.query_fingerprint:
            return False
        if ours.canary and not theirs.canary:
            return False  # the other's encoder is compared with nothing
        try:
            require_alike(ours, theirs)
        except (ArtifactError, EncoderError):
            return False
        return True

    def get(self) -> WindowEncoder:
        """Return it.

        Raises:
            EncoderError: it is not the index's, or gives other embeddings than it did.
        """
        with self._loading:
            if self._encoder is None:
                # Reports first that the index has no encoder, or that torch is not installed.
                spec, folder, config = self.resolve(documents=False)
                loaded = make_encoder(spec, folder, config)
                if not spec.canary and self.recorded.canary:
                    spec = spec_with_canary(loaded)
                    require_alike(self.recorded, spec)
                if config.onnx and not spec.canary:
                    raise EncoderError(
                        f"the index keeps no embeddings to compare the ONNX file of {spec.model} "
                        "with, or the file gives none, so it may be of other weights; use torch "
                        "(pip install 'whiten-index[encode]'), or build the index again"
                    )
                self._encoder = loaded
            return self._encoder

    def resolve(self, *, documents: bool = True) -> tuple[Spec, ModelFolder | None, EncoderConfig]:
        """Find the model and check that it is the index's, without loading it.

        It is checked for queries, and for ``documents`` too; one behind an API is asked.
        """
        recorded = self.recorded
        config = recorded_config(recorded, **self._opening)
        spec, folder = resolve_encoder(config, recorded)
        require_same(recorded, spec.query_fingerprint, spec.model)
        if documents:
            require_same(recorded, spec.fingerprint, spec.model, of="fingerprint")
        require_alike(recorded, spec)
        return spec, folder, config


def require_same(
    recorded: Spec, fingerprint: str, model: str, *, of: str = "query_fingerprint"
) -> None:
    """Refuse a model whose fingerprint ``of`` queries, or of documents, is not the recorded one."""
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
            raise ConfigError(
                f"{what} {number} is {shown(text)}, no text; give a string (embeddings go to "
                "search_embeddings and reduce)"
            )
        if not text.strip():
            raise ConfigError(
                f"a {what} is blank (number {number}, from 0); give it some text, or leave it out"
            )
        require_text(text, f"{what} {number}")


def digest_of(fingerprint: str, whitening: Whitening, queries: Spec | None) -> str:
    """Return the identity of a transform of queries, 32 hex digits: equal ones, equal vectors.

    ``fingerprint`` is that of documents; ``queries`` may have another, or be unknown.
    """
    told = json.dumps([fingerprint, whitening.digest, queries and queries.query_fingerprint])
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def query_embeddings(
    store: EmbeddingStore | None,
    texts: Sequence[str],
    encode: Callable[[Sequence[str]], NDArray[np.floating]],
    stages: Stages,
) -> NDArray[np.float32]:
    """Return the raw embeddings (q, d) of queries, from the store where they are known."""
    texts = list(texts)
    key: dict[str, Any] = {}
    if store is not None:
        key = {"queries": fingerprint({"texts": texts}), **asked_by(store.encoder)}
        if (kept := store.results.sample(key, {"queries": "qd"})) is not None:
            return kept["queries"].astype(np.float32)
    with stages.whole("encode queries", len(texts)):
        found = encode(texts).astype(np.float32)
    if store is not None:
        store.results.save_sample(key, {"queries": found})
    return found


def asked_by(encoder: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of a query's embedding, next to its text and the store's encoder."""
    spec = recorded_spec(encoder)
    return {"query_encoder": spec and spec.query_fingerprint}
