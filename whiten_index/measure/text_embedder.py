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
from whiten_index.artifacts.tensors import content_digest, read_sealed, write_sealed
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.spec import EncoderSpec, recorded_spec, resolve_encoder
from whiten_index.errors import ArtifactError, StorageError
from whiten_index.measure.eval_config import EvalConfig
from whiten_index.progress import Stages
from whiten_index.search.query_encoder import QueryEncoder
from whiten_index.store.embedding_store import EmbeddingStore
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
        """Return the embeddings (n, d) of texts, from the store if it has them."""
        made, missing = (
            np.empty((len(texts), self._spec.dim), np.float32),
            np.ones(len(texts), bool),
        )
        kept: KeptTexts | None = None
        if self._store is not None:
            spec = self._spec
            store = EmbeddingStore.create(self._store, spec.to_json(), spec.fingerprint)
            kept = KeptTexts(store.folder / "texts")
            there, rows = kept.find(texts)
            missing = ~there
            if rows:
                made[there] = np.stack(rows)
                self._stages.watcher.note(
                    f"{len(rows):,} of {len(texts):,} texts: embeddings found in {self._store}"
                )
        if missing.any():
            new = [text for text, lacks in zip(texts, missing, strict=True) if lacks]
            made[missing] = self._encode(new, kept)
        return made

    def _encode(self, texts: list[str], kept: KeptTexts | None) -> NDArray[np.float32]:
        """Return the embeddings (n, d) of texts, and keep each window of them as it is done."""
        if self._encoder is None:
            from whiten_index.encoding.encoder import Encoder

            self._encoder = Encoder(self._spec, self._folder, self._config)
        made = np.empty((len(texts), self._spec.dim), np.float32)
        filled = 0
        with self._stages.stage("encode", len(texts)) as watcher:
            for block in self._encoder.stream([texts], advance=watcher.advance):
                made[filled : filled + len(block)] = block
                if kept is not None:
                    try:
                        kept.add(texts[filled : filled + len(block)], block)
                    except StorageError as error:
                        # The evaluation needs no store; the user should know that it was of no use.
                        self._stages.watcher.note(f"note: embeddings are not kept: {error}")
                        kept = None
                filled += len(block)
        return made


def open_embedder(config: EvalConfig, stages: Stages) -> TextEmbedder:
    """Return what embeds the texts of an evaluation."""
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


_KIND, _VERSION = "texts", 1
_BYTES = 16


def text_digests(texts: Sequence[str]) -> NDArray[np.uint8]:
    """Return the digests of n texts, (n, 16)."""
    found = b"".join(hashlib.blake2b(t.encode(), digest_size=_BYTES).digest() for t in texts)
    return np.frombuffer(found, np.uint8).reshape(len(texts), _BYTES)


class KeptTexts:
    """The texts of one encoder that are kept in a folder; damaged files are passed over."""

    def __init__(self, folder: Path) -> None:
        """Read the files of a folder; one that does not exist holds nothing."""
        self._folder = folder
        self._blocks: list[NDArray[np.floating]] = []
        self._places: dict[bytes, tuple[int, int]] = {}
        for path in list_folder(folder, "*.safetensors"):
            with contextlib.suppress(ArtifactError):
                self._hold(*_read(path))

    def find(self, texts: Sequence[str]) -> tuple[NDArray[np.bool_], list[NDArray[np.floating]]]:
        """Return which of n texts are kept, (n,), and the embeddings (d,) of those in order."""
        places = [self._places.get(digest.tobytes()) for digest in text_digests(texts)]
        rows = [self._blocks[place[0]][place[1]] for place in places if place is not None]
        return np.array([place is not None for place in places], bool), rows

    def add(self, texts: Sequence[str], embeddings: NDArray[np.float32]) -> None:
        """Keep the embeddings (n, d) of n texts that are not kept, whole or not at all."""
        digests = text_digests(texts)
        tensors: dict[str, NDArray[Any]] = {"digests": digests, "embeddings": embeddings}
        path = self._folder / f"{content_digest(tensors, {})[:32]}.safetensors"
        with writing(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                write_sealed(temporary, tensors, kind=_KIND, version=_VERSION)
        self._hold(digests, embeddings)

    def _hold(self, digests: NDArray[np.uint8], embeddings: NDArray[np.floating]) -> None:
        block = len(self._blocks)
        self._blocks.append(embeddings)
        for row, digest in enumerate(digests):
            self._places[digest.tobytes()] = block, row


def _read(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.floating]]:
    shapes = {"digests": "nb", "embeddings": "nd"}
    found, _ = read_sealed(path, kind=_KIND, version=_VERSION, shapes=shapes)
    if found["digests"].shape[1] != _BYTES:
        raise ArtifactError(f"{path} is damaged; remove it, and its texts are encoded again")
    return found["digests"], found["embeddings"]
