"""Texts to raw embeddings for an evaluation: each distinct text once, kept for later runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.manifest import fingerprint
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.spec import EncoderSpec, recorded_spec, resolve_encoder
from whiten_index.errors import StorageError
from whiten_index.measure.eval_config import EvalConfig
from whiten_index.progress import Stages
from whiten_index.search.query_encoder import QueryEncoder
from whiten_index.store.embedding_store import EmbeddingStore

if TYPE_CHECKING:
    from whiten_index.encoding.encoder import Encoder

# Texts that a store keeps together, and that an interrupted evaluation loses at most.
_WINDOW = 1 << 14


class TextEmbedder(Protocol):
    """Gives the raw embeddings of texts."""

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings (n, d) of n texts, unnormalised; equal texts are encoded once."""

    def facts(self) -> dict[str, Any]:
        """Return what makes the embeddings what they are, as JSON values."""


def open_embedder(config: EvalConfig, stages: Stages) -> TextEmbedder:
    """Return what embeds the texts of an evaluation."""
    if config.published is None:
        asked = config.encoder
        spec, folder = resolve_encoder(asked)
    else:
        spec, folder, asked = QueryEncoder(
            recorded_spec(config.published.fields["encoder"]),
            **config.opening,
            instead="evaluate its model with --model alone",
        ).resolve()
    for wanted in config.transforms:
        wanted.require_dim(spec.dim)
    store = None
    if config.store is not None:
        store = EmbeddingStore.create(Path(config.store), spec.to_json(), spec.fingerprint)
    return EncoderTexts(spec, folder, asked, stages, store)


class EncoderTexts:
    """Encodes with a Transformer, loaded when first needed; see ``TextEmbedder``."""

    def __init__(
        self,
        spec: EncoderSpec,
        folder: ModelFolder,
        config: EncoderConfig,
        stages: Stages,
        store: EmbeddingStore | None,
    ) -> None:
        self._spec, self._folder, self._config = spec, folder, config
        self._stages, self._store = stages, store
        self._rows: dict[str, NDArray[np.float32]] = {}

    @cached_property
    def _encoder(self) -> Encoder:
        from whiten_index.encoding.encoder import Encoder

        return Encoder(self._spec, self._folder, self._config)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings (n, d) of n texts; if any is new, all are read or encoded."""
        if not self._rows.keys() >= set(texts):
            distinct = list(dict.fromkeys(texts))
            with self._stages.stage("encode", len(distinct)) as watcher:
                for start in range(0, len(distinct), _WINDOW):
                    self._read_or_encode(distinct[start : start + _WINDOW], watcher.advance)
        rows = [self._rows[text] for text in texts]
        return np.array(rows, np.float32).reshape(len(texts), self._spec.dim)

    def facts(self) -> dict[str, Any]:
        """Return the encoder's identity."""
        return encoder_facts(self._spec)

    def _read_or_encode(self, texts: list[str], advance: Any) -> None:
        key = {"texts": fingerprint({"texts": texts})}
        kept = None if self._store is None else self._store.results.sample(key, {"texts": "nd"})
        if kept is not None:
            self._rows.update(zip(texts, kept["texts"], strict=True))
            advance(len(texts))
            return
        blocks = self._encoder.stream([texts], advance=advance)
        found = np.concatenate([np.array(block, np.float32) for block in blocks])
        self._rows.update(zip(texts, found, strict=True))
        if self._store is not None:
            try:
                self._store.results.save_sample(key, {"texts": found})
            except StorageError as error:
                # The evaluation needs no store; the user should know that it was no use.
                self._stages.watcher.note(f"note: embeddings are not kept: {error}")
                self._store = None


def encoder_facts(spec: EncoderSpec) -> dict[str, Any]:
    """Return what a reader must know of an encoder to compare its figures with others."""
    kept = ("model", "revision", "pooling", "layers", "max_length", "dtype", "dim")
    facts = {name: value for name, value in spec.to_json().items() if name in kept}
    if spec.document_prompt:
        facts["prompt"] = spec.document_prompt
    return {"kind": "transformer", **facts, "fingerprint": spec.fingerprint}
