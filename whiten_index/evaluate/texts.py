"""Texts to raw embeddings for an evaluation: each distinct text once, kept for later runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from whiten_index.encoding import (
    EncoderConfig,
    EncoderSpec,
    ModelFolder,
    recorded_spec,
    resolve_encoder,
)
from whiten_index.errors import StorageError
from whiten_index.evaluate.config import EvalConfig
from whiten_index.evaluate.fits import check_fit
from whiten_index.evaluate.kept import KeptTexts
from whiten_index.progress import Stages
from whiten_index.search.query_encoder import QueryEncoder
from whiten_index.store import EmbeddingStore
from whiten_index.versions.published import read_published


class TextEmbedder(Protocol):
    """Gives the raw embeddings of texts."""

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings (n, d) of n texts, unnormalised; equal texts are encoded once."""

    def facts(self) -> dict[str, Any]:
        """Return what makes the embeddings what they are, as JSON values."""


class EncoderTexts:
    """Encodes with a Transformer, loaded when first needed; see ``TextEmbedder``."""

    def __init__(
        self,
        spec: EncoderSpec,
        folder: ModelFolder,
        config: EncoderConfig,
        *,
        stages: Stages,
        store: Path | None = None,
    ) -> None:
        self._rows: dict[str, int] = {}
        self._values: NDArray[np.float32] | None = None
        self._spec, self._folder, self._config = spec, folder, config
        self._stages = stages
        self._store = store
        self._encoder: Any = None

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings (n, d) of n texts; what is new is made together."""
        new = [text for text in dict.fromkeys(texts) if text not in self._rows]
        if new or self._values is None:
            made = self._make(new)
            before = self._values
            start = 0 if before is None else len(before)
            self._values = made if before is None else np.concatenate([before, made])
            self._rows.update((text, start + i) for i, text in enumerate(new))
        return self._values[[self._rows[text] for text in texts]]

    def facts(self) -> dict[str, Any]:
        """Return the encoder's identity."""
        return encoder_facts(self._spec)

    def _make(self, texts: list[str]) -> NDArray[np.float32]:
        made = np.empty((len(texts), self._spec.dim), np.float32)
        kept = self._opened()
        there = np.zeros(len(texts), bool)
        if kept is not None:
            there, rows = kept.find(texts)
            if rows:
                made[there] = np.stack(rows)
                self._stages.watcher.note(
                    f"{len(rows):,} of {len(texts):,} texts: embeddings found in {self._store}"
                )
        new = [text for text, found in zip(texts, there, strict=True) if not found]
        if new:
            made[~there] = self._encode(new, kept)
        return made

    def _encode(self, texts: list[str], kept: KeptTexts | None) -> NDArray[np.float32]:
        """Return the embeddings (n, d) of texts, and keep each window of them as it is done."""
        if self._encoder is None:
            from whiten_index.encoding import Encoder

            self._encoder = Encoder(self._spec, self._folder, self._config)
        made = np.empty((len(texts), self._spec.dim), np.float32)
        filled = 0
        with self._stages.stage("encode", len(texts)) as watcher:
            for block in self._encoder.stream([texts], advance=watcher.advance):
                made[filled : filled + len(block)] = block
                if kept is not None:
                    kept = self._kept(kept, texts[filled : filled + len(block)], block)
                filled += len(block)
        return made

    def _kept(
        self, kept: KeptTexts, texts: list[str], embeddings: NDArray[np.float32]
    ) -> KeptTexts | None:
        """Keep embeddings; None where that cannot be, so that it is tried and told once."""
        try:
            kept.add(texts, embeddings)
        except StorageError as error:
            # The evaluation needs no store; the user should know that it was of no use.
            self._stages.watcher.note(f"note: embeddings are not kept: {error}")
            return None
        return kept

    def _opened(self) -> KeptTexts | None:
        if self._store is None:
            return None
        spec = self._spec
        store = EmbeddingStore.create(self._store, spec.to_json(), spec.fingerprint)
        return KeptTexts(store.folder / "texts")


def open_embedder(config: EvalConfig, stages: Stages) -> TextEmbedder:
    """Return what embeds the texts of an evaluation.

    Raises:
        EncoderError: the model cannot be found or used as asked.
        ConfigError: a layer or a length that the model does not have; an index without an encoder.
        CorpusError: the corpus to fit on cannot be read.
        ArtifactError: the index is missing or damaged.
    """
    check_fit(config)
    if config.index is None:
        asked = config.encoder
        spec, folder = resolve_encoder(asked)
    else:
        spec, folder, asked = QueryEncoder(
            recorded_spec(read_published(Path(config.index)).fields["encoder"]),
            **config.opening,
            instead="evaluate its model with --model alone",
        ).resolve()
    for wanted in config.transforms:
        wanted.require_dim(spec.dim)
    store = None if config.store is None else Path(config.store)
    return EncoderTexts(spec, folder, asked, stages=stages, store=store)


def encoder_facts(spec: EncoderSpec) -> dict[str, Any]:
    """Return what a reader must know of an encoder to compare its figures with others."""
    kept = ("model", "revision", "pooling", "layers", "max_length", "dtype", "dim")
    facts = {name: value for name, value in spec.to_json().items() if name in kept}
    if spec.document_prompt:
        facts["prompt"] = spec.document_prompt
    return {"kind": "transformer", **facts, "fingerprint": spec.fingerprint}
