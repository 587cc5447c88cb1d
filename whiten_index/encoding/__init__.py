"""Texts to embeddings. torch and transformers load with ``Encoder``, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whiten_index.encoding.models import ModelFolder, embedded_available, find_model
from whiten_index.encoding.spec import (
    DEFAULT_MODEL,
    DTYPES,
    POOLINGS,
    EncoderConfig,
    EncoderSpec,
    resolve_encoder,
)

if TYPE_CHECKING:
    from whiten_index.encoding.encoder import Encoded, Encoder

__all__ = [
    "DEFAULT_MODEL",
    "DTYPES",
    "POOLINGS",
    "Encoded",
    "Encoder",
    "EncoderConfig",
    "EncoderSpec",
    "ModelFolder",
    "embedded_available",
    "find_model",
    "resolve_encoder",
]


def __getattr__(name: str) -> Any:
    if name in ("Encoder", "Encoded"):
        from whiten_index.encoding import encoder

        return getattr(encoder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
