"""Texts to raw embeddings for an evaluation: each distinct text once, kept for later runs."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.atomic import replacing
from whiten_index.artifacts.files import list_folder, writing
from whiten_index.artifacts.tensors import content_digest, read_tensors, write_tensors
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.spec import EncoderSpec, recorded_spec, resolve_encoder
from whiten_index.errors import ArtifactError, StorageError
from whiten_index.measure.eval_config import EvalConfig
from whiten_index.progress import Stages
from whiten_index.search.query_encoder import QueryEncoder
from whiten_index.store.embedding_store import EmbeddingStore

_KIND, _VERSION = "texts", 1
_BYTES = 16


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
    store = None if config.store is None else Path(config.store)
    return EncoderTexts(spec, folder, asked, stages, store)


class EncoderTexts:
    """Encodes with a Transformer, loaded when first needed; see ``TextEmbedder``.

    With a store, each window of embeddings is a file there; damaged files are passed over.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        folder: ModelFolder,
        config: EncoderConfig,
        stages: Stages,
        store: Path | None,
    ) -> None:
        self._spec, self._folder, self._config = spec, folder, config
        self._stages, self._store = stages, store
        self._kept: Path | None = None
        self._encoder: Any = None
        self._rows: dict[bytes, NDArray[np.floating]] = {}
        self._stored: dict[bytes, NDArray[np.floating]] = {}
        if store is not None:
            made = EmbeddingStore.create(store, spec.to_json(), spec.fingerprint)
            self._kept = made.folder / "texts"
            for path in list_folder(self._kept, "*.safetensors"):
                with contextlib.suppress(ArtifactError):
                    self._stored |= _read(path)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings (n, d) of n texts; those not known are encoded together."""
        digests = [_digest(text) for text in texts]
        named = dict(zip(digests, texts, strict=True))
        new = {digest: text for digest, text in named.items() if digest not in self._rows}
        if found := new.keys() & self._stored.keys():
            self._stages.watcher.note(
                f"{len(found):,} of {len(new):,} texts: embeddings found in {self._store}"
            )
            self._rows.update((digest, self._stored[digest]) for digest in found)
        if left := {digest: text for digest, text in new.items() if digest not in found}:
            self._encode(left)
        rows = [self._rows[digest] for digest in digests]
        return np.array(rows, np.float32).reshape(len(texts), self._spec.dim)

    def facts(self) -> dict[str, Any]:
        """Return the encoder's identity."""
        return encoder_facts(self._spec)

    def _encode(self, new: dict[bytes, str]) -> None:
        """Encode texts, and keep each window of them as it is done."""
        if self._encoder is None:
            from whiten_index.encoding.encoder import Encoder

            self._encoder = Encoder(self._spec, self._folder, self._config)
        digests, filled = list(new), 0
        with self._stages.stage("encode", len(new)) as watcher:
            for block in self._encoder.stream([list(new.values())], advance=watcher.advance):
                named = digests[filled : filled + len(block)]
                self._rows.update(zip(named, np.array(block, np.float32), strict=True))
                filled += len(block)
                if self._kept is not None:
                    try:
                        _write(self._kept, named, block)
                    except StorageError as error:
                        # The evaluation needs no store; the user should know that it was no use.
                        self._stages.watcher.note(f"note: embeddings are not kept: {error}")
                        self._kept = None


def encoder_facts(spec: EncoderSpec) -> dict[str, Any]:
    """Return what a reader must know of an encoder to compare its figures with others."""
    kept = ("model", "revision", "pooling", "layers", "max_length", "dtype", "dim")
    facts = {name: value for name, value in spec.to_json().items() if name in kept}
    if spec.document_prompt:
        facts["prompt"] = spec.document_prompt
    return {"kind": "transformer", **facts, "fingerprint": spec.fingerprint}


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_BYTES).digest()


def _write(folder: Path, digests: Sequence[bytes], embeddings: NDArray[np.float32]) -> None:
    """Write a file of embeddings (n, d), whole or not at all."""
    named = np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), _BYTES)
    tensors: dict[str, NDArray[Any]] = {"digests": named, "embeddings": embeddings}
    path = folder / f"{content_digest(tensors, {})[:32]}.safetensors"
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            write_tensors(temporary, tensors, kind=_KIND, version=_VERSION, seal=True)


def _read(path: Path) -> dict[bytes, NDArray[np.floating]]:
    shapes = {"digests": "nb", "embeddings": "nd"}
    found, _ = read_tensors(path, kind=_KIND, version=_VERSION, shapes=shapes, sealed=True)
    return {
        digest.tobytes(): row
        for digest, row in zip(found["digests"], found["embeddings"], strict=True)
    }
